"""Attention written out in full in float64: the oracle that every other path is tested against.

Arrays are (batch, seqlen, heads, head_dim) of any real dtype, those of NumPy, torch, CuPy and JAX, or lists; results
are NumPy's. Everything is computed from the inputs alone, at the price of the whole (seqlen_q, seqlen_k) score matrix.
`options` are the features of `features.py`, as keywords, and their meaning is taken from that table.

Masked keys are *selected* away, never multiplied by zero: whatever a masked key, or a query that does not see a key,
holds (NaN and inf included) has no influence on the other.
"""

from __future__ import annotations

import numpy as np

from . import features, sequences
from .features import Place, Sizes


def attention(q, k, v, *, softmax_scale: float | None = None, seqused_q=None, seqused_k=None, **options):
    """softmax(score(softmax_scale * q k^T)) v and its log-sum-exp.

    Parameters
    ----------
    q : array (batch, seqlen_q, heads_q, head_dim)
    k : array (batch, seqlen_k, heads_kv, head_dim)
    v : array (batch, seqlen_k, heads_kv, head_dim_v)
    softmax_scale, seqused_q, seqused_k, options
        As for `pyflash.flash_attention`. Dropout needs its seed.

    Returns
    -------
    out : float64 array (batch, seqlen_q, heads_q, head_dim_v)
        0 in rows that see no key.
    lse : float64 array (batch, heads_q, seqlen_q)
        -inf there, or the sink; -inf past seqused_q.

    Raises
    ------
    TypeError, ValueError
        As `pyflash.flash_attention` of options, and of what is no array.
        Shapes are not checked: where they do not fit, the error is NumPy's.
    """
    (q, k, v), options = _hosts(q=q, k=k, v=v), _hosted(options)
    if seqused_q is None and seqused_k is None:
        return _attention(q, k, v, softmax_scale, options)
    lengths = _lengths(seqused_q=seqused_q, seqused_k=seqused_k)
    return _forward_of_each(q, k, v, lengths, softmax_scale, options)


def attention_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k=None, *, softmax_scale=None, seqused_q=None, seqused_k=None, **options
):
    """`attention` of packed sequences.

    Parameters
    ----------
    q, k, v : arrays (tokens_q, heads_q, head_dim), (tokens_k, heads_kv, head_dim), (tokens_k, heads_kv, head_dim_v)
    cu_seqlens_q, cu_seqlens_k, softmax_scale, seqused_q, seqused_k, options
        As for `pyflash.flash_attention_varlen`. Dropout needs its seed.

    Returns
    -------
    out : float64 array (tokens_q, heads_q, head_dim_v)
    lse : float64 array (heads_q, tokens_q)

    Raises
    ------
    TypeError, ValueError
        As `pyflash.flash_attention_varlen` of options, and of what is no array.
        Shapes are not checked: where they do not fit, the error is NumPy's.
    """
    lengths = _packed(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    q, k, v = (a[None] for a in _hosts(q=q, k=k, v=v))
    out, lse = _forward_of_each(q, k, v, lengths, softmax_scale, _hosted(options))
    return out[0], lse[0]


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
    return_dscore_mod: bool = False,
    seqused_q=None,
    seqused_k=None,
    **options,
):
    """The gradients of sum(out * dout) + sum(lse * dlse), in the shapes of what they belong to.

    Parameters
    ----------
    dout : array (batch, seqlen_q, heads_q, head_dim_v)
        The gradient of out.
    q, k, v, softmax_scale, seqused_q, seqused_k, options
        As for `attention`. Neither out nor lse is taken: both are computed again.
    dlse : array (batch, heads_q, seqlen_q), optional
        The gradient of lse.
    return_dbias, return_dsinks, return_dscore_mod : bool
        As for `pyflash.flash_attention_backward`.

    Returns
    -------
    dq, dk, dv[, dbias][, dsinks] : float64 arrays
    dscore_mod : tuple of float64 arrays
        Only with ``return_dscore_mod``.

    Raises
    ------
    TypeError, ValueError
        As `pyflash.flash_attention_backward` of options, and of what is no array.
        Shapes are not checked: where they do not fit, the error is NumPy's.
    """
    wanted, options = _wanted(return_dbias, return_dsinks, return_dscore_mod), _hosted(options)
    dout, q, k, v, dlse = _hosts(dout=dout, q=q, k=k, v=v, dlse=dlse)
    if seqused_q is None and seqused_k is None:
        return _backward(dout, q, k, v, softmax_scale, dlse, wanted, options)
    lengths = _lengths(seqused_q=seqused_q, seqused_k=seqused_k)
    return _backward_of_each(dout, q, k, v, lengths, softmax_scale, dlse, wanted, options)


