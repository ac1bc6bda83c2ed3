"""A plan in words and numbers: what runs and why, and what the hardware could do at best."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from . import features, sequences
from .blocks import EMPTY
from .device import KNOWN, Device
from .plan import Launch, Plan
from .plan import plan as make_plan
from .problem import DTYPES, ITEMSIZES, Problem
from .tiles import FAMILIES, KERNELS, Row

# Measured on an H200: the share of the data sheet's FLOP/s that a family reached on the longest sequences, by head_dim,
# forward and backward (float32 for simt, whose backward was not measured and is taken to be as its forward).
_REACHED = {
    ("sm90", False): {64: 0.555, 128: 0.78, 256: 0.76},
    ("sm90", True): {64: 0.545, 128: 0.60, 256: 0.49},
    ("sm80", False): {64: 0.36, 128: 0.36, 256: 0.32},
    ("sm80", True): {64: 0.31, 128: 0.36, 256: 0.27},
    ("simt", False): {64: 0.64, 128: 0.60},
    ("simt", True): {64: 0.64, 128: 0.60},
}
_MEASURED_ON = KNOWN["H200"]
_AMPERES_SHARE = 0.5  # of Hopper's FLOP/s that Ampere's instructions, which sm80 uses, can have there
# How much of the least traffic takes time of its own beside the products, forward and backward (which adds to dq).
# With it, times from 1024 tokens to 16384 are within an eighth of those measured; causal ones at 512 took longer.
_EXPOSED = {False: 0.5, True: 1.5}
_LAUNCH_SECONDS = 3e-6  # assumed of a kernel that has next to nothing to do


@dataclass(frozen=True)
class Explanation:
    """Figures of one call. `str()` is the report; where there is no GPU, `device` and `plan` are None."""

    problem: Problem
    device: Device | None
    plan: Plan | None
    visible_pairs: int  # (query, key) pairs that the options in `counted` leave, of all heads and batches
    flops: int  # of the matrix products on the visible pairs
    least_bytes: int  # every array moved once
    score_bytes: int  # a matrix of queries and keys for every head and sequence, which ordinary attention writes
    tile_bytes: int | None  # what the tiles of the main kernel load and store, most of it from the L2 cache
    counted: tuple[str, ...]  # the options of which it is counted what they hide

    @property
    def ordinary_bytes(self) -> int:
        """What ordinary attention moves: its arrays, and score matrices from one product to the next.

        Forward: s and p, each written and read. Backward: p read twice; dp written and read; ds written and read twice.
        """
        return self.least_bytes + (7 if self.problem.backward else 4) * self.score_bytes

    @property
    def held_bytes(self) -> int:
        """The call's arrays and its workspace."""
        return self.least_bytes + (self.plan.workspace_bytes if self.plan else 0)

    @property
    def ordinary_held_bytes(self) -> int:
        """The same arrays, and the score matrices that are there at once: s and p; p, dp and ds in the backward."""
        return self.least_bytes + (3 if self.problem.backward else 2) * self.score_bytes

    @property
    def seqlen(self) -> int:
        return max(self.problem.seqlen_q, self.problem.seqlen_k)

    @property
    def longest_seqlen(self) -> int | None:
        """Of queries or keys, whichever are more, and the others in proportion: with so many the call fits the GPU."""
        return self._longest(self.held_bytes, 0)

    @property
    def ordinary_longest_seqlen(self) -> int | None:
        return self._longest(self.least_bytes, self.ordinary_held_bytes - self.least_bytes)

    def _longest(self, linear: int, square: int) -> int | None:
        """For memory that now has a part that grows with the length and one that grows with its square."""
        if not (self.device and self.seqlen and linear):
            return None
        memory = self.device.memory_bytes
        # linear * x + square * x^2 = memory, for sequences x times as long; solved without cancellation.
        x = 2 * memory / (linear + math.sqrt(linear**2 + 4 * square * memory))
        return int(x * self.seqlen)

    @property
    def intensity(self) -> float:
        """FLOPs a byte moved, at best."""
        return self.flops / self.least_bytes if self.least_bytes else 0.0

    @property
    def ordinary_intensity(self) -> float:
        return self.flops / self.ordinary_bytes if self.ordinary_bytes else 0.0

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s of the units that the plan uses, where the data sheet's figure is known."""
        return self.device.flops(self.problem.dtype.itemsize) if self.device else None

    @property
    def compute_seconds(self) -> float | None:
        return self.flops / self.peak_flops if self.peak_flops else None

    @property
    def memory_seconds(self) -> float | None:
        return self.least_bytes / self.device.bandwidth if self.device and self.device.bandwidth else None

    @property
    def roofline_seconds(self) -> float | None:
        """The time below which no kernel can go."""
        times = [t for t in (self.compute_seconds, self.memory_seconds) if t is not None]
        return max(times) if times else None

    @property
    def ordinary_seconds(self) -> float | None:
        """The time below which no kernels can go that write the score matrix."""
        if self.roofline_seconds is None:
            return None
        return max(self.compute_seconds or 0.0, self.ordinary_bytes / self.device.bandwidth)

    @property
    def expected_seconds(self) -> float | None:
        """By what the family reached where it was measured."""
        return max(self._expected.values()) if self._expected else None

    @property
    def expected_is_measured(self) -> bool:
        """Whether that was on such a GPU with such a head_dim, a type of the same units and no more than causal;
        otherwise it is an estimate."""
        if not self._expected:
            return False
        half = self.problem.dtype.itemsize == 2
        alike = self.problem.head_dim == self.problem.head_dim_v and self.problem.head_dim in self._reached
        plain = not set(self.problem.on) & set(features.DEFAULTS) - {"causal"} and not self.problem.varlen
        # One that is present has its driver's name and a little less memory.
        same = all(getattr(self.device, x) == getattr(_MEASURED_ON, x) for x in ("capability", "sm_count", "bandwidth"))
        return same and self.plan.family != "simt" and half and alike and plain

    @property
    def _reached(self) -> dict[int, float]:
        return _REACHED[self.plan.family, self.problem.backward]

    @property
    def reached_flops(self) -> float | None:
        """FLOP/s to expect of the main kernel when every multiprocessor has its fill."""
        if self.plan is None or not self.peak_flops or self.plan.family not in FAMILIES:
            return None
        share = _at((self.problem.head_dim + self.problem.head_dim_v) / 2, self._reached)
        if self.plan.family == "sm80" and self.device.capability[0] in _OWN_INSTRUCTIONS:
            per_multiprocessor = _MEASURED_ON.half_flops / _MEASURED_ON.sm_count
            return share * per_multiprocessor * self.device.sm_count
        return share * self.peak_flops / (_AMPERES_SHARE if self.plan.family == "sm80" else 1)

    @property
    def _expected(self) -> dict[str, float]:
        """Times of which the longest is expected, by what takes them."""
        main = _main(self.plan) if self.reached_flops and self.memory_seconds else None
        if main is None:
            return {}
        row, per_multiprocessor = tile_row(main), tiles(main) / self.device.sm_count
        # What tiles compute and hide again along the edges of the band, and multiprocessors without a tile at the end.
        edges = sum(bound is not None for bound in features.band(self.problem.on, 0, 0))
        rows = self.problem.num_rows
        hidden = edges * rows * (row.tile_m + row.tile_n) / 4
        work = self.flops * min(1 + hidden / max(self.visible_pairs, 1), 2)
        idle = math.ceil(per_multiprocessor) / per_multiprocessor
        launches = _LAUNCH_SECONDS * len(self.plan.launches)
        products = work * idle / self.reached_flops + _EXPOSED[self.problem.backward] * self.memory_seconds + launches
        return {
            f"products at {amount(self.reached_flops, 'FLOP/s')}, {self.reached_flops / self.peak_flops:.0%} of the "
            "data sheet's": products,
            "the traffic at the data sheet's bandwidth, which is the least": self.memory_seconds,
            f"{duration(_LAUNCH_SECONDS)} a launch, which is assumed": launches,
        }  # fmt: skip

    @property
    def uncounted(self) -> list[str]:
        """The options that are on and not in the work: neither what they cost nor what they hide."""
        return [name for name in self.problem.on if name in features.DEFAULTS and name not in self.counted]

    def facts(self) -> dict[str, object]:
        """All of it, for programs."""
        counted = ("visible_pairs", "flops", "least_bytes", "score_bytes", "tile_bytes", "counted")
        derived = (name for name, value in vars(Explanation).items() if isinstance(value, property) and name[0] != "_")
        plan = self.plan and {
            "family": self.plan.family,
            "notes": self.plan.notes,
            "workspace_bytes": self.plan.workspace_bytes,
            "launches": [
                {"kernel": x.kernel, "grid": x.grid, "block": x.block, "smem_bytes": x.smem_bytes,
                 "waves": waves(x, self.device), "why": tile_row(x).why, "config": dict(x.config)}
                for x in self.plan.launches
            ],
        }  # fmt: skip
        return {"call": str(self.problem), "backward": self.problem.backward, "gpu": self.device, "plan": plan} | {
            name: getattr(self, name) for name in (*counted, *derived)
        }

    def __str__(self) -> str:
        return "\n".join(f"{label:13}{text}".rstrip() for label, text in _report(self))


