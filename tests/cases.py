"""The calls that every tier tests: named cases, adversarial values, memory layouts, and Hypothesis strategies.

A `Case` says everything about a call but the library that holds its arrays. Each kind of condition in which attention
goes wrong is in `CASES` by name; `cases()` draws the space around them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from hypothesis import strategies as st
from values import VALUES

import pyflash
from pyflash import features
from pyflash.tiles import KERNELS


def lengths(tile: int) -> tuple[int, ...]:
    """Sequence lengths around a tile's edges."""
    return 0, 1, tile - 1, tile, tile + 1, 2 * tile + 63


@dataclass(frozen=True)
class Case:
    batch: int = 2
    seqlen_q: int = 65
    seqlen_k: int = 127
    heads_q: int = 2
    heads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int = 64
    dtype: str = "float32"
    softmax_scale: float | None = None
    options: tuple[tuple[str, object], ...] = ()  # features that are on; of arrays and functions, a key of their table
    values: str = "normal"  # a key of VALUES
    layouts: tuple[str, str, str, str] = ("contiguous",) * 4  # of q, k, v, dout: keys of LAYOUTS
    dlse: bool = False
    seed: int = 0

    @property
    def scalars(self) -> dict[str, object]:
        """The features that are no arrays, as a problem has them."""
        return self._plain | self._traced[0]

    def feature_arrays(self) -> dict[str, np.ndarray]:
        """Those that are, and what functions capture."""
        return self._made(ARRAYS, np) | self._traced[1]

    def call_of(self, xp) -> dict[str, object]:
        """The keyword arguments of the public functions, arrays those of `xp` (NumPy or CuPy)."""
        seed = {"seed": self.dropout_seed} if "dropout_p" in self._plain else {}
        made = self._made(ARRAYS, xp) | self._made(FUNCTIONS, xp)
        return {"softmax_scale": self.softmax_scale, **self._plain, **seed, **made}

    @property
    def _plain(self) -> dict[str, object]:
        return {name: value for name, value in self.options if name not in ARRAYS | FUNCTIONS}

    @property
    def _traced(self) -> tuple[dict[str, object], dict[str, object]]:
        return features.parted(features.check(self._made(FUNCTIONS, np)))

    def _made(self, table: dict[str, dict[str, Callable]], xp) -> dict[str, object]:
        rng = np.random.default_rng(self.seed + 1)
        return {name: table[name][value](self, rng, xp) for name, value in self.options if name in table}

    @property
    def dropout_seed(self) -> int:
        return self.seed * 0x123456789ABCDEF % 2**64

    @property
    def call(self) -> dict[str, object]:
        return self.call_of(np)

    @property
    def differentiated(self) -> tuple[str, ...]:
        """The features whose gradients are looked at."""
        return tuple(n for n in ("bias", "sinks") if n in dict(self.options))

    @property
    def returns(self) -> dict[str, bool]:
        """What asks for them."""
        return {f"return_d{name}": True for name in self.differentiated}

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim) if self.softmax_scale is None else self.softmax_scale

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        out = (self.batch, self.seqlen_q, self.heads_q, self.head_dim_v)
        return {
            "q": (self.batch, self.seqlen_q, self.heads_q, self.head_dim),
            "k": (self.batch, self.seqlen_k, self.heads_kv, self.head_dim),
            "v": (self.batch, self.seqlen_k, self.heads_kv, self.head_dim_v),
            "dout": out,
            "lse": (self.batch, self.heads_q, self.seqlen_q),
        }

    @property
    def group(self) -> int:
        return self.heads_q // self.heads_kv

    def arrays(self, xp=np) -> dict[str, object]:
        """q, k, v, dout, and dlse if the case has one: arrays of `xp` (NumPy or CuPy) in the case's layouts."""
        rng = np.random.default_rng(self.seed)
        made = VALUES[self.values](self, rng)
        dtype = numpy_dtype(self.dtype)
        arrays = {}
        for (name, value), layout in zip(made.items(), self.layouts, strict=True):
            arrays[name] = LAYOUTS[layout].place(value.astype(np.float32 if dtype.itemsize < 4 else dtype), dtype, xp)
        if self.dlse:
            arrays["dlse"] = xp.asarray(rng.standard_normal(self.shapes["lse"]).astype(self.lse_dtype))
        return arrays

    @property
    def lse_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"


