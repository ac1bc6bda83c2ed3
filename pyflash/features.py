"""The table of mask and score features: each is stated once, here, and once for the kernels (`mask.cuh`, `score.cuh`).

A row gives a keyword argument of the public functions, its validation, the flags that compile it into the kernels, its
kernel arguments, the kernels that take it, and its term in NumPy, for the oracle and the NumPy path. Everything else
loops over the table.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping

import numpy as np

from . import graphs, softcap, trace
from .blocks import EMPTY, FULL, BlockMask, Blocks
from .feature import Feature, Field, Place, Sizes, fail, read_number

SIMT, SM80, SM90 = (("fwd_simt", "bwd_simt"), ("fwd_sm80", "bwd_sm80"), ("fwd_sm90", "bwd_sm90"))


class _Causal(Feature):
    name, default, takes = "causal", False, "True or False"
    flags = ("CAUSAL",)
    kernels = SIMT + SM80 + SM90

    def check(self, value):
        if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
            return bool(value)
        fail(self.name, value, self.takes, TypeError)

    def visible(self, value, at):
        return _in_band({self.name: value}, at)


class _Window(Feature):
    name, default = "window", (None, None)
    takes = "(left, right), each None or an integer from 0 on"
    flags = ("WINDOW_LEFT", "WINDOW_RIGHT")
    kernels = SIMT + SM80 + SM90
    fields = (
        Field("window_left", "i32", "int", "keys that a query sees before that of its own position; WINDOW_LEFT"),
        Field("window_right", "i32", "int", "and behind it; WINDOW_RIGHT"),
    )

    def check(self, value):
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            fail(self.name, value, self.takes, TypeError)
        sides = []
        for side in value:
            try:
                if isinstance(side, bool):
                    raise TypeError
                sides.append(None if side is None else operator.index(side))
            except TypeError:
                fail(self.name, value, self.takes, TypeError)
            if side is not None and side < 0:
                fail(self.name, value, self.takes, ValueError)
        return tuple(sides)

    def flags_of(self, value):
        return tuple(flag for flag, side in zip(self.flags, value, strict=True) if side is not None)

    def values(self, value, softmax_scale, sizes):
        # More than all there are is as good as any such number, and none overflows in the kernels.
        left, right = (0 if side is None else side for side in value)
        return {"window_left": min(left, sizes.seqlen_k), "window_right": min(right, sizes.seqlen_q)}

    def visible(self, value, at):
        return _in_band({self.name: value}, at)


class _Softcap(Feature):
    name, takes = "softcap", "None or a number from 1e-30 to 1e30"
    changes_scores = True
    flags = ("SOFTCAP",)
    kernels = SIMT + SM80 + SM90
    fields = (
        Field("softcap_in", "real", "{real}", "softmax_scale / softcap; SOFTCAP"),
        Field("softcap_out", "real", "{real}", "softcap * log2(e)"),
        Field("softcap_out_inverse", "real", "{real}", "1 / softcap_out"),
        Field("softcap_small", "real", "{real}", "products of at most this size have tanh's series"),
        Field("softcap_series", "real", "{real}", "which takes them to scores in units of log2", 4),
        Field("softcap_short_series", "real", "{real}", "a shorter one for smaller products", 3),
        Field("softcap_levels", "real", "{real}", "log2 of sums of 2^score, by it, between which it served", 2),
    )

    def check(self, value):
        if value is None:
            return None
        number = read_number(self.name, value, self.takes)
        if not 1e-30 <= number <= 1e30:
            fail(self.name, value, self.takes, ValueError)
        return number

    def values(self, value, softmax_scale, sizes):
        return softcap.values(value, softmax_scale)

    def score(self, value, s, at):
        return s.dtype.type(value) * np.tanh(s / s.dtype.type(value))

    def slope(self, value, s, at):
        return 1 - np.tanh(s / s.dtype.type(value)) ** 2


class _AlibiSlopes(Feature):
    name, takes = "alibi_slopes", "None or an array (heads_q,) or (batch, heads_q)"
    is_array = changes_scores = True
    flags = ("ALIBI",)
    kernels = SIMT + SM80 + SM90
    fields = (
        Field("alibi_slopes", "pointer", "const {real}*", "(batch, num_heads_q); ALIBI"),
        Field("alibi_slopes_stride", "i64", "long long", "elements: batch, head", 2),
    )

    def shape_error(self, shape, sizes):
        allowed = (sizes.heads_q,), (sizes.batch, sizes.heads_q)
        return None if shape in allowed else f"{allowed[0]} or {allowed[1]}: (heads_q,) or (batch, heads_q)"

    def values(self, value, softmax_scale, sizes):
        return {"alibi_slopes_stride": (0, *value.strides)[-2:]}

    def score(self, value, s, at):
        _, _, i, j = at.indices()
        slopes = at.of(np.asarray(value, s.dtype)[..., None, None])
        return s - slopes * np.abs(i + at.sizes.seqlen_k - at.sizes.seqlen_q - j).astype(s.dtype)


class _Broadcast(Feature):
    """An array that broadcasts to the score matrix, by NumPy's rules."""

    is_array = by_element = True

    def shape_error(self, shape, sizes):
        fits = len(shape) <= 4 and all(
            n in (1, size) for n, size in zip(reversed(shape), reversed(sizes), strict=False)
        )
        return None if fits else f"one that broadcasts to {tuple(sizes)}: (batch, heads_q, seqlen_q, seqlen_k)"

    def values(self, value, softmax_scale, sizes):
        return {f"{self.name}_stride": self._strides(value.strides, value.shape)}

    def _strides(self, strides, shape) -> tuple[int, ...]:
        """Of the whole matrix, 0 where the array is broadcast."""
        return (0, 0, 0, 0, *(stride if n > 1 else 0 for stride, n in zip(strides, shape, strict=True)))[-4:]


