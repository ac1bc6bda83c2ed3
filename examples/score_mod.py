"""Scores of your own: relative positions from a learned table, in documents that do not see each other.

`score_mod` says what becomes of a score, `mask_mod` which query sees which key. Both are traced once and compiled into
the kernels. The backward returns the gradient of the table, too, and a few steps along it find one that is hidden.
"""

import numpy as np

import pyflash

try:
    import cupy as xp

    xp.cuda.runtime.getDeviceCount()
except Exception:  # no CuPy, no driver, or no GPU
    xp = np

rng = np.random.default_rng(0)
batch, seqlen, heads, head_dim, distances = 1, 384, 2, 32, 32
q, k, v = (xp.asarray(rng.standard_normal((batch, seqlen, heads, head_dim), np.float32)) for _ in range(3))
table = xp.zeros((heads, distances), np.float32)  # what is learned: a number for each head and distance
hidden = xp.asarray(rng.standard_normal(table.shape, np.float32))  # what is to be found
document = xp.asarray(np.arange(seqlen, dtype=np.int32) // 100)  # four of them


def with_table(table):
    """It is captured, as any array of q's kind may be. Changing its contents compiles nothing anew."""
    return lambda score, batch, head, q_idx, kv_idx: (
        score + table[head, pyflash.minimum(pyflash.abs(q_idx - kv_idx), distances - 1)]
    )


def same_document(batch, head, q_idx, kv_idx):
    return (document[q_idx] == document[kv_idx]) & (kv_idx <= q_idx)


# The mask is known beforehand, so its empty blocks are skipped. 1 head: it is the same for all.
block_mask = pyflash.block_mask(same_document, batch, 1, seqlen, seqlen)
print(block_mask)

# Forward and backward, checked against the float64 reference, which takes the same functions.
options = {"score_mod": with_table(hidden)}
out, lse = pyflash.flash_attention(q, k, v, block_mask=block_mask, return_lse=True, **options)
dout = xp.asarray(rng.standard_normal(out.shape, np.float32))
dq, dk, dv, (dtable,) = pyflash.flash_attention_backward(
    dout, q, k, v, out, lse, block_mask=block_mask, return_dscore_mod=True, **options
)
options["mask_mod"] = same_document
expected, _ = pyflash.reference.attention(q, k, v, **options)
*gradients, (expected_dtable,) = pyflash.reference.attention_backward(dout, q, k, v, return_dscore_mod=True, **options)
pairs = zip((out, dq, dk, dv, dtable), (expected, *gradients, expected_dtable), strict=True)
errors = [float(abs(ours - xp.asarray(theirs)).max() / abs(theirs).max()) for ours, theirs in pairs]
print(f"largest relative difference from the reference, gradients included: {max(errors):.1e}")
assert max(errors) < 1e-4

# Learning: the loss is the sum of the squares of what is still wrong.
losses = []
for _ in range(10):
    options = {"score_mod": with_table(table), "block_mask": block_mask}
    found, lse = pyflash.flash_attention(q, k, v, return_lse=True, **options)
    wrong = found - out
    losses.append(float((wrong**2).sum()))
    *_, (dtable,) = pyflash.flash_attention_backward(2 * wrong, q, k, v, found, lse, return_dscore_mod=True, **options)
    table -= 0.004 * dtable
print(f"loss {losses[0]:.1f} -> {losses[-1]:.1f} in {len(losses)} steps, from an empty table")
assert losses[-1] < 0.5 * losses[0]