def attention_varlen_backward(
    dout,
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k=None,
    *,
    softmax_scale: float | None = None,
    dlse=None,
    return_dbias: bool = False,
    return_dsinks: bool = False,
    return_dscore_mod: bool = False,
    seqused_q=None,
    seqused_k=None,
    **options,
):
    """`attention_backward` of packed sequences.

    Parameters
    ----------
    dout : array (tokens_q, heads_q, head_dim_v)
        The gradient of out.
    q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, seqused_q, seqused_k, options
        As for `attention_varlen`.
    dlse : array (heads_q, tokens_q), optional
        The gradient of lse.
    return_dbias, return_dsinks, return_dscore_mod : bool
        As for `pyflash.flash_attention_backward`.

    Returns
    -------
    dq, dk, dv[, dbias][, dsinks] : float64 arrays
    dscore_mod : tuple of float64 arrays
        Only with ``return_dscore_mod``.

    Raises
    ------
    TypeError, ValueError
        As `pyflash.flash_attention_varlen_backward` of options, and of what is no array.
        Shapes are not checked: where they do not fit, the error is NumPy's.
    """
    lengths = _packed(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    found = _hosts(dout=dout, q=q, k=k, v=v, dlse=dlse)
    dout, q, k, v, dlse = (None if a is None else a[None] for a in found)
    wanted = _wanted(return_dbias, return_dsinks, return_dscore_mod)
    found = _backward_of_each(dout, q, k, v, lengths, softmax_scale, dlse, wanted, _hosted(options))
    return *(gradient[0] for gradient in found[:3]), *found[3:]


def _wanted(*flags: bool) -> tuple[str, ...]:
    return tuple(name for name, flag in zip(("bias", "sinks", "score_mod"), flags, strict=True) if flag)


def _gradients(wanted: tuple[str, ...], on: dict[str, object]) -> dict[str, np.ndarray]:
    """Zeros for those of features, by their arrays' names."""
    for name in wanted:
        if name not in on:
            raise ValueError(f"return_d{name}: got True, takes False where {name} is None")
    arrays = {**on, **features.parted(on)[1]}
    names = (array for name in wanted for array in features.BY_NAME[name].differentiated(on[name]))
    return {f"d{name}": np.zeros(np.shape(arrays[name])) for name in names}


def _host(name: str, array) -> np.ndarray:
    """An array of any library, or a list, as NumPy's."""
    if hasattr(array, "detach"):  # torch's: NumPy takes none that requires grad, has the negative bit or is bfloat16
        array = array.detach().resolve_neg().cpu()
        array = array.double() if array.is_floating_point() else array
    elif hasattr(array, "__cuda_array_interface__") and hasattr(array, "get"):  # CuPy's
        array = array.get()
    try:
        found = np.asarray(array)
    except (TypeError, ValueError):
        found = np.asarray(None)
    if found.dtype.kind in "OcSUMm":
        got = type(array).__name__ if found.dtype.kind == "O" else f"dtype {found.dtype}"
        raise TypeError(f"{name}: got {got}, takes an array of real numbers, of NumPy, torch, CuPy or JAX, or a list")
    return found


def _hosts(**arrays) -> tuple[np.ndarray | None, ...]:
    return tuple(None if array is None and name == "dlse" else _host(name, array) for name, array in arrays.items())


def _hosted(options: dict[str, object]) -> dict[str, object]:
    """Options with NumPy's arrays, what functions capture among them."""
    arrays = features.parted(features.check(options))[1]
    return {**options, **{name: _host(name, array) for name, array in arrays.items()}}


def _lengths(**given) -> dict[str, np.ndarray]:
    return {name: _host(name, value) for name, value in given.items() if value is not None}


def _packed(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k) -> dict[str, np.ndarray]:
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    return _lengths(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k)


def _each(q, k, arrays: dict[str, np.ndarray]):
    """The sequences of a call, and how to take the queries' or keys' rows of an array that are one's."""
    batch = len(arrays["cu_seqlens_q"]) - 1 if "cu_seqlens_q" in arrays else len(q)
    for x in sequences.each(batch, q.shape[1], k.shape[1], arrays):
        yield x.batch, (slice(x.array, x.array + 1), x.queries), (slice(x.array, x.array + 1), x.keys)


def _forward_of_each(q, k, v, lengths, softmax_scale, options):
    out, lse = np.zeros((*q.shape[:3], v.shape[3])), np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf)
    for batch, queries, keys in _each(q, k, lengths):
        found = _attention(q[queries], k[keys], v[keys], softmax_scale, options, batch)
        out[queries], lse.swapaxes(1, 2)[queries] = found[0], found[1].swapaxes(1, 2)
    return out, lse


