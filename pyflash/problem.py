"""The problem: what was asked for, checked. Everything after it can trust it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from . import features, sequences

MAX_HEAD_DIM = 256
MAX_SIZE = 2**31 - 1


class Dtype(NamedTuple):
    name: str
    itemsize: int
    element: str  # the type's name in the kernels
    real: str  # what it is computed in, and the type of lse


DTYPES = {
    row.name: row
    for row in (
        Dtype("float16", 2, "fp16", "float"),
        Dtype("bfloat16", 2, "bf16", "float"),
        Dtype("float32", 4, "float", "float"),
        Dtype("float64", 8, "double", "double"),
    )
}
REAL_DTYPES = {"float": "float32", "double": "float64"}
ITEMSIZES = {"bool": 1, "int32": 4, "int64": 8, **{row.name: row.itemsize for row in DTYPES.values()}}


class Tensor(NamedTuple):
    """What matters of an array besides its contents."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: str
    alignment: int = 16  # the largest power of two up to 16 that divides the address

    def wide(self) -> bool:
        """Whether rows can be moved 16 bytes at a time."""
        itemsize = DTYPES[self.dtype].itemsize if self.dtype in DTYPES else 1  # bool
        outer = zip(self.shape[:-1], self.strides[:-1], strict=True)
        return (
            self.alignment == 16
            and (self.strides[-1] == 1 or self.shape[-1] == 1)
            and self.shape[-1] * itemsize % 16 == 0
            and all(extent <= 1 or stride * itemsize % 16 == 0 for extent, stride in outer)
        )

    def span(self) -> int:
        """How many elements there are in memory from the first to the last, if strides are positive; or back."""
        return sum((extent - 1) * abs(stride) for extent, stride in zip(self.shape, self.strides, strict=True)) + 1

    def overlaps_itself(self) -> bool:
        """Whether two indices can share an address, by the sufficient test that sorted strides nest."""
        if 0 in self.shape:
            return False
        reach = 0
        for stride, extent in sorted((abs(s), n) for s, n in zip(self.strides, self.shape, strict=True) if n > 1):
            if stride <= reach:
                return True
            reach += stride * (extent - 1)
        return False


def one_batch(tensor: Tensor) -> Tensor:
    """A packed array as the one batch of another."""
    (rows, *_), (stride, *_) = tensor.shape, tensor.strides
    return tensor._replace(shape=(1, *tensor.shape), strides=(rows * stride, *tensor.strides))


def contiguous(shape: tuple[int, ...], dtype: str) -> Tensor:
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return Tensor(shape, strides, dtype)