def explain(
    problem: Problem,
    device: Device | None,
    families: tuple[str, ...] = FAMILIES,
    arrays: Mapping[str, np.ndarray] | None = None,
    kinds: np.ndarray | None = None,
) -> Explanation:
    """Explain a call on a GPU, or on NumPy if `device` is None. `arrays` say where sequences are; without them, each is
    as long as it may be. `kinds` are those of the blocks of a block mask, if the host knows them."""
    tensors = [t for name, t in problem.tensors]
    lengths = Counter({(problem.seqlen_q, problem.seqlen_k): problem.batch})
    if arrays:
        found = sequences.each(problem.batch, problem.rows_q, problem.rows_k, arrays)
        lengths = Counter((x.queries.stop - x.queries.start, x.keys.stop - x.keys.start) for x in found)
    alone = {each: replace(problem, seqlen_q=each[0], seqlen_k=each[1]).visible_pairs for each in lengths}
    pairs = problem.num_heads_q * sum(count * alone[each] for each, count in lengths.items())
    scores = problem.num_heads_q * sum(count * math.prod(each) for each, count in lengths.items())
    counted = ("causal", "window")
    if kinds is not None and not problem.varlen and not problem.banded:
        pairs, counted = _listed_pairs(problem, kinds), (*counted, "block_mask")
    d, dv = problem.head_dim, problem.head_dim_v
    plan = make_plan(problem, device, families) if device else None
    # Forward: q k^T and p v. Backward: q k^T again, dout v^T, p^T dout, ds k, ds^T q.
    per_pair = 2 * (3 * d + 2 * dv) if problem.backward else 2 * (d + dv)
    return Explanation(
        problem=problem,
        device=device,
        plan=plan,
        visible_pairs=pairs,
        flops=pairs * per_pair,
        least_bytes=sum(math.prod(t.shape) * ITEMSIZES[t.dtype] for t in tensors),
        score_bytes=scores * problem.dtype.itemsize,
        tile_bytes=_tile_bytes(problem, plan, pairs) if plan else None,
        counted=counted,
    )


