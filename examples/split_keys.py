"""Attention over keys that lie in several places, merged through lse.

Each part of the keys gives an output and a log-sum-exp; weighting the outputs by exp(lse - total) gives attention over
all keys, exactly. Rings of GPUs, and caches of keys that do not fit one array, work like this.
"""

import numpy as np

import pyflash

rng = np.random.default_rng(0)
q = rng.standard_normal((1, 300, 4, 64), np.float32)
k, v = (rng.standard_normal((1, 1000, 4, 64), np.float32) for _ in range(2))

parts = [slice(0, 100), slice(100, 640), slice(640, 1000)]
outs, lses = zip(*(pyflash.flash_attention(q, k[:, p], v[:, p], return_lse=True) for p in parts), strict=True)

total = np.logaddexp.reduce(lses)  # (batch, heads, seqlen)
weights = [np.exp(lse - total).swapaxes(1, 2)[..., None] for lse in lses]
merged = sum(weight * out for weight, out in zip(weights, outs, strict=True))

whole, lse = pyflash.flash_attention(q, k, v, return_lse=True)
print(f"merged from {len(parts)} parts: off by at most {np.abs(merged - whole).max():.1e} from attention over all keys")
np.testing.assert_allclose(merged, whole, atol=2e-6)
np.testing.assert_allclose(total, lse, rtol=1e-6)

# The backward needs no merging of its own: with the whole row's out and lse, each part gives its keys' gradients, and
# the queries' gradients add up.
dout = rng.standard_normal(whole.shape, np.float32)
dq, dk, dv = pyflash.flash_attention_backward(dout, q, k, v, whole, lse)
pieces = [pyflash.flash_attention_backward(dout, q, k[:, p], v[:, p], whole, lse) for p in parts]
np.testing.assert_allclose(sum(piece[0] for piece in pieces), dq, atol=2e-5)
np.testing.assert_allclose(np.concatenate([piece[1] for piece in pieces], 1), dk, atol=2e-5)
np.testing.assert_allclose(np.concatenate([piece[2] for piece in pieces], 1), dv, atol=2e-5)
print("gradients computed part by part equal those over all keys")