@dataclass(frozen=True)
class Problem:
    """One call. `tensors` holds every array that comes in or goes out, by its name in the kernels. Packed ones are
    there as arrays of one batch."""

    backward: bool
    dtype: Dtype
    batch: int  # sequences
    seqlen_q: int  # no sequence is longer
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    options: tuple[tuple[str, object], ...]  # the scalar features that are on
    tensors: tuple[tuple[str, Tensor], ...]
    outputs: tuple[str, ...]  # those of `tensors` that the call makes
    deterministic: bool = False

    @property
    def qheads_per_kv(self) -> int:
        return self.num_heads_q // self.num_heads_kv

    @property
    def packed(self) -> bool:
        return "cu_seqlens_q" in dict(self.tensors)

    @property
    def gaps(self) -> bool:
        """Whether sequences may be shorter than the room that they have. Where elements or blocks belong to positions,
        too, so that none are looked for behind the longest sequence."""
        names = dict(self.tensors).keys()
        listed = names & {"bias", "mask"} or self.option("block_mask")
        return bool(names & set(sequences.USED)) or (self.packed and bool(listed))

    @property
    def varlen(self) -> bool:
        """Whether lengths are a matter of each sequence."""
        return self.packed or self.gaps

    @property
    def arrays_batch(self) -> int:
        return 1 if self.packed else self.batch

    @property
    def rows_q(self) -> int:
        """Queries of a batch of the arrays."""
        return dict(self.tensors)["q"].shape[1]

    @property
    def rows_k(self) -> int:
        return dict(self.tensors)["k"].shape[1]

    @property
    def usual_seqlen_q(self) -> int:
        """For which tiles are chosen: that of sequences, by which most time is taken where lengths differ."""
        return self._usual(self.seqlen_q, self.rows_q)

    @property
    def usual_seqlen_k(self) -> int:
        return self._usual(self.seqlen_k, self.rows_k)

    def _usual(self, longest: int, rows: int) -> int:
        return min(longest, 2 * rows // max(self.batch, 1)) if self.packed else longest

    @property
    def num_rows(self) -> int:
        """Of softmax: queries of all heads."""
        return self.arrays_batch * self.num_heads_q * self.rows_q

    def tiles_per_head(self, rows: int, seqlen: int, tile: int) -> int:
        """Tiles of so many of a batch's queries or keys, of all sequences. Where lengths differ, numbers of tiles, of
        which not all exist (sequences.cuh)."""
        if not self.varlen:
            return self.batch * -(-seqlen // tile)
        return self.arrays_batch * rows // tile + self.batch * (1 + self.gaps) + self.packed

    def shape(self, name: str) -> tuple[int, ...]:
        """Of an array as the public functions have it."""
        shape = dict(self.tensors)[name].shape
        return shape[1:] if self.packed and name in _BATCHED else shape

    @property
    def operands(self) -> tuple[tuple[str, Tensor], ...]:
        """The (batch, seqlen, heads, head_dim) tensors."""
        return tuple((name, t) for name, t in self.tensors if name in _OPERANDS)

    @property
    def on(self) -> dict[str, object]:
        """The features that are on, each with its value: the scalar, or what is known of the array."""
        on = {**dict(self.options), **dict(self.tensors)}
        return {name: on[name] for name in features.BY_NAME if name in on}

    @property
    def sizes(self) -> features.Sizes:
        return features.Sizes(self.batch, self.num_heads_q, self.seqlen_q, self.seqlen_k)

    @property
    def most(self) -> features.Sizes:
        """Sizes that no sequence exceeds, however wrong what was said of the longest is."""
        return self.sizes._replace(seqlen_q=self.rows_q, seqlen_k=self.rows_k)

    @property
    def banded(self) -> bool:
        """Whether what a query sees depends on its position."""
        return features.band(self.on, 0, 0) != (None, None)

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs of one head that the features leave by position."""

        def up_to(bound: int | None) -> int:
            """Pairs of query i and key j <= i + bound."""
            if bound is None:
                return self.seqlen_q * self.seqlen_k
            first, last = bound + 1, bound + self.seqlen_q  # keys of the first and the last query, were there so many
            low, high = max(first, 1), min(last, self.seqlen_k)
            beyond = last - max(self.seqlen_k, first - 1)
            return (low + high) * max(high - low + 1, 0) // 2 + self.seqlen_k * max(beyond, 0)

        low, high = features.band(self.on, self.seqlen_q, self.seqlen_k)
        return up_to(high) - (0 if low is None else up_to(low - 1))

    def option(self, name: str) -> object:
        return dict(self.options).get(name)

    def __str__(self) -> str:
        shown = {name: tensor._replace(shape=self.shape(name)) for name, tensor in self.tensors}
        return describe(shown, self.softmax_scale, self.options)


def argument(name: str) -> str:
    """What the public functions call a tensor."""
    if name in (slot.name for slot in features.BLOCK_LISTS):
        return f"{name} of block_mask"
    if name in (slot.name for slot in features.CAPTURED):
        return f"array {name.rpartition('_')[2]} that score_mod or mask_mod captures"
    return "out" if name == "o" else name


def shown(name: str) -> str:
    """An array's name as the public functions have it."""
    return "out" if name == "o" else name


def describe(tensors: dict[str, Tensor], softmax_scale: object, options: tuple[tuple[str, object], ...]) -> str:
    """A call in one line, for error messages."""
    arrays = ", ".join(f"{argument(name)} {t.shape} {t.dtype}" for name, t in tensors.items())
    extras = "".join(f", {name}={value}" for name, value in (("softmax_scale", softmax_scale), *options))
    return f"[{arrays}{extras}]"


_MOST_SCALE = 1e30  # float32 holds it, in units of log2 too


def check_scale(softmax_scale: object) -> float | None:
    """softmax_scale as a Python number; None stands for 1 / sqrt(head_dim)."""
    if softmax_scale is None or (type(softmax_scale) is float and abs(softmax_scale) <= _MOST_SCALE):
        return softmax_scale
    try:
        value = None if isinstance(softmax_scale, (bool, str)) else float(softmax_scale)
    except OverflowError:
        value = math.inf
    except (TypeError, ValueError):
        value = None
    if value is None or not abs(value) <= _MOST_SCALE:
        error = TypeError if value is None else ValueError
        raise error(f"softmax_scale: got {softmax_scale!r}, takes a number from -1e30 to 1e30 or None")
    return value


class _Checker:
    """Raises with the argument's name, what it got, what it takes, and the whole call."""

    def __init__(self, tensors: dict[str, Tensor], call: str):
        self.tensors, self.call = tensors, call

    def fail(self, name: str, got: object, takes: str, error: type[Exception] = ValueError):
        raise error(f"{argument(name)}: got {got}, takes {takes}; call {self.call}")

    def rank(self, name: str, rank: int, layout: str) -> None:
        shape = self.tensors[name].shape
        if len(shape) != rank:
            self.fail(name, f"{len(shape)} dimensions {shape}", f"{rank}: {layout}")
        if max(shape) > MAX_SIZE:
            self.fail(name, f"shape {shape}", f"sizes up to {MAX_SIZE}")

    def same_dtype(self, name: str, dtype: str, whose: str) -> None:
        if self.tensors[name].dtype != dtype:
            self.fail(name, f"dtype {self.tensors[name].dtype}", f"{dtype}{whose}", TypeError)

    def feature(self, feature: features.Feature, dtype: Dtype, sizes: features.Sizes) -> None:
        tensor, dtypes = self.tensors[feature.name], feature.dtypes(dtype.name, REAL_DTYPES[dtype.real])
        if tensor.dtype not in dtypes:
            takes = f"{' or '.join(dtypes)} for {dtype.name} inputs"
            self.fail(feature.name, f"dtype {tensor.dtype}", takes, TypeError)
        if takes := feature.shape_error(tensor.shape, sizes):
            self.fail(feature.name, f"shape {tensor.shape}", takes)

    def integers(self, name: str, size: int, layout: str) -> None:
        """What says where or how long sequences are."""
        self.rank(name, 1, layout)
        tensor = self.tensors[name]
        if tensor.dtype not in sequences.DTYPES:
            self.fail(name, f"dtype {tensor.dtype}", " or ".join(sequences.DTYPES), TypeError)
        self.shape(name, (size,), layout)
        if tensor.strides != (1,) and size > 1:
            self.fail(name, f"strides {tensor.strides}", "an array without gaps")

    def sequences(self) -> int:
        """How many there are, by offsets."""
        layout, offsets = "(batch + 1,)", self.tensors["cu_seqlens_q"]
        self.rank("cu_seqlens_q", 1, layout)
        if not offsets.shape[0]:
            self.fail("cu_seqlens_q", "shape (0,)", f"{layout}, of which the first is 0")
        for name in sequences.OFFSETS:
            self.integers(name, offsets.shape[0], layout)
        return offsets.shape[0] - 1

    def lengths(self, batch: int) -> None:
        for name in self.tensors.keys() & set(sequences.USED):
            self.integers(name, batch, "(batch,)")

    def shape(self, name: str, shape: tuple[int, ...], layout: str) -> None:
        if self.tensors[name].shape != shape:
            self.fail(name, f"shape {self.tensors[name].shape}", f"{shape}: {layout}")


_OPERANDS = ("q", "k", "v", "o", "dout", "dq", "dk", "dv")
_BATCHED = (*_OPERANDS, "lse", "dlse")
_LAYOUT, _PACKED_LAYOUT = "(batch, seqlen, heads, head_dim)", "(tokens, heads, head_dim)"
_ROWS, _PACKED_ROWS = "(batch, heads_q, seqlen_q)", "(heads_q, tokens)"


def make(
    tensors: dict[str, Tensor],
    *,
    backward: bool,
    softmax_scale: object = None,
    deterministic: bool = False,
    wants_lse: bool = False,
    gradients: tuple[str, ...] = (),
    options: dict[str, object] | None = None,
    longest: tuple[int | None, int | None] = (None, None),
) -> Problem:
    """Check a call and turn it into a Problem, whose `tensors` are those given and the outputs.

    `tensors` holds q, k, v; for a forward the o to write to, if any; for a backward dout, o, lse, and dlse, if any;
    the arrays of features, and those that say where sequences are: with offsets all others are packed. `options` holds
    the features' scalars. `gradients` are the features whose gradients are wanted. `longest` is what is known of the
    longest sequence of packed queries and keys.
    """
    on, scale = tuple(features.check(options or {}).items()), check_scale(softmax_scale)
    check = _Checker(tensors, describe(tensors, softmax_scale, on))
    q, k, v = (tensors[name] for name in "qkv")
    packed = "cu_seqlens_q" in tensors
    layout, row_layout = (_PACKED_LAYOUT, _PACKED_ROWS) if packed else (_LAYOUT, _ROWS)
    for name in "qkv":
        check.rank(name, 4 - packed, layout)
    if q.dtype not in DTYPES:
        check.fail("q", f"dtype {q.dtype}", f"one of {', '.join(DTYPES)}", TypeError)
    dtype = DTYPES[q.dtype]
    for name in "kv":
        check.same_dtype(name, q.dtype, ", as q")
    *lead, rows_q, heads_q, head_dim = q.shape
    rows_k, heads_kv, head_dim_v = *k.shape[-3:-1], v.shape[-1]
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        check.fail("q", f"head_dim {head_dim}", f"1 to {MAX_HEAD_DIM}")
    if not 1 <= head_dim_v <= MAX_HEAD_DIM:
        check.fail("v", f"head_dim {head_dim_v}", f"1 to {MAX_HEAD_DIM}")
    if heads_q < 1:
        check.fail("q", f"{heads_q} heads", "at least 1")
    if heads_kv < 1:
        check.fail("k", f"{heads_kv} heads", "at least 1")
    if heads_q % heads_kv:
        check.fail("q", f"{heads_q} heads", f"a multiple of k's {heads_kv}")
    as_q, as_k = ("", "tokens") if packed else ("batch and ", "batch as q, seqlen")
    check.shape("k", (*lead, rows_k, heads_kv, head_dim), f"{layout}, {as_q}head_dim as q")
    check.shape("v", (*lead, rows_k, heads_kv, head_dim_v), f"{layout}, {as_k} and heads as k")
    outs, rows = (*lead, rows_q, heads_q, head_dim_v), (*lead, heads_q, rows_q)
    for name in ("o", "dout"):
        if name in tensors:
            check.rank(name, 4 - packed, layout)
            check.same_dtype(name, q.dtype, ", as q")
            takes = "(tokens, heads_q, head_dim_v)" if packed else "(batch, seqlen_q, heads_q, head_dim_v)"
            check.shape(name, outs, takes)
    for name in ("lse", "dlse"):
        if name in tensors:
            check.rank(name, 3 - packed, row_layout)
            check.same_dtype(name, REAL_DTYPES[dtype.real], f" for {q.dtype} inputs")
            check.shape(name, rows, row_layout)
    batch = check.sequences() if packed else lead[0]
    check.lengths(batch)
    seqlen_q, seqlen_k = (n if most is None else most for n, most in zip((rows_q, rows_k), longest, strict=True))
    if not backward and "o" in tensors and tensors["o"].overlaps_itself():
        check.fail("o", f"strides {tensors['o'].strides} for shape {outs}", "an array whose elements do not overlap")
    sizes = features.Sizes(batch, heads_q, seqlen_q, seqlen_k)
    for name, value in on:
        if misfit := features.BY_NAME[name].misfit(value, sizes):
            check.fail(name, *misfit)
    for name in tensors.keys() & features.BY_NAME.keys():
        check.feature(features.BY_NAME[name], dtype, sizes)
    if backward:
        every = {**tensors, **dict(on)}
        for name in gradients:
            if name not in every:
                raise ValueError(f"return_d{name}: got True, takes False where {name} is None; call {check.call}")
        arrays = (array for name in gradients for array in features.BY_NAME[name].differentiated(every[name]))
        outputs = {f"d{n}": contiguous(tensors[n].shape, tensors[n].dtype) for n in (*"qkv", *arrays)}
    else:
        outputs = {"o": contiguous(outs, q.dtype)} if "o" not in tensors else {}
        outputs |= {"lse": contiguous(rows, REAL_DTYPES[dtype.real])} if wants_lse else {}
    every = tensors | outputs
    if packed:
        every = {name: one_batch(tensor) if name in _BATCHED else tensor for name, tensor in every.items()}
    return Problem(
        backward=backward,
        dtype=dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads_q=heads_q,
        num_heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        softmax_scale=1.0 / math.sqrt(head_dim) if scale is None else scale,
        options=tuple((name, value) for name, value in on if not features.BY_NAME[name].idle(value)),
        tensors=tuple(every.items()),
        outputs=tuple(outputs),
        deterministic=deterministic,
    )


def backward_tensors(forward: Problem) -> dict[str, Tensor]:
    """What `make` takes for the backward of a forward call that returned lse, with contiguous out and dout."""
    tensors = dict(forward.tensors)
    kept = ("q", "k", "v", "o", "lse", *(name for name in (*features.BY_NAME, *sequences.ARRAYS) if name in tensors))
    given = {**{name: tensors[name] for name in kept}, "dout": tensors["o"]}
    if not forward.packed:
        return given
    return {n: t._replace(shape=t.shape[1:], strides=t.strides[1:]) if n in _BATCHED else t for n, t in given.items()}