class _Bias(_Broadcast):
    name, takes = "bias", "None or an array that broadcasts to (batch, heads_q, seqlen_q, seqlen_k)"
    changes_scores = has_gradient = True
    flags = ("BIAS",)
    kernels = SIMT + SM80 + SM90
    fields = (
        Field(
            "bias", "pointer", "const cfg::Bias*", "(batch, num_heads_q, seqlen_q, seqlen_k), strides may be 0; BIAS"
        ),
        Field("bias_stride", "i64", "long long", "elements: batch, head, query, key", 4),
        Field("dbias", "pointer", "{real}*", "the same, zeroed; null: not wanted"),
        Field("dbias_stride", "i64", "long long", "elements: batch, head, query, key", 4),
    )

    def dtypes(self, dtype, real):
        return tuple(dict.fromkeys((dtype, real)))

    def values(self, value, softmax_scale, sizes):
        contiguous = [math.prod(value.shape[i + 1 :]) for i in range(len(value.shape))]
        strides = super().values(value, softmax_scale, sizes)
        return {**strides, "dbias_stride": self._strides(contiguous, value.shape)}

    def score(self, value, s, at):
        return s + at.of(value).astype(s.dtype)


class _Mask(_Broadcast):
    name, takes = "mask", "None or a boolean array that broadcasts to (batch, heads_q, seqlen_q, seqlen_k)"
    hides_anywhere = True
    flags = ("MASK",)
    kernels = SIMT + SM80 + SM90
    fields = (
        Field("mask", "pointer", "const unsigned char*", "(batch, num_heads_q, seqlen_q, seqlen_k); MASK"),
        Field("mask_stride", "i64", "long long", "elements: batch, head, query, key", 4),
    )

    def dtypes(self, dtype, real):
        return ("bool",)

    def visible(self, value, at):
        return np.broadcast_to(at.of(value), [part.stop - part.start for part in at[:4]])


class _Sinks(Feature):
    name, takes = "sinks", "None or an array (heads_q,)"
    is_array = has_gradient = True
    flags = ("SINKS",)
    kernels = SIMT + SM80 + SM90
    fields = (
        Field("sinks", "pointer", "const {real}*", "(num_heads_q); SINKS"),
        Field("sinks_stride", "i64", "long long", "elements"),
    )

    def shape_error(self, shape, sizes):
        return None if shape == (sizes.heads_q,) else f"({sizes.heads_q},): (heads_q,)"

    def values(self, value, softmax_scale, sizes):
        return {"sinks_stride": value.strides[0]}

    def sink(self, value, at):
        return at.of(np.asarray(value)[:, None, None])


