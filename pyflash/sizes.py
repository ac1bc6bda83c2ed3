"""What kernels are told of a problem's sizes, and of where its sequences are."""

from __future__ import annotations

from . import sequences
from .problem import Problem


def of(problem: Problem, tile_m: int, tile_n: int, by_sequence: bool) -> dict[str, int]:
    """What a kernel is told of sizes, and how many tiles of queries and of keys a head has in all."""
    return {
        "batch": problem.batch if by_sequence else problem.arrays_batch,
        "seqlen_q": problem.seqlen_q if by_sequence else problem.rows_q,
        "seqlen_k": problem.seqlen_k if by_sequence else problem.rows_k,
        "rows_q": problem.rows_q,
        "rows_k": problem.rows_k,
        "max_seqlen_q": problem.seqlen_q,
        "max_seqlen_k": problem.seqlen_k,
        **dict.fromkeys(("first_q", "first_k", "no_sequence"), 0),
        "query_tiles": problem.tiles_per_head(problem.rows_q, problem.seqlen_q, tile_m),
        "key_tiles": problem.tiles_per_head(problem.rows_k, problem.seqlen_k, tile_n),
        "num_heads_q": problem.num_heads_q,
        "num_heads_kv": problem.num_heads_kv,
        "qheads_per_kv": problem.qheads_per_kv,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "num_m_blocks": -(-problem.seqlen_q // tile_m),
        "num_n_blocks": -(-problem.seqlen_k // tile_n),
    }


def config(problem: Problem) -> dict[str, object]:
    """Of a kernel that works by sequences."""
    tensors = dict(problem.tensors)
    types = {
        kernels: sequences.DTYPES[tensors[name].dtype if name in tensors else "int32"]
        for name, kernels in zip(sequences.ARRAYS, ("CuSeqlensQ", "CuSeqlensK", "SeqUsedQ", "SeqUsedK"), strict=True)
    }
    return {"PACKED": problem.packed, "GAPS": problem.gaps, **types}


def num_flags(problem: Problem, tile_m: int) -> int:
    """Flags of the query tiles of a head, in each batch of the arrays: no more than rows, as bwd_delta zeroes them."""
    return problem.rows_q if problem.varlen else -(-problem.seqlen_q // tile_m)


def _section_bytes(group_bytes: int) -> int:
    """How much k and v may be that heads have whose tiles are ordered together, given those of one head.

    With 64 MB, not 32: +3 to +7 % at head_dim 256 from 4k on, +3 to +5 % at 128 from 8k on, but -3 % there at 4k.
    """
    return (64 if group_bytes >= 4 << 20 else 32) << 20


def heads_per_section(problem: Problem) -> int:
    """How many heads of q have their tiles ordered together, longest first: those whose k and v share L2. A block mask
    may have its longest walks anywhere: of heads in one order they are not the last ones. And it leaves out some of k
    and v, so that there may be more (twice as many: documents +1 to +2 %)."""
    if not problem.banded and "block_mask" not in problem.on:
        return 1  # all tiles are equally long: those of one head follow each other
    groups = problem.batch * problem.num_heads_kv
    group_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    section_bytes = _section_bytes(group_bytes) << ("block_mask" in problem.on)
    sections = -(-groups // max(section_bytes // group_bytes, 1))
    return -(-groups // sections) * problem.qheads_per_kv


def key_heads_per_section(problem: Problem, ordered: bool) -> int:
    """How many heads of k have their tiles ordered together in a backward: those whose q, do and sum of dq share L2."""
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize + problem.head_dim * 4
    group_bytes = max(problem.seqlen_q * problem.qheads_per_kv, 1) * row_bytes
    groups = max(problem.batch * problem.num_heads_kv, 1)
    sections = -(-groups // max((32 << 20) // group_bytes, 1 if ordered else 2))
    return -(-groups // sections)
