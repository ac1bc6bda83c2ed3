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
from .features import Place, Sizes


def attention(q, k, v, *, softmax_scale: float | None = None, **options):
    """softmax(score(softmax_scale * q k^T)) v and its log-sum-exp.

    Returns `out` (batch, seqlen_q, heads_q, head_dim_v) and `lse` (batch, heads_q, seqlen_q), both float64. A row
    that sees no key has out 0, and lse -inf or its sink.
    """
    q, k, v = _by_head(q, k, v)
    with np.errstate(all="ignore"):
        rows = _Rows(_scale(q, softmax_scale) * (q @ k.swapaxes(-1, -2)), options)
        return rows.out(v).swapaxes(1, 2), rows.lse


def attention_backward(
    dout,
    q,
    k,
    v,
    *,
    softmax_scale: float | None = None,
    dlse=None,
    return_dbias: bool = False,
    return_dsinks: bool = False,
    **options,
):
    """The gradients dq, dk, dv[, dbias][, dsinks] of sum(out * dout) + sum(lse * dlse), float64, in the shapes of what
    they belong to."""
    heads_kv = np.shape(k)[2]
    q, dout, k, v = _by_head(q, dout, k, v)
    scale = _scale(q, softmax_scale)
    with np.errstate(all="ignore"):
        rows = _Rows(scale * (q @ k.swapaxes(-1, -2)), options)
        delta = np.matmul(dout[..., None, :], rows.out(v)[..., None])[..., 0, 0]
        if dlse is not None:
            delta = delta - np.asarray(dlse, np.float64)
        visible, transposed = rows.visible, rows.visible.swapaxes(-1, -2)
        ds = np.where(visible, rows.p * (rows.weight * (dout @ v.swapaxes(-1, -2)) - delta[..., None]), 0.0)
        dbias = summed_to(np.shape(options.get("bias", 0)), np.where(visible, ds * rows.slope_since_bias, 0.0))
        ds = np.where(visible, ds * rows.slope, 0.0)
        dq = scale * select_matmul(ds, k, visible)
        dk = scale * select_matmul(ds.swapaxes(-1, -2), q, transposed)
        dv = select_matmul((rows.weight * rows.p).swapaxes(-1, -2), dout, transposed)
        dsinks = (-rows.p_sink * delta).sum((0, 2))
    extra = (dbias,) * return_dbias + (dsinks,) * return_dsinks
    return dq.swapaxes(1, 2), _per_kv_head(dk, heads_kv), _per_kv_head(dv, heads_kv), *extra


class _Rows:
    """Rows of scores, (batch, heads_q, seqlen_q, seqlen_k), and what becomes of them."""

    def __init__(self, s, options: dict[str, object]):
        on, whole = features.check(options), Place.whole(Sizes(*s.shape))
        self.visible = visibility(Sizes(*s.shape), options)
        weight, (self.slope, self.slope_since_bias) = features.weight(on, whole), features.slopes(on, s, whole)
        self.weight = 1.0 if weight is None else weight
        s = np.where(self.visible, features.score(on, s, whole), -np.inf)
        sink = features.sink(on, whole)
        sink = np.float64(-np.inf) if sink is None else sink.astype(np.float64)
        row_max = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), sink)
        shift = np.where(row_max == -np.inf, 0.0, row_max)
        p, p_sink = np.exp(s - shift), np.exp(sink - shift)
        row_sum = p.sum(-1, keepdims=True) + p_sink
        self.lse = (row_max + np.log(row_sum))[..., 0]
        divisor = np.where(row_sum == 0, 1.0, row_sum)
        self.p, self.p_sink = np.where(self.visible, p / divisor, 0.0), (p_sink / divisor)[..., 0]

    def out(self, v):
        return select_matmul(self.weight * self.p, v, self.visible)


def select_matmul(weights, rows, visible, matmul=np.matmul):
    """weights @ rows for weights (..., m, n) that are 0 where `visible` (broadcast) is False, and rows (..., n, d).

    Rows with NaN or inf contribute exactly to those that see them: an ordinary product would spread 0 * NaN.
    """
    finite = np.isfinite(rows).all(-1)
    if finite.all():
        return matmul(weights, rows)
    product = matmul(weights, np.where(finite[..., None], rows, 0))
    for n in np.flatnonzero(~finite.reshape(-1, finite.shape[-1]).all(0)):
        row = np.where(finite[..., n, None], 0, rows[..., n, :])
        product = product + np.where(visible[..., n, None], weights[..., n, None] * row[..., None, :], 0)
    return product


def visibility(sizes: Sizes, options: dict[str, object]):
    """Which query sees which key: (seqlen_q, seqlen_k), with batches and heads in front where they differ."""
    seen = features.visible(features.check(options), Place.whole(sizes))
    return np.ones(sizes[2:], bool) if seen is None else seen


def summed_to(shape: tuple[int, ...], a):
    """The gradient of an array of this shape that was broadcast to `a`."""
    axes = tuple(axis for axis in range(a.ndim) if axis < a.ndim - len(shape) or shape[axis - a.ndim] != a.shape[axis])
    return a.sum(axes, keepdims=True).reshape(shape)


def _scale(q, softmax_scale):
    return 1 / np.sqrt(q.shape[-1]) if softmax_scale is None else float(softmax_scale)


def _by_head(q, *others):
    """(batch, seqlen, heads, dim) -> (batch, heads_q, seqlen, dim), key heads repeated for the queries they serve."""
    heads_q = np.shape(q)[2]
    arrays = (np.asarray(a).astype(np.float64).swapaxes(1, 2) for a in (q, *others))
    return tuple(np.repeat(a, heads_q // a.shape[1], axis=1) for a in arrays)


def _per_kv_head(a, heads_kv: int):
    """The gradient of what _by_head repeats: (batch, heads_q, seqlen, dim) -> (batch, seqlen, heads_kv, dim)."""
    batch, heads_q, *rest = a.shape
    return a.reshape(batch, heads_kv, heads_q // heads_kv, *rest).sum(2).swapaxes(1, 2)
