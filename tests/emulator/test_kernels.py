"""Every kernel, as planned for a whole call, on the CPU: against the oracle, under several schedules.

A family runs every named case that it can. Each run also asserts what the emulator asserts: no race, no access out of
bounds, no deadlock, nothing written but the outputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from functools import cache

import numpy as np
import plans
import pytest
from assert_close import assert_attention, assert_gradients
from cases import CASES, Case
from problems import device_of

from pyflash import reference
from pyflash.errors import Unsupported
from pyflash.plan import Plan
from pyflash.tiles import FAMILIES, KERNELS

DEVICE = device_of((9, 0))
RUNS = [
    (family, backward, name)
    for family in FAMILIES
    for backward in (False, True)
    if f"{'bwd' if backward else 'fwd'}_{family}" in KERNELS
    for name in CASES
]
NAMES = [f"{family}-{'backward' if backward else 'forward'}-{name}" for family, backward, name in RUNS]


def element(dtype: str, names: tuple[str, ...], turn: int) -> str:
    """A case's dtype where the kernel has it; otherwise each of the kernel's in turn."""
    return dtype if dtype in names else names[turn % len(names)]


def case_for(family: str, backward: bool, name: str, turn: int = 0) -> Case:
    dtypes = KERNELS[f"{'bwd' if backward else 'fwd'}_{family}"].dtypes
    return dataclasses.replace(CASES[name], dtype=element(CASES[name].dtype, dtypes, turn + list(CASES).index(name)))


@cache
def inputs(case: Case, backward: bool) -> dict[str, np.ndarray]:
    arrays = case.arrays()
    if not backward:
        return {name: arrays[name] for name in "qkv"}
    out, lse = reference.attention(*(arrays[name] for name in "qkv"), **case.call)
    return {**arrays, "o": out.astype(arrays["q"].dtype), "lse": lse.astype(case.lse_dtype)}


def plan_of(family: str, backward: bool, case: Case, **call) -> Plan:
    arrays = inputs(case, backward)
    made = plans.make_problem(
        arrays, backward=backward, softmax_scale=case.softmax_scale, options=dict(case.options), **call
    )
    return plans.plan(made, DEVICE, (family,))


def check(case: Case, arrays: dict[str, np.ndarray], results: dict[str, np.ndarray]) -> None:
    q, k, v = (arrays[name] for name in "qkv")
    if "dout" in arrays:
        gradients = [results[name] for name in ("dq", "dk", "dv")]
        assert_gradients(gradients, arrays["dout"], q, k, v, dlse=arrays.get("dlse"), **case.call)
    else:
        assert_attention(results["o"], results.get("lse"), q, k, v, **case.call)


@pytest.fixture(scope="module", autouse=True)
def built_ahead(request):
    """Compiles what the chosen tests need, on all cores. What does not compile, its own test reports."""
    launches = []
    for item in request.session.items:
        run = item.callspec.params.get("run") if hasattr(item, "callspec") else None
        if item.fspath == request.fspath and run:
            with contextlib.suppress(Unsupported):
                launches += plan_of(run[0], run[1], case_for(*run)).launches
    plans.build(launches)


@pytest.mark.parametrize("run", RUNS, ids=NAMES)
def test_cases(run):
    family, backward, name = run
    case = case_for(family, backward, name)
    try:
        plan = plan_of(family, backward, case)
    except Unsupported as reason:
        if family != "sm90":
            raise
        pytest.skip(str(reason))
    arrays = inputs(case, backward)
    first = 2 * list(CASES).index(name)
    for seed in (first, first + 1):
        check(case, arrays, plans.run_plan(plan, arrays, seed=seed))