def numpy_dtype(name: str) -> np.dtype:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


# ---- layouts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How an array of shape (batch, seqlen, heads, head_dim) lies in memory."""

    storage: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple  # the shape of the memory
    view: Callable[[object], object] = field(default=lambda memory: memory, repr=False)  # that memory -> the array
    repeated: tuple[int, ...] = ()  # axes with stride 0: the first value stands for all

    def place(self, value: np.ndarray, dtype: np.dtype, xp=np):
        """An array with this layout and these values; what else its memory holds is NaN."""
        kept = value[tuple(slice(1) if axis in self.repeated else slice(None) for axis in range(value.ndim))]
        memory = np.full(self.storage(kept.shape), np.nan, dtype)
        self.view(memory)[...] = kept
        placed = self.view(xp.asarray(memory))
        return xp.broadcast_to(placed, value.shape) if self.repeated else placed


LAYOUTS: dict[str, Layout] = {
    "contiguous": Layout(),
    "heads first": Layout(lambda s: (s[0], s[2], s[1], s[3]), lambda m: m.swapaxes(1, 2)),
    "packed": Layout(lambda s: (*s[:2], 3, *s[2:]), lambda m: m[:, :, 1]),
    "one off": Layout(lambda s: (*s[:3], s[3] + 1), lambda m: m[..., 1:]),
    "wide rows": Layout(lambda s: (*s[:3], s[3] + 16), lambda m: m[..., :-16]),
    "columns first": Layout(lambda s: (s[0], s[1], s[3], s[2]), lambda m: m.swapaxes(2, 3)),
    "every second": Layout(lambda s: (s[0], 2 * s[1], s[2], 2 * s[3]), lambda m: m[:, ::2, :, ::2]),
    "backwards": Layout(view=lambda m: m[:, ::-1]),
    "one number": Layout(repeated=(0, 1, 2, 3)),
    "one batch for all": Layout(repeated=(0,)),
}


# ---- arrays of features ----------------------------------------------------------------------------------------------
# Name of the feature -> name of a kind of array -> function (case, rng, xp) that makes one.


def _slopes(case: Case, rng, xp, *, batched: bool, step: int = 1):
    slopes = np.zeros((case.batch, case.heads_q * step) if batched else (case.heads_q * step,), case.lse_dtype)
    slopes[...] = np.nan  # between the elements
    slopes[..., ::step] = 2.0 ** rng.uniform(-8, 0, slopes[..., ::step].shape) * rng.choice([1, 1, -1], case.heads_q)
    return xp.asarray(slopes)[..., ::step]


def _broadcast(case: Case, rng, xp, *, axes: str, make: Callable, layout: Callable = lambda a: a):
    """An array that differs along `axes` of b, h, q, k."""
    sizes = {"b": case.batch, "h": case.heads_q, "q": case.seqlen_q, "k": case.seqlen_k}
    return layout(xp.asarray(make(case, rng, tuple(size if axis in axes else 1 for axis, size in sizes.items()))))


def _floats(case: Case, rng, shape: tuple[int, ...]) -> np.ndarray:
    return (2 * rng.standard_normal(shape)).astype(case.lse_dtype)


def _floats_of_q(case: Case, rng, shape: tuple[int, ...]) -> np.ndarray:
    return _floats(case, rng, shape).astype(numpy_dtype(case.dtype))


def _mostly_true(case: Case, rng, shape: tuple[int, ...]) -> np.ndarray:
    return rng.random(shape) < 0.7


def _half_the_rows(case: Case, rng, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.arange(shape[2])[:, None] % 2 == 0, shape).copy()


def _sink_scores(case: Case, rng, xp):
    sinks = (3 * rng.standard_normal(case.heads_q)).astype(case.lse_dtype)
    sinks[0] = -np.inf
    return xp.asarray(sinks)


def _transposed(a):
    """The same elements, queries next to each other in memory, and backwards."""
    return a[..., ::-1, :].swapaxes(2, 3).copy().swapaxes(2, 3)[..., ::-1, :]


