"""Problem + device -> plan: which kernels run, with which constants, on which grid. Pure: no GPU is touched."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from . import features, params, scores, sequences, sizes, sums
from .device import Device
from .errors import Unsupported
from .feature import LOG2_E
from .graphs import INPUTS, Graph
from .problem import DTYPES, REAL_DTYPES, Problem, Tensor
from .tiles import FAMILIES, KERNELS, Kernel, Row

_WORKSPACE_ALIGNMENT, MAX_GRID = 256, 2**31 - 1
_WG_ROWS, _WARP_ROWS = 64, 16  # rows of a warpgroup, and of each of its warps
# For estimates: what a multiprocessor of Hopper does a second; what an output tile's ends and another launch take.
_SM_FLOPS, _SM_BANDWIDTH, _TILE_SECONDS, _COMBINE_SECONDS = 5e12, 30e9, 2.5e-6, 4e-6
_PARTIAL = {"o": "o_partial", "lse": "lse_partial"}  # where a forward that splits keys leaves the parts' results


@dataclass(frozen=True)
class TensorMap:
    """A tensor as TMA sees it: (head_dim, seqlen, head, batch) cut into boxes of `box` (columns, rows[, heads])."""

    array: str
    box: tuple[int, ...]
    tensor: Tensor | None = None  # the array, where its own dimensions are others


@dataclass(frozen=True)
class Launch:
    """One kernel launch. The text to compile follows from `kernel`, `real`, `config` and `functions` alone."""

    kernel: str
    real: str  # float or double
    config: tuple[tuple[str, object], ...]  # namespace cfg
    grid: int
    block: int
    smem_bytes: int
    values: tuple[tuple[str, object], ...]  # Params that are known now
    arrays: tuple[tuple[str, str], ...]  # pointer Params and the arrays that they point to
    tensor_maps: tuple[tuple[str, TensorMap], ...] = ()
    functions: tuple[tuple[str, tuple[str, ...], Graph], ...] = ()  # namespace mod: name, arguments, what it computes
    overlaps: bool = False  # may start before the launch before it has ended, and waits for that itself
    drawn: int | None = None  # how many tiles its CTAs draw, where they do not have one each


@dataclass(frozen=True)
class Buffer:
    """A piece of the workspace, which is one allocation."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Plan:
    problem: Problem
    family: str
    launches: tuple[Launch, ...]
    workspace: tuple[Buffer, ...]
    notes: tuple[str, ...]  # why not a preferred family, and what costs speed

    @property
    def workspace_bytes(self) -> int:
        return max((b.offset + b.nbytes for b in self.workspace), default=0)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _padded(problem: Problem, kernel: Kernel) -> tuple[int, int]:
    return tuple(_cdiv(d, kernel.pad) * kernel.pad for d in (problem.head_dim, problem.head_dim_v))


_WALKING = tuple(kernel for name, kernel in KERNELS.items() if params.computes_scores(name))  # over tiles of scores


def _divides(problem: Problem, kernel: Kernel, row: Row) -> bool:
    """Whether the blocks of a block mask, if there is one, are made of whole tiles."""
    blocks = problem.option("block_mask") if kernel in _WALKING else None
    return blocks is None or blocks.obstacle([(row.tile_m, row.tile_n)]) is None


def _band_width(problem: Problem) -> float:
    """How many keys a query may see by causal and window."""
    low, high = features.band(problem.on, problem.seqlen_q, problem.seqlen_k)
    return math.inf if low is None or high is None else high - low + 1


