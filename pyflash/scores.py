"""What kernels that compute scores are told of features: constants of the program."""

from __future__ import annotations

import math

from . import features, sums
from .graphs import KINDS, Graph, by_position, shared
from .problem import DTYPES, Problem, Tensor
from .tiles import Kernel, Row
from .trace import INPUTS

_CAPTURED = {slot.name for slot in features.CAPTURED}


def _rows(problem: Problem) -> dict[str, bool]:
    """The arrays that have an element for each key, and whether their rows can be read 16 bytes at a time."""
    arrays, read = dict(problem.tensors), {"bias": problem.dtype.name, "mask": "bool"}
    given = {n: (arrays[n], dtype) for n, dtype in read.items() if n in arrays and arrays[n].shape[-1:] > (1,)}
    return {
        n: t.strides[-1] == 1 and min(t.strides) >= 0 and t.dtype == dtype and t.wide()
        for n, (t, dtype) in given.items()
    }


def wide(problem: Problem, name: str) -> bool:
    """Whether there is such an array, and Hopper's kernels read it 16 bytes at a time."""
    return _rows(problem).get(name, False)


def smem_bytes(problem: Problem, kernel: Kernel, row: Row, tile_d: int, tile_dv: int) -> int:
    """Of a CTA, with the rows of a bias, if they pass through."""
    itemsize = problem.dtype.itemsize
    bias = row.stages * row.tile_m * row.tile_n * itemsize if stages_bias(problem, kernel, row) else 0
    told = _told_bytes(problem, row) if kernel.tells_masks and not dict(row.knobs)["LARGE_HEADS"] else 0
    return bias + told + kernel.smem_bytes(row, tile_d, tile_dv, itemsize)


def _told_bytes(problem: Problem, row: Row) -> int:
    """Of visits, of bits of what is hidden, and of bytes of a mask on their way to these: two tiles, by halves."""
    of_array = wide(problem, "mask") and not problem.option("mask_mod")
    if not of_array and not problem.option("block_mask"):
        return 0
    visits, bits = 8 * 8, row.stages * row.tile_m * row.tile_n // 8
    units = of_array * 2 * 2 * row.tile_m * (row.tile_n // 2 + 16)
    return -(-(units + visits + bits) // 1024) * 1024


def stages_bias(problem: Problem, kernel: Kernel, row: Row) -> bool:
    """Whether TMA brings rows of a bias to shared memory, with tiles of k, or of q in a backward."""
    return kernel.stages_bias and wide(problem, "bias") and not dict(row.knobs).get("LARGE_HEADS")


def adds_alone(problem: Problem) -> bool:
    """Whether a bias that is read 16 bytes at a time is all that makes scores other than products."""
    others = [name for name in problem.on if name != "bias"]
    return wide(problem, "bias") and not features.by_element(others) and not features.changes_scores(others)


def bias_box(problem: Problem, row: Row, queries: int, pack: int = 1) -> tuple[tuple[int, ...], Tensor]:
    """How it does so, of some queries of `pack` heads: its box, and the tensor this is of, (batch, seqlen_q, heads,
    seqlen_k). What the bias is broadcast over they have once."""
    bias = dict(problem.tensors)["bias"]
    dims = ((1, 0),) * 4 + tuple(zip(bias.shape, bias.strides, strict=True))
    batch, heads, rows, keys = ((n, stride) if n > 1 and stride else (1, 0) for n, stride in dims[-4:])
    shape, strides = zip(batch, rows, heads, keys, strict=True)
    box = math.gcd(row.tile_n, 64), queries if rows[1] else 1, pack if heads[1] else 1
    return box, bias._replace(shape=shape, strides=strides)


def _tells_rows_apart(fact: Graph, rest: Graph) -> bool:
    """Whether rows may differ whose facts are equal, as 0.0 and -0.0 are, which a function can tell apart."""
    return fact.nodes[-1].kind == "real" or any(node[:4:3] == ("input", "q_idx") for node in rest.nodes)


def facts(problem: Problem, kernel: Kernel) -> tuple[tuple[str, tuple[str, ...], Graph], ...]:
    """Functions, with their arguments: what mask_mod reads for a key whatever the query is, and the rest. A lane of
    Hopper's forward, and of what looks for hidden elements in the backward, has many keys, so that lanes share them
    out; of the fewer queries of the backward's accumulators it reads its own. And what it reads for a query, if but for
    positions that is all by which it depends on that: a warp has many queries, often alike."""
    mod, found = problem.option("mask_mod"), []
    if mod and kernel.only_capability and (not problem.backward or problem.option("block_mask")):
        knowing = mod.graph
        if parts := shared(mod.graph, "kv_idx"):
            fact, knowing = parts
            found += [("mask_mod_fact", ("batch", "head", "kv_idx"), fact)]
            found += [("mask_mod_knowing", (*INPUTS["mask_mod"], "fact"), knowing)]
        reading, positions = by_position(knowing)
        of_query = shared(reading, "q_idx", "row_fact")
        if of_query and not _tells_rows_apart(*of_query):
            found += [("mask_mod_row_fact", ("batch", "head", "q_idx"), of_query[0])]
            found += [("mask_mod_of_alike", ("batch", "head", "kv_idx", "fact", "row_fact"), of_query[1])]
            found += [("mask_mod_position", INPUTS["mask_mod"], positions)] if positions else []
    return tuple(found)


def read_by_element(problem: Problem) -> tuple[str, ...]:
    """Those of which Hopper's kernels read every element by itself."""
    return tuple(name for name, wide in _rows(problem).items() if not wide)


def config(problem: Problem, kernel: Kernel, row: Row) -> dict[str, object]:
    """Of a kernel that computes scores in tiles of a row."""
    blocks = problem.option("block_mask")
    arrays, hopper = dict(problem.tensors), kernel.only_capability is not None
    rows = _rows(problem)
    kinds = {name: KINDS[made.nodes[-1].kind][0].replace("Real", "float") for name, _, made in facts(problem, kernel)}
    # Whether elements of neighbouring keys are neighbours in memory. With it of a mask fwd_sm80 spills 804 bytes,
    # not 316, so Hopper's kernels alone are told; and whether rows can be read 16 bytes at a time.
    unit = {n: n in rows and arrays[n].strides[-1] == 1 and (hopper or n == "bias") for n in ("bias", "mask")}
    return {
        "SCALE_FIRST": problem.softmax_scale <= 0 or features.changes_scores(problem.on),
        "Bias": DTYPES[arrays["bias"].dtype].element if "bias" in arrays else problem.dtype.element,
        "MASK_BLOCK_M": blocks.block_q if blocks else row.tile_m,
        "MASK_BLOCK_N": blocks.block_k if blocks else row.tile_n,
        **{f"UNIT_{name.upper()}": value for name, value in unit.items()},
        **{f"WIDE_{name.upper()}": hopper and wide(problem, name) for name in unit},
        "DBIAS": "dbias" in arrays,
        "UNIT_DBIAS": "dbias" in arrays and arrays["bias"].shape[-1:] > (1,),
        "NEAR_ARRAYS": all(t.span() < 2**31 for n, t in arrays.items() if n in _CAPTURED),
        **features.flags(problem.on),
        "FACTS": "mask_mod_fact" in kinds,
        "Fact": kinds.get("mask_mod_fact", "int"),
        "ROW_FACTS": "mask_mod_row_fact" in kinds,
        "RowFact": kinds.get("mask_mod_row_fact", "int"),
        "POSITIONS": "mask_mod_position" in kinds,
        "SCATTERS": sums.scatters(problem),
    }
