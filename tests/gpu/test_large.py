"""Sizes that break 32-bit offsets, grid limits and quadratic memory. Checked in places: all of it would take hours."""

from __future__ import annotations

import numpy as np
import pytest
from cases import LARGE_CASES, numpy_dtype
from runs import cp

import pyflash
from pyflash import reference

BOUNDS = {"float16": 6e-3, "bfloat16": 4e-2, "float32": 1e-5}  # relative to the largest entry


def random(shape: tuple[int, ...], dtype: str, seed: int):
    """Standard normals, repeated with an odd period: quick to make, and different wherever one looks."""
    base = np.random.default_rng(seed).standard_normal(999_983).astype(np.float32)
    return cp.asarray(np.resize(base.astype(numpy_dtype(dtype)), shape))


def needs_memory(nbytes: float) -> None:
    cp.get_default_memory_pool().free_all_blocks()
    free = cp.cuda.runtime.memGetInfo()[0]
    if free < nbytes:
        pytest.skip(f"needs {nbytes / 1e9:.0f} GB of the GPU's memory, {free / 1e9:.0f} GB are free")


def close(got, want, dtype: str) -> None:
    got, want = cp.asnumpy(got).astype(np.float64), np.asarray(want, np.float64)
    assert np.abs(got - want).max() <= BOUNDS[dtype] * np.abs(want).max()


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
            close(got[part], want, dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_offsets_past_32_bits(dtype):
    """Neighbouring keys, queries and outputs lie 2^30 elements apart, so that the last are past 2^31 elements."""
    itemsize = np.dtype(dtype).itemsize
    needs_memory(1.1 * 2 * 3 * 2**30 * itemsize)
    shape, strides = (1, 4, 1, 64), (itemsize, 2**30 * itemsize, itemsize, itemsize)

    def spread(memory, place: int):
        return cp.ndarray(shape, dtype, memory.data + 256 * place * itemsize, strides)

    inputs, outputs = (cp.empty(3 * 2**30 + 1024, dtype) for _ in range(2))
    q, k, v = (spread(inputs, place) for place in range(3))
    for seed, array in enumerate((q, k, v)):
        array[...] = random(shape, dtype, seed)
    out = spread(outputs, 0)
    result, lse = pyflash.flash_attention(q, k, v, causal=True, return_lse=True, out=out)
    host = [cp.asnumpy(a) for a in (q, k, v)]
    close(result, reference.attention(*host, causal=True)[0], dtype)
    gradients = pyflash.flash_attention_backward(q, q, k, v, out, lse, causal=True)
    for got, want in zip(gradients, reference.attention_backward(host[0], *host, causal=True), strict=True):
        close(got, want, dtype)


def test_131072_tokens():
    """Forward and backward, each query and key that is looked at computed again in float64 from its whole row."""
    seqlen, heads, dim, dtype = 131072, 8, 128, "bfloat16"
    q, k, v, dout = (random((1, seqlen, heads, dim), dtype, seed) for seed in range(4))
    pool = cp.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    out, lse = pyflash.flash_attention(q, k, v, causal=True, return_lse=True)
    dq, dk, dv = pyflash.flash_attention_backward(dout, q, k, v, out, lse, causal=True)
    cp.cuda.Device().synchronize()
    assert pool.total_bytes() - before <= 7.5 * q.nbytes, "four results like q, lse, and three times q between"

    head, scale = 5, dim**-0.5
    rows = [0, 1, 63, 64, 127, 128, 4095, 65536, 131000, seqlen - 1]
    qh, kh, vh, dh, oh = (cp.asnumpy(a[0, :, head]).astype(np.float64) for a in (q, k, v, dout, out))
    s = scale * qh[rows] @ kh.T
    s[np.arange(seqlen) > np.array(rows)[:, None]] = -np.inf
    expected_lse = np.log(np.exp(s - s.max(1, keepdims=True)).sum(1)) + s.max(1)
    p = np.exp(s - expected_lse[:, None])
    np.testing.assert_allclose(cp.asnumpy(lse[0, head])[rows], expected_lse, rtol=1e-5, atol=1e-5)
    close(out[0, :, head][rows], p @ vh, dtype)
    delta = (dh[rows] * (p @ vh)).sum(1, keepdims=True)
    close(dq[0, :, head][rows], scale * (p * (dh[rows] @ vh.T - delta)) @ kh, dtype)

    keys = [0, 1, 63, 64, 65535, 131000, seqlen - 1]
    s = scale * qh @ kh[keys].T
    s[np.arange(seqlen)[:, None] < np.array(keys)] = -np.inf
    p = np.exp(s - cp.asnumpy(lse[0, head]).astype(np.float64)[:, None])
    delta = (dh * oh).sum(1, keepdims=True)
    close(dv[0, :, head][keys], p.T @ dh, dtype)
    close(dk[0, :, head][keys], scale * (p * (dh @ vh[keys].T - delta)).T @ qh, dtype)
