"""Block sparsity: which blocks of the score matrix a mask function leaves empty, hides in part, or leaves full.

The blocks that are not empty are listed twice: for each block of queries those of keys, which the forward walks, and
for each block of keys those of queries, for the backward. A list is a row of integers: how many there are, and then, in
rising order, 2 * the block's number, + 1 if it is full.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

EMPTY, PARTIAL, FULL = range(3)
_KINDS = ("empty", "partial", "full")
_ELEMENTS = 1 << 20  # of the mask that are looked at together


def count(size: int, block: int) -> int:
    """Blocks along an axis."""
    return -(-size // block)


class Blocks(NamedTuple):
    """What a call is told of a BlockMask; `batch` and `heads` may be 1, for all."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    block_q: int
    block_k: int
    arrays: tuple = ()  # the lists of key blocks, and those of query blocks

    def __repr__(self) -> str:
        return f"<blocks of {self.block_q} x {self.block_k}>"

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks along queries and along keys."""
        return count(self.seqlen_q, self.block_q), count(self.seqlen_k, self.block_k)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the kinds of the blocks, the lists of key blocks and those of query blocks."""
        (rows, columns), lead = self.grid, (self.batch, self.heads)
        return (*lead, rows, columns), (*lead, rows, columns + 1), (*lead, columns, rows + 1)

    def obstacle(self, tiles: list[tuple[int, int]]) -> str | None:
        """Why none of the tiles serves, if so: one must divide the blocks."""
        nearest = min(((count(self.block_q, m) * m, count(self.block_k, n) * n) for m, n in tiles), key=math.prod)
        if nearest == (self.block_q, self.block_k):
            return None
        shown = "block_mask's blocks of {} x {}, the nearest that work are {} x {}"
        return "no tile divides " + shown.format(self.block_q, self.block_k, *nearest)

    def kind(self, batches: slice, heads: slice, queries: slice, keys: slice) -> int:
        """Of a part of the score matrix, from lists that are NumPy arrays; PARTIAL if its blocks differ."""
        every = slice(None)
        rows = slice(queries.start // self.block_q, count(queries.stop, self.block_q))
        batches, heads = batches if self.batch > 1 else every, heads if self.heads > 1 else every
        lists = self.arrays[0][batches, heads, rows]
        entries, first, last = lists[..., 1:], keys.start // self.block_k, count(keys.stop, self.block_k)
        listed = (np.arange(entries.shape[-1]) < lists[..., :1]) & (entries // 2 >= first) & (entries // 2 < last)
        found = entries[listed]
        if not found.size:
            return EMPTY
        return FULL if found.size == lists[..., 0].size * (last - first) and (found % 2).all() else PARTIAL


class BlockMask:
    """A mask function, and which blocks it leaves empty, hides in part, or leaves full. `pyflash.block_mask` makes one.

    Attributes
    ----------
    kinds : array (batch, heads, blocks of queries, blocks of keys)
        0 where a block is empty, 1 where a part of it is hidden, 2 where it is full. uint8, of the arrays' kind.
    block_q, block_k : int
        Queries and keys of a block.
    """

    def __init__(self, mask_mod, blocks: Blocks, kinds):
        self.mask_mod, self.blocks, self.kinds = mask_mod, blocks, kinds
        self.block_q, self.block_k = blocks.block_q, blocks.block_k

    @property
    def shares(self) -> dict[str, float]:
        """Which share of the blocks is empty, partial and full."""
        counts = np.bincount(np.array(self.kinds.tolist(), np.uint8).ravel(), minlength=len(_KINDS))
        return dict(zip(_KINDS, (counts / max(counts.sum(), 1)).tolist(), strict=True))

    def __repr__(self) -> str:
        shares = ", ".join(f"{100 * share:.1f} % {name}" for name, share in self.shares.items())
        return f"BlockMask({self.blocks[:4]}, blocks of {self.block_q} x {self.block_k}: {shares})"


def kinds_of(blocks: Blocks, visible: Callable[[slice, slice, slice, slice], np.ndarray]) -> np.ndarray:
    """The kind of every block, given what tells which elements of a part are visible. Never more than _ELEMENTS."""
    kinds = np.empty(blocks.shapes[0], np.uint8)
    strip = max(_ELEMENTS // (blocks.block_q * blocks.block_k), 1) * blocks.block_k
    for b, h, row in np.ndindex(kinds.shape[:3]):
        m = slice(row * blocks.block_q, min((row + 1) * blocks.block_q, blocks.seqlen_q))
        for start in range(0, blocks.seqlen_k, strip):
            n = slice(start, min(start + strip, blocks.seqlen_k))
            seen = visible(slice(b, b + 1), slice(h, h + 1), m, n)[0, 0]
            edges = np.arange(0, n.stop - n.start, blocks.block_k)
            some = np.logical_or.reduceat(seen.any(0), edges)
            every = np.logical_and.reduceat(seen.all(0), edges)
            first = start // blocks.block_k
            kinds[b, h, row, first : first + edges.size] = some.astype(np.uint8) + every
    return kinds


def lists_of(kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lists of key blocks, and those of query blocks."""
    return _lists(kinds), _lists(kinds.swapaxes(2, 3))


def _lists(kinds: np.ndarray) -> np.ndarray:
    listed = kinds != EMPTY
    lists = np.zeros((*kinds.shape[:3], kinds.shape[3] + 1), np.int32)
    lists[..., 0] = listed.sum(-1)
    order = np.argsort(~listed, axis=-1, kind="stable")  # those that are listed first, in rising order
    lists[..., 1:] = 2 * order + (np.take_along_axis(kinds, order, -1) == FULL)
    return lists