def _philox(counter: tuple[np.ndarray, ...], key: int) -> list[np.ndarray]:
    """Four random 32-bit words for each counter of four (Philox4x32-10, Salmon et al. 2011), as uint64."""
    low = np.uint64(0xFFFFFFFF)
    x = [np.asarray(c, np.uint64) for c in counter]
    keys = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, b = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        k0, k1 = (np.uint64(k) for k in keys)
        x = [(b >> np.uint64(32)) ^ x[1] ^ k0, b & low, (a >> np.uint64(32)) ^ x[3] ^ k1, a & low]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return x


class _Dropout(Feature):
    """A probability is dropped where 16 random bits that belong to its (batch, head, query, key) are below a threshold.

    Eight elements share the 128 bits that one counter gives: those whose query differs in bit 3, and whose key in bits
    3 and 0. They are what lanes hold together of an accumulator, forward and, transposed, backward.
    """

    name, default, takes = "dropout_p", 0.0, "a number from 0 up to but not including 1"
    by_element = True
    flags = ("DROPOUT",)
    kernels = SIMT + SM80 + SM90
    fields = (
        Field("dropout_threshold", "i32", "int", "of 65536; DROPOUT"),
        Field("dropout_scale", "real", "{real}", "1 / (1 - threshold / 65536)"),
        Field("seed", "u64", "unsigned long long", "of the random bits"),
    )

    def check(self, value):
        number = read_number(self.name, value, self.takes)
        if not 0 <= number < 1:
            fail(self.name, value, self.takes, ValueError)
        return number

    @staticmethod
    def _threshold(value: float) -> int:
        return min(round(value * 65536), 65535)

    def values(self, value, softmax_scale, sizes):
        threshold = self._threshold(value)
        return {"dropout_threshold": threshold, "dropout_scale": 65536 / (65536 - threshold)}

    def weight(self, value, at):
        (b, h, i, j), (p, seed) = at.indices(), value
        words = _philox((i & ~8, j & ~9, h, b), seed)
        word = np.where(i & 8, np.where(j & 8, words[3], words[2]), np.where(j & 8, words[1], words[0]))
        bits = np.where(j & 1, word >> np.uint64(16), word & np.uint64(0xFFFF))
        threshold = self._threshold(p)
        return np.where(bits >= threshold, 65536 / (65536 - threshold), 0.0)


class _Function(Feature):
    """A Python function, traced. Its value is a graphs.Mod."""

    by_element = True

    def check(self, value):
        return trace.trace(self.name, value)

    def places(self, at: Place) -> dict[str, np.ndarray]:
        return dict(zip(graphs.INPUTS["mask_mod"], at.indices(), strict=True))

    def evaluated(self, graph: graphs.Graph, value: graphs.Mod, at: Place, real: type, **score) -> np.ndarray:
        found = graph.evaluate({**score, **self.places(at)}, value.arrays, real)
        return np.broadcast_to(found, [part.stop - part.start for part in at[:4]])


class _ScoreMod(_Function):
    name, takes = "score_mod", "None or a function (score, batch, head, q_idx, kv_idx) -> score"
    changes_scores = has_gradient = True
    flags = ("SCORE_MOD",)
    kernels = SIMT + SM80 + SM90

    def idle(self, value):
        return value.graph.nodes[-1].operation == "input"  # the score itself: others would be cast

    def score(self, value, s, at):
        return self.evaluated(value.graph, value, at, s.dtype.type, score=s).copy()

    def slope(self, value, s, at):
        return self.evaluated(value.slope, value, at, s.dtype.type, score=s)

    def differentiated(self, value):
        return tuple(CAPTURED[place].name for place in value.differentiable)

    def gradient(self, value, found):
        return tuple(found[f"d{name}"] for name in self.differentiated(value))

    def scatter(self, value, s, ds, at, totals):
        inputs = {"score": s, "ds": ds, **self.places(at)}
        value.scatter.scatter(inputs, value.arrays, totals, s.dtype.type)


class _MaskMod(_Function):
    name, takes = "mask_mod", "None or a function (batch, head, q_idx, kv_idx) -> bool"
    hides_anywhere = True
    flags = ("MASK_MOD",)
    kernels = SIMT + SM80 + SM90

    def visible(self, value, at):
        return self.evaluated(value.graph, value, at, np.float64)