def _listed_pairs(problem: Problem, kinds: np.ndarray) -> int:
    """Pairs in the blocks that are not empty, which are those that kernels compute."""
    blocks = problem.option("block_mask")
    rows, columns = (
        np.minimum(np.arange(n) * size + size, length) - np.arange(n) * size
        for n, size, length in zip(
            blocks.grid, (blocks.block_q, blocks.block_k), (problem.seqlen_q, problem.seqlen_k), strict=True
        )
    )
    alike = problem.batch * problem.num_heads_q // max(blocks.batch * blocks.heads, 1)
    return alike * int(((kinds != EMPTY) * np.multiply.outer(rows, columns)).sum())


def _tile_bytes(problem: Problem, plan: Plan, pairs: int) -> int | None:
    """A tile of queries loads k and v of its visible keys; a tile of keys, in the backward, q and dout, and adds dq."""
    if not (main := _main(plan)):
        return None
    row = tile_row(main)
    columns = problem.head_dim + problem.head_dim_v
    if not problem.backward:
        return pairs // row.tile_m * columns * problem.dtype.itemsize
    return pairs // row.tile_n * (columns * problem.dtype.itemsize + 2 * problem.head_dim * 4)


def _main(plan: Plan) -> Launch | None:
    """The launch of a plan that computes scores, if there are any."""
    names = (f"fwd_{plan.family}", f"bwd_{plan.family}")
    return next((launch for launch in plan.launches if launch.kernel in names), None)


