"""Tile rows: which tile, thread count and pipeline depth each kernel uses at which size, and why.

A row serves every problem whose padded head_dim and head_dim_v are at most its `head_dim`; the planner takes the first
row of a kernel's list that serves the problem and whose shared memory the device has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    head_dim: int
    tile_m: int  # query rows
    tile_n: int  # key columns
    threads: int
    stages: int  # K/V (forward) or Q/dO (backward) tiles in flight
    min_ctas: int  # CTAs that must fit on a multiprocessor: bounds the registers
    why: str
    knobs: tuple[tuple[str, object], ...] = ()  # further constants of this kernel
    causal: bool | None = None  # serves only problems with causal or window (or only those without)
    itemsize: int | None = None  # serves only elements of this many bytes
    min_seqlen_q: int = 0  # serves only problems with at least this many queries
    max_seqlen: int | None = None  # and at most this many, and as many keys
    whole: bool = False  # made for many long tiles: serves neither those of several heads nor parts of the keys
    plain: bool = False  # serves no feature that takes code of its own for each element: has no registers for it
    bare: bool = False  # serves no feature at all, nor sequences of their own lengths: has no registers for them
    max_band: int | None = None  # serves only problems whose queries see at most this many keys, by causal and window
    adds: bool = False  # serves only problems of whose features a bias that TMA brings alone changes scores
    min_head_dim: int = 0  # serves only problems whose head_dim and head_dim_v, padded, are at least this
    min_smem: int = 0  # serves only devices that give a CTA this many bytes: where min_ctas CTAs need more than one's


@dataclass(frozen=True)
class Kernel:
    """What a kernel file can do, and its rows."""

    dtypes: tuple[str, ...]
    min_capability: tuple[int, int]
    only_capability: tuple[int, int] | None  # an architecture-specific binary runs on exactly one
    pad: int  # head_dim and head_dim_v are padded to a multiple of this in shared memory and registers
    smem_bytes: Callable[[Row, int, int, int], int]  # (row, TILE_D, TILE_DV, bytes of an element) -> sizeof(Smem)
    rows: tuple[Row, ...]
    tells_masks: bool = False  # consumers are told through shared memory what masks hide
    stages_bias: bool = False  # rows of a bias that are read 16 bytes at a time pass through shared memory, padded
    spill_bytes: int = 0  # the most that a variant may spill, stores and loads together, with any NVRTC
    option_spill_bytes: int = 0  # the same where features other than causal are on


_HALF = ("float16", "bfloat16")
_FULL = ("float32", "float64")


def _fwd_sm80_smem(row: Row, tile_d: int, tile_dv: int, itemsize: int) -> int:
    stage = row.tile_n * (tile_d + tile_dv) * itemsize
    q, o = row.tile_m * tile_d * itemsize, row.tile_m * tile_dv * itemsize
    # q lies behind the ring if blocks of it are read in every step, otherwise over the stages that are filled last.
    early = row.stages if dict(row.knobs)["Q_BLOCKS"] * 16 < tile_d else max(row.stages - -(-q // stage), 1)
    return max(row.stages * stage, early * stage + q, o) + 128


def _bwd_sm80_smem(row: Row, tile_d: int, tile_dv: int, itemsize: int) -> int:
    queries = row.tile_m * (tile_d + tile_dv) * itemsize + row.tile_m * 2 * 4  # q, do; lse, delta
    scores = row.tile_n * row.tile_m * itemsize
    flags = 16
    return row.tile_n * (tile_d + tile_dv) * itemsize + row.stages * (queries + scores) + flags


def _fwd_sm90_smem(row: Row, tile_d: int, tile_dv: int, itemsize: int) -> int:
    knobs = dict(row.knobs)
    chunked_d, chunked_dv = (-(-d // 64) * 64 * itemsize for d in (tile_d, tile_dv))
    q = knobs["Q_STAGES"] * row.tile_m * chunked_d
    kv = row.tile_n * (row.stages * chunked_d + knobs["V_STAGES"] * chunked_dv)
    kv += (row.stages + knobs["V_STAGES"]) * 16  # mbarriers
    control = knobs["Q_STAGES"] * row.tile_m // 64 * 32  # those of q, and what travels with it
    return -(-(q + kv + control) // 1024) * 1024


def _bwd_sm90_smem(row: Row, tile_d: int, tile_dv: int, itemsize: int) -> int:
    columns = sum(-(-d // 64) * 64 for d in (tile_d, tile_dv))  # whole chunks of 64 columns
    scores = row.tile_m * row.tile_n
    if dict(row.knobs)["LARGE_HEADS"]:
        handed_over, barriers = 2 * 2 * scores, 4 + 5 * row.stages + 10  # p and ds, two of each
    else:
        handed_over, barriers = 2 * scores, 5 + 4 * row.stages + 6  # two ds
    elements = (row.tile_n + row.stages * row.tile_m) * columns + handed_over
    lse_and_delta = row.stages * row.tile_m * 2 * 4
    names = 2 * (16 + 2 * 8)  # of two tiles, and their mbarriers
    flags = (1 + 3 * row.stages) * 4
    return -(-(elements * itemsize + lse_and_delta + barriers * 8 + names + flags) // 1024) * 1024


def _no_smem(row: Row, tile_d: int, tile_dv: int, itemsize: int) -> int:
    return 0


def _simt_smem(own: int, other: int, row: Row, columns: tuple[int, ...], slice_columns: int, itemsize: int) -> int:
    """`own` rows of each operand in `columns` and of weights for `other` rows, and the slots of what streams."""
    knobs, vector = dict(row.knobs), 16 // itemsize

    def padded(cols: int) -> int:
        return (cols // vector | 1) * vector

    weights = other + knobs["THREAD_COLS"] * 4 // itemsize
    slot = max(other * padded(knobs["SLICE_D"]), knobs["SLICE_N"] * slice_columns)
    return (own * (sum(map(padded, columns)) + weights) + row.stages * slot) * itemsize


def _fwd_simt_smem(row: Row, tile_d: int, tile_dv: int, itemsize: int) -> int:
    return _simt_smem(row.tile_m, row.tile_n, row, (tile_d,), tile_dv, itemsize)


def _bwd_simt_smem(row: Row, tile_d: int, tile_dv: int, itemsize: int) -> int:
    # Both launches, one owning queries and one owning keys, have the same bytes because tile_m == tile_n.
    return _simt_smem(row.tile_m, row.tile_n, row, (tile_d, tile_dv), max(tile_d, tile_dv), itemsize)


def _fwd_sm80(head_dim: int, tile_m: int, tile_n: int, threads: int, stages: int, min_ctas: int, strip: int,
              q_blocks: int, why: str, *, causal: bool | None = None, min_smem: int = 0) -> Row:  # fmt: skip
    """`strip`: keys of a pipeline step; `q_blocks`: 16-column blocks of q held in registers, the others are read from
    shared memory in every step."""
    knobs = ("STRIP", strip), ("Q_BLOCKS", q_blocks)
    return Row(head_dim, tile_m, tile_n, threads, stages, min_ctas, why, knobs, causal, min_smem=min_smem)


def _bwd_sm80(head_dim: int, tile_m: int, tile_n: int, warps: int, split: int, kept: tuple[int, int],
              dq_m_warps: int, why: str) -> Row:  # fmt: skip
    """`split`: warps that share the gradients of their keys; `kept`: 16-column blocks of k and v in registers;
    `dq_m_warps`: warps that divide the rows of dq, while the others divide its columns."""
    knobs = ("COLUMN_SPLIT", split), ("K_RMEM_BLOCKS", kept[0]), ("V_RMEM_BLOCKS", kept[1])
    knobs += (("DQ_M_WARPS", dq_m_warps),)
    return Row(head_dim, tile_m, tile_n, warps * 32, 3, 1, why, knobs)


def _fwd_sm90(
    head_dim: int,
    tile_m: int,
    tile_n: int,
    stages: int,
    q_stages: int,
    why: str,
    *,
    early: bool = True,
    ping_pong: bool = True,
    min_seqlen_q: int = 0,
    only_causal: bool | None = None,
    dynamic: bool = False,
    whole: bool = False,
    max_seqlen: int | None = None,
    max_band: int | None = None,
    v_stages: int | None = None,
    store_tma: bool = False,
    ctas: int = 1,
    bare: bool = False,
    adds: bool = False,
    min_head_dim: int = 0,
) -> tuple[Row, ...]:
    """One warpgroup loads; those that compute 64 rows each share the other registers. Causal tiles differ in length, so
    they are handed out as CTAs get free, as are `dynamic` ones. `early`: scores of the next output tile beside the last
    step of this one; `ping_pong`: warpgroups take turns at products, so that each has its exponentials under another's;
    `v_stages`: tiles of v in flight, if not as many as of k; `store_tma`: o goes out by TMA where it can; `ctas`: on a
    multiprocessor, of which several have a warp that loads, and no registers to share out."""
    shared = {128: (40, 232), 192: (32, 160), 256: (32, 112)}[tile_m]
    loaders, (producer, consumer) = (128, shared) if ctas == 1 else (32, (0, 0))
    rows = []
    for causal in (False, True) if only_causal is None else (only_causal,):
        knobs = {
            "ONE_KEY_TILE": max_seqlen is not None and max_seqlen <= tile_n,
            "Q_STAGES": q_stages,
            "V_STAGES": v_stages or stages,
            "DYNAMIC": causal or dynamic,
            "SCORE_EARLY": early,
            "PING_PONG": ping_pong,
            "STORE_TMA": store_tma,
            "PRODUCER_REGS": producer,
            "CONSUMER_REGS": consumer,
        }
        threads = 2 * tile_m + loaders
        row = Row(head_dim, tile_m, tile_n, threads, stages, ctas, why, tuple(knobs.items()), causal, None,
                  min_seqlen_q, max_seqlen, whole, plain=whole and not adds, max_band=max_band, bare=bare, adds=adds,
                  min_head_dim=min_head_dim)  # fmt: skip
        rows.append(row)
    return tuple(rows)


def _bwd_sm90(head_dim: int, tile_m: int, tile_n: int, stages: int, why: str, *, large: bool = False,
              ping_pong: bool = False, causal: bool | None = None, plain: bool = False) -> Row:  # fmt: skip
    """One warpgroup loads, one computes dq, and two the rest: they divide keys, or products where heads are `large`."""
    knobs = (
        ("LARGE_HEADS", large),
        ("PING_PONG", ping_pong),
        ("PRODUCER_REGISTERS", 32),
        ("DQ_REGISTERS", 64),
        ("CONSUMER_REGISTERS", 208),
    )
    return Row(head_dim, tile_m, tile_n, 512, stages, 1, why, knobs, causal, plain=plain)


def _rows(head_dim: int, rows: int, itemsize: int) -> Row:
    return Row(head_dim, rows, 1, 256, 1, 2, "eight 16-byte loads in flight a thread", itemsize=itemsize)


def _simt(head_dim: int, tile_m: int, tile_n: int, threads: int, grid: tuple[int, int, int], min_ctas: int,
          itemsize: int, why: str) -> Row:  # fmt: skip
    """`grid`: threads along a row of results, columns and rows of a slice."""
    knobs = tuple(zip(("THREAD_COLS", "SLICE_D", "SLICE_N"), grid, strict=True))
    return Row(head_dim, tile_m, tile_n, threads, 2, min_ctas, why, knobs, itemsize=itemsize)


_FOUR_WARPGROUPS = "as exponentials bind, four to hide them: 192 rows of 128 keys -4 % full, -7 % causal"
_THREE_WARPGROUPS = "three hide more of a long walk, and share k and v: 128 x 128 -3 to -9 %"
_SHARED_LONGER = "rows of a bias compete with k and v, which three share: 128 rows -8 % full, -6 % causal"
_NARROW = "less of a window's ends is hidden: 80 keys -6 % with 1025; two stages -6 %, turns -3 %"
_SHORT = (
    "one q, three k: at 512 and 1k -3 to -5 %; two v, three k -3 to -7 %; o not by TMA -1 to -2 %; 144, 176 keys -20 %"
)
_LONG_PARTS = "for parts of the keys, several heads in a tile, and what is computed by elements"
_ONE_TILE_FULL = "all is memory, of which two CTAs ask for more: one -2 %; o not by TMA -2 %, three q -1 %, turns -2 %"
_ONE_TILE = "half of the keys are visible to half of the rows: turns -2 %; 128 keys +3 %, but less exact with ALiBi"
_ONE_TILE_WIDE = "all is memory: code for more key tiles -3 % causal; 64 keys, two of q and k no better; 64 rows -12 %"
_BLOCKS = "8 x 8 results a thread in both products, two CTAs a multiprocessor"
_LESS_SMEM = "as above in 99 KB, what consumer GPUs of compute capability 8.6 to 12.0 have"
_LEAST_SMEM = "in the 64 KB of compute capability 7.5"

KERNELS: dict[str, Kernel] = {
    "fwd_sm80": Kernel(
        dtypes=_HALF,
        min_capability=(8, 0),
        only_capability=None,
        pad=16,
        smem_bytes=_fwd_sm80_smem,
        rows=(
            _fwd_sm80(64, 128, 128, 128, 3, 2, 32, 16, "tiles of 64 keys -2 to -5 %", min_smem=2 * 98432),
            _fwd_sm80(64, 128, 64, 128, 3, 2, 32, 16, "32 rows a warp: an operand read feeds two products"),
            _fwd_sm80(128, 128, 32, 128, 3, 2, 16, 6, "as much of q in registers as fits beside o", causal=False),
            _fwd_sm80(128, 128, 32, 128, 3, 2, 16, 5, "a block of q less, for the range of each warp", causal=True),
            _fwd_sm80(
                256,
                64,
                32,
                128,
                3,
                2,
                16,
                16,
                "two CTAs hide each other's ends: at 512 +7 %, at 16k -6 %",
                causal=True,
                min_smem=2 * 98432,
            ),
            _fwd_sm80(256, 128, 32, 256, 5, 1, 16, 16, "three stages -1 to -2 %", causal=False),
            _fwd_sm80(256, 128, 32, 256, 3, 1, 16, 16, "16 rows a warp: the registers hold no more of o"),
        ),
        # All 255 registers are taken, and some variants (element-wise, ragged, other GPUs) spill a few of them.
        spill_bytes=84,  # head_dim 256, columns that do not exist, by NVRTC 13.5; by 13.0 at most 68
        option_spill_bytes=724,  # bias and mask at once, by NVRTC 12.4: places of elements
    ),
    "fwd_sm90": Kernel(
        dtypes=_HALF,
        min_capability=(9, 0),
        only_capability=(9, 0),
        pad=16,
        smem_bytes=_fwd_sm90_smem,
        rows=(
            *_fwd_sm90(64, 256, 64, 4, 2, _FOUR_WARPGROUPS, min_seqlen_q=129, whole=True, store_tma=True),
            *_fwd_sm90(64, 128, 64, 4, 2, _ONE_TILE, ping_pong=False, only_causal=True, max_seqlen=128),
            *_fwd_sm90(
                64,
                128,
                128,
                2,
                2,
                _ONE_TILE_FULL,
                early=False,
                ping_pong=False,
                only_causal=False,
                dynamic=True,
                whole=True,
                max_seqlen=128,
                store_tma=True,
                ctas=2,
                bare=True,
                min_head_dim=64,
            ),
            *_fwd_sm90(64, 192, 128, 2, 2, _SHARED_LONGER, min_seqlen_q=4096, whole=True, adds=True),
            *_fwd_sm90(64, 128, 128, 2, 2, "no more rows than queries: at 128 +20 % full, +15 % causal", dynamic=True),
            *_fwd_sm90(80, 192, 112, 2, 1, "three warpgroups: 128 x 128 -11 % full, -8 % causal at 4k", whole=True),
            *_fwd_sm90(80, 128, 128, 2, 2, "for parts of the keys or several heads in a tile, and where tiles are few"),
            *_fwd_sm90(
                96,
                192,
                96,
                2,
                2,
                "three warpgroups: 128 x 128 -11 % full, -2 % causal at 4k; two of v -1 %",
                min_seqlen_q=2048,
                whole=True,
                v_stages=3,
            ),
            *_fwd_sm90(96, 128, 128, 2, 2, "less of a tile is idle: 192 x 96 -1 % full, -3 % causal at 1k"),
            *_fwd_sm90(
                128,
                192,
                80,
                2,
                2,
                f"{_THREE_WARPGROUPS}; two of v -1 %, o not by TMA -1 % with softcap",
                min_seqlen_q=4096,
                only_causal=False,
                whole=True,
                v_stages=3,
                store_tma=True,
            ),
            *_fwd_sm90(
                128,
                192,
                64,
                4,
                2,
                _NARROW,
                ping_pong=False,
                min_seqlen_q=8192,
                only_causal=True,
                whole=True,
                max_band=1280,
            ),
            *_fwd_sm90(128, 192, 80, 2, 2, _THREE_WARPGROUPS, min_seqlen_q=8192, only_causal=True, whole=True),
            *_fwd_sm90(
                128,
                128,
                128,
                3,
                1,
                _ONE_TILE_WIDE,
                early=False,
                ping_pong=False,
                dynamic=True,
                whole=True,
                max_seqlen=128,
            ),
            *_fwd_sm90(
                128,
                128,
                128,
                2,
                2,
                _SHORT,
                min_seqlen_q=512,
                only_causal=False,
                whole=True,
                v_stages=3,
                store_tma=True,
            ),
            *_fwd_sm90(
                128,
                128,
                128,
                2,
                2,
                _SHORT,
                dynamic=True,
                min_seqlen_q=129,
                whole=True,
                v_stages=3,
                store_tma=True,
            ),
            *_fwd_sm90(128, 128, 128, 3, 1, _LONG_PARTS, min_seqlen_q=512, only_causal=False),
            *_fwd_sm90(128, 128, 128, 3, 1, f"{_LONG_PARTS}; handed out, at 128 +3 % full", dynamic=True),
            *_fwd_sm90(128, 128, 128, 2, 1, "what fits beside rows of a bias"),
            *_fwd_sm90(192, 128, 128, 2, 1, "head_dim_v up to 128; 112 or 96 keys -1 to -8 %"),
            *_fwd_sm90(192, 128, 96, 2, 1, "112 keys -3 % at 1k, equal from 4k on"),
            *_fwd_sm90(
                256,
                128,
                80,
                2,
                1,
                "the most keys that fit beside q",
                early=False,
                min_seqlen_q=4096,
                only_causal=False,
                whole=True,
            ),
            *_fwd_sm90(
                256,
                128,
                64,
                2,
                1,
                "two of v: at 512 -3 %; 80 keys -3 to -5 %",
                early=False,
                only_causal=False,
                whole=True,
                v_stages=3,
            ),
            *_fwd_sm90(
                256,
                128,
                64,
                2,
                1,
                "80 keys -3 to -5 % at 512, -1 to -2 % at 1k: more of the last is masked",
                early=False,
            ),
        ),
        stages_bias=True,
        option_spill_bytes=400,  # 364 by NVRTC 13.0: window, softcap and ALiBi, packed; alone at most 152, of dropout
    ),
    "fwd_simt": Kernel(
        dtypes=_FULL,
        min_capability=(7, 5),
        only_capability=None,
        pad=16,
        smem_bytes=_fwd_simt_smem,
        rows=(
            _simt(64, 128, 64, 128, (8, 64, 64), 2, 4, _BLOCKS),
            _simt(64, 128, 64, 128, (8, 32, 32), 2, 4, _LESS_SMEM),
            _simt(64, 64, 64, 128, (8, 32, 32), 2, 4, _LEAST_SMEM),
            _simt(128, 64, 128, 128, (16, 32, 32), 2, 4, _BLOCKS),
            _simt(128, 64, 64, 128, (16, 32, 16), 2, 4, _LESS_SMEM),
            _simt(128, 32, 64, 128, (16, 32, 16), 2, 4, _LEAST_SMEM),
            _simt(256, 64, 64, 128, (16, 32, 8), 2, 4, "8 x 16 results of p v a thread are all that registers hold"),
            _simt(256, 64, 32, 128, (16, 32, 8), 2, 4, _LESS_SMEM),
            _simt(256, 32, 32, 128, (16, 32, 8), 2, 4, _LEAST_SMEM),
            _simt(64, 64, 64, 128, (16, 32, 32), 2, 8, "float64: as many register bytes as float32 with 8 x 8"),
            _simt(64, 32, 64, 128, (16, 32, 16), 2, 8, _LEAST_SMEM),
            _simt(128, 32, 64, 128, (16, 16, 8), 2, 8, "4 rows a thread: 8 x 8 results would not fit the registers"),
            _simt(128, 32, 32, 128, (16, 16, 8), 2, 8, _LEAST_SMEM),
            _simt(256, 32, 64, 128, (16, 16, 4), 2, 8, "4 x 16 results of p v a thread are all that registers hold"),
            _simt(256, 32, 32, 128, (16, 16, 4), 2, 8, _LESS_SMEM),
            _simt(256, 16, 32, 128, (16, 16, 4), 2, 8, _LEAST_SMEM),
        ),
        option_spill_bytes=512,  # bias and mask at once: places of elements
    ),
    "bwd_simt": Kernel(
        dtypes=_FULL,
        min_capability=(7, 5),
        only_capability=None,
        pad=16,
        smem_bytes=_bwd_simt_smem,
        rows=(
            _simt(64, 64, 64, 128, (8, 64, 64), 2, 4, "both operands of the own rows resident, two CTAs"),
            _simt(64, 64, 64, 128, (8, 16, 16), 2, 4, _LEAST_SMEM),
            _simt(128, 64, 64, 128, (16, 32, 16), 2, 4, "dk and dv with 8 x 8 results a thread each, two CTAs"),
            _simt(128, 64, 64, 128, (16, 16, 8), 2, 4, _LESS_SMEM),
            _simt(128, 32, 32, 128, (16, 32, 16), 2, 4, _LEAST_SMEM),
            _simt(256, 64, 64, 256, (16, 64, 16), 1, 4, "dk and dv with 4 x 16 results a thread each"),
            _simt(256, 32, 32, 128, (16, 64, 8), 2, 4, _LESS_SMEM),
            _simt(256, 16, 16, 128, (16, 32, 8), 2, 4, _LEAST_SMEM),
            _simt(64, 32, 32, 128, (16, 32, 16), 2, 8, "float64: half the rows, so that two or more CTAs fit"),
            _simt(128, 32, 32, 128, (16, 32, 8), 2, 8, "dk and dv with 4 x 8 results a thread each, two CTAs"),
            _simt(128, 16, 16, 128, (16, 32, 8), 2, 8, _LEAST_SMEM),
            _simt(256, 32, 32, 256, (16, 16, 4), 1, 8, "dk and dv with 2 x 16 results a thread each"),
            _simt(256, 16, 16, 128, (16, 16, 4), 2, 8, _LESS_SMEM),
            _simt(256, 8, 8, 64, (8, 16, 2), 2, 8, _LEAST_SMEM),
        ),
        option_spill_bytes=256,  # bias and mask at once: places of elements
    ),
    "bwd_sm80": Kernel(
        dtypes=_HALF,
        min_capability=(8, 0),
        only_capability=None,
        pad=16,
        smem_bytes=_bwd_sm80_smem,
        rows=(
            _bwd_sm80(64, 64, 128, 8, 1, (4, 4), 2, "0.99 to 1.06 of FlashAttention-2, 1k to 16k"),
            _bwd_sm80(64, 32, 128, 8, 1, (4, 4), 2, _LESS_SMEM),
            _bwd_sm80(128, 64, 128, 8, 1, (0, 0), 2, "1.04 to 1.14 of FlashAttention-2, 1k to 16k"),
            _bwd_sm80(128, 32, 128, 8, 1, (0, 0), 2, "as above in the 163 KB of compute capability 8.0"),
            _bwd_sm80(128, 32, 64, 8, 1, (8, 8), 2, _LESS_SMEM),
            _bwd_sm80(256, 32, 64, 8, 2, (7, 7), 1, "1.01 to 1.05 of FlashAttention-2, 1k to 16k"),
            _bwd_sm80(256, 16, 64, 8, 2, (8, 8), 1, "as above in the 163 KB of compute capability 8.0"),
            _bwd_sm80(256, 16, 32, 4, 2, (7, 7), 1, _LESS_SMEM),
        ),
        spill_bytes=128,  # deterministic, ragged and scaled first, for compute capability 10.0; others nothing
        option_spill_bytes=672,  # a block mask of packed sequences, on compute capability 8.0; a mask 576
    ),
    "bwd_sm90": Kernel(
        dtypes=_HALF,
        min_capability=(9, 0),
        only_capability=(9, 0),
        pad=16,
        smem_bytes=_bwd_sm90_smem,
        tells_masks=True,
        rows=(
            _bwd_sm90(64, 128, 128, 3, "in turns +4 to +7 % from 4k on", ping_pong=True, causal=False, plain=True),
            _bwd_sm90(64, 128, 128, 3, "64 queries -3 to -6 % from 4k on", causal=True, plain=True),
            _bwd_sm90(128, 64, 128, 3, "in turns +2 to +4 % from 4k on; two stages equal", ping_pong=True),
            _bwd_sm90(128, 64, 128, 2, "what fits beside rows of a bias", ping_pong=True),
            _bwd_sm90(256, 64, 64, 2, "dk and dv of 64 keys fill a warpgroup each", large=True),
        ),
        stages_bias=True,
        option_spill_bytes=640,  # a block mask, head_dim 256, deterministic: 620, where dq's warpgroup walks
    ),
    "bwd_delta": Kernel(
        dtypes=_HALF + _FULL,
        min_capability=(7, 5),
        only_capability=None,
        pad=16,
        smem_bytes=_no_smem,
        rows=tuple(
            _rows(head_dim, 128 * 64 * 2 // (head_dim * itemsize), itemsize)
            for itemsize in (2, 4, 8)
            for head_dim in (64, 128, 256)
        ),
        spill_bytes=32,  # where float16 is loaded element by element
    ),
    "bwd_sinks": Kernel(
        dtypes=_HALF + _FULL,
        min_capability=(7, 5),
        only_capability=None,
        pad=16,
        smem_bytes=_no_smem,
        rows=(Row(256, 1, 1, 1024, 1, 1, "a CTA for each head"),),
    ),
    "bwd_sums": Kernel(
        dtypes=_HALF + _FULL,
        min_capability=(7, 5),
        only_capability=None,
        pad=16,
        smem_bytes=_no_smem,
        rows=(Row(256, 1024, 1, 256, 1, 2, "four elements a thread"),),
    ),
    "block_kinds": Kernel(
        dtypes=_HALF + _FULL,
        min_capability=(7, 5),
        only_capability=None,
        pad=16,
        smem_bytes=_no_smem,
        rows=(Row(256, 1, 1, 128, 1, 4, "a CTA for each block"),),
    ),
    "block_lists": Kernel(
        dtypes=_HALF + _FULL,
        min_capability=(7, 5),
        only_capability=None,
        pad=16,
        smem_bytes=_no_smem,
        rows=(Row(256, 8, 1, 256, 1, 4, "a warp for each list"),),
    ),
    "combine": Kernel(
        dtypes=_HALF,
        min_capability=(9, 0),
        only_capability=None,
        pad=16,
        smem_bytes=_no_smem,
        rows=tuple(_rows(head_dim, 256 * 8 // head_dim, 2) for head_dim in (64, 128, 256)),
    ),
    "bwd_convert": Kernel(
        dtypes=_HALF,
        min_capability=(8, 0),
        only_capability=None,
        pad=16,
        smem_bytes=_no_smem,
        rows=tuple(_rows(head_dim, 128 * 64 // head_dim, 2) for head_dim in (64, 128, 256)),
    ),
    "bwd_convert_sm90": Kernel(
        dtypes=_HALF,
        min_capability=(9, 0),
        only_capability=(9, 0),
        pad=16,
        smem_bytes=_no_smem,
        rows=(Row(256, 64, 1, 128, 1, 3, "a CTA for the 64 rows that bwd_sm90 adds at once"),),
    ),
}

# Families in the order of preference.
FAMILIES = ("sm90", "sm80", "simt")
