"""Hypothesis strategies for valid calls, as the planner sees them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from pyflash import features, problem
from pyflash.blocks import Blocks
from pyflash.device import KNOWN, Device
from pyflash.features import Sizes
from pyflash.problem import Tensor, contiguous

devices = st.sampled_from(sorted(KNOWN.values(), key=lambda device: device.name))

lengths = st.one_of(st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129, 319, 131072]), st.integers(0, 5000))
batches = st.one_of(st.integers(1, 4), st.sampled_from([0, 300, 8300, 65536]))
head_dims = st.one_of(st.sampled_from([8, 16, 32, 64, 80, 96, 128, 192, 256]), st.integers(1, 256))
dtypes = st.sampled_from(sorted(problem.DTYPES))


# What two functions capture, and they.
TABLE, IDS = np.zeros((2, 8), np.float32), np.zeros(8, np.int32)
FUNCTIONS = {
    "score_mod": lambda score, batch, head, q_idx, kv_idx: score * 2 + TABLE[0, q_idx - kv_idx],
    "mask_mod": lambda batch, head, q_idx, kv_idx: IDS[q_idx] == IDS[kv_idx],
}


# One that only adds to the score.
ADDED = {"score_mod": lambda score, batch, head, q_idx, kv_idx: score + TABLE[1, kv_idx]}

BLOCKS = Blocks(1, 1, 0, 0, 128, 128)  # `example` and `option_sets` make it one for their sequences


def traced(options: dict[str, object]) -> tuple[dict[str, object], dict[str, Tensor]]:
    """The functions among options as a problem has them, and their blocks: scalars, and arrays."""
    made = {name: value for name, value in options.items() if name in FUNCTIONS}
    if "block_mask" in options:
        made["mask_mod"] = FUNCTIONS["mask_mod"]
    scalars, arrays = features.parted(features.check(made))
    tensors = {name: contiguous(array.shape, array.dtype.name) for name, array in arrays.items()}
    if blocks := options.get("block_mask"):
        scalars["block_mask"] = blocks
        names = (slot.name for slot in features.BLOCK_LISTS)
        tensors |= {name: contiguous(shape, "int32") for name, shape in zip(names, blocks.shapes[1:], strict=True)}
    return scalars, tensors


@st.composite
def tensors(draw, shape: tuple[int, ...], dtype: str, *, output: bool = False) -> Tensor:
    """An array of a shape: contiguous, a transposed view, a slice of something larger, misaligned or broadcast."""
    layout = draw(st.sampled_from(["contiguous", "transposed", "sliced", "misaligned"] + ["broadcast"] * (not output)))
    if layout == "transposed":  # (batch, heads, seqlen, head_dim) in memory
        batch, seqlen, heads, dim = shape
        return Tensor(shape, (heads * seqlen * dim, dim, seqlen * dim, 1), dtype)
    if layout == "sliced":  # the first of `shape[2]` heads of a packed array, the first columns of a wider one
        wider = (*shape[:2], shape[2] + draw(st.integers(0, 3)), shape[3] + draw(st.sampled_from([0, 1, 8, 16])))
        return Tensor(shape, contiguous(wider, dtype).strides, dtype)
    if layout == "misaligned":
        return contiguous(shape, dtype)._replace(alignment=problem.DTYPES[dtype].itemsize)
    if layout == "broadcast":
        keep = draw(st.tuples(*[st.booleans()] * 4))
        return Tensor(shape, tuple(s * k for s, k in zip(contiguous(shape, dtype).strides, keep, strict=True)), dtype)
    return contiguous(shape, dtype)


@st.composite
def option_sets(draw, sizes: Sizes, real: str) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Any subset of the features: scalars and arrays."""
    side = st.one_of(st.none(), st.integers(0, 3000), st.just(2**40))
    slopes = st.sampled_from([(sizes.heads_q,), sizes[:2]]).map(lambda shape: contiguous(shape, real))
    broadcast = st.tuples(*(st.sampled_from([1, size]) for size in sizes))
    values = {
        "causal": st.booleans(),
        "window": st.tuples(side, side),
        "softcap": st.sampled_from([None, 30.0]),
        "alibi_slopes": slopes,
        "bias": broadcast.map(lambda shape: contiguous(shape, real)),
        "mask": broadcast.map(lambda shape: contiguous(shape, "bool")),
        "dropout_p": st.sampled_from([0.0, 0.2]),
        "sinks": st.just(contiguous((sizes.heads_q,), real)),
        **{name: st.just(function) for name, function in FUNCTIONS.items()},
        "block_mask": st.just(BLOCKS._replace(seqlen_q=sizes.seqlen_q, seqlen_k=sizes.seqlen_k)),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(values)), unique=True, max_size=3))
    made = {name: draw(values[name]) for name in chosen}
    functions, captured = traced(made)
    made |= functions | captured
    is_array = {name: features.BY_NAME[name].is_array for name in made}
    return {n: x for n, x in made.items() if not is_array[n]}, {n: x for n, x in made.items() if is_array[n]}


