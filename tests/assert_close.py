"""The error bar: at most twice the error of ordinary attention in the same precision, and the rounding of the result.

For a gradient there is also the rounding of what the backward is given, where ordinary attention has it exactly: of
`lse`, which p = exp(s - lse) feels in proportion to |lse|, and of `out`, from which comes delta; and both may come from
scores that were rounded otherwise than the backward's own. What this does to first order is added to the bar.

Ordinary attention forms the whole score matrix in the arrays' dtype, and its softmax in float32 (float64 for float64).
How large its error comes out also depends on the order in which it sums, so it is done term by term and by the BLAS,
the latter in several orders of the keys and of head_dim, and the largest error counts. Before any value is compared,
the positions of inf and NaN must match.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pyflash import features, reference
from pyflash.features import Place, Sizes

_FACTOR = 2
_RANDOM_ORDERS = 2


def assert_attention(
    out, lse, q, k, v, *, softmax_scale: float | None = None, batch: int | None = None, expected=None, **options
) -> None:
    """Check what a forward call returned. `lse` may be None. Arrays are NumPy's. Of a sequence, number `batch` of a
    call, the caller says what is `expected`."""
    if expected is None:
        expected = reference.attention(q, k, v, softmax_scale=softmax_scale, **options)
    expected, expected_lse = expected
    ordinary = list(_ordinary(q, k, v, softmax_scale, options, batch))
    outs, lses = zip(*(x.attention() for x in ordinary), strict=True)
    allowances = ordinary[0].oracle_rounding()
    assert_close(out, expected, outs, "out", _rounding(q.dtype), allowances[0])
    assert out.dtype == q.dtype
    if lse is not None:
        assert_close(lse, expected_lse, lses, "lse", _rounding(lse.dtype), allowances[1])
        assert lse.dtype == _real(q.dtype)


def assert_gradients(
    gradients, dout, q, k, v, *, dlse=None, softmax_scale: float | None = None, differentiated=(),
    batch: int | None = None, expected=None, **options,
) -> None:  # fmt: skip
    """Check the dq, dk, dv and the gradients of the features `differentiated` that a backward call returned."""
    if expected is None:
        returns = {f"return_d{name}": True for name in differentiated}
        call = {"dlse": dlse, "softmax_scale": softmax_scale, **returns, **options}
        expected = reference.attention_backward(dout, q, k, v, **call)
    ordinary = list(_ordinary(q, k, v, softmax_scale, options, batch))
    others = [x.gradients(dout, dlse) for x in ordinary]
    allowances = ordinary[0].given_rounding(dout, dlse)
    dtypes = {**dict.fromkeys("qkv", q.dtype), **{name: options[name].dtype for name in differentiated}}
    for (name, dtype), actual, right in zip(dtypes.items(), gradients, expected, strict=True):
        alike = [x[name].astype(dtype) for x in others]
        assert_close(actual, right, alike, f"d{name}", _rounding(dtype), allowances[name])
        assert actual.dtype == dtype


def assert_close(
    actual: np.ndarray,
    expected: np.ndarray,
    ordinary: Sequence[np.ndarray],
    name: str,
    rounding: float,
    allowance: np.ndarray | float = 0.0,
) -> None:
    """`expected` is float64; `ordinary` holds the same quantity by ordinary attention in the precision of `actual`.
    `rounding` is relative to the result; `allowance` comes on top."""
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, not {expected.shape}"
    with np.errstate(all="ignore"):
        rounded = expected.astype(actual.dtype).astype(np.float64)  # inf where it exceeds the dtype's range
    actual = actual.astype(np.float64)
    for kind, where in (("NaN", np.isnan), ("inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = np.argwhere(where(actual) != where(rounded))
        assert not len(wrong), (
            f"{name}: {len(wrong)} wrong positions of {kind}, first {tuple(wrong[0])}: "
            f"got {actual[tuple(wrong[0])]}, not {expected[tuple(wrong[0])]}"
        )
    finite = np.isfinite(rounded)
    if not finite.any():
        return
    right = expected[finite]
    error = np.abs(actual[finite] - right)
    others = [np.abs(np.nan_to_num(x.astype(np.float64)[finite], nan=np.inf) - right) for x in ordinary]
    allowance = np.broadcast_to(allowance, actual.shape)[finite]
    worst = tuple(np.argwhere(finite)[np.argmax(error)].tolist())
    for measure, size in (("largest", _largest), ("root mean square", _root_mean_square)):
        bar = _FACTOR * max(map(size, others)) + rounding * size(right) + size(allowance)
        assert size(error) <= bar, (
            f"{name}: {measure} error {size(error):.3g}, allowed {bar:.3g}; worst at {worst}: "
            f"got {actual[worst]}, not {expected[worst]}"
        )


def _largest(a) -> float:
    return np.abs(a).max(initial=0.0)


def _root_mean_square(a) -> float:
    return np.sqrt(np.mean(np.square(a)))


def _rounding(dtype: np.dtype) -> float:
    """The relative rounding of a result, and of a few operations where ordinary attention happens to make none."""
    return max(float(_finfo(dtype).eps), 4 * float(np.finfo(_real(dtype)).eps))


def _real(dtype: np.dtype) -> type:
    """What arrays of a dtype are computed in."""
    return np.float64 if dtype == np.float64 else np.float32


def _finfo(dtype: np.dtype):
    if dtype.kind == "f":
        return np.finfo(dtype)
    import ml_dtypes

    return ml_dtypes.finfo(dtype)


def _ordinary(q, k, v, softmax_scale: float | None, options: dict[str, object], batch=None) -> Iterator[Ordinary]:
    """Ordinary attention, summed in several ways."""
    rng = np.random.default_rng(0)
    seqlen_k, head_dim = k.shape[1], k.shape[3]
    terms = Terms(Sizes(q.shape[0], q.shape[2], q.shape[1], seqlen_k), options, batch)
    scale = 1 / np.sqrt(head_dim) if softmax_scale is None else softmax_scale
    keys, dims = np.arange(seqlen_k), np.arange(head_dim)
    yield Ordinary(q, k, v, scale, terms, keys, dims, _term_by_term)
    yield Ordinary(q, k, v, scale, terms, keys[::-1], dims[::-1], np.matmul)
    for _ in range(_RANDOM_ORDERS):
        yield Ordinary(q, k, v, scale, terms, rng.permutation(keys), rng.permutation(dims), np.matmul)


def _term_by_term(a, b):
    """a @ b."""
    total = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), a.dtype)
    for n in range(a.shape[-1]):
        total += a[..., n, None] * b[..., n, None, :]
    return total


class Terms:
    """The features of a call, for scores whose keys are in any order."""

    def __init__(self, sizes: Sizes, options: dict[str, object], batch: int | None = None):
        self.on, self.whole, self.options = features.check(options), Place.whole(sizes, batch), options
        self.batch = batch

    def visible(self, keys):
        return reference.visibility(self.whole.sizes, self.options, self.batch)[..., keys]

    def score(self, s, keys):
        return features.score(self.on, s[..., np.argsort(keys)], self.whole)[..., keys]

    def slopes(self, s, keys):
        """The derivatives of score(): by the products, and by what the bias adds."""
        slopes = features.slopes(self.on, s[..., np.argsort(keys)], self.whole)
        return tuple(slope if np.isscalar(slope) else slope[..., keys] for slope in slopes)

    def slope_per_score(self) -> float:
        """How far the slope moves, at most, as the score does from which a backward takes it."""
        return 2 / self.on["softcap"] if "softcap" in self.on else 0.0

    def sink(self):
        sink = features.sink(self.on, self.whole)
        return np.float32(-np.inf) if sink is None else sink

    def weight(self, keys):
        weight = features.weight(self.on, self.whole)
        return np.float32(1) if weight is None else weight[..., keys]

    def of_bias(self, ds, keys):
        """What is added up to be the gradient of the bias."""
        shape = np.shape(self.on.get("bias", 0))
        if self.batch is not None:
            shape = self.whole.of(np.zeros(shape)).shape
        return reference.summed_to(shape, ds[..., np.argsort(keys)])


class Ordinary:
    """Attention as one would write it with an array library: the products' results in the arrays' dtype, softmax in
    float32. The keys are taken in the order `keys`, and the components of q and k in the order `dims`."""

    def __init__(self, q, k, v, scale: float, terms: Terms, keys, dims, matmul):
        self.dtype, self.real = q.dtype, _real(q.dtype)
        self.keys, self.dims, self.matmul = keys, dims, matmul
        self.group = q.shape[2] // k.shape[2]
        self.scale, self.visible = self.real(scale), terms.visible(keys)
        self.terms, self.sink, self.weight = terms, terms.sink().astype(self.real), terms.weight(keys).astype(self.real)
        k, v = (np.repeat(a[:, keys], self.group, axis=2) for a in (k, v))  # one kv head for each query head
        self.q, self.k, self.v = self._rows(q[..., dims]), self._rows(k[..., dims]), self._rows(v)
        with np.errstate(all="ignore"):
            qk = self.scale * matmul(self.q, self.k.swapaxes(-1, -2))
            self.qk, self.s = qk, terms.score(qk, keys)
            self.slope, self.slope_since_bias = terms.slopes(qk, keys)
            self.unrounded_p, self.lse, _ = self._softmax(self.s)
            self.p, _, self.p_sink = self._softmax(self._rounded(terms.score(self._rounded(qk), keys)))
            self.rounded_slope, _ = terms.slopes(self._rounded(qk), keys)

    def attention(self) -> tuple[np.ndarray, np.ndarray]:
        with np.errstate(all="ignore"):
            out = self._selected(self._rounded(self.weight * self.p), self.v, self.visible)
            return out.swapaxes(1, 2).astype(self.dtype), self.lse

    def oracle_rounding(self) -> tuple[np.ndarray | float, np.ndarray | float]:
        """What rounding scores does to out and lse of the oracle: in float64 it is no more exact than what it judges,
        and ordinary attention, which forms its scores alike, does not show it."""
        if self.real is not np.float64:
            return 0.0, 0.0
        with np.errstate(all="ignore"):
            scores = np.where(self.visible & np.isfinite(self.s), self.s, 0)  # what is not finite has p = 0
            moved = self.unrounded_p * np.finfo(self.real).eps / 2 * np.abs(scores)
            squares = np.square(moved).sum(-1, keepdims=True)
            out = self._selected(self.weight * self.unrounded_p, self.v, self.visible)
            of_out = np.square(self.weight * moved) @ np.square(self.v) + squares * np.square(out)
        return np.sqrt(of_out).swapaxes(1, 2), np.sqrt(squares[..., 0])

    def gradients(self, dout, dlse) -> dict[str, np.ndarray]:
        dout = self._rows(dout)
        transposed = self.visible.swapaxes(-1, -2)
        with np.errstate(all="ignore"):
            dv = self._selected(self._rounded(self.weight * self.p).swapaxes(-1, -2), dout, transposed)
            dp = np.where(self.visible, self._rounded(self.matmul(dout, self.v.swapaxes(-1, -2))), 0) * self.weight
            delta = (self.p * dp).sum(-1, keepdims=True) - (0 if dlse is None else dlse[..., None])
            ds = np.where(self.visible, self.p * (dp - delta), 0)
            dbias = self.terms.of_bias(np.where(self.visible, ds * self.slope_since_bias, 0), self.keys)
            dsinks = -(self.p_sink * delta).sum((0, 2, 3))
            ds = self._rounded(np.where(self.visible, self.rounded_slope * ds, 0))
            dq = self.scale * self._selected(ds, self.k, self.visible)
            dk = self.scale * self._selected(ds.swapaxes(-1, -2), self.q, transposed)
            dk, dv = self._per_kv_head(dk), self._per_kv_head(dv)
        return {**self._in_order(dq, dk, dv), "bias": dbias, "sinks": dsinks}

    def given_rounding(self, dout, dlse) -> dict[str, np.ndarray]:
        """What rounding lse, out and scores does to dq, dk and dv: p = exp(s - lse) is off by a factor in each row and
        one in each element, delta by a term. Rows err together, as where all are equal, or independently."""
        dout, q, k, v = (a.astype(np.float64) for a in (self._rows(dout), self.q, self.k, self.v))
        p = self.unrounded_p.astype(np.float64)
        with np.errstate(all="ignore"):
            weighted = self.weight * p
            out, dp = weighted @ v, self.weight * (dout @ v.swapaxes(-1, -2))
            delta = (p * dp).sum(-1, keepdims=True) - (0 if dlse is None else dlse[..., None])
            ds = np.where(self.visible, p * (dp - delta), 0)
            half = np.finfo(self.real).eps / 2
            of_p = half * np.abs(np.where(np.isfinite(self.lse), self.lse, 0))[..., None]
            of_s = half * q.shape[-1] ** 0.5 * np.abs(np.where(self.visible, self.slope * self.qk, 0))
            scores = np.where(self.visible & np.isfinite(self.s), self.s, 0)  # what is not finite has p = 0
            of_s = of_s + half * np.abs(scores)
            # Of out, and of a sum of products whose like in dp is summed in another order.
            of_out = float(_finfo(self.dtype).eps) / 2 + 2 * v.shape[-1] ** 0.5 * half
            of_delta = of_out * np.sqrt(np.square(dout * out).sum(-1, keepdims=True))

            of_each = np.abs(ds) * (of_p + of_s) + of_delta * p
            of_bias = np.where(self.visible, of_each * np.abs(self.slope_since_bias), 0)
            dbias = self.terms.of_bias(of_bias, self.keys)
            p_sink = np.exp(self.sink - np.where(np.isfinite(self.lse), self.lse, np.inf)[..., None])
            dsinks = (p_sink * (np.abs(delta) * of_p + of_delta)).sum((0, 2, 3))
            off = half * np.abs(scores)
            if self.dtype.itemsize == 2:  # the slope of scores follows from log(p) + lse, where p may have been rounded
                off = off + half * np.where(np.isfinite(self.lse), np.abs(self.lse), 0)[..., None]
                off = off + float(_finfo(self.dtype).eps) / 2
            of_slope = np.where(self.visible, np.abs(ds) * self.terms.slope_per_score() * off, 0)
            ds = np.where(self.visible, ds * self.slope, 0)

            def apart(weights, rows):
                return np.sqrt(np.square(weights) @ np.square(rows))

            def by_key(of_rows, of_elements, rows):
                of_rows, of_elements = of_rows.swapaxes(-1, -2), of_elements.swapaxes(-1, -2)
                return self._per_kv_head(np.abs(of_rows @ rows) + apart(of_rows, rows) + apart(of_elements, rows))

            moved = p * self.slope  # ds as delta moves
            each = of_s * ds + of_slope
            dq = abs(self.scale) * (of_p * np.abs(ds @ k) + of_delta * np.abs(moved @ k) + apart(each, k))
            dk = abs(self.scale) * by_key(of_p * ds + of_delta * moved, each, q)
            dv = by_key(of_p * weighted, of_s * weighted, dout)
        return {**self._in_order(dq, dk, dv), "bias": dbias, "sinks": dsinks}

    def _selected(self, weights, rows, visible):
        return reference.select_matmul(weights, rows, visible, self.matmul)

    def _softmax(self, s):
        s = np.where(self.visible, s, -np.inf)
        row_max = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), self.sink)
        shift = np.where(row_max == -np.inf, 0, row_max)
        p, p_sink = np.exp(s - shift), np.exp(self.sink - shift)
        row_sum = self.matmul(p, np.ones((p.shape[-1], 1), p.dtype)) + p_sink
        divisor = np.where(row_sum == 0, 1, row_sum)
        p = np.where(self.visible, p / divisor, 0).astype(self.real)
        return p, (row_max + np.log(row_sum))[..., 0], p_sink / divisor

    def _rows(self, a):
        """(batch, seqlen, heads, dim) -> (batch, heads, seqlen, dim)."""
        return np.ascontiguousarray(a.swapaxes(1, 2), self.real)

    def _per_kv_head(self, a):
        return a.reshape(a.shape[0], a.shape[1] // self.group, self.group, *a.shape[2:]).sum(2)

    def _in_order(self, dq, dk, dv):
        """Rows of gradients as (batch, seqlen, heads, dim), keys and components where they belong."""
        keys, dims = np.argsort(self.keys), np.argsort(self.dims)
        found = {"q": dq[..., dims], "k": dk[..., keys, :][..., dims], "v": dv[..., keys, :]}
        return {name: a.swapaxes(1, 2) for name, a in found.items()}

    def _rounded(self, a):
        return a.astype(self.dtype).astype(self.real)
