"""The tiled algorithm on NumPy arrays: exact attention in O(seqlen) memory on a machine without a GPU.

One pass over the keys with an online softmax, like the CUDA kernels, but with tiles the size of a CPU cache and BLAS
for the products. The query heads that share a kv head are stacked as rows of one tile, so k and v are never expanded;
small problems put several heads and batches into one stack of tiles, so that NumPy's cost per call is spread.
float16 and bfloat16 are computed in float32. The functions take validated arrays and write into the last ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .reference import select_matmul

# Measured on two cores, forward, seqlen 512 and 2048, head_dim 64 and 128: of 128 x 512, 256 x 512, 512 x 512 and
# 256 x 1024 this is the fastest or within 4 % of it.
_TILE_ROWS = 256  # query rows of all heads that share a kv head
_TILE_COLUMNS = 1024  # keys
_STACK_SCORES = _TILE_ROWS * _TILE_COLUMNS  # of all tiles in a stack: 1 MiB in float32, the size of a core's L2


def forward(q, k, v, out, lse, *, softmax_scale: float, causal: bool) -> None:
    """Write softmax(softmax_scale * q k^T) v into `out`, and its log-sum-exp into `lse` unless that is None."""
    scale = _real(q)(softmax_scale)
    with np.errstate(all="ignore"):
        for stack in _stacks(q, k):
            k_stack, v_stack = stack.kv_rows(k), stack.kv_rows(v)
            for m in _tiles(q.shape[1], stack.tile_m):
                q_tile = stack.q_rows(q, m)
                acc = np.zeros((*q_tile.shape[:-1], v.shape[3]), q_tile.dtype)
                row_max = np.full((*q_tile.shape[:-1], 1), -np.inf, q_tile.dtype)
                row_sum = np.zeros_like(row_max)
                for n, visible in _visited(m, q.shape[1], k.shape[1], causal, stack.group):
                    s = q_tile @ k_stack[:, :, n].swapaxes(-1, -2)
                    s *= scale
                    if visible is not None:
                        np.copyto(s, -np.inf, where=~visible)
                    new_max = np.maximum(row_max, s.max(-1, keepdims=True))
                    shift = np.where(new_max == -np.inf, 0, new_max)  # a row with no visible key so far
                    s -= shift
                    p = np.exp(s, out=s)
                    rescale = np.exp(row_max - shift)
                    row_max = new_max
                    row_sum *= rescale
                    row_sum += p.sum(-1, keepdims=True)
                    acc *= rescale
                    acc += _matmul(p, v_stack[:, :, n], visible)
                acc /= np.where(row_sum == 0, 1, row_sum)
                stack.store_q_rows(out, m, acc)
                if lse is not None:
                    stack.store_statistic(lse, m, row_max + np.log(row_sum))


def backward(dout, q, k, v, out, lse, dlse, dq, dk, dv, *, softmax_scale: float, causal: bool) -> None:
    """Write the gradients into `dq`, `dk`, `dv`, recomputing the probabilities from `lse`. `dlse` may be None."""
    scale = _real(q)(softmax_scale)
    with np.errstate(all="ignore"):
        for stack in _stacks(q, k):
            k_stack, v_stack = stack.kv_rows(k), stack.kv_rows(v)
            dk_stack, dv_stack = np.zeros_like(k_stack), np.zeros_like(v_stack)
            for m in _tiles(q.shape[1], stack.tile_m):
                q_tile = stack.q_rows(q, m)
                dout_tile = stack.q_rows(dout, m)
                delta = (dout_tile * stack.q_rows(out, m)).sum(-1, keepdims=True)
                if dlse is not None:
                    delta -= stack.statistic(dlse, m)
                shift = stack.statistic(lse, m)
                np.copyto(shift, np.inf, where=shift == -np.inf)  # a row with no visible key: p = 0
                dq_tile = np.zeros_like(q_tile)
                for n, visible in _visited(m, q.shape[1], k.shape[1], causal, stack.group):
                    transposed = None if visible is None else visible.T
                    k_tile, v_tile = k_stack[:, :, n], v_stack[:, :, n]
                    s = q_tile @ k_tile.swapaxes(-1, -2)
                    s *= scale
                    s -= shift
                    p = np.exp(s, out=s)
                    ds = dout_tile @ v_tile.swapaxes(-1, -2)
                    ds -= delta
                    ds *= p
                    if visible is not None:
                        np.copyto(p, 0, where=~visible)
                        np.copyto(ds, 0, where=~visible)
                    dv_stack[:, :, n] += _matmul(p.swapaxes(-1, -2), dout_tile, transposed)
                    dk_stack[:, :, n] += _matmul(ds.swapaxes(-1, -2), q_tile, transposed)
                    dq_tile += _matmul(ds, k_tile, visible)
                stack.store_q_rows(dq, m, scale * dq_tile)
            stack.store_kv_rows(dk, scale * dk_stack)
            stack.store_kv_rows(dv, dv_stack)


class _Stack:
    """Some batches and kv heads, taken together. Rows are stacked (batches, kv heads, rows, head_dim), where the rows
    of a tile of queries are those of each query head of the group in turn."""

    def __init__(self, batches: slice, heads: slice, group: int, tile_m: int, real):
        self.group, self.tile_m, self.real = group, tile_m, real
        self.batches, self.kv_heads = batches, heads
        self.q_heads = slice(heads.start * group, heads.stop * group)

    def kv_rows(self, a):
        return np.ascontiguousarray(a[self.batches, :, self.kv_heads].swapaxes(1, 2), self.real)

    def store_kv_rows(self, a, rows):
        a[self.batches, :, self.kv_heads] = rows.swapaxes(1, 2)

    def q_rows(self, a, m: slice):
        return self._stacked(a[self.batches, m, self.q_heads].swapaxes(1, 2))

    def store_q_rows(self, a, m: slice, rows):
        target = a[self.batches, m, self.q_heads]
        batches, seqlen, heads, head_dim = target.shape
        target[...] = rows.reshape(batches, heads, seqlen, head_dim).swapaxes(1, 2)

    def statistic(self, a, m: slice):
        """One number a row, from (batch, heads, seqlen)."""
        return self._stacked(a[self.batches, self.q_heads, m, None])

    def store_statistic(self, a, m: slice, rows):
        target = a[self.batches, self.q_heads, m]
        target[...] = rows.reshape(target.shape)

    def _stacked(self, a):
        batches, heads, seqlen, width = a.shape
        rows = np.array(a, self.real, order="C")
        return rows.reshape(batches, heads // self.group, self.group * seqlen, width)


def _stacks(q, k) -> Iterator[_Stack]:
    """Cut the problem into stacks whose tiles fit the cache together. None if there is nothing to compute."""
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_k, heads_kv = k.shape[1:3]
    group = heads_q // heads_kv
    tile_m = max(1, min(_TILE_ROWS // group, seqlen_q))
    scores = group * tile_m * max(1, min(_TILE_COLUMNS, seqlen_k))
    heads = min(heads_kv, max(1, _STACK_SCORES // scores))
    batches = max(1, _STACK_SCORES // (scores * heads)) if heads == heads_kv else 1
    for b in _tiles(batch, batches):
        for h in _tiles(heads_kv, heads):
            yield _Stack(b, h, group, tile_m, _real(q))


def _visited(m: slice, seqlen_q: int, seqlen_k: int, causal: bool, group: int) -> Iterator[tuple[slice, object]]:
    """The tiles of keys that the queries `m` see, each with which row sees which key (None: all see all)."""
    shift = seqlen_k - seqlen_q if causal else seqlen_k  # query i sees the keys up to i + shift
    for n in _tiles(min(seqlen_k, m.stop + shift), _TILE_COLUMNS):
        if n.stop <= m.start + shift + 1:
            yield n, None
        else:
            visible = np.arange(n.start, n.stop) <= np.arange(m.start, m.stop)[:, None] + shift
            yield n, np.tile(visible, (group, 1))


def _tiles(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _matmul(weights, rows, visible):
    return weights @ rows if visible is None else select_matmul(weights, rows, visible)


def _real(a):
    """The type that a's dtype is computed in."""
    return np.float64 if a.dtype == np.float64 else np.float32