def _rows(problem: Problem, kernel: Kernel, device: Device, fits: Callable = _divides) -> Iterator[Row]:
    """The rows that serve the problem and fit the device."""
    dims = _padded(problem, kernel)
    for row in kernel.rows:
        if (
            row.min_head_dim <= min(dims) <= max(dims) <= row.head_dim
            and row.causal in (None, problem.banded)
            and row.itemsize in (None, problem.dtype.itemsize)
            and not (row.plain and features.by_element(problem.on))
            and not (row.adds and not scores.adds_alone(problem))
            and not (row.bare and (problem.on or problem.varlen))
            and row.min_seqlen_q <= problem.usual_seqlen_q
            and (row.max_seqlen is None or max(problem.seqlen_q, problem.seqlen_k) <= row.max_seqlen)
            and (row.max_band is None or _band_width(problem) <= row.max_band)
            and row.min_smem <= device.smem_bytes
            and scores.smem_bytes(problem, kernel, row, *dims) <= device.smem_bytes
            and fits(problem, kernel, row)
        ):
            yield row


def _row(problem: Problem, kernel: Kernel, device: Device) -> Row | None:
    """The first of them."""
    return next(_rows(problem, kernel, device), None)


def _tma_obstacle(problem: Problem) -> str | None:
    """Why TMA cannot describe some tensor of the problem, if so."""
    if not problem.seqlen_k:
        return "seqlen_k is 0"
    for name, tensor in problem.operands:
        if not tensor.wide():
            return f"{name}'s address or strides are not multiples of 16 bytes, or its head_dim is not"
        if any(stride <= 0 and extent > 1 for stride, extent in zip(tensor.strides, tensor.shape, strict=True)):
            return f"{name} has a stride that is zero or negative"
    return None


def _obstacle(problem: Problem, device: Device, name: str) -> str | None:
    """Why a kernel cannot serve the problem on the device, or None."""
    kernel = KERNELS.get(name)
    if kernel is None:
        return "not written yet"
    if problem.dtype.name not in kernel.dtypes:
        return f"takes {' and '.join(kernel.dtypes)}"
    if untaken := [feature for feature in problem.on if name not in features.BY_NAME[feature].kernels]:
        return f"does not take {' and '.join(untaken)}"
    if name == "bwd_sm90" and (reason := sums.obstacle_to_weights(problem)):
        return reason
    if kernel.only_capability not in (None, device.capability):
        return "made for compute capability {}.{} alone".format(*kernel.only_capability)
    if device.capability < kernel.min_capability:
        return "needs compute capability {}.{}".format(*kernel.min_capability)
    if _row(problem, kernel, device) is None:
        if others := [(row.tile_m, row.tile_n) for row in _rows(problem, kernel, device, lambda *_: True)]:
            return problem.option("block_mask").obstacle(others)
        return f"has no tile for head_dim {problem.head_dim}/{problem.head_dim_v} in {device.smem_bytes} B of smem"
    return _tma_obstacle(problem) if name.endswith("sm90") else None


