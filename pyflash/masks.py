"""Mask functions ready made, for `mask_mod` and `pyflash.block_mask`, and what combines them with others.

In each, query i stands at key i + shift; with seqlen_k - seqlen_q the last query stands at the last key, as with
`causal=True`.
"""

from __future__ import annotations

import operator

import numpy as np

from . import arrays
from .feature import fail


def causal(shift: int = 0):
    """Which keys are not behind the query.

    Parameters
    ----------
    shift : int
        See above.

    Returns
    -------
    function (batch, head, q_idx, kv_idx) -> bool

    Raises
    ------
    TypeError
        shift is no integer; the message names it, what it got and what it takes.
    """
    shift = _integer("shift", shift)
    return lambda batch, head, q_idx, kv_idx: kv_idx <= q_idx + shift


def sliding_window(left: int, right: int = 0, sinks: int = 0, shift: int = 0):
    """Which keys lie from `left` before the query to `right` behind it, both inclusive, and the first `sinks` keys of
    all, as far as they are not further behind it than that.

    Parameters
    ----------
    left, right : int
    sinks : int
        Keys that every query behind them sees, however far it is.
    shift : int
        See above.

    Returns
    -------
    function (batch, head, q_idx, kv_idx) -> bool

    Raises
    ------
    TypeError, ValueError
        An argument is no integer, or a negative one where that makes no sense.
    """
    left, right, sinks = _integer("left", left, 0), _integer("right", right, 0), _integer("sinks", sinks, 0)
    shift = _integer("shift", shift)

    def mask(batch, head, q_idx, kv_idx):
        place = q_idx + shift
        return (kv_idx <= place + right) & ((kv_idx >= place - left) | (kv_idx < sinks))

    return mask


def prefix_lm(prefix, shift: int = 0):
    """Which keys belong to the prefix, which every query sees, or are not behind the query.

    Parameters
    ----------
    prefix : int, or array (batch,) of integers
        Keys of the prefix.
    shift : int
        See above.

    Returns
    -------
    function (batch, head, q_idx, kv_idx) -> bool

    Raises
    ------
    TypeError, ValueError
        An argument is no integer, or a prefix is negative or an array of another shape.
    """
    shift = _integer("shift", shift)
    if _is_array(prefix):
        _dimensions("prefix", prefix, 1, "(batch,)")
        return lambda batch, head, q_idx, kv_idx: (kv_idx < prefix[batch]) | (kv_idx <= q_idx + shift)
    prefix = _integer("prefix", prefix, 0)
    return lambda batch, head, q_idx, kv_idx: (kv_idx < prefix) | (kv_idx <= q_idx + shift)


def documents(ids, ids_k=None):
    """Which keys are of the query's document.

    Parameters
    ----------
    ids : array (seqlen_q,) or (batch, seqlen_q)
        The number of each query's document.
    ids_k : array, optional
        The same of keys, if they differ from the queries'.

    Returns
    -------
    function (batch, head, q_idx, kv_idx) -> bool

    Raises
    ------
    TypeError, ValueError
        An argument is no array, or one of another shape, or the two differ in dimensions.
    """
    ids_k = ids if ids_k is None else ids_k
    for name, array in (("ids", ids), ("ids_k", ids_k)):
        _dimensions(name, array, 2 if len(getattr(array, "shape", ())) == 2 else 1, "(seqlen,) or (batch, seqlen)")
    if len(ids.shape) != len(ids_k.shape):
        raise ValueError(f"ids_k: got shape {tuple(ids_k.shape)}, takes {len(ids.shape)} dimensions, as ids")
    if ids_k is ids and len(ids.shape) == 1:
        return lambda batch, head, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]
    if ids_k is ids:
        return lambda batch, head, q_idx, kv_idx: ids[batch, q_idx] == ids[batch, kv_idx]
    if len(ids.shape) == 1:
        return lambda batch, head, q_idx, kv_idx: ids[q_idx] == ids_k[kv_idx]
    return lambda batch, head, q_idx, kv_idx: ids[batch, q_idx] == ids_k[batch, kv_idx]


def packed_documents(cu_seqlens, cu_seqlens_k=None):
    """`documents` by where each begins, as packed sequences are given.

    Parameters
    ----------
    cu_seqlens : array (documents + 1,) of integers
        0, the first document's end, the second's, ... It is read, which waits for a GPU.
    cu_seqlens_k : array, optional
        The same of keys, if they differ from the queries'.

    Returns
    -------
    function (batch, head, q_idx, kv_idx) -> bool

    Raises
    ------
    TypeError, ValueError, pyflash.Unsupported
        An argument is no array, or does not begin with 0, or falls, or lies where PyFlash does not run.
    """
    of_queries = _ids("cu_seqlens", cu_seqlens)
    return documents(of_queries, None if cu_seqlens_k is None else _ids("cu_seqlens_k", cu_seqlens_k))


def and_masks(*masks):
    """What all of some mask functions show.

    Parameters
    ----------
    masks : functions (batch, head, q_idx, kv_idx) -> bool

    Returns
    -------
    function (batch, head, q_idx, kv_idx) -> bool

    Raises
    ------
    TypeError
        There is none, or one that is no function.
    """
    return _combined(operator.and_, masks)


def or_masks(*masks):
    """What any of some mask functions shows.

    Parameters
    ----------
    masks : functions (batch, head, q_idx, kv_idx) -> bool

    Returns
    -------
    function (batch, head, q_idx, kv_idx) -> bool

    Raises
    ------
    TypeError
        There is none, or one that is no function.
    """
    return _combined(operator.or_, masks)


def _combined(combine, masks: tuple):
    if not masks or not all(callable(mask) for mask in masks):
        fail("masks", masks, "one mask function or more", TypeError)

    def mask(batch, head, q_idx, kv_idx):
        seen = masks[0](batch, head, q_idx, kv_idx)
        for other in masks[1:]:
            seen = combine(seen, other(batch, head, q_idx, kv_idx))
        return seen

    return mask


def _is_array(value) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic)


def _dimensions(name: str, array, wanted: int, takes: str) -> None:
    if not _is_array(array):
        fail(name, array, f"an array {takes}", TypeError)
    if len(array.shape) != wanted:
        raise ValueError(f"{name}: got shape {tuple(array.shape)}, takes {takes}")


def _integer(name: str, value: object, least: int | None = None) -> int:
    takes = "an integer" if least is None else f"an integer from {least} on"
    try:
        number = operator.index(value)
    except TypeError:
        fail(name, value, takes, TypeError)
    return number if least is None or number >= least else fail(name, value, takes, ValueError)


def _ids(name: str, cu_seqlens):
    """The document of each token, an array of the kind of `cu_seqlens`."""
    takes = "(documents + 1,) of integers that begin with 0 and never fall"
    _dimensions(name, cu_seqlens, 1, takes)
    ends = np.array(cu_seqlens.tolist())
    if ends.dtype.kind not in "iu" or ends[0] or (np.diff(ends) < 0).any():
        fail(name, ends.tolist(), takes, ValueError)
    ids = np.repeat(np.arange(len(ends) - 1, dtype=np.int32), np.diff(ends))
    kind = arrays.kind_of(cu_seqlens, name)
    device_id = arrays.Inspected(kind, {name: cu_seqlens}).device_id()
    return kind.wrap(kind.upload(ids, device_id), cu_seqlens)
