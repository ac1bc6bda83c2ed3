"""Attention written out in full in float64: the oracle that every other path is tested against.

Arrays are (batch, seqlen, heads, head_dim) of any real dtype, and everything is computed from the inputs alone, at the
price of the whole (seqlen_q, seqlen_k) score matrix. `options` are the features of `features.py`, as keywords, and
their meaning is taken from that table.

Masked keys are *selected* away, never multiplied by zero: whatever a masked key, or a query that does not see a key,
holds (NaN and inf included) has no influence on the other.
"""

from __future__ import annotations

import numpy as np

from . import features


def attention(q, k, v, *, softmax_scale: float | None = None, **options):
    """softmax(softmax_scale * q k^T) v and its log-sum-exp.

    Returns `out` (batch, seqlen_q, heads_q, head_dim_v) and `lse` (batch, heads_q, seqlen_q), both float64. A row
    that sees no key has out 0 and lse -inf.
    """
    q, k, v = _grouped(q, k, v)
    with np.errstate(all="ignore"):
        visible = visibility(q.shape[-2], k.shape[-2], options)
        p, lse = _softmax(_scores(q, k, softmax_scale), visible)
        out = select_matmul(p, v, visible)
    return _ungrouped(out), lse.reshape(lse.shape[0], lse.shape[1] * lse.shape[2], lse.shape[3])


def attention_backward(dout, q, k, v, *, softmax_scale: float | None = None, dlse=None, **options):
    """The gradients dq, dk, dv of sum(out * dout) + sum(lse * dlse), float64, in the shapes of q, k, v."""
    scale = _scale(q, softmax_scale)
    q, dout, k, v = _grouped(q, dout, k, v)
    with np.errstate(all="ignore"):
        visible = visibility(q.shape[-2], k.shape[-2], options)
        p, lse = _softmax(_scores(q, k, scale), visible)
        delta = (dout * select_matmul(p, v, visible)).sum(-1)
        if dlse is not None:
            delta = delta - np.asarray(dlse, np.float64).reshape(lse.shape)
        dp = dout @ v.swapaxes(-1, -2)
        ds = np.where(visible, p * (dp - delta[..., None]), 0.0)
        dq = scale * select_matmul(ds, k, visible)
        # One kv head serves a whole group of query heads, and collects all their gradients.
        dk = scale * select_matmul(ds.swapaxes(-1, -2), q, visible.T).sum(2, keepdims=True)
        dv = select_matmul(p.swapaxes(-1, -2), dout, visible.T).sum(2, keepdims=True)
    return _ungrouped(dq), _ungrouped(dk), _ungrouped(dv)


def select_matmul(weights, rows, visible, matmul=np.matmul):
    """weights @ rows for weights (..., m, n) that are 0 where `visible` (m, n) is False, and rows (..., n, d).

    Rows with NaN or inf contribute exactly to those that see them: an ordinary product would spread 0 * NaN.
    """
    finite = np.isfinite(rows).all(-1)
    if finite.all():
        return matmul(weights, rows)
    product = matmul(weights, np.where(finite[..., None], rows, 0))
    for n in np.flatnonzero(~finite.reshape(-1, finite.shape[-1]).all(0)):
        row = np.where(finite[..., n, None], 0, rows[..., n, :])
        product = product + np.where(visible[:, n, None], weights[..., n, None] * row[..., None, :], 0)
    return product


def visibility(seqlen_q: int, seqlen_k: int, options: dict[str, object]):
    """(seqlen_q, seqlen_k): which query sees which key."""
    terms = {feature.name: feature.visible for feature in features.FEATURES}
    if unknown := options.keys() - terms.keys():
        raise TypeError(f"unknown options {sorted(unknown)}, takes {sorted(terms)}")
    i, j = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)
    visible = np.ones((seqlen_q, seqlen_k), bool)
    for name, value in features.check(options):
        visible &= terms[name](value, i, j, seqlen_q, seqlen_k)
    return visible


def _scores(q, k, softmax_scale):
    return _scale(q, softmax_scale) * (q @ k.swapaxes(-1, -2))


def _softmax(s, visible):
    """Probabilities and log-sum-exp of each row of s over its visible keys."""
    s = np.where(visible, s, -np.inf)
    row_max = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(row_max == -np.inf, 0.0, row_max))
    row_sum = p.sum(-1, keepdims=True)
    lse = (row_max + np.log(row_sum))[..., 0]
    return np.where(visible, p / np.where(row_sum == 0, 1.0, row_sum), 0.0), lse


def _scale(q, softmax_scale):
    return 1 / np.sqrt(q.shape[-1]) if softmax_scale is None else float(softmax_scale)


def _grouped(*arrays):
    """The last two arrays are k and v: (batch, seqlen, heads, dim) -> (batch, heads_kv, 1, seqlen, dim). Those before
    have query heads: -> (batch, heads_kv, group, seqlen, dim), which broadcasts against k and v."""
    heads_kv = np.shape(arrays[-1])[2]
    arrays = [np.asarray(a).astype(np.float64).swapaxes(1, 2) for a in arrays]
    return tuple(a.reshape(a.shape[0], heads_kv, a.shape[1] // heads_kv, *a.shape[2:]) for a in arrays)


def _ungrouped(a):
    """(batch, heads_kv, group, seqlen, dim) -> (batch, seqlen, heads, dim)."""
    return a.reshape(a.shape[0], a.shape[1] * a.shape[2], *a.shape[3:]).swapaxes(1, 2)