def choose_family(problem: Problem, device: Device, families: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The first family that can, and why those before it cannot."""
    notes = []
    for family in families:
        obstacle = _obstacle(problem, device, f"{'bwd' if problem.backward else 'fwd'}_{family}")
        if obstacle is None:
            return family, tuple(notes)
        notes.append(f"{family}: {obstacle}")
    capability = "{}.{}".format(*device.capability)
    raise Unsupported(
        f"no kernel serves {problem} on {device.name} (compute capability {capability}): "
        + "; ".join(notes)
        + ". float16 and bfloat16 need compute capability 8.0; float32 and float64 run on any"
    )


def _config(problem: Problem, name: str, row: Row, tensors: dict[str, Tensor]) -> dict[str, object]:
    kernel = KERNELS[name]
    tile_d, tile_dv = _padded(problem, kernel)
    return {
        "Element": problem.dtype.element,
        "TILE_M": row.tile_m,
        "TILE_N": row.tile_n,
        "TILE_D": tile_d,
        "TILE_DV": tile_dv,
        "RAGGED_D": (tile_d, tile_dv) != (problem.head_dim, problem.head_dim_v),
        "NUM_THREADS": row.threads,
        "MIN_CTAS": row.min_ctas,
        "STAGES": row.stages,
        **dict(row.knobs),
        **(scores.config(problem, kernel, row) if params.computes_scores(name) else {}),
        **(sizes.config(problem) if params.by_sequence(name) else {}),
        **{f"WIDE_{n.upper()}": n not in tensors or tensors[n].wide() for n in params.strided_tensors(name)},
        "SMEM_BYTES": scores.smem_bytes(problem, kernel, row, tile_d, tile_dv),
    }


def _functions(problem: Problem, kernel: Kernel) -> tuple[tuple[str, tuple[str, ...], Graph], ...]:
    """What the kernels are to compile of functions: their values, and in a backward their derivatives."""
    made = []
    for name, arguments in INPUTS.items():
        if mod := problem.option(name):
            made.append((name, arguments, mod.graph))
            if problem.backward and mod.slope:
                made.append((f"{name}_slope", arguments, mod.slope))
            if name == "score_mod" and sums.scatters(problem):
                made.append((f"{name}_scatter", ("score", "ds", *arguments[1:]), mod.scatter))
    return *made, *scores.facts(problem, kernel)


def _launch(
    problem: Problem,
    device: Device,
    name: str,
    arrays: dict[str, Tensor],
    pointers: tuple[str | tuple[str, str], ...],
    grid: Callable[[dict[str, int]], int],
    config: dict[str, object] | None = None,
    values: dict[str, object] | None = None,
    tensor_maps: dict[str, TensorMap] | None = None,
    row: Row | None = None,
    overlaps: bool = False,
    drawn: int | None = None,
) -> Launch:
    """A launch of kernel `name` over `arrays` (given with their strides) and `pointers` (contiguous by contract), given
    as names, or as pairs of the argument's and the array's; in tiles of `row`, or of the first that serves."""
    kernel = KERNELS[name]
    row = row or _row(problem, kernel, device)
    if row is None:
        raise Unsupported(f"{name} has no tile for {problem} on {device.name}")
    constants = {**_config(problem, name, row, arrays), **(config or {})}
    told = sizes.of(problem, row.tile_m, row.tile_n, params.by_sequence(name))
    common = {"softmax_scale": problem.softmax_scale, "scale_log2": problem.softmax_scale * LOG2_E}
    for feature, value in problem.on.items():
        common |= features.BY_NAME[feature].values(value, problem.softmax_scale, problem.most)
    known = params.layout(name, problem.dtype.real).offsets
    on_arrays = tuple(n for n in problem.on if features.BY_NAME[n].is_array and n in known)
    on_arrays += ("seed",) * ("dropout_p" in problem.on and "seed" in known)
    on_arrays += tuple(n for n in sequences.ARRAYS if n in known and n in dict(problem.tensors))
    return Launch(
        kernel=name,
        real=problem.dtype.real,
        config=tuple(constants.items()),
        grid=grid(told),
        block=row.threads,
        smem_bytes=constants["SMEM_BYTES"],
        values=tuple(
            {
                **{f"{n}_stride": t.strides for n, t in arrays.items()},
                **{n: x for n, x in (told | common).items() if n in known},
                **(values or {}),
            }.items()
        ),
        arrays=tuple((n, n) if isinstance(n, str) else n for n in (*arrays, *pointers, *on_arrays)),
        tensor_maps=tuple((tensor_maps or {}).items()),
        functions=_functions(problem, kernel) if params.computes_scores(name) else (),
        overlaps=overlaps,
        drawn=drawn,
    )


def _workspace(sizes: dict[str, int]) -> tuple[Buffer, ...]:
    buffers, end = [], 0
    for name, nbytes in sizes.items():
        buffers.append(Buffer(name, end, nbytes))
        end += _cdiv(nbytes, _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
    return tuple(buffers)


def _finish(
    problem: Problem, family: str, launches: list[Launch], workspace: dict[str, int], notes: tuple[str, ...]
) -> Plan:
    for launch in launches:
        if launch.grid > MAX_GRID:
            raise Unsupported(f"{launch.kernel} would need {launch.grid} CTAs for {problem}; a grid holds {MAX_GRID}")
    slow = tuple(
        f"{name}: element-wise access, because its address, strides or head_dim are not multiples of 16 bytes"
        for name, tensor in problem.operands
        if not tensor.wide()
    )
    if family == "sm90":
        slow += tuple(
            f"{name}: element-wise access, because its dtype is not q's, a stride is negative, or its address, strides "
            "or seqlen_k are not multiples of 16 bytes"
            for name in scores.read_by_element(problem)
        )
    return Plan(problem, family, tuple(x for x in launches if x.grid), _workspace(workspace), notes + slow)


def _forward(problem: Problem, device: Device, family: str, notes: tuple[str, ...]) -> Plan:
    if family == "sm90":
        return _forward_sm90(problem, device, notes)
    tensors = dict(problem.tensors)
    arrays = {name: tensors[name] for name in ("q", "k", "v", "o")}
    launch = _launch(
        problem,
        device,
        f"fwd_{family}",
        arrays,
        ("lse",) if "lse" in tensors else (),
        lambda n: n["query_tiles"] * problem.num_heads_q,
    )
    return _finish(problem, family, [launch], {}, notes)


@dataclass(frozen=True)
class _Tiling:
    """How Hopper's forward is cut into output tiles."""

    row: Row
    pack: int  # query heads that share k and v and have rows in one tile
    num_m_blocks: int
    query_tiles: int
    splits: int  # parts of the keys
    seconds: float  # a rough estimate

    @property
    def tiles(self) -> int:
        return self.query_tiles * self.splits


def _whole(problem: Problem, row: Row) -> bool:
    """Whether tiles are those of one head and all keys: the lists of a block mask are a head's."""
    return row.whole or "block_mask" in problem.on


def _packs(problem: Problem, row: Row) -> list[int]:
    most = 1 if _whole(problem, row) else min(problem.qheads_per_kv, _WG_ROWS)
    return [n for n in range(1, most + 1) if problem.qheads_per_kv % n == 0]


def _tile_queries(row: Row, pack: int) -> int:
    """How many queries, of each head, have rows in a tile."""
    return row.tile_m // _WG_ROWS * (_WG_ROWS // pack)


def _tilings(problem: Problem, device: Device) -> Iterator[_Tiling]:
    """Those that serve the problem, from the one that is best where there are many tiles."""
    first, *others = _rows(problem, KERNELS["fwd_sm90"], device)
    dims, heads = problem.head_dim + problem.head_dim_v, problem.batch * problem.num_heads_q
    partial_bytes = heads * problem.seqlen_q * problem.head_dim_v * 4
    low, high = features.band(problem.on, problem.seqlen_q, problem.seqlen_k)
    for row in (first, *(row for row in others if row.head_dim == first.head_dim)):
        # Key tiles of the longest walk, and of the mean one.
        window = problem.seqlen_k if low is None or high is None else high - low + row.tile_m
        longest = min(window, problem.seqlen_k) / row.tile_n
        mean = problem.visible_pairs / max(problem.seqlen_q, 1) / row.tile_n
        key_tile_seconds = 2 * row.tile_m * row.tile_n * dims / _SM_FLOPS
        for pack in _packs(problem, row):
            num_m_blocks = _cdiv(problem.seqlen_q, _tile_queries(row, pack))
            query_tiles = num_m_blocks * heads // pack
            most_splits = 1
            if not _whole(problem, row) and 0 < query_tiles < device.sm_count:
                most_splits = max(min(math.ceil(longest), 4 * device.sm_count // query_tiles), 1)
            for splits in range(1, most_splits + 1):
                waves = _cdiv(query_tiles * splits, device.sm_count)
                walk = max(longest, waves * mean) / splits
                seconds = walk * key_tile_seconds + waves * _TILE_SECONDS
                if splits > 1:
                    seconds += _COMBINE_SECONDS + 2 * splits * partial_bytes / (device.sm_count * _SM_BANDWIDTH)
                yield _Tiling(row, pack, num_m_blocks, query_tiles, splits, seconds)


def _best(tilings: list[_Tiling]) -> _Tiling:
    """The first, unless another promises to be clearly faster."""
    fastest = min(tilings, key=lambda tiling: tiling.seconds)
    return tilings[0] if tilings[0].seconds <= 1.1 * fastest.seconds else fastest


def _tiling(problem: Problem, device: Device) -> _Tiling:
    """The best, where lengths differ for sequences that all are as long as usual."""
    usual = replace(problem, seqlen_q=problem.usual_seqlen_q, seqlen_k=problem.usual_seqlen_k)
    best = _best(list(_tilings(usual, device)))
    if not problem.varlen:
        return best
    queries, heads = _tile_queries(best.row, best.pack), problem.num_heads_q // best.pack
    tiles = problem.tiles_per_head(problem.rows_q, problem.seqlen_q, queries) * heads
    return replace(best, num_m_blocks=_cdiv(problem.seqlen_q, queries), query_tiles=tiles)


def _combine(problem: Problem, device: Device, splits: int) -> Launch:
    """What makes o and lse of those of the parts."""
    tensors, row = dict(problem.tensors), _row(problem, KERNELS["combine"], device)
    pointers = ("lse",) * ("lse" in tensors) + tuple(_PARTIAL.values())
    grid, values = lambda _: _cdiv(problem.num_rows, row.tile_m), {"num_splits": splits}
    return _launch(problem, device, "combine", {"o": tensors["o"]}, pointers, grid, values=values)


def _bias_map(problem: Problem, name: str, row: Row, *rows: int) -> dict[str, TensorMap]:
    staged = scores.stages_bias(problem, KERNELS[name], row)
    return {"tma_bias": TensorMap("bias", *scores.bias_box(problem, row, *rows))} if staged else {}


def _forward_sm90(problem: Problem, device: Device, notes: tuple[str, ...]) -> Plan:
    tensors, tiling = dict(problem.tensors), _tiling(problem, device)
    row, pack, splits, split = tiling.row, tiling.pack, tiling.splits, tiling.splits > 1
    if tiling.tiles + device.sm_count > MAX_GRID:
        raise Unsupported(f"fwd_sm90 would have {tiling.tiles} output tiles for {problem}; it counts to {MAX_GRID}")
    if pack > 1:
        notes += (f"tiles hold rows of {pack} query heads: those of one fill fewer",)
    if split:
        notes += (f"keys are split in {splits}, results merged: {tiling.query_tiles} query tiles leave the GPU idle",)
    dynamic = dict(row.knobs)["DYNAMIC"] or problem.varlen or "block_mask" in problem.on  # walks differ in length
    arrays, pointers, values = {name: tensors[name] for name in "qkv"}, ("lse",) * ("lse" in tensors), {}
    if split:  # one output for each part, one behind the other like batches
        heads, seqlen, dim = problem.num_heads_q, problem.rows_q, problem.head_dim_v
        pointers, values = tuple(_PARTIAL.items()), {"o_stride": (heads * seqlen * dim, dim, seqlen * dim, 1)}
    else:
        arrays["o"] = tensors["o"]
    main = _launch(
        problem,
        device,
        "fwd_sm90",
        arrays,
        pointers + ("tile_counter",) * dynamic,
        lambda n: min(row.min_ctas * device.sm_count, tiling.tiles),
        {"PACK": pack, "SPLIT": split, "Output": "float" if split else problem.dtype.element},
        {
            **values,
            "num_m_blocks": tiling.num_m_blocks,
            "num_tiles": tiling.tiles,
            "packs_per_section": max(sizes.heads_per_section(problem) // pack, 1),
            "num_splits": splits,
        },
        {
            "tma_q": TensorMap("q", (64, _WG_ROWS // pack, pack)),
            "tma_k": TensorMap("k", (64, row.tile_n)),
            "tma_v": TensorMap("v", (64, row.tile_n)),
            **({"tma_o": TensorMap("o", (64, _WARP_ROWS))} if dict(row.knobs)["STORE_TMA"] and not split else {}),
            **_bias_map(problem, "fwd_sm90", row, _WG_ROWS // pack, pack),
        },
        row,
        drawn=tiling.tiles,
    )
    if not split:
        return _finish(problem, "sm90", [main], {}, notes)
    rows = splits * problem.num_rows
    workspace = {_PARTIAL["o"]: rows * problem.head_dim_v * 4, _PARTIAL["lse"]: rows * 4}
    return _finish(problem, "sm90", [main, _combine(problem, device, splits)], workspace, notes)


@dataclass(frozen=True)
class _FeatureGradients:
    """What the gradients of features take besides what the main kernels do."""

    before: tuple[Launch, ...]
    after: tuple[Launch, ...]
    workspace: dict[str, int]
    pointers: tuple[tuple[str, str], ...]  # of the main kernel that sums them


def _around_sum(problem: Problem, device: Device, name: str, total: str, zero: bool) -> Launch:
    """Zeroes what a gradient is summed into, or makes the gradient of it."""
    tensor, tile = dict(problem.tensors)[name], KERNELS["bwd_sums"].rows[0].tile_m
    config, count = {"ZERO": zero, "Output": DTYPES[tensor.dtype].element}, math.prod(tensor.shape)
    arrays = ("sum", total), ("out", name)
    return _launch(problem, device, "bwd_sums", {}, arrays, lambda _: _cdiv(count, tile), config, {"count": count})


def _feature_gradients(problem: Problem, device: Device) -> _FeatureGradients:
    tensors, before, after, workspace, pointers = dict(problem.tensors), [], [], {}, ()
    if problem.deterministic:
        sums.check_deterministic(problem)
    for name, tensor in sums.wanted(problem).items():
        real = REAL_DTYPES[problem.dtype.real]
        total = name if tensor.dtype == real else f"{name}_sum"
        pointers += ((name, total),)
        before.append(_around_sum(problem, device, name, total, zero=True))
        if total != name:
            workspace[total] = math.prod(tensor.shape) * DTYPES[real].itemsize
            after.append(_around_sum(problem, device, name, total, zero=False))
    if "dsinks" in tensors:
        given = {"lse": tensors["lse"]}
        after += [_launch(problem, device, "bwd_sinks", given, ("delta", "dsinks"), lambda n: n["num_heads_q"])]
    return _FeatureGradients(tuple(before), tuple(after), workspace, pointers)


def _delta(problem: Problem, device: Device, pieces: tuple[str, ...], num_m_blocks: int) -> Launch:
    """What a backward needs to know of each row, and the zeroes that it adds to."""
    tensors, row = dict(problem.tensors), _row(problem, KERNELS["bwd_delta"], device)
    given = {n: tensors[n] for n in ("o", "dout", "dlse") if n in tensors}
    grid, values = lambda _: _cdiv(problem.num_rows, row.tile_m), {"num_m_blocks": num_m_blocks}
    return _launch(problem, device, "bwd_delta", given, pieces, grid, values=values)


def _backward_sm90(problem: Problem, device: Device, notes: tuple[str, ...]) -> Plan:
    tensors = dict(problem.tensors)
    rows = problem.num_rows
    row = _row(problem, KERNELS["bwd_sm90"], device)
    num_m_blocks = sizes.num_flags(problem, row.tile_m)
    tiles = problem.tiles_per_head(problem.rows_k, problem.seqlen_k, row.tile_n) * problem.num_heads_kv
    if tiles + device.sm_count > MAX_GRID:
        raise Unsupported(f"bwd_sm90 would have {tiles} key tiles for {problem}; it counts to {MAX_GRID}")
    # With one key tile of all queries, visited by those that lie together, nothing is added up for dq.
    alone = problem.seqlen_k <= row.tile_n and not problem.varlen and not problem.option("block_mask")
    ordered = problem.deterministic and not alone
    workspace = {"delta": rows * 4}
    if not alone:
        workspace["dq_accum"] = rows * problem.head_dim * 4
    if ordered:
        workspace["semaphore"] = problem.arrays_batch * problem.num_heads_q * num_m_blocks * 4
    more = _feature_gradients(problem, device)
    every_piece = workspace | more.workspace
    delta = _delta(problem, device, tuple(workspace), num_m_blocks)
    main = _launch(
        problem,
        device,
        "bwd_sm90",
        {n: tensors[n] for n in ("q", "k", "v", "dout", "lse", "dk", "dv", *("dq",) * alone)},
        (*workspace, "tile_counter", *more.pointers),
        lambda _: min(device.sm_count, tiles),
        {"DETERMINISTIC": ordered, "ALONE": alone},
        {"heads_per_section": sizes.key_heads_per_section(problem, ordered)},
        tensor_maps={
            "tma_q": TensorMap("q", (64, row.tile_m)),
            "tma_k": TensorMap("k", (64, row.tile_n)),
            "tma_v": TensorMap("v", (64, row.tile_n)),
            "tma_dout": TensorMap("dout", (64, row.tile_m)),
            **_bias_map(problem, "bwd_sm90", row, row.tile_m),
        },
        overlaps=True,
        drawn=tiles,
    )
    if alone:
        return _finish(problem, "sm90", [*more.before, delta, main, *more.after], every_piece, notes)
    convert = _launch(
        problem,
        device,
        "bwd_convert_sm90",
        {"dq": tensors["dq"]},
        ("dq_accum",),
        lambda n: n["query_tiles"] * problem.num_heads_q,
        overlaps=True,
    )
    return _finish(problem, "sm90", [*more.before, delta, main, convert, *more.after], every_piece, notes)


def _backward(problem: Problem, device: Device, family: str, notes: tuple[str, ...]) -> Plan:
    if family == "sm90":
        return _backward_sm90(problem, device, notes)
    tensors = dict(problem.tensors)
    rows = problem.num_rows
    name = f"bwd_{family}"
    through_accum = family != "simt"
    row = _row(problem, KERNELS[name], device)
    num_m_blocks = sizes.num_flags(problem, row.tile_m)
    ordered = through_accum and problem.deterministic
    workspace = {"delta": rows * (8 if problem.dtype.real == "double" else 4)}
    if through_accum:
        workspace["dq_accum"] = rows * problem.head_dim * 4
    if ordered:
        workspace["semaphore"] = problem.arrays_batch * problem.num_heads_q * num_m_blocks * 4
    given = {n: tensors[n] for n in ("q", "k", "v", "dout", "lse")}
    more = _feature_gradients(problem, device)
    every_piece = workspace | more.workspace

    def per_key_tile(n: dict[str, int]) -> int:
        return n["key_tiles"] * problem.num_heads_kv

    def per_query_tile(n: dict[str, int]) -> int:
        return n["query_tiles"] * problem.num_heads_q

    delta = _delta(problem, device, tuple(workspace), num_m_blocks)
    if not through_accum:
        every = {**given, **{n: tensors[n] for n in ("dq", "dk", "dv")}}
        dq = _launch(problem, device, name, every, ("delta", *more.pointers), per_query_tile, {"PHASE_DQ": True})
        phase = {"PHASE_DQ": False, "SCATTERS": 0, "DBIAS": False}
        dkdv = _launch(problem, device, name, every, ("delta",), per_key_tile, phase)
        return _finish(problem, family, [delta, *more.before, dq, dkdv, *more.after], every_piece, notes)
    main = _launch(
        problem,
        device,
        name,
        {**given, "dk": tensors["dk"], "dv": tensors["dv"]},
        (*workspace, *more.pointers),
        per_key_tile,
        {"DETERMINISTIC": ordered},
    )
    convert = _launch(
        problem,
        device,
        "bwd_convert",
        {"dq": tensors["dq"]},
        ("dq_accum",),
        lambda _: _cdiv(rows, _row(problem, KERNELS["bwd_convert"], device).tile_m),
    )
    return _finish(problem, family, [delta, *more.before, main, convert, *more.after], every_piece, notes)


def plan(problem: Problem, device: Device, families: tuple[str, ...] = FAMILIES) -> Plan:
    """The plan of a checked problem. `families` is narrowed by tests."""
    family, notes = choose_family(problem, device, families)
    return (_backward if problem.backward else _forward)(problem, device, family, notes)
