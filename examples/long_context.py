"""A sequence so long that its score matrix would not fit: 131072 tokens on a GPU, 16384 without one."""

import time
import tracemalloc

import numpy as np

import pyflash

try:
    import cupy as xp

    xp.cuda.runtime.getDeviceCount()
    seqlen, heads, head_dim, dtype = 131072, 8, 128, np.float16
except Exception:  # no CuPy, no driver, or no GPU
    xp = np
    seqlen, heads, head_dim, dtype = 16384, 1, 64, np.float32

rng = np.random.default_rng(0)
q, k, v, dout = (
    xp.asarray(rng.standard_normal((1, seqlen, heads, head_dim), np.float32).astype(dtype)) for _ in range(4)
)

tracemalloc.start()
pool = None if xp is np else xp.get_default_memory_pool()
before = 0 if pool is None else pool.total_bytes()
start = time.perf_counter()
out, lse = pyflash.flash_attention(q, k, v, causal=True, return_lse=True)
dq, dk, dv = pyflash.flash_attention_backward(dout, q, k, v, out, lse, causal=True)
if pool is not None:
    xp.cuda.Device().synchronize()
seconds = time.perf_counter() - start
used = tracemalloc.get_traced_memory()[1] if pool is None else pool.total_bytes() - before

scores = heads * seqlen * seqlen * np.dtype(dtype).itemsize
print(f"{seqlen} tokens, {heads} heads of {head_dim}, {np.dtype(dtype)}, forward and backward in {seconds:.2f} s")
print(f"memory for results and everything between: {used / 1e9:.2f} GB")
print(f"one score matrix of ordinary attention:    {scores / 1e9:.2f} GB")
assert used < scores
assert all(bool(xp.isfinite(a).all()) for a in (out, dq, dk, dv))