class _Captured(Feature):
    """An array that `score_mod` and `mask_mod` capture: no argument of its own, and taken wherever they are."""

    is_array = True
    flags = ()
    kernels = SIMT + SM80 + SM90

    def __init__(self, place: int):
        self.name = f"mod_array_{place}"
        self.fields = (
            Field(self.name, "pointer", "const void*", "what a function captures; SCORE_MOD, MASK_MOD"),
            Field(f"{self.name}_stride", "i64", "long long", "elements: each dimension", graphs.MAX_DIMENSIONS),
            Field(f"{self.name}_size", "i32", "int", "of each dimension", graphs.MAX_DIMENSIONS),
            Field(f"d{self.name}", "pointer", "{real}*", "its gradient, contiguous, zeroed; null: not wanted"),
        )

    def shape_error(self, shape, sizes):
        return None if 0 not in shape or 0 in sizes else "one with elements"

    def dtypes(self, dtype, real):
        return tuple(graphs.ELEMENTS)

    def values(self, value, softmax_scale, sizes):
        unused = (0,) * (graphs.MAX_DIMENSIONS - len(value.shape))
        return {f"{self.name}_stride": (*value.strides, *unused), f"{self.name}_size": (*value.shape, *unused)}


class _BlockMask(Feature):
    """The blocks of a mask function, which is `mask_mod` then: what is visible is its affair."""

    name, takes = "block_mask", "None or what pyflash.block_mask made"
    flags = ("BLOCK_MASK",)
    kernels = SIMT + SM80 + SM90

    def check(self, value):
        value = value.blocks if isinstance(value, BlockMask) else value
        return value if isinstance(value, Blocks) else fail(self.name, value, self.takes, TypeError)

    def misfit(self, value: Blocks, sizes: Sizes):
        fits = value.batch in (1, sizes.batch) and value.heads in (1, sizes.heads_q) and value[2:4] == sizes[2:4]
        return None if fits else (f"one for {value[:4]}", f"one for {tuple(sizes)}, or with batch or heads of 1")


class _BlockLists(Feature):
    """An array of a block mask: no argument of its own, and taken wherever that is."""

    is_array = True
    flags = ()
    kernels = SIMT + SM80 + SM90

    def __init__(self, name: str, shape: str):
        self.name = name
        self.fields = (
            Field(name, "pointer", "const int*", f"{shape}, batch and heads or 1 each, contiguous; BLOCK_MASK"),
            Field(f"{name}_stride", "i64", "long long", "elements: batch, head", 2),
        )

    def dtypes(self, dtype, real):
        return ("int32",)

    def values(self, value, softmax_scale, sizes):
        strides = (stride if n > 1 else 0 for n, stride in zip(value.shape[:2], value.strides, strict=False))
        return {f"{self.name}_stride": tuple(strides)}


FEATURES: tuple[Feature, ...] = (
    _Causal(), _Window(), _Softcap(), _AlibiSlopes(), _Bias(), _Mask(), _Sinks(), _ScoreMod(), _MaskMod(), _BlockMask(),
    _Dropout(),
)  # fmt: skip
CAPTURED = tuple(_Captured(place) for place in range(graphs.MAX_ARRAYS))
BLOCK_LISTS = (
    _BlockLists("key_blocks", "(batch, heads, blocks of queries, 1 + blocks of keys)"),
    _BlockLists("query_blocks", "(batch, heads, blocks of keys, 1 + blocks of queries)"),
)
FUNCTIONS = tuple(graphs.INPUTS)  # the features that are functions
HOLDERS = {**dict.fromkeys(FUNCTIONS, CAPTURED), "block_mask": BLOCK_LISTS}  # scalars with `arrays`, and what these are
BY_NAME = {feature.name: feature for feature in FEATURES + CAPTURED + BLOCK_LISTS}
_DEFAULTS = {name: feature.default for name, feature in BY_NAME.items()} | {"seed": None}
DEFAULTS = {feature.name: feature.default for feature in FEATURES}
FIELDS = tuple(field for feature in FEATURES + CAPTURED + BLOCK_LISTS for field in feature.fields)