def _at(head_dim: float, reached: Mapping[int, float]) -> float:
    """Between what was measured, in proportion; below it the time of a score is what does not depend on head_dim."""
    least = min(reached)
    return float(np.interp(head_dim, list(reached), list(reached.values()))) * min(head_dim / least, 1)


def tile_row(launch: Launch) -> Row:
    """The row of tiles.py that a launch was built from."""
    cfg = dict(launch.config)
    itemsize = next(dtype.itemsize for dtype in DTYPES.values() if dtype.element == cfg["Element"])
    fields = ("TILE_M", "TILE_N", "NUM_THREADS", "STAGES", "MIN_CTAS")
    return next(
        row
        for row in KERNELS[launch.kernel].rows
        if tuple(cfg[f] for f in fields) == (row.tile_m, row.tile_n, row.threads, row.stages, row.min_ctas)
        and max(cfg["TILE_D"], cfg["TILE_DV"]) <= row.head_dim
        and row.causal in (None, features.banded(cfg))
        and row.itemsize in (None, itemsize)
        and all(cfg[name] == value for name, value in row.knobs)
    )


def resident_ctas(launch: Launch, device: Device) -> int:
    """CTAs of a launch that a multiprocessor is sure to hold at once, by registers and shared memory."""
    reserved = 1024  # bytes of each CTA's shared memory that are the system's; a CTA may have all but one such piece
    by_smem = (device.smem_bytes + reserved) // (launch.smem_bytes + reserved)
    return max(1, min(tile_row(launch).min_ctas, by_smem))


def tiles(launch: Launch) -> int:
    """Tiles that the CTAs of a launch work through."""
    return launch.grid if launch.drawn is None else launch.drawn


def waves(launch: Launch, device: Device) -> float:
    """How many times the launch's tiles fill the GPU."""
    return tiles(launch) / (resident_ctas(launch, device) * device.sm_count)


