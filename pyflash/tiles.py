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
    causal: bool | None = None  # serves only causal (or only full) problems


@dataclass(frozen=True)
class Kernel:
    """What a kernel file can do, and its rows."""

    dtypes: tuple[str, ...]
    min_capability: tuple[int, int]
    only_capability: tuple[int, int] | None  # an architecture-specific binary runs on exactly one
    pad: int  # head_dim and head_dim_v are padded to a multiple of this in shared memory and registers
    smem_bytes: Callable[[Row, int, int, int], int]  # (row, TILE_D, TILE_DV, bytes of an element) -> sizeof(Smem)
    rows: tuple[Row, ...]


_HALF = ("float16", "bfloat16")
_FULL = ("float32", "float64")


def _fwd_sm80_smem(row: Row, tile_d: int, tile_dv: int, itemsize: int) -> int:
    return (row.tile_m * tile_d + row.stages * row.tile_n * (tile_d + tile_dv)) * itemsize


KERNELS: dict[str, Kernel] = {
    "fwd_sm80": Kernel(
        dtypes=_HALF,
        min_capability=(8, 0),
        only_capability=None,
        pad=16,
        smem_bytes=_fwd_sm80_smem,
        rows=(
            Row(64, 128, 128, 128, 1, 2, "placeholder"),
            Row(128, 128, 64, 128, 1, 2, "placeholder"),
            Row(256, 128, 64, 256, 1, 1, "placeholder"),
        ),
    ),
}

# Families in the order of preference.
FAMILIES = ("sm90", "sm80", "simt")