@st.composite
def problems(draw, backward: bool | None = None, dtype: str | None = None) -> problem.Problem:
    """Any valid call."""
    backward = draw(st.booleans()) if backward is None else backward
    dtype = dtype or draw(dtypes)
    batch, seqlen_q, seqlen_k = draw(batches), draw(lengths), draw(lengths)
    heads_kv, group = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    head_dim = draw(head_dims)
    head_dim_v = draw(st.one_of(st.just(head_dim), head_dims))
    out_shape = (batch, seqlen_q, heads_kv * group, head_dim_v)
    rows = (batch, heads_kv * group, seqlen_q)
    real = problem.REAL_DTYPES[problem.DTYPES[dtype].real]
    given = {
        "q": draw(tensors((batch, seqlen_q, heads_kv * group, head_dim), dtype)),
        "k": draw(tensors((batch, seqlen_k, heads_kv, head_dim), dtype)),
        "v": draw(tensors((batch, seqlen_k, heads_kv, head_dim_v), dtype)),
    }
    if backward:
        given["dout"] = draw(tensors(out_shape, dtype))
        given["o"] = draw(tensors(out_shape, dtype))
        given["lse"] = contiguous(rows, real)
        if draw(st.booleans()):
            given["dlse"] = contiguous(rows, real)
    elif draw(st.booleans()):
        given["o"] = draw(tensors(out_shape, dtype, output=True))
    options, arrays = draw(option_sets(Sizes(batch, heads_kv * group, seqlen_q, seqlen_k), real))
    return problem.make(
        given | arrays,
        backward=backward,
        softmax_scale=draw(st.sampled_from([None, 0.3, 0.0, -2.0])),
        deterministic=backward and draw(st.booleans()),
        wants_lse=not backward and draw(st.booleans()),
        options=options,
    )


def example(
    *,
    backward: bool = False,
    dtype: str = "bfloat16",
    batch: int = 2,
    seqlen_q: int = 1024,
    seqlen_k: int | None = None,
    heads: int = 4,
    heads_kv: int | None = None,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    narrow: tuple[str, ...] = (),
    softmax_scale: float | None = None,
    deterministic: bool = False,
    wants_lse: bool = True,
    dlse: bool = False,
    gradients: tuple[str, ...] = (),
    **options: object,
) -> problem.Problem:
    """One valid call with contiguous arrays, those in `narrow` misaligned. Of features that are arrays, `options` has
    the shapes, where "k" is seqlen_k."""
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    shapes = {
        "q": (batch, seqlen_q, heads, head_dim),
        "k": (batch, seqlen_k, heads_kv or heads, head_dim),
        "v": (batch, seqlen_k, heads_kv or heads, head_dim_v or head_dim),
    }
    given = {name: contiguous(shape, dtype) for name, shape in shapes.items()}
    for name in [name for name in options if features.BY_NAME[name].is_array]:
        allowed = features.BY_NAME[name].dtypes(dtype, problem.REAL_DTYPES[problem.DTYPES[dtype].real])
        given[name] = contiguous(tuple(seqlen_k if n == "k" else n for n in options.pop(name)), allowed[0])
    if blocks := options.get("block_mask"):
        options["block_mask"] = blocks._replace(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    functions, captured = traced(options)
    options, given = options | functions, given | captured
    wants_lse = wants_lse or backward
    made = problem.make(given, backward=False, softmax_scale=softmax_scale, wants_lse=wants_lse, options=options)
    if not backward and not narrow:
        return made
    given = problem.backward_tensors(made) if backward else given
    if "o" in narrow:
        given["o"] = dict(made.tensors)["o"]
    for name in narrow:
        given[name] = given[name]._replace(alignment=problem.DTYPES[dtype].itemsize)
    if backward and dlse:
        given["dlse"] = given["lse"]
    return problem.make(
        given,
        backward=backward,
        softmax_scale=softmax_scale,
        deterministic=deterministic,
        wants_lse=wants_lse and not backward,
        gradients=gradients,
        options=options,
    )


def packed(
    *,
    backward: bool = False,
    dtype: str = "bfloat16",
    tokens: int = 4096,
    batch: int = 8,
    heads: int = 4,
    heads_kv: int | None = None,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    used: bool = False,
    max_seqlen: int | None = None,
    offsets: str = "int32",
    deterministic: bool = False,
    **options: object,
) -> problem.Problem:
    """One valid call of packed sequences, of whose rows not all are `used`. Of features that are arrays, `options` has
    the shapes."""
    shapes = (heads, head_dim), (heads_kv or heads, head_dim), (heads_kv or heads, head_dim_v or head_dim)
    given = {name: contiguous((tokens, *shape), dtype) for name, shape in zip("qkv", shapes, strict=True)}
    given |= {f"cu_seqlens_{side}": contiguous((batch + 1,), offsets) for side in "qk"}
    given |= {f"seqused_{side}": contiguous((batch,), "int32") for side in "qk" if used}
    for name in [name for name in options if features.BY_NAME[name].is_array]:
        allowed = features.BY_NAME[name].dtypes(dtype, problem.REAL_DTYPES[problem.DTYPES[dtype].real])
        given[name] = contiguous(options.pop(name), allowed[0])
    if blocks := options.get("block_mask"):
        most = tokens if max_seqlen is None else max_seqlen
        options["block_mask"] = blocks._replace(seqlen_q=most, seqlen_k=most)
    functions, captured = traced(options)
    options, given = options | functions, given | captured
    call = {"options": options, "longest": (max_seqlen, max_seqlen)}
    made = problem.make(given, backward=False, wants_lse=True, **call)
    if not backward:
        return made
    return problem.make(problem.backward_tensors(made), backward=True, deterministic=deterministic, **call)


def device_of(capability: tuple[int, int]) -> Device:
    return next(device for device in KNOWN.values() if device.capability == capability)
