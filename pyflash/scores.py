"""What kernels that compute scores are told of features: constants of the program."""

from __future__ import annotations

from . import features, sums
from .problem import DTYPES, Problem
from .tiles import Kernel, Row

_CAPTURED = {slot.name for slot in features.CAPTURED}


def config(problem: Problem, kernel: Kernel, row: Row) -> dict[str, object]:
    """Of a kernel that computes scores in tiles of a row."""
    blocks = problem.option("block_mask")
    arrays, hopper = dict(problem.tensors), kernel.only_capability is not None
    # Whether elements of neighbouring keys are neighbours in memory. With it of a mask fwd_sm80 spills 804 bytes,
    # not 316, so Hopper's kernels alone are told; and whether rows can be read 16 bytes at a time.
    last = {n: (t.shape[-1:], t.strides[-1:]) for n, t in arrays.items() if n == "bias" or (n == "mask" and hopper)}
    unit = {f"UNIT_{n.upper()}": n in last and last[n][0] > (1,) and last[n][1] == (1,) for n in ("bias", "mask")}
    read = {"bias": problem.dtype.name, "mask": "bool"}
    wide = {
        f"WIDE_{n.upper()}": hopper and unit[f"UNIT_{n.upper()}"] and arrays[n].dtype == dtype and arrays[n].wide()
        for n, dtype in read.items()
    }
    return {
        "SCALE_FIRST": problem.softmax_scale <= 0 or features.changes_scores(problem.on),
        "Bias": DTYPES[arrays["bias"].dtype].element if "bias" in arrays else problem.dtype.element,
        "MASK_BLOCK_M": blocks.block_q if blocks else row.tile_m,
        "MASK_BLOCK_N": blocks.block_k if blocks else row.tile_n,
        **unit,
        **wide,
        "DBIAS": "dbias" in arrays,
        "UNIT_DBIAS": "dbias" in arrays and arrays["bias"].shape[-1:] > (1,),
        "NEAR_ARRAYS": all(t.span() < 2**31 for n, t in arrays.items() if n in _CAPTURED),
        **features.flags(problem.on),
        "SCATTERS": sums.scatters(problem),
    }
