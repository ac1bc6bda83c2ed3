"""The problem: what was asked for, checked. Everything after it can trust it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from . import features

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
        itemsize = DTYPES[self.dtype].itemsize
        outer = zip(self.shape[:-1], self.strides[:-1], strict=True)
        return (
            self.alignment == 16
            and (self.strides[-1] == 1 or self.shape[-1] == 1)
            and self.shape[-1] * itemsize % 16 == 0
            and all(extent <= 1 or stride * itemsize % 16 == 0 for extent, stride in outer)
        )

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


def contiguous(shape: tuple[int, ...], dtype: str) -> Tensor:
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return Tensor(shape, strides, dtype)


@dataclass(frozen=True)
class Problem:
    """One call. `tensors` holds every array that comes in or goes out, by its name in the kernels."""

    backward: bool
    dtype: Dtype
    batch: int
    seqlen_q: int
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
        return describe(dict(self.tensors), self.softmax_scale, self.options)


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

    def shape(self, name: str, shape: tuple[int, ...], layout: str) -> None:
        if self.tensors[name].shape != shape:
            self.fail(name, f"shape {self.tensors[name].shape}", f"{shape}: {layout}")


_OPERANDS = ("q", "k", "v", "o", "dout", "dq", "dk", "dv")
_LAYOUT = "(batch, seqlen, heads, head_dim)"
_ROWS = "(batch, heads_q, seqlen_q)"


def make(
    tensors: dict[str, Tensor],
    *,
    backward: bool,
    softmax_scale: object = None,
    deterministic: bool = False,
    wants_lse: bool = False,
    gradients: tuple[str, ...] = (),
    options: dict[str, object] | None = None,
) -> Problem:
    """Check a call and turn it into a Problem, whose `tensors` are those given and the outputs.

    `tensors` holds q, k, v; for a forward the o to write to, if any; for a backward dout, o, lse, and dlse, if any;
    and the arrays of features. `options` holds their scalars. `gradients` are the features whose gradients are wanted.
    """
    on, scale = tuple(features.check(options or {}).items()), check_scale(softmax_scale)
    check = _Checker(tensors, describe(tensors, softmax_scale, on))
    q, k, v = (tensors[name] for name in "qkv")
    for name in "qkv":
        check.rank(name, 4, _LAYOUT)
    if q.dtype not in DTYPES:
        check.fail("q", f"dtype {q.dtype}", f"one of {', '.join(DTYPES)}", TypeError)
    dtype = DTYPES[q.dtype]
    for name in "kv":
        check.same_dtype(name, q.dtype, ", as q")
    batch, seqlen_q, heads_q, head_dim = q.shape
    _, seqlen_k, heads_kv, head_dim_v = v.shape
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        check.fail("q", f"head_dim {head_dim}", f"1 to {MAX_HEAD_DIM}")
    if not 1 <= head_dim_v <= MAX_HEAD_DIM:
        check.fail("v", f"head_dim {head_dim_v}", f"1 to {MAX_HEAD_DIM}")
    if heads_q < 1:
        check.fail("q", f"{heads_q} heads", "at least 1")
    if k.shape[2] < 1:
        check.fail("k", f"{k.shape[2]} heads", "at least 1")
    if heads_q % k.shape[2]:
        check.fail("q", f"{heads_q} heads", f"a multiple of k's {k.shape[2]}")
    check.shape("k", (batch, k.shape[1], k.shape[2], head_dim), f"{_LAYOUT}, batch and head_dim as q")
    check.shape("v", (batch, k.shape[1], k.shape[2], head_dim_v), f"{_LAYOUT}, batch as q, seqlen and heads as k")
    outs, rows = (batch, seqlen_q, heads_q, head_dim_v), (batch, heads_q, seqlen_q)
    for name in ("o", "dout"):
        if name in tensors:
            check.rank(name, 4, _LAYOUT)
            check.same_dtype(name, q.dtype, ", as q")
            if tensors[name].shape != outs:
                check.fail(name, f"shape {tensors[name].shape}", f"{outs}: (batch, seqlen_q, heads_q, head_dim_v)")
    for name in ("lse", "dlse"):
        if name in tensors:
            check.rank(name, 3, _ROWS)
            check.same_dtype(name, REAL_DTYPES[dtype.real], f" for {q.dtype} inputs")
            check.shape(name, rows, _ROWS)
    if not backward and "o" in tensors and tensors["o"].overlaps_itself():
        check.fail("o", f"strides {tensors['o'].strides} for shape {outs}", "an array whose elements do not overlap")
    sizes = features.Sizes(batch, heads_q, seqlen_q, k.shape[1])
    for name, value in on:
        if misfit := features.BY_NAME[name].misfit(value, sizes):
            check.fail(name, *misfit)
    for name in tensors.keys() & features.BY_NAME.keys():
        check.feature(features.BY_NAME[name], dtype, sizes)
    if backward:
        for name in gradients:
            if name not in tensors:
                raise ValueError(f"return_d{name}: got True, takes False where {name} is None; call {check.call}")
        outputs = {f"d{n}": contiguous(tensors[n].shape, tensors[n].dtype) for n in (*"qkv", *gradients)}
    else:
        outputs = {"o": contiguous(outs, q.dtype)} if "o" not in tensors else {}
        outputs |= {"lse": contiguous(rows, REAL_DTYPES[dtype.real])} if wants_lse else {}
    return Problem(
        backward=backward,
        dtype=dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=k.shape[1],
        num_heads_q=heads_q,
        num_heads_kv=k.shape[2],
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        softmax_scale=1.0 / math.sqrt(head_dim) if scale is None else scale,
        options=on,
        tensors=tuple((tensors | outputs).items()),
        outputs=tuple(outputs),
        deterministic=deterministic,
    )


def backward_tensors(forward: Problem) -> dict[str, Tensor]:
    """What `make` takes for the backward of a forward call that returned lse, with contiguous out and dout."""
    tensors = dict(forward.tensors)
    kept = ("q", "k", "v", "o", "lse", *(name for name in features.BY_NAME if name in tensors))
    return {**{name: tensors[name] for name in kept}, "dout": tensors["o"]}
