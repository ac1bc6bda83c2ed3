"""Sizes that break 32-bit offsets, grid limits and quadratic memory. Checked in places: all of it would take hours."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, partial

import numpy as np
import pytest
import runs
from cases import LARGE_CASES, numpy_dtype
from runs import cp
from tilings import tiled
from variants import every

import pyflash
from pyflash import debug, features, reference
from pyflash.device import present
from pyflash.explain import tile_row
from pyflash.problem import Problem
from pyflash.tiles import FAMILIES, KERNELS, Row

BOUNDS = {"float16": 6e-3, "bfloat16": 4e-2, "float32": 1e-5, "float64": 1e-12}  # relative to the largest entry


def random(shape: tuple[int, ...], dtype: str, seed: int):
    """Standard normals, repeated with an odd period: quick to make, and different wherever one looks."""
    base = np.random.default_rng(seed).standard_normal(999_983).astype(np.float32)
    return cp.asarray(np.resize(base.astype(numpy_dtype(dtype)), shape))


def needs_memory(nbytes: float) -> None:
    cp.get_default_memory_pool().free_all_blocks()
    free = cp.cuda.runtime.memGetInfo()[0]
    if free < nbytes:
        pytest.skip(f"needs {nbytes / 1e9:.0f} GB of the GPU's memory, {free / 1e9:.0f} GB are free")


def close(got, want, dtype: str, floor: float = 0.0) -> None:
    """`floor`: a magnitude that counts where the right values are nothing but rounding, as dq is for a single key."""
    got, want = cp.asnumpy(got).astype(np.float64), np.asarray(want, np.float64)
    assert np.abs(got - want).max() <= BOUNDS[dtype] * max(np.abs(want).max(), floor)


@pytest.mark.parametrize("name", LARGE_CASES)
def test_many_batches_and_heads(name):
    """The first, the last, and some between are right: whatever wraps around would land on others' places."""
    case = LARGE_CASES[name]
    shapes, dtype = case.shapes, case.dtype
    needs_memory(20 * np.prod(shapes["q"]) * 2)
    q, k, v, dout = (random(shapes[n], dtype, seed) for seed, n in enumerate(("q", "k", "v", "dout")))
    out, lse = pyflash.flash_attention(q, k, v, return_lse=True)
    gradients = pyflash.flash_attention_backward(dout, q, k, v, out, lse)
    axis = 0 if case.batch > case.heads_q else 2
    extent = shapes["q"][axis]
    for i in (0, 1, extent // 3, extent // 2, 32767 % extent, extent - 2, extent - 1):
        part = (slice(i, i + 1),) if axis == 0 else (slice(None), slice(None), slice(i, i + 1))
        inputs = [cp.asnumpy(a[part]).astype(np.float64) for a in (q, k, v, dout)]
        close(out[part], reference.attention(*inputs[:3])[0], dtype)
        for got, want in zip(gradients, reference.attention_backward(inputs[3], *inputs[:3]), strict=True):
            close(got[part], want, dtype, floor=0.1)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_offsets_past_32_bits(dtype):
    """Neighbouring keys, queries and outputs lie 2^30 elements apart, so that the last are past 2^31 elements."""
    itemsize = np.dtype(dtype).itemsize
    needs_memory(1.1 * 2 * 3 * 2**30 * itemsize)
    shape, strides = (1, 4, 1, 64), (itemsize, 2**30 * itemsize, itemsize, itemsize)

    def placed(memory, place: int):
        return cp.ndarray(shape, dtype, memory.data + 256 * place * itemsize, strides)

    inputs, outputs = (cp.empty(3 * 2**30 + 1024, dtype) for _ in range(2))
    q, k, v = (placed(inputs, place) for place in range(3))
    for seed, array in enumerate((q, k, v)):
        array[...] = random(shape, dtype, seed)
    out = placed(outputs, 0)
    result, lse = pyflash.flash_attention(q, k, v, causal=True, return_lse=True, out=out)
    host = [cp.asnumpy(a) for a in (q, k, v)]
    close(result, reference.attention(*host, causal=True)[0], dtype)
    gradients = pyflash.flash_attention_backward(q, q, k, v, out, lse, causal=True)
    for got, want in zip(gradients, reference.attention_backward(host[0], *host, causal=True), strict=True):
        close(got, want, dtype)


def spread(extent: int) -> list[int]:
    """Places at both ends, around the edges of tiles, and between."""
    places = (0, 1, 63, 64, 127, 128, 129, 4095, extent // 3, extent // 2, extent - 130, extent - 2, extent - 1)
    return sorted({place for place in places if 0 <= place < extent})


def check_places(arrays, results, head: int, options: dict[str, object], dtype: str, scale: float, bias=None) -> None:
    """Some queries and keys of one head of the first batch, computed again in float64 from all that they see."""
    added = np.zeros((1, 1)) if bias is None else cp.asnumpy(bias[0, head]).astype(np.float64)
    q, k, v, dout = arrays
    out, lse, dq, dk, dv = results
    group = q.shape[2] // k.shape[2]
    assert group == 1, "the gradients of a key are those of one query head"
    qh, kh, vh, dh, oh = (cp.asnumpy(a[0, :, head]).astype(np.float64) for a in (q, k, v, dout, out))
    added = np.broadcast_to(added, (len(qh), len(kh)))
    low, high = features.band(features.check(options), len(qh), len(kh))

    def seen(rows, keys) -> np.ndarray:
        distance = np.array(keys) - np.array(rows)[:, None]
        return (distance >= (-np.inf if low is None else low)) & (distance <= (np.inf if high is None else high))

    rows = spread(len(qh))
    s = np.where(seen(rows, range(len(kh))), scale * qh[rows] @ kh.T + added[rows], -np.inf)
    top = s.max(1)
    expected_lse = np.log(np.exp(s - top[:, None]).sum(1)) + top
    p = np.exp(s - expected_lse[:, None])
    delta = (dh[rows] * (p @ vh)).sum(1, keepdims=True)
    np.testing.assert_allclose(cp.asnumpy(lse[0, head])[rows], expected_lse, rtol=1e-5, atol=1e-5)
    close(out[0, :, head][rows], p @ vh, dtype)
    close(dq[0, :, head][rows], scale * (p * (dh[rows] @ vh.T - delta)) @ kh, dtype)

    keys = spread(len(kh))
    s = np.where(seen(range(len(qh)), keys), scale * qh @ kh[keys].T + added[:, keys], -np.inf)
    p = np.exp(s - cp.asnumpy(lse[0, head]).astype(np.float64)[:, None])
    delta = (dh * oh).sum(1, keepdims=True)
    close(dv[0, :, head][keys], p.T @ dh, dtype)
    close(dk[0, :, head][keys], scale * (p * (dh @ vh[keys].T - delta)).T @ qh, dtype)


def test_131072_tokens():
    """Forward and backward, within the memory that the README promises."""
    seqlen, heads, dim, dtype = 131072, 8, 128, "bfloat16"
    q, k, v, dout = (random((1, seqlen, heads, dim), dtype, seed) for seed in range(4))
    pool = cp.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    out, lse = pyflash.flash_attention(q, k, v, causal=True, return_lse=True)
    dq, dk, dv = pyflash.flash_attention_backward(dout, q, k, v, out, lse, causal=True)
    cp.cuda.Device().synchronize()
    assert pool.total_bytes() - before <= 7.5 * q.nbytes, "four results like q, lse, and three times q between"

    check_places((q, k, v, dout), (out, lse, dq, dk, dv), 5, {"causal": True}, dtype, dim**-0.5)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_long_rows_of_a_bias(head_dim, causal):
    seqlen, dtype = 4168, "bfloat16"
    q, k, v, dout = (random((1, seqlen, 2, head_dim), dtype, seed) for seed in range(4))
    bias = random((1, 2, seqlen, seqlen), dtype, 4)
    out, lse = pyflash.flash_attention(q, k, v, causal=causal, bias=bias, return_lse=True)
    gradients = pyflash.flash_attention_backward(dout, q, k, v, out, lse, causal=causal, bias=bias)
    check_places((q, k, v, dout), (out, lse, *gradients), 1, {"causal": causal}, dtype, head_dim**-0.5, bias)


@cache
def problems_here() -> dict[tuple, Problem]:
    """For each tile row that this GPU uses without options but for position, a problem that uses it."""
    rows: dict[tuple, Problem] = {}
    for variant in every([present(0)]):
        problem = variant.problem
        if isinstance(problem, Problem) and set(problem.on) <= {"causal", "window"} and not problem.packed:
            rows.setdefault(variant.row, problem)
    return rows


def run_row(kernel: str, row: Row) -> tuple:
    """Inputs, results and options of a call that uses a tile row, at lengths that are no multiples of any tile."""
    problem = problems_here()[kernel, row]
    dtype, seqlen_q, on = problem.dtype.name, problem.seqlen_q + 57, dict(problem.on)
    seqlen_k = max(seqlen_q, row.max_seqlen or 757)
    extents = [(seqlen_q, problem.head_dim), (seqlen_k, problem.head_dim), (seqlen_k, problem.head_dim_v)]
    q, k, v = (random((1, seqlen, 2, width), dtype, seed) for seed, (seqlen, width) in enumerate(extents))
    dout = random((1, seqlen_q, 2, problem.head_dim_v), dtype, 3)
    options = {**on, "softmax_scale": problem.softmax_scale}
    family, backward = kernel.rpartition("_")[2], {"deterministic": problem.deterministic}
    tiling = tiled(row=row) if kernel == "fwd_sm90" else nullcontext()
    with tiling, debug.families(family, *(other for other in FAMILIES if other != family)):
        plan = pyflash.explain(q, k, v, backward=kernel.startswith("bwd"), **backward, **options).plan
        assert row in map(tile_row, plan.launches)
        out, lse = pyflash.flash_attention(q, k, v, return_lse=True, **options)
        gradients = pyflash.flash_attention_backward(dout, q, k, v, out, lse, **backward, **options)
    return (q, k, v, dout), (out, lse, *gradients), on, dtype, problem.softmax_scale


ROWS = [(name, row) for name, kernel in KERNELS.items() for row in kernel.rows if name[4:] in FAMILIES]


@pytest.fixture(scope="module")
def compiled_ahead(request):
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = [item.callspec.params["tile"] for item in items if "tile" in item.callspec.params]
    runs.compile_ahead(partial(run_row, *tile) for tile in asked if tile in problems_here())


@pytest.mark.parametrize("tile", ROWS, ids=[f"{name}-{KERNELS[name].rows.index(row)}" for name, row in ROWS])
def test_every_tile_row(tile, compiled_ahead):
    """Rows that serve long sequences alone, and others."""
    if tile not in problems_here():
        pytest.skip("this GPU uses it with options alone, or never")
    arrays, results, on, dtype, scale = run_row(*tile)
    check_places(arrays, results, 1, on, dtype, scale)