ARRAYS: dict[str, dict[str, Callable]] = {
    "bias": {
        "of every element": partial(_broadcast, axes="bhqk", make=_floats_of_q),
        "of keys": partial(_broadcast, axes="k", make=_floats),
        "of heads, queries and keys, in q's type": partial(_broadcast, axes="hqk", make=_floats_of_q),
        "of batches and keys, in q's type": partial(_broadcast, axes="bk", make=_floats_of_q),
        "of batches and queries": partial(_broadcast, axes="bq", make=_floats),
        "transposed": partial(_broadcast, axes="bhqk", make=_floats, layout=_transposed),
        "queries and keys alone": partial(_broadcast, axes="qk", make=_floats, layout=lambda a: a[0, 0]),
    },
    "mask": {
        "of every element": partial(_broadcast, axes="bhqk", make=_mostly_true),
        "of batches and keys": partial(_broadcast, axes="bk", make=_mostly_true),
        "of half the queries": partial(_broadcast, axes="q", make=_half_the_rows),
        "transposed": partial(_broadcast, axes="hqk", make=_mostly_true, layout=_transposed),
        "queries and keys alone": partial(_broadcast, axes="qk", make=_mostly_true, layout=lambda a: a[0, 0]),
    },
    "sinks": {"of heads": _sink_scores},
    "alibi_slopes": {
        "of heads": partial(_slopes, batched=False),
        "of batches and heads": partial(_slopes, batched=True),
        "every third": partial(_slopes, batched=True, step=3),
    },
}


# ---- functions, as ARRAYS --------------------------------------------------------------------------------------------


def _alibi(case: Case, rng, xp):
    slopes = xp.asarray(2.0 ** rng.uniform(-8, 0, case.heads_q).astype(case.lse_dtype))
    shift = case.seqlen_k - case.seqlen_q
    return lambda score, batch, head, q_idx, kv_idx: score - slopes[head] * pyflash.abs(q_idx + shift - kv_idx)


def _relative_bias(case: Case, rng, xp):
    """A table of distances, in q's type and backwards."""
    distances = case.seqlen_q + case.seqlen_k
    table = xp.asarray(rng.standard_normal((distances, case.heads_q)).astype(numpy_dtype(case.dtype)))[::-1]
    first = case.seqlen_k
    return lambda score, batch, head, q_idx, kv_idx: score + table[q_idx - kv_idx + first, head]


def _capped(case: Case, rng, xp):
    return lambda score, batch, head, q_idx, kv_idx: 4.0 * pyflash.tanh(score / 4.0)