def check(options: Mapping[str, object]) -> dict[str, object]:
    """The features among `options` that are on, with their checked values, arrays as they are, in the order of the
    table. A right bound of 0 is causal, however it was asked for; dropout for which there is a seed is the pair."""
    if not options.keys() <= _DEFAULTS.keys():
        raise TypeError(f"unknown options {sorted(options.keys() - _DEFAULTS.keys())}, takes {sorted(BY_NAME)}")
    if isinstance(block_mask := options.get("block_mask"), BlockMask):
        check_alone(options.get("mask_mod"))
        options = {**options, "mask_mod": block_mask.mask_mod}
    on = {}
    for name, default in DEFAULTS.items():
        value = options.get(name, default)
        if value is not default:
            feature = BY_NAME[name]
            value = value if feature.is_array else feature.check(value)
            if feature.is_array or value != default:
                on[name] = value
    if "window" in on:
        left, right = on.pop("window")
        if right == 0 or (right is not None and "causal" in on):
            on, right = {"causal": True, **on}, None
        if (left, right) != (None, None):
            causal = {"causal": on.pop("causal")} if "causal" in on else {}
            on = {**causal, "window": (left, right), **on}
    if "dropout_p" in on and options.get("seed") is not None:
        on["dropout_p"] = on["dropout_p"], check_seed(options["seed"])
    if not on.keys().isdisjoint(HOLDERS):
        if functions := [name for name in FUNCTIONS if name in on]:
            on |= dict(zip(functions, graphs.joined([on[name] for name in functions]), strict=True))
        for name in [name for name in HOLDERS if name in on]:
            if arrays := tuple(options[slot.name] for slot in HOLDERS[name] if slot.name in options):
                on[name] = on[name]._replace(arrays=arrays)
    return on


def check_alone(mask_mod: object) -> None:
    """That there is none beside a block mask."""
    if mask_mod is not None:
        fail("mask_mod", mask_mod, "None where there is a block_mask, which has one of its own", ValueError)


