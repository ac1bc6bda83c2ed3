"""The measurement: results checked, then times, memory and what follows from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np

from .. import reference
from ..explain import explain
from .cases import Case
from .contestants import Calls, Contestant
from .machines import Machine

# Of the largest entry of what is compared with: several times the rounding of a result of the type.
_BOUNDS = {"float16": 1e-2, "bfloat16": 6e-2, "float32": 1e-4, "float64": 1e-6}
_CHECKED_SEQLEN, _CHECKED_HEADS = 192, 2


@dataclass(frozen=True)
class Figures:
    """The machine, and what it does at best."""

    machine: str
    matmul_flops: float  # FLOP/s of a large matrix product in the type measured
    copy_bandwidth: float  # bytes/s read and written by a large copy


@dataclass(frozen=True)
class Row:
    """One contestant in one direction of one case. Figures are None where `failure` says why there are none."""

    case: Case
    direction: str  # forward or backward
    contestant: str
    seconds: float | None = None
    flops: float | None = None  # FLOP/s on the visible scores
    bandwidth: float | None = None  # bytes/s if each array moved once
    matmul_share: float | None = None  # of a large matrix product's FLOP/s
    copy_share: float | None = None  # of a large copy's bytes/s
    memory_bytes: int | None = None  # the most that the call held, its results included
    ratio: float | None = None  # of its time to PyFlash's
    failure: str | None = None

    def flat(self) -> dict[str, object]:
        fields = asdict(self)
        case = fields.pop("case")
        options = {"options": " ".join(f"{n}={x}" for n, x in case.pop("options"))}
        return case | options | fields


def measure(
    cases: list[Case],
    directions: tuple[str, ...],
    machine: Machine,
    contestants: list[Contestant],
    *,
    budget: float = 0.1,
    step: Callable[[str], None] = lambda what: None,
) -> tuple[Figures, list[Row]]:
    """Measure every contestant on every case, the first being the one that the others are compared with.

    Each measurement takes about `budget` seconds. `step` is told what is done next, `steps` times in all.
    """
    step("what the machine can do")
    best = Figures(machine.name, machine.matmul_flops(cases[0].dtype), machine.copy_bandwidth())
    checked: dict[tuple, str | None] = {}
    rows = []
    for case in cases:
        arrays = _arrays(case, machine)
        first: dict[str, tuple] = {}  # results and rows of the first contestant, by direction
        for contestant in contestants:
            step(f"{contestant.name}: {case}")
            calls = None
            for direction in directions:
                key = contestant.name, _small(case), direction
                if key not in checked:
                    checked[key] = _fault(contestant, _small(case), direction, machine)
                row = Row(case, direction, contestant.name, failure=checked[key] or contestant.obstacle(case, machine))
                if not row.failure:
                    try:
                        calls = calls or contestant.prepare(case, *arrays)
                        row = _measured(row, calls, machine, best, first, budget)
                    except Exception as error:  # every library raises what it likes
                        row = replace(row, failure=_said(error, machine))
                rows.append(row)
            del calls
            machine.release()
    return best, rows


def steps(cases: list[Case], contestants: list[Contestant]) -> int:
    return 1 + len(cases) * len(contestants)


def _measured(row: Row, calls: Calls, machine: Machine, best: Figures, first: dict[str, tuple], budget: float) -> Row:
    call, whole = (calls.forward, calls.forward) if row.direction == "forward" else (calls.backward, calls.both)
    part = [machine.get(a[:1, :, :1]) for a in _tuple(call())]  # of the first head and batch
    expected, ours = first.setdefault(row.direction, (part, None))
    error = max(_difference(a, b) for a, b in zip(part, expected, strict=True))
    if not error <= 2 * _BOUNDS[row.case.dtype]:  # each within one of what is right
        return replace(row, failure=f"differs from {'the others' if ours is None else 'PyFlash'} by {error:.0e}")
    seconds = machine.seconds(call, budget)
    facts = explain(row.case.problem(row.direction == "backward"), None)
    flops, bandwidth = facts.flops / seconds, facts.least_bytes / seconds
    row = replace(
        row,
        seconds=seconds,
        flops=flops,
        bandwidth=bandwidth,
        matmul_share=flops / best.matmul_flops,
        copy_share=bandwidth / best.copy_bandwidth,
        memory_bytes=machine.peak_bytes(whole),
        ratio=seconds / (ours or seconds),
    )
    first[row.direction] = (expected, ours or seconds)
    return row


def _fault(contestant: Contestant, case: Case, direction: str, machine: Machine) -> str | None:
    """What is wrong with the contestant on a case that the reference can do, if anything."""
    if obstacle := contestant.obstacle(case, machine):
        return obstacle
    arrays = _arrays(case, machine)
    q, k, v, dout = (machine.get(a) for a in arrays)
    options = case.call
    try:
        calls = contestant.prepare(case, *arrays)
        results = _tuple(calls.forward() if direction == "forward" else calls.backward())
    except Exception as error:  # every library raises what it likes
        return _said(error, machine)
    if direction == "forward":
        expected = reference.attention(q, k, v, **options)[:1]
    else:
        expected = reference.attention_backward(dout, q, k, v, **options)
    error = max(_difference(machine.get(a), b) for a, b in zip(results, expected, strict=True))
    return None if error <= _BOUNDS[case.dtype] else f"wrong by {error:.0e}"  # a NaN is not


def _small(case: Case) -> Case:
    """A case for the same kernels, or nearly, that the reference can do."""
    group = case.heads // case.heads_kv
    lengths = {name: min(getattr(case, name), _CHECKED_SEQLEN) for name in ("seqlen_q", "seqlen_k")}
    return replace(case, batch=1, heads=_CHECKED_HEADS * group, heads_kv=_CHECKED_HEADS, **lengths)


def _arrays(case: Case, machine: Machine) -> list[object]:
    """q, k, v, dout: normally distributed numbers, the same over and over again after a prime number of them."""
    drawn = np.random.default_rng(0).standard_normal((4, 1_000_003), np.float32)
    shapes = case.shapes.values()
    return [machine.put(np.resize(numbers, shape), case.dtype) for numbers, shape in zip(drawn, shapes, strict=True)]


def _tuple(results) -> tuple:
    return results if isinstance(results, tuple) else (results,)


def _difference(got: np.ndarray, expected: np.ndarray) -> float:
    """Relative to the largest entry, or to one of a hundredth where all are smaller: a gradient may be exactly 0."""
    return float(np.abs(got - expected).max() / max(np.abs(expected).max(), 0.01))


def _said(error: Exception, machine: Machine) -> str:
    if machine.is_out_of_memory(error):
        return "out of memory"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:100]}" if lines else type(error).__name__
