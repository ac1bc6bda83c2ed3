"""Attention forward and backward on plain arrays: CuPy's on a GPU, NumPy's without one."""

import numpy as np

import pyflash

try:
    import cupy as xp

    xp.cuda.runtime.getDeviceCount()
except Exception:  # no CuPy, no driver, or no GPU
    xp = np

# (batch, seqlen, heads, head_dim). Twelve query heads share four heads of keys and values.
rng = np.random.default_rng(0)
q = xp.asarray(rng.standard_normal((2, 1000, 12, 64), np.float32))
k = xp.asarray(rng.standard_normal((2, 1000, 4, 64), np.float32))
v = xp.asarray(rng.standard_normal((2, 1000, 4, 64), np.float32))

# Forward. lse, the log-sum-exp of each row of scores, is all that the backward needs besides the output.
out, lse = pyflash.flash_attention(q, k, v, causal=True, return_lse=True)
print("out", out.shape, out.dtype, type(out).__module__, "  lse", lse.shape, lse.dtype)

# Backward: the gradients of sum(out * dout).
dout = xp.asarray(rng.standard_normal(out.shape, np.float32))
dq, dk, dv = pyflash.flash_attention_backward(dout, q, k, v, out, lse, causal=True)
print("dq", dq.shape, "  dk", dk.shape, "  dv", dv.shape)

# The first token sees only itself, so its output is its value, whatever the scores.
np.testing.assert_allclose(out[:, 0, ::3].tolist(), v[:, 0].tolist(), rtol=1e-6)

# The dense float64 reference takes the same options.
expected, _ = pyflash.reference.attention(*(a if xp is np else xp.asnumpy(a) for a in (q, k, v)), causal=True)
error = np.abs((out if xp is np else xp.asnumpy(out)) - expected).max()
print(f"largest difference from the float64 reference: {error:.1e}")
assert error < 1e-5

# Arrays that lie as (batch, heads, seqlen, head_dim) are passed as transposed views; nothing is copied.
q_heads_first = xp.ascontiguousarray(q.swapaxes(1, 2))
again = pyflash.flash_attention(q_heads_first.swapaxes(1, 2), k, v, causal=True)
assert bool((again == out).all())

print(pyflash.explain(q, k, v, causal=True))