def parted(on: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """What is hashable of features that are on, and the arrays, those that scalars hold among them."""
    scalars, arrays = {}, {}
    for name, value in on.items():
        (arrays if BY_NAME[name].is_array else scalars)[name] = value
    for name in HOLDERS:
        if name in scalars:
            arrays |= {slot.name: array for slot, array in zip(HOLDERS[name], scalars[name].arrays, strict=False)}
            scalars[name] = scalars[name]._replace(arrays=())
    return scalars, arrays


def check_seed(value: object) -> int:
    """A seed of dropout."""
    takes = "None or an integer from 0 up to but not including 2**64"
    try:
        seed = operator.index(fail("seed", value, takes, TypeError) if isinstance(value, bool) else value)
    except TypeError:
        fail("seed", value, takes, TypeError)
    return seed if 0 <= seed < 2**64 else fail("seed", value, takes, ValueError)


def band(on: Mapping[str, object], seqlen_q: int, seqlen_k: int) -> tuple[int | None, int | None]:
    """(low, high): by causal and window, query i sees the keys from i + low to i + high. None is no bound."""
    left, right = on.get("window", (None, None))
    right = 0 if on.get("causal") else right
    shift = seqlen_k - seqlen_q
    low, high = None if left is None else shift - left, None if right is None else shift + right
    # Past the matrix all bounds are alike, and those that are clipped to it do not overflow.
    return tuple(None if bound is None else min(max(bound, -seqlen_q), seqlen_k) for bound in (low, high))


def _in_band(on: Mapping[str, object], at: Place) -> np.ndarray:
    low, high = band(on, at.sizes.seqlen_q, at.sizes.seqlen_k)
    _, _, i, j = at.indices()
    seen = np.ones((i.size, j.size), bool)
    if low is not None:
        seen &= j >= i + low
    if high is not None:
        seen &= j <= i + high
    return seen


def banded(flags: Mapping[str, object]) -> bool:
    """Whether flags are those of a program in which what a query sees depends on its position."""
    return any(flags.get(flag) for name in ("causal", "window") for flag in BY_NAME[name].flags)


def flags(on: Mapping[str, object]) -> dict[str, bool]:
    """Every flag of the table."""
    true = {flag for name, value in on.items() for flag in BY_NAME[name].flags_of(value)}
    return {flag: flag in true for feature in FEATURES for flag in feature.flags}


def changes_scores(on: Iterable[str]) -> bool:
    return any(BY_NAME[name].changes_scores for name in on)


def by_element(on: Iterable[str]) -> bool:
    return any(BY_NAME[name].by_element for name in on)


def hides_by_position_only(on: Iterable[str]) -> bool:
    return not any(BY_NAME[name].hides_anywhere for name in on)


def visible(on: Mapping[str, object], at: Place) -> np.ndarray | None:
    """Which elements are visible, (queries, keys) or with batches and heads in front; None: all."""
    parts = [BY_NAME[name].visible(value, at) for name, value in on.items()]
    parts = [part for part in parts if part is not None]
    seen = parts[0] if parts else None
    for part in parts[1:]:
        seen = seen & part
    return seen


def deciding(on: Mapping[str, object], at: Place) -> Mapping[str, object] | None:
    """The features of which it depends what is visible of a part; None: nothing is."""
    kind = on["block_mask"].kind(*at[:4]) if "block_mask" in on else None
    if kind == EMPTY:
        return None
    return {name: value for name, value in on.items() if name != "mask_mod"} if kind == FULL else on


def score(on: Mapping[str, object], s: np.ndarray, at: Place) -> np.ndarray:
    """softmax_scale * q.k, modified. s is (batches, heads, queries, keys)."""
    for name, value in on.items():
        s = BY_NAME[name].score(value, s, at)
    return s


def weight(on: Mapping[str, object], at: Place) -> np.ndarray | None:
    """What the probabilities are multiplied with on their way to the values; None: 1."""
    found = (BY_NAME[name].weight(value, at) for name, value in on.items())
    return next((weight for weight in found if weight is not None), None)


def sink(on: Mapping[str, object], at: Place) -> np.ndarray | None:
    """A score that takes part in the softmax of each row and has no key, (1, heads, 1, 1); None: none."""
    found = (BY_NAME[name].sink(value, at) for name, value in on.items())
    return next((sink for sink in found if sink is not None), None)


def slopes(on: Mapping[str, object], s: np.ndarray, at: Place) -> tuple[np.ndarray | float, np.ndarray | float]:
    """The derivatives of score() at s: by s, and by what the bias adds to it."""
    total = since_bias = 1.0
    for name, value in on.items():
        slope = BY_NAME[name].slope(value, s, at)
        total, since_bias = total * slope, 1.0 if name == "bias" else since_bias * slope
        s = BY_NAME[name].score(value, s, at)
    return total, since_bias


def captured_gradients(found: Mapping[str, np.ndarray]) -> dict[int, np.ndarray]:
    """Those of captured arrays among gradients by name, by the arrays' places."""
    return {place: found[f"d{slot.name}"] for place, slot in enumerate(CAPTURED) if f"d{slot.name}" in found}


def scatter(
    on: Mapping[str, object], s: np.ndarray, ds: np.ndarray, at: Place, totals: Mapping[int, np.ndarray]
) -> None:
    """Add to the gradients of the arrays that score_mod captures, by their places: at s, from ds of what it makes, the
    last change of a score."""
    for name, value in on.items():
        if name == "score_mod":
            return BY_NAME[name].scatter(value, s, ds, at, totals)
        s = BY_NAME[name].score(value, s, at)


def support_matrix() -> str:
    """Which families take which option, forward and backward, and differentiate by which, as the table of README.md."""
    families = {"simt": SIMT, "sm80": SM80, "sm90": SM90}
    lines = ["| option | NumPy | " + " | ".join(families) + " |", "|---|---|" + "---|" * len(families)]
    for feature in FEATURES:
        taken = [[kernel in feature.kernels for kernel in kernels] for kernels in families.values()]
        cells = [{(1, 1): "yes", (1, 0): "forward", (0, 1): "backward", (0, 0): "no"}[tuple(both)] for both in taken]
        lines.append(f"| `{feature.name}` | yes | " + " | ".join(cells) + " |")
    for feature in (feature for feature in FEATURES if feature.has_gradient):
        cells = ["yes" if backward in feature.kernels else "no" for _, backward in families.values()]
        lines.append(f"| `return_d{feature.name}` | yes | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
