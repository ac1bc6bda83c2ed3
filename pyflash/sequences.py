"""Sequences of their own lengths: packed one behind the other, or in a padded batch.

`cu_seqlens_q` and `cu_seqlens_k` (batch + 1) say where each sequence begins among the rows of packed arrays, and where
the last ends. `seqused_q` and `seqused_k` (batch) say how many of its rows exist. What can be looked at without waiting
for a GPU, arrays of the host, is checked here; the kernels clamp what cannot.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")
USED = ("seqused_q", "seqused_k")
ARRAYS = OFFSETS + USED
LONGEST = ("max_seqlen_q", "max_seqlen_k")
DTYPES = {"int32": "int", "int64": "long long"}  # and the kernels' names for them
TAKES = {
    **dict.fromkeys(OFFSETS, "an array or a list of batch + 1 integers"),
    **dict.fromkeys(USED, "None or an array or a list of batch integers"),
}
MOST = 2**31 - 1


def named(
    cu_seqlens_q, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None, seqused_k=None
) -> dict[str, object]:
    """The arguments that say where sequences are: without its own, keys lie where queries do."""
    if cu_seqlens_k is None:
        cu_seqlens_k, max_seqlen_k = cu_seqlens_q, max_seqlen_q if max_seqlen_k is None else max_seqlen_k
    if cu_seqlens_q is None and any(x is not None for x in (cu_seqlens_k, max_seqlen_q, max_seqlen_k)):
        raise TypeError(f"cu_seqlens_q: got None, takes {TAKES['cu_seqlens_q']} for packed sequences")
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k
    return dict(zip(ARRAYS + LONGEST, lengths, strict=True))


def on_host(name: str, value: object) -> np.ndarray | None:
    """A list, a tuple or a NumPy array as the latter; None for what is something else."""
    if not isinstance(value, (list, tuple, np.ndarray)):
        return None
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name}: got a numpy.ma.MaskedArray, takes {TAKES[name]}")
    try:
        array = np.asarray(value) if len(np.shape(value)) != 1 or len(value) else np.zeros(0, np.int64)
    except ValueError:
        raise TypeError(f"{name}: got {value!r}, takes {TAKES[name]}") from None
    if array.dtype.kind not in "iu" or array.dtype == np.uint64:
        raise TypeError(f"{name}: got dtype {array.dtype}, takes {' or '.join(DTYPES)}")
    if isinstance(value, np.ndarray) and array.dtype.name not in DTYPES:
        raise TypeError(f"{name}: got dtype {array.dtype}, takes {' or '.join(DTYPES)}")
    return array


def check_longest(name: str, value: object) -> int | None:
    """max_seqlen_q or max_seqlen_k."""
    takes = "None or an integer from 0 on"
    try:
        number = None if value is None else operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or (number == -1 and not isinstance(value, int)):
        raise TypeError(f"{name}: got {value!r}, takes {takes}")
    if number is not None and not 0 <= number <= MOST:
        raise ValueError(f"{name}: got {value!r}, takes {takes}")
    return number


def longest(hosts: Mapping[str, np.ndarray], side: str) -> int | None:
    """The longest sequence of queries ("q") or keys ("k"), by offsets of the host, however wrong they may be."""
    offsets = hosts.get(f"cu_seqlens_{side}")
    if offsets is None or offsets.ndim != 1:
        return None
    return int(np.diff(offsets.astype(np.int64)).max(initial=0))


def check(
    hosts: Mapping[str, np.ndarray],
    packed: bool,
    rows: Mapping[str, int],
    bounds: Mapping[str, int | None],
    call: object,
) -> None:
    """Raise if arrays of the host say what cannot be. `rows` are those of a batch of the arrays, by side, and `bounds`
    what the caller said of the longest sequences; shapes are checked already."""

    def fail(name: str, got: str, takes: str):
        raise ValueError(f"{name}: got {got}, takes {takes}; call {call}")

    for name in (name for name in OFFSETS if name in hosts):
        offsets, total = hosts[name].astype(np.int64), rows[name[-1]]
        if offsets[0] != 0:
            fail(name, f"{offsets[0]} as the first offset", "0")
        if (falls := np.flatnonzero(np.diff(offsets) < 0)).size:
            s = int(falls[0])
            fail(name, f"{offsets[s + 1]} after {offsets[s]}, at {s + 1}", "offsets that do not decrease")
        if offsets[-1] != total:
            fail(name, f"{offsets[-1]} as the last offset", f"{total}, the tokens of {name[-1]}")
        most, bound = longest(hosts, name[-1]), bounds[name[-1]]
        if bound is not None and bound < most:
            fail(f"max_seqlen_{name[-1]}", str(bound), f"None or at least {most}, the longest sequence")
    for name in (name for name in USED if name in hosts):
        used, side = hosts[name].astype(np.int64), name[-1]
        offsets = hosts.get(f"cu_seqlens_{side}")
        if offsets is not None:
            lengths = np.diff(offsets.astype(np.int64))
        else:  # the offsets may be the GPU's
            lengths = np.full(used.shape, MOST if packed else rows[side])
        wrong = np.flatnonzero((used < 0) | (used > lengths))
        if wrong.size:
            s = int(wrong[0])
            fail(name, f"{used[s]} at {s}", f"0 to {lengths[s]}, the length of the sequence")


class Sequence(NamedTuple):
    """One of a call: number `batch`, whose rows are these of the arrays' batch `array`."""

    batch: int
    array: int
    queries: slice
    keys: slice


def each(batch: int, rows_q: int, rows_k: int, arrays: Mapping[str, np.ndarray]) -> Iterator[Sequence]:
    """The sequences of a call whose arrays have so many rows, clamped to them as the kernels do."""
    for s in range(batch):
        sides = []
        for side, rows in (("q", rows_q), ("k", rows_k)):
            begin, end = 0, rows
            if (offsets := arrays.get(f"cu_seqlens_{side}")) is not None:
                begin, end = (min(max(int(offsets[i]), 0), rows) if i else 0 for i in (s, s + 1))
            length = max(end - begin, 0)
            if (used := arrays.get(f"seqused_{side}")) is not None:
                length = min(max(int(used[s]), 0), length)
            sides.append(slice(begin, begin + length))
        yield Sequence(s, 0 if "cu_seqlens_q" in arrays else s, *sides)