def _of_everything(case: Case, rng, xp):
    """Every operation, without steps and kinks in the score."""
    scales = xp.asarray(rng.uniform(0.5, 1, (case.batch, case.heads_q)).astype(case.lse_dtype))
    turns = xp.asarray(rng.integers(1, 9, case.seqlen_k).astype("int64"))

    def function(score, batch, head, q_idx, kv_idx):
        score = score * scales[batch, head]
        softplus = pyflash.log(1 + pyflash.exp(pyflash.minimum(score, 30.0)))
        wave = pyflash.sin(score) + pyflash.cos(score * 0.5) / pyflash.sqrt(1 + score**2)
        turn = (q_idx // turns[kv_idx] + kv_idx % 5) % 3
        near = pyflash.maximum(-pyflash.abs(q_idx - kv_idx) / 16, -2) + pyflash.floor(kv_idx / 7) * 0.01
        return pyflash.where((turn == 0) & ~(q_idx < 3), softplus, pyflash.where(turn != 1, score + near, wave))

    return function


def _near(case: Case, rng, xp):
    """Hides keys by their score: those that are far, and all from some queries."""
    width = 20

    def function(score, batch, head, q_idx, kv_idx):
        far = (pyflash.abs(q_idx + 3 * head - kv_idx) > width) | (q_idx % 11 == 5)
        return pyflash.where(far, -float("inf"), score)

    return function


def _documents(case: Case, rng, xp):
    ids = [np.sort(rng.integers(0, 4, (case.batch, n)), -1).astype("int32") for n in (case.seqlen_q, case.seqlen_k)]
    of_queries, of_keys = map(xp.asarray, ids)
    return lambda batch, head, q_idx, kv_idx: of_queries[batch, q_idx] == of_keys[batch, kv_idx]


def _documents_causal(case: Case, rng, xp):
    """Of keys up to some behind the query."""
    same, ahead = _documents(case, rng, xp), case.seqlen_k - case.seqlen_q
    return lambda batch, head, q_idx, kv_idx: same(batch, head, q_idx, kv_idx) & (kv_idx - q_idx <= ahead)


def _prefix(case: Case, rng, xp):
    prefix = 20
    return lambda batch, head, q_idx, kv_idx: (kv_idx < prefix + head) | (kv_idx <= q_idx)


def _blocks(case: Case, rng, xp, *, function: Callable, batch: int | None = None, heads: int | None = None, **sides):
    """A block mask: of every batch and head, unless told otherwise."""
    mask_mod = function(case, rng, xp)
    sizes = (case.batch if batch is None else batch, heads or case.heads_q, case.seqlen_q, case.seqlen_k)
    return pyflash.block_mask(mask_mod, *sizes, **sides, like=xp.zeros(1, xp.int32))


def _near_or_first(case: Case, rng, xp):
    """A window that differs among heads, and the first keys; some queries see nothing."""
    reach = xp.asarray(rng.integers(1, 90, case.heads_q).astype("int32"))
    return lambda batch, head, q_idx, kv_idx: (
        (pyflash.abs(q_idx - kv_idx) < reach[head]) | (kv_idx < 5)
    ) & (q_idx % 150 != 40)  # fmt: skip


FUNCTIONS: dict[str, dict[str, Callable]] = {
    "score_mod": {
        "alibi": _alibi, "relative bias": _relative_bias, "capped": _capped, "every operation": _of_everything,
        "near": _near,
    },
    "mask_mod": {"documents": _documents, "prefix": _prefix},
    "block_mask": {
        "documents": partial(_blocks, function=_documents, heads=1),
        "documents, causal": partial(_blocks, function=_documents_causal),
        "near or first": partial(_blocks, function=_near_or_first, batch=1),
        "near or first, larger blocks": partial(_blocks, function=_near_or_first, block_q=256, block_k=384),
    },
}  # fmt: skip


# ---- named cases -----------------------------------------------------------------------------------------------------

CAUSAL = (("causal", True),)
HALVES, FULLS = ("float16", "bfloat16"), ("float32", "float64")
DTYPES = HALVES + FULLS

CASES: dict[str, Case] = {
    "plain": Case(),
    "causal": Case(options=CAUSAL),
    "causal, more queries than keys": Case(seqlen_q=200, seqlen_k=70, options=CAUSAL),
    "all logits far below zero": Case(1, 1, 16, 1, 1, 128, 128, "bfloat16", values="all far below zero"),
    "causal, first visited tile masked, logits near -200": Case(
        1, 88, 448, 14, 2, 64, 64, "bfloat16", softmax_scale=200 / 64**3, options=CAUSAL, values="all far below zero"
    ),
    "rows with no visible key": Case(1, 40, 8, 1, 1, 8, 8, options=CAUSAL, dlse=True),
    "no keys": Case(seqlen_k=0),
    "no queries": Case(seqlen_q=0),
    "empty batch": Case(batch=0),
    "one query": Case(seqlen_q=1, seqlen_k=319),
    "scale zero": Case(softmax_scale=0.0),
    "scale negative": Case(softmax_scale=-0.2, options=CAUSAL),
    "only v transposed": Case(
        1, 62, 62, 2, 2, 128, 128, "bfloat16", layouts=("contiguous", "contiguous", "heads first", "contiguous")
    ),
    "dout a slice": Case(layouts=("contiguous",) * 3 + ("packed",)),
    "dout of a sum": Case(layouts=("contiguous",) * 3 + ("one number",)),
    "packed qkv": Case(seqlen_q=65, seqlen_k=65, layouts=("packed",) * 4),
    "pointers one element off": Case(layouts=("one off",) * 4),
    "strides in head_dim": Case(layouts=("every second", "columns first", "every second", "columns first")),
    "one key": Case(1, 1, 1, 1, 1, 16, 16, "float16", values="times 3"),
    "groups of 4, three of them": Case(heads_q=12, heads_kv=3, options=CAUSAL),
    "multi-query": Case(heads_q=8, heads_kv=1),
    "head_dim_v smaller": Case(head_dim=64, head_dim_v=24),
    "head_dim_v larger": Case(head_dim=24, head_dim_v=128, options=CAUSAL),
    "head_dim 1": Case(head_dim=1, head_dim_v=1),
    "head_dim 256": Case(1, 65, 65, 1, 1, 256, 256, options=CAUSAL),
    "odd head_dim": Case(head_dim=37, head_dim_v=81, options=CAUSAL),
    "row offsets": Case(values="row offsets"),
    "gradient of lse": Case(options=CAUSAL, dlse=True),
    "window": Case(seqlen_q=150, seqlen_k=200, options=(("window", (40, 20)),)),
    "window, causal": Case(1, 260, 260, 4, 2, 128, 128, options=(("window", (130, 0)),)),
    "window to the left": Case(seqlen_q=200, seqlen_k=170, options=(("window", (50, None)),), values="rising"),
    "window to the right": Case(seqlen_q=120, seqlen_k=260, options=(("window", (None, 30)),), values="rising"),
    "window of one key": Case(seqlen_q=140, seqlen_k=150, options=(("window", (0, 0)),), dlse=True),
    "window wider than all, more queries than keys": Case(
        seqlen_q=256, seqlen_k=128, options=(("window", (None, 2**40)),)
    ),
    "window on the left, few queries and many keys": Case(
        1, 60, 700, 8, 2, 128, 128, "float16", options=(("window", (333, None)),)
    ),
    "window, rows with no visible key": Case(seqlen_q=200, seqlen_k=70, options=(("window", (20, 3)),), dlse=True),
    "softcap": Case(options=(("softcap", 2.0),), values="times 3"),
    "softcap, large scores": Case(options=(("causal", True), ("softcap", 30.0)), values="sharp"),
    "softcap far above scores": Case(1, 70, 330, 2, 1, 64, 64, options=(("softcap", 30.0),)),
    "softcap above scores": Case(1, 70, 330, 2, 1, 64, 64, options=(("softcap", 30.0),), values="around 24"),
    "softcap below scores": Case(1, 70, 330, 2, 1, 64, 64, options=(("softcap", 30.0),), values="around -24"),
    "softcap far above most scores": Case(1, 70, 330, 2, 1, 64, 64, options=(("softcap", 30.0),), values="some far"),
    "softcap beyond all scores": Case(1, 70, 140, options=(("softcap", 1e6),), values="times 3"),
    "softcap, negative scale": Case(softmax_scale=-0.3, options=(("window", (40, 9)), ("softcap", 5.0))),
    "alibi": Case(heads_q=4, options=(("causal", True), ("alibi_slopes", "of heads"))),
    "alibi, both sides, more queries than keys": Case(
        seqlen_q=200, seqlen_k=100, heads_q=6, options=(("alibi_slopes", "of batches and heads"),), dlse=True
    ),
    "bias": Case(options=(("bias", "of every element"),)),
    "bias of keys, causal": Case(options=(("causal", True), ("bias", "of keys")), dlse=True),
    "bias in q's type, softcap": Case(
        heads_q=4, options=(("softcap", 5.0), ("bias", "of heads, queries and keys, in q's type")), values="times 3"
    ),
    "bias transposed, window": Case(seqlen_q=150, options=(("window", (30, 9)), ("bias", "transposed"))),
    "mask": Case(options=(("mask", "of every element"),)),
    "mask of keys, stride 0 in two dimensions": Case(heads_q=4, options=(("mask", "of batches and keys"),)),
    "mask, rows with no visible key": Case(1, 8, 8, 1, 1, 8, 8, options=(("mask", "of half the queries"),), dlse=True),
    "mask transposed, causal": Case(seqlen_q=130, options=(("causal", True), ("mask", "transposed"))),
    "mask and bias, odd lengths": Case(
        1, 1025, 77, 2, 1, 16, 16, options=(("bias", "queries and keys alone"), ("mask", "queries and keys alone"))
    ),
    "mask and bias, aligned rows": Case(
        2, 150, 208, options=(("bias", "of batches and keys, in q's type"), ("mask", "of every element"))
    ),
    "mask, aligned rows, causal": Case(
        1, 150, 272, 2, 1, 128, 128, options=(("causal", True), ("mask", "of every element"))
    ),
    "bias, aligned rows, window": Case(
        1, 150, 264, 2, 1, 80, 96, options=(("window", (100, 30)), ("bias", "of heads, queries and keys, in q's type"))
    ),
    "sinks": Case(heads_q=4, options=(("sinks", "of heads"),)),
    "sinks, rows with no visible key": Case(
        seqlen_q=150, seqlen_k=40, heads_q=4, options=(("causal", True), ("sinks", "of heads")), dlse=True
    ),
    "sinks, window": Case(seqlen_q=200, seqlen_k=260, heads_q=6, options=(("window", (30, 0)), ("sinks", "of heads"))),
    "dropout": Case(options=(("dropout_p", 0.3),), seed=5),
    "dropout, causal": Case(seqlen_q=150, heads_q=4, options=(("causal", True), ("dropout_p", 0.1)), seed=9, dlse=True),
    "dropout, wide heads": Case(1, 9, 130, 2, 1, 192, 256, options=(("dropout_p", 0.5), ("sinks", "of heads")), seed=3),
    "alibi as a function": Case(heads_q=4, options=(("causal", True), ("score_mod", "alibi"))),
    "relative bias as a function, window": Case(
        seqlen_q=130, heads_q=4, options=(("window", (60, 30)), ("score_mod", "relative bias")), dlse=True
    ),
    "softcap as a function, over another, and a bias": Case(
        options=(("softcap", 6.0), ("bias", "of keys"), ("score_mod", "capped")), values="times 3"
    ),
    "every operation in a function, and in a mask": Case(
        heads_q=4, options=(("score_mod", "every operation"), ("mask_mod", "documents"))
    ),
    "a function, causal, whole heads of 128": Case(
        1, 200, 330, 2, 1, 128, 128, options=(("causal", True), ("score_mod", "near"), ("mask_mod", "prefix"))
    ),
    "scores of minus infinity": Case(
        seqlen_q=140, seqlen_k=300, heads_q=4, options=(("score_mod", "near"),), values="rising", dlse=True
    ),
    "documents": Case(seqlen_q=140, heads_q=4, options=(("mask_mod", "documents"),), dlse=True),
    "documents, wide heads": Case(
        1, 70, 150, 2, 1, 192, 256, options=(("score_mod", "relative bias"), ("mask_mod", "documents"))
    ),
    "blocks of documents": Case(
        seqlen_q=300, seqlen_k=420, heads_q=4, options=(("block_mask", "documents"),), dlse=True
    ),
    "blocks of documents, causal": Case(
        1, 200, 330, 4, 2, 128, 128, options=(("block_mask", "documents, causal"),), dlse=True
    ),
    "blocks that differ among heads, causal, window": Case(
        1, 390, 390, 6, 2, options=(("window", (200, 0)), ("block_mask", "near or first")), values="rising"
    ),
    "large blocks, more keys than queries": Case(
        1, 290, 900, 2, 1, options=(("sinks", "of heads"), ("block_mask", "near or first, larger blocks"))
    ),
    "prefix, softcap": Case(seqlen_q=100, options=(("softcap", 5.0), ("mask_mod", "prefix"))),
    "everything": Case(
        seqlen_q=100, seqlen_k=150, heads_q=4,
        options=(("window", (60, 20)), ("softcap", 6.0), ("alibi_slopes", "of heads"), ("bias", "of keys"),
                 ("mask", "of every element"), ("sinks", "of heads"), ("dropout_p", 0.2)), seed=1,
    ),
    "alibi, softcap, window": Case(
        seqlen_q=130, seqlen_k=190, heads_q=4,
        options=(("window", (70, 15)), ("softcap", 4.0), ("alibi_slopes", "every third")), values="times 3",
    ),
}  # fmt: skip

# For the GPU alone: sizes that break 32-bit offsets and grid limits.
LARGE_CASES: dict[str, Case] = {
    "batch 65536": Case(65536, 16, 16, 1, 1, 80, 80, "float16"),
    "heads 65536": Case(1, 16, 16, 65536, 65536, 80, 80, "float16"),
    "sequences of one": Case(8300, 1, 1, 16, 16, 128, 128, "bfloat16"),
    "many short key ranges": Case(300, 2048, 128, 1, 1, 128, 128, "float16", values="times 3"),
    "many long key ranges": Case(40, 500, 600, 8, 4, 64, 64, "float16", values="times 3"),
}


# ---- strategies ------------------------------------------------------------------------------------------------------


@st.composite
def option_sets(draw) -> tuple[tuple[str, object], ...]:
    """Any subset of the features."""
    side = st.one_of(st.none(), st.integers(0, 12), st.sampled_from([63, 64, 65, 127, 2**33]))
    strategies = {
        "causal": st.just(True),
        "window": st.tuples(side, side),
        "softcap": st.sampled_from([2.0, 15.0, 50.0]),
        "dropout_p": st.sampled_from([0.1, 0.5]),
        **{name: st.sampled_from(sorted(kinds)) for name, kinds in (ARRAYS | FUNCTIONS).items()},
    }
    names = draw(st.lists(st.sampled_from([f.name for f in features.FEATURES]), unique=True))
    names = [name for name in names if name != "mask_mod" or "block_mask" not in names]
    return tuple((name, draw(strategies[name])) for name in sorted(names))


@st.composite
def cases(draw, *, tile: int = 64, dtypes: tuple[str, ...] = DTYPES, max_head_dim: int = 256) -> Case:
    """Any call of moderate size, with lengths around the edges of `tile`."""
    length = st.one_of(st.sampled_from(lengths(tile)), st.integers(0, 2 * tile + 63))
    head_dims = st.one_of(
        st.sampled_from([d for d in (8, 16, 32, 64, 80, 96, 128, 192, 256) if d <= max_head_dim]),
        st.integers(1, max_head_dim),
    )
    # In a sum of equal numbers the error is a matter of luck, for ordinary attention too.
    varied = sorted(name for name, layout in LAYOUTS.items() if len(layout.repeated) < 4)
    heads_kv, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (3, 4)]))
    head_dim = draw(head_dims)
    return Case(
        batch=draw(st.sampled_from([1, 2, 3, 0])),
        seqlen_q=draw(length),
        seqlen_k=draw(length),
        heads_q=heads_kv * group,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=draw(st.one_of(st.just(head_dim), head_dims)),
        dtype=draw(st.sampled_from(dtypes)),
        softmax_scale=draw(st.sampled_from([None, None, 0.3, 0.0, -0.1])),
        options=draw(option_sets()),
        values=draw(st.sampled_from(sorted(VALUES))),
        layouts=draw(st.tuples(*[st.sampled_from(varied)] * 4)),
        dlse=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


def taken(family: str, case: Case) -> Case:
    """The case, changed as far as the kernels of the family refuse it."""
    kernels = f"fwd_{family}", f"bwd_{family}"
    options = tuple(
        (name, value) for name, value in case.options if set(kernels) <= set(features.BY_NAME[name].kernels)
    )
    dtypes = KERNELS[kernels[0]].dtypes
    case = replace(case, dtype=dtypes[case.seed % len(dtypes)], options=options)
    if family != "sm90":
        return case
    # Its backward differentiates a bias beside softcap or score_mod, not both.
    if {"bias", "softcap", "score_mod"} <= {name for name, _ in options}:
        options = tuple((name, value) for name, value in options if name != "softcap")
    # What TMA can describe: something, in rows of 16 bytes.
    sizes = {name: max(getattr(case, name), 1) for name in ("batch", "seqlen_q", "seqlen_k")}
    dims = {name: -(-getattr(case, name) // 8) * 8 for name in ("head_dim", "head_dim_v")}
    return replace(case, **sizes, **dims, options=options, layouts=("contiguous",) * 4)