def _backward_of_each(dout, q, k, v, lengths, softmax_scale, dlse, wanted, options):
    dq, dk, dv = (np.zeros(a.shape) for a in (q, k, v))
    on = features.check(options)
    extra = _gradients(wanted, on)
    for batch, queries, keys in _each(q, k, lengths):
        own_dlse = None if dlse is None else dlse.swapaxes(1, 2)[queries].swapaxes(1, 2)
        tensors = dout[queries], q[queries], k[keys], v[keys]
        dq[queries], dk[keys], dv[keys] = _differentiate(*tensors, softmax_scale, own_dlse, extra, options, batch)
    return dq, dk, dv, *(features.BY_NAME[name].gradient(on[name], extra) for name in wanted)


def _attention(q, k, v, softmax_scale, options, batch: int | None = None):
    """Of whole arrays, or of a sequence that is number `batch` of its call."""
    q, k, v = _by_head(q, k, v)
    with np.errstate(all="ignore"):
        rows = _Rows(_scale(q, softmax_scale) * (q @ k.swapaxes(-1, -2)), options, batch)
        return rows.out(v).swapaxes(1, 2), rows.lse


def _backward(dout, q, k, v, softmax_scale, dlse, wanted, options):
    on = features.check(options)
    extra = _gradients(wanted, on)
    gradients = _differentiate(dout, q, k, v, softmax_scale, dlse, extra, options)
    return *gradients, *(features.BY_NAME[name].gradient(on[name], extra) for name in wanted)


def _differentiate(dout, q, k, v, softmax_scale, dlse, extra, options, batch: int | None = None):
    """dq, dk and dv; gradients of features are added to `extra`."""
    heads_kv = k.shape[2]
    q, dout, k, v = _by_head(q, dout, k, v)
    scale = _scale(q, softmax_scale)
    with np.errstate(all="ignore"):
        rows = _Rows(scale * (q @ k.swapaxes(-1, -2)), options, batch)
        delta = np.matmul(dout[..., None, :], rows.out(v)[..., None])[..., 0, 0]
        if dlse is not None:
            delta = delta - dlse.astype(np.float64)
        visible, transposed = rows.visible, rows.visible.swapaxes(-1, -2)
        ds = np.where(visible, rows.p * (rows.weight * (dout @ v.swapaxes(-1, -2)) - delta[..., None]), 0.0)
        if "dbias" in extra:
            part = rows.place.of(extra["dbias"])
            part += summed_to(part.shape, np.where(visible, ds * rows.slope_since_bias, 0.0))
        if "dsinks" in extra:
            extra["dsinks"] += (-rows.p_sink * delta).sum((0, 2))
        if totals := features.captured_gradients(extra):
            features.scatter(rows.on, rows.products, ds, rows.place, totals)
        ds = np.where(visible, ds * rows.slope, 0.0)
        dq = scale * select_matmul(ds, k, visible)
        dk = scale * select_matmul(ds.swapaxes(-1, -2), q, transposed)
        dv = select_matmul((rows.weight * rows.p).swapaxes(-1, -2), dout, transposed)
    return dq.swapaxes(1, 2), _per_kv_head(dk, heads_kv), _per_kv_head(dv, heads_kv)


class _Rows:
    """Rows of scores, (batch, heads_q, seqlen_q, seqlen_k), and what becomes of them."""

    def __init__(self, s, options: dict[str, object], batch: int | None = None):
        on, whole = features.check(options), Place.whole(Sizes(*s.shape), batch)
        self.on, self.place, self.products = on, whole, s
        self.visible = visibility(Sizes(*s.shape), options, batch)
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


def visibility(sizes: Sizes, options: dict[str, object], batch: int | None = None):
    """Which query sees which key: (seqlen_q, seqlen_k), with batches and heads in front where they differ."""
    seen = features.visible(features.check(options), Place.whole(sizes, batch))
    return np.ones(sizes[2:], bool) if seen is None else seen


def summed_to(shape: tuple[int, ...], a):
    """The gradient of an array of this shape that was broadcast to `a`."""
    axes = tuple(axis for axis in range(a.ndim) if axis < a.ndim - len(shape) or shape[axis - a.ndim] != a.shape[axis])
    return a.sum(axes, keepdims=True).reshape(shape)


def _scale(q, softmax_scale):
    return 1 / np.sqrt(q.shape[-1]) if softmax_scale is None else float(softmax_scale)


def _by_head(q, *others):
    """(batch, seqlen, heads, dim) -> (batch, heads_q, seqlen, dim), key heads repeated for the queries they serve."""
    heads_q = q.shape[2]
    arrays = (a.astype(np.float64).swapaxes(1, 2) for a in (q, *others))
    return tuple(np.repeat(a, heads_q // a.shape[1], axis=1) for a in arrays)


def _per_kv_head(a, heads_kv: int):
    """The gradient of what _by_head repeats: (batch, heads_q, seqlen, dim) -> (batch, seqlen, heads_kv, dim)."""
    batch, heads_q, *rest = a.shape
    return a.reshape(batch, heads_kv, heads_q // heads_kv, *rest).sum(2).swapaxes(1, 2)
