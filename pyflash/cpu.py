"""The tiled algorithm on NumPy arrays: exact attention in O(seqlen) memory on a machine without a GPU.

One pass over the keys with an online softmax, like the CUDA kernels, but with tiles the size of a CPU cache and BLAS
for the products. The query heads that share a kv head are stacked as rows of one tile, so k and v are never expanded;
small problems put several heads and batches into one stack of tiles, so that NumPy's cost per call is spread.
float16 and bfloat16 are computed in float32. The functions take validated arrays and write into the last ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from . import features, sequences
from .features import Place, Sizes
from .reference import select_matmul

# Measured on a core, seqlen 512 and 2048, head_dim 64 and 128: of 256 x 1024, 512 x 512, 512 x 1024 and 1024 x 1024 all
# are within 12 % of each other, causal the smaller ones faster. But each product is a meeting of BLAS's threads, which
# takes long where other work has a core: of 512 rows there are half as many as of 256, and as quick on two idle cores.
_TILE_ROWS = 512  # query rows of all heads that share a kv head
_TILE_COLUMNS = 1024  # keys
_STACK_SCORES = _TILE_ROWS * _TILE_COLUMNS  # of all tiles in a stack: 2 MiB in float32


def forward(
    q, k, v, out, lse, *, softmax_scale: float, on: dict[str, object], lengths: Mapping[str, object] | None = None
) -> None:
    """Write softmax(score(softmax_scale * q k^T)) v into `out`, and its log-sum-exp into `lse` unless that is None.
    `on` holds the features that are on, scalars and arrays. `lengths` are the arrays that say where sequences are: with
    offsets all others are packed."""
    if not lengths:
        return _forward(q, k, v, out, lse, softmax_scale, on, None)
    if "cu_seqlens_q" in lengths:
        q, k, v, out, lse = (None if a is None else a[None] for a in (q, k, v, out, lse))
    out[...] = 0
    if lse is not None:
        lse[...] = -np.inf
    for batch, queries, keys, rows in _places(q, k, lengths):
        tensors = q[queries], k[keys], v[keys], out[queries], None if lse is None else lse[rows]
        _forward(*tensors, softmax_scale, on, batch)


def _forward(q, k, v, out, lse, softmax_scale: float, on: dict[str, object], batch: int | None) -> None:
    """Of whole arrays, or of a sequence that is number `batch` of its call."""
    scale = _real(q)(softmax_scale)
    with np.errstate(all="ignore"):
        for stack in _stacks(q, k, on, batch):
            k_stack, v_stack = stack.kv_rows(k), stack.kv_rows(v)
            for m in _tiles(q.shape[1], stack.tile_m):
                q_tile = stack.q_rows(q, m)
                acc = np.zeros((*q_tile.shape[:-1], v.shape[3]), q_tile.dtype)
                row_max = np.full((*q_tile.shape[:-1], 1), -np.inf, q_tile.dtype)
                row_max[...] = stack.sink(m)
                row_sum = np.where(row_max == -np.inf, row_max.dtype.type(0), row_max.dtype.type(1))
                for n, visible in stack.visited(m):
                    s = q_tile @ k_stack[:, :, n].swapaxes(-1, -2)
                    s *= scale
                    s = stack.score(s, m, n)
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
                    p *= stack.weight(m, n)
                    acc += _matmul(p, v_stack[:, :, n], visible)
                acc /= np.where(row_sum == 0, 1, row_sum)
                stack.store_q_rows(out, m, acc)
                if lse is not None:
                    stack.store_statistic(lse, m, row_max + np.log(row_sum))


def backward(
    dout, q, k, v, out, lse, dlse, dq, dk, dv, *, softmax_scale: float, on: dict[str, object],
    more: Mapping[str, np.ndarray] | None = None, lengths: Mapping[str, object] | None = None,
) -> None:  # fmt: skip
    """Write the gradients into `dq`, `dk`, `dv`, and those of arrays of features into `more`, by name, recomputing the
    probabilities from `lse`. `dlse` may be None."""
    more = more or {}
    sums = {name: np.zeros(a.shape, _real(q)) for name, a in more.items()}
    if not lengths:
        _backward(dout, q, k, v, out, lse, dlse, dq, dk, dv, sums, softmax_scale, on, None)
    else:
        if "cu_seqlens_q" in lengths:
            packed = dout, q, k, v, out, lse, dlse, dq, dk, dv
            dout, q, k, v, out, lse, dlse, dq, dk, dv = (None if a is None else a[None] for a in packed)
        for gradient in (dq, dk, dv):
            gradient[...] = 0
        for batch, queries, keys, rows in _places(q, k, lengths):
            statistics = lse[rows], None if dlse is None else dlse[rows]
            given = dout[queries], q[queries], k[keys], v[keys], out[queries], *statistics
            _backward(*given, dq[queries], dk[keys], dv[keys], sums, softmax_scale, on, batch)
    for name, total in sums.items():
        more[name][...] = total


def _places(q, k, lengths: Mapping[str, object]):
    """Of each sequence: its number, where its queries and its keys lie, and its rows of lse."""
    batch = len(lengths["cu_seqlens_q"]) - 1 if "cu_seqlens_q" in lengths else len(q)
    for x in sequences.each(batch, q.shape[1], k.shape[1], lengths):
        array = slice(x.array, x.array + 1)
        yield x.batch, (array, x.queries), (array, x.keys), (array, slice(None), x.queries)


def _backward(
    dout, q, k, v, out, lse, dlse, dq, dk, dv, sums: dict[str, np.ndarray], softmax_scale: float,
    on: dict[str, object], batch: int | None,
) -> None:  # fmt: skip
    """As _forward; gradients of features are added to the sums."""
    captured = features.captured_gradients(sums)
    scale = _real(q)(softmax_scale)
    with np.errstate(all="ignore"):
        for stack in _stacks(q, k, on, batch):
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
                if "dsinks" in sums:
                    stack.add_dsinks(sums["dsinks"], m, np.exp(stack.sink(m) - shift) * -delta)
                dq_tile = np.zeros_like(q_tile)
                for n, visible in stack.visited(m):
                    transposed = None if visible is None else visible.swapaxes(-1, -2)
                    k_tile, v_tile = k_stack[:, :, n], v_stack[:, :, n]
                    s = q_tile @ k_tile.swapaxes(-1, -2)
                    s *= scale
                    slope, slope_since_bias = stack.slopes(s, m, n)
                    products = s
                    s = stack.score(s, m, n)
                    s -= shift
                    p = np.exp(s, out=s)
                    weight = stack.weight(m, n)
                    ds = dout_tile @ v_tile.swapaxes(-1, -2)
                    ds *= weight
                    ds -= delta
                    ds *= p
                    p *= weight
                    if visible is not None:
                        np.copyto(p, 0, where=~visible)
                        np.copyto(ds, 0, where=~visible)
                    if "dbias" in sums:
                        stack.add_dbias(sums["dbias"], m, n, _selected(ds * slope_since_bias, visible))
                    if captured:
                        stack.add_captured(captured, m, n, products, ds)
                    ds = _selected(ds * slope, visible)
                    dv_stack[:, :, n] += _matmul(p.swapaxes(-1, -2), dout_tile, transposed)
                    dk_stack[:, :, n] += _matmul(ds.swapaxes(-1, -2), q_tile, transposed)
                    dq_tile += _matmul(ds, k_tile, visible)
                stack.store_q_rows(dq, m, scale * dq_tile)
            stack.store_kv_rows(dk, scale * dk_stack)
            stack.store_kv_rows(dv, dv_stack)


class _Stack:
    """Some batches and kv heads, taken together. Rows are stacked (batches, kv heads, rows, head_dim), where the rows
    of a tile of queries are those of each query head of the group in turn."""

    def __init__(self, batches: slice, heads: slice, group: int, tile_m: int, real, sizes: Sizes, on, number):
        self.numbers = batches if number is None else slice(number, number + 1)
        self.group, self.tile_m, self.real = group, tile_m, real
        self.batches, self.kv_heads = batches, heads
        self.q_heads = slice(heads.start * group, heads.stop * group)
        self.sizes, self.on = sizes, on

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

    def visited(self, m: slice) -> Iterator[tuple[slice, object]]:
        """The tiles of keys that the queries `m` see, each with which row sees which key (None: all see all)."""
        seqlen_k = self.sizes.seqlen_k
        low, high = features.band(self.on, self.sizes.seqlen_q, seqlen_k)
        begin = 0 if low is None else max(m.start + low, 0)
        end = seqlen_k if high is None else min(m.stop + high, seqlen_k)
        for n in _tiles(end, _TILE_COLUMNS, begin // _TILE_COLUMNS * _TILE_COLUMNS):
            inside = (low is None or n.start >= m.stop - 1 + low) and (high is None or n.stop <= m.start + high + 1)
            deciding = features.deciding(self.on, self._place(m, n))
            if deciding is None:
                continue
            by_position = features.hides_by_position_only(deciding)
            visible = None if by_position and inside else features.visible(deciding, self._place(m, n))
            yield n, None if visible is None else self._of_rows(visible)

    def score(self, s, m: slice, n: slice):
        """A tile of scores, modified."""
        by_head = s.reshape(s.shape[0], -1, m.stop - m.start, s.shape[-1])
        return features.score(self.on, by_head, self._place(m, n)).reshape(s.shape)

    def slopes(self, s, m: slice, n: slice):
        """Its derivatives, of a tile before it: by the scores, and by what the bias adds."""
        by_head = s.reshape(s.shape[0], -1, m.stop - m.start, s.shape[-1])
        slopes = features.slopes(self.on, by_head, self._place(m, n))
        return tuple(slope if np.isscalar(slope) else slope.reshape(s.shape) for slope in slopes)

    def weight(self, m: slice, n: slice):
        """What a tile's probabilities are multiplied with on their way to the values."""
        weight = features.weight(self.on, self._place(m, n))
        return 1 if weight is None else self._of_rows(weight.astype(self.real))

    def sink(self, m: slice):
        """What takes part in each row's softmax besides its keys, in the shape of statistics."""
        sink = features.sink(self.on, self._place(m, slice(0, 1)))
        if sink is None:
            return -np.inf
        return self._of_rows(np.broadcast_to(sink, (1, *sink.shape[1:2], m.stop - m.start, 1)).astype(self.real))

    def add_dsinks(self, total, m: slice, rows):
        heads = self.q_heads.stop - self.q_heads.start
        total[self.q_heads] += rows.reshape(rows.shape[0], heads, m.stop - m.start).sum((0, 2))

    def add_dbias(self, total, m: slice, n: slice, ds):
        """Add a tile of the gradient of scores, summed over what was broadcast."""
        heads = self.q_heads.stop - self.q_heads.start
        part = self._place(m, n).of(total)
        ds = ds.reshape(ds.shape[0], heads, m.stop - m.start, ds.shape[-1])
        part += ds.sum(tuple(axis for axis in range(4) if part.shape[axis] != ds.shape[axis]), keepdims=True)

    def add_captured(self, totals, m: slice, n: slice, products, ds):
        """Add a tile's part of the gradients of what score_mod captures, from that of what it makes."""
        products, ds = (a.reshape(a.shape[0], -1, m.stop - m.start, a.shape[-1]) for a in (products, ds))
        features.scatter(self.on, products, ds, self._place(m, n), totals)

    def _place(self, m: slice, n: slice) -> Place:
        return Place(self.numbers, self.q_heads, m, n, self.sizes)

    def _of_rows(self, elements):
        """What is known of (batches, query heads, queries, keys), or of all heads, stacked."""
        if elements.ndim == 2:
            return np.tile(elements, (self.group, 1))
        heads = self.q_heads.stop - self.q_heads.start
        elements = np.broadcast_to(elements, (elements.shape[0], heads, *elements.shape[2:]))
        return elements.reshape(elements.shape[0], heads // self.group, -1, elements.shape[-1])

    def _stacked(self, a):
        batches, heads, seqlen, width = a.shape
        rows = np.array(a, self.real, order="C")
        return rows.reshape(batches, heads // self.group, self.group * seqlen, width)


def _stacks(q, k, on: dict[str, object], number: int | None) -> Iterator[_Stack]:
    """Cut the problem into stacks whose tiles fit the cache together. None if there is nothing to compute."""
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_k, heads_kv = k.shape[1:3]
    group = heads_q // heads_kv
    tile_m = max(1, min(_TILE_ROWS // group, seqlen_q))
    scores = group * tile_m * max(1, min(_TILE_COLUMNS, seqlen_k))
    sizes = Sizes(batch, heads_q, seqlen_q, seqlen_k)
    heads = min(heads_kv, max(1, _STACK_SCORES // scores))
    batches = max(1, _STACK_SCORES // (scores * heads)) if heads == heads_kv else 1
    for b in _tiles(batch, batches):
        for h in _tiles(heads_kv, heads):
            yield _Stack(b, h, group, tile_m, _real(q), sizes, on, number)


def _tiles(end: int, size: int, begin: int = 0) -> Iterator[slice]:
    return (slice(start, min(start + size, end)) for start in range(begin, end, size))


def _selected(ds, visible):
    """0 where hidden, whatever the slope is there."""
    if visible is not None:
        np.copyto(ds, 0, where=~visible)
    return ds


def _matmul(weights, rows, visible):
    return weights @ rows if visible is None else select_matmul(weights, rows, visible)


def _real(a):
    """The type that a's dtype is computed in."""
    return np.float64 if a.dtype == np.float64 else np.float32
