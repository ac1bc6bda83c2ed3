"""Sequences of different lengths in one call, without padding: packed one behind the other.

A padded batch computes on what is not there. Here sequences lie in one array, and `cu_seqlens` says where each begins;
the result is that of each sequence alone. `seqused` is for batches that are padded already.
"""

import numpy as np

import pyflash

rng = np.random.default_rng(0)
lengths = [700, 30, 0, 250, 120]
cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
q, k, v = (rng.standard_normal((cu_seqlens[-1], 4, 64), np.float32) for _ in range(3))

out, lse = pyflash.flash_attention_varlen(q, k, v, cu_seqlens, causal=True, return_lse=True)
for begin, end in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
    alone = pyflash.flash_attention(*(a[None, begin:end] for a in (q, k, v)), causal=True)[0]
    np.testing.assert_allclose(out[begin:end], alone, atol=1e-6)
tokens, padded = cu_seqlens[-1], len(lengths) * max(lengths)
print(f"{len(lengths)} sequences, {tokens} tokens, each as if alone; padded they would be {padded}")

dout = rng.standard_normal(out.shape, np.float32)
dq, dk, dv = pyflash.flash_attention_varlen_backward(dout, q, k, v, out, lse, cu_seqlens, causal=True)
print("gradients are packed, too:", dq.shape, dk.shape, dv.shape)

# The same sequences in a padded batch: what lies behind them has no influence, even if it is NaN.
batch = np.full((3, len(lengths), max(lengths), 4, 64), np.nan, np.float32)
for s, length in enumerate(lengths):
    batch[:, s, :length] = np.stack((q, k, v))[:, cu_seqlens[s] : cu_seqlens[s] + length]
used = pyflash.flash_attention(*batch, causal=True, seqused_q=lengths, seqused_k=lengths)
np.testing.assert_allclose(np.concatenate([used[s, :n] for s, n in enumerate(lengths)]), out, atol=1e-6)
assert not used[1, 30:].any(), "and what does not exist gives 0"
print("a padded batch with seqused_q and seqused_k gives the same")