def figure(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def amount(value: float, unit: str) -> str:
    """A number with a decimal prefix: 1.34e8 B -> 134 MB."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{figure(value / size)} {prefix}{unit}"
    return f"{figure(value)} {unit}"


def duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{figure(seconds / size)} {unit}"
    return f"{figure(seconds / 1e-6)} us"


def _report(x: Explanation) -> list[tuple[str, str]]:
    problem = x.problem
    all_pairs = x.score_bytes // problem.dtype.itemsize
    masked = x.visible_pairs < all_pairs
    share = f", for the {x.visible_pairs / all_pairs:.0%} of the scores that are visible" if masked else ""
    share += f"; not counted: {', '.join(x.uncounted)}" if x.uncounted else ""
    where = _gpu_lines(x.device, x.plan) if x.plan else [("where", "NumPy on the CPU: tiles, an online softmax, BLAS")]
    lines = [
        ("backward" if problem.backward else "forward", str(problem)),
        *where,
        ("work", f"{amount(x.flops, 'FLOP')} in matrix products{share}"),
        ("traffic", f"at least {amount(x.least_bytes, 'B')}: each array once{_asked(x)}"),
        ("  ordinary", f"{amount(x.ordinary_bytes, 'B')}: {amount(x.score_bytes, 'B')} of scores, "
                       f"{'7' if problem.backward else '4'} times through memory; here they are never written"),
    ]  # fmt: skip
    if x.plan and x.least_bytes:
        lines += [*_roofline_lines(x), *_memory_lines(x)]
    return lines


def _asked(x: Explanation) -> str:
    again = x.tile_bytes is not None and x.tile_bytes > x.least_bytes
    return f"; its tiles ask the L2 cache for {amount(x.tile_bytes, 'B')}" if again else ""


def _memory_lines(x: Explanation) -> list[tuple[str, str]]:
    workspace = amount(x.plan.workspace_bytes, "B")
    lines = [
        ("memory", f"{amount(x.held_bytes, 'B')}, of which {workspace} workspace"),
        ("  ordinary", f"{amount(x.ordinary_held_bytes, 'B')} with its score matrices"),
    ]
    if x.longest_seqlen is not None:
        fits = f"{x.longest_seqlen:,} tokens; ordinary attention {x.ordinary_longest_seqlen:,}"
        room = f"{amount(x.device.memory_bytes, 'B')} ({x.device.memory_bytes / 2**30:.0f} GiB)"
        lines.append(("longest", f"in {room} fit {fits}"))
    return lines


def _gpu_lines(gpu: Device, plan: Plan) -> list[tuple[str, str]]:
    capability = "compute capability {}.{}".format(*gpu.capability)
    smem = f"{gpu.smem_bytes // 1024} KiB of shared memory a CTA"
    lines = [
        ("GPU", f"{gpu.name}: {capability}, {gpu.sm_count} multiprocessors, {smem}"),
        ("family", plan.family),
        *(("  note", note) for note in plan.notes),
    ]
    for launch in plan.launches:
        row, cfg = tile_row(launch), dict(launch.config)
        tile = f"tiles of {row.tile_m} queries x {row.tile_n} keys"
        padded = f"head_dim padded to {cfg['TILE_D']}/{cfg['TILE_DV']}"
        cta = f"{launch.block} threads, {row.stages} in the pipeline, {launch.smem_bytes} B of shared memory"
        full = f"{tiles(launch)} tiles, {waves(launch, gpu):.2f} waves at {resident_ctas(launch, gpu)} a multiprocessor"
        lines += [
            ("kernel", f"{launch.kernel}: {tile}, {padded}"),
            ("  why", row.why),
            ("  CTAs", f"{launch.grid} of {cta}; {full}"),
        ]
    return lines if plan.launches else [*lines, ("kernel", "none: there is nothing to compute")]


def _roofline_lines(x: Explanation) -> list[tuple[str, str]]:
    intensity = f"{figure(x.intensity)} FLOP/B at best"
    if x.memory_seconds is None:
        return [("intensity", intensity), *_expected_lines(x)]
    traffic = f"{duration(x.memory_seconds)} of traffic at {amount(x.device.bandwidth, 'B/s')}"
    if x.compute_seconds is None:
        unknown = f"{x.problem.dtype.name} FLOP/s of this GPU are not in the table"
        roofline = ("roofline", f"{traffic}, by the data sheet; {unknown}")
        return [("intensity", intensity), roofline, *_expected_lines(x)]
    balance = x.peak_flops / x.device.bandwidth
    bound = "arithmetic" if x.intensity >= balance else "memory"
    work = f"{duration(x.compute_seconds)} of arithmetic at {amount(x.peak_flops, 'FLOP/s')}"
    return [
        ("intensity", f"{intensity}, where the GPU balances at {figure(balance)}: bound by {bound}"),
        ("  ordinary", f"{figure(x.ordinary_intensity)} FLOP/B"),
        ("roofline", f"{duration(x.roofline_seconds)}: {work}, {traffic}, by the data sheet"),
        ("  ordinary", f"{duration(x.ordinary_seconds)}"),
        *_unreachable_lines(x),
        *_expected_lines(x),
    ]


_OWN_INSTRUCTIONS = (9, 10, 11)  # data-centre GPUs from Hopper on have tensor core instructions of their own


def _unreachable_lines(x: Explanation) -> list[tuple[str, str]]:
    if x.plan.family != "sm80" or x.device.capability[0] not in _OWN_INSTRUCTIONS:
        return []
    return [("  note", f"sm80 uses Ampere's instructions; the data sheet's FLOP/s of {x.device.name} take others")]


def _expected_lines(x: Explanation) -> list[tuple[str, str]]:
    if not _main(x.plan):
        return []
    if not x._expected:
        return [("expected", f"unknown: the FLOP/s or the bandwidth of {x.device.name} are not in the table")]
    basis, seconds = max(x._expected.items(), key=lambda item: item[1])
    others = [name for name in x.problem.on if name in features.DEFAULTS and name != "causal"]
    without = f"; without the cost of {', '.join(others)}" if others else ""
    kind = (
        "by what was measured on such a GPU"
        if x.expected_is_measured
        else "an estimate from what was measured on an H200"
    )
    return [("expected", f"about {duration(seconds)}, {kind}: {basis}{without}")]
