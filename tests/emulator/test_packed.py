"""Every kernel on sequences of their own lengths: against the oracle, and with offsets that lie."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import plans
import pytest
from cases import CAUSAL, Case
from packed import PACKED, Packed
from problems import device_of
from tilings import tiled

from pyflash.device import Device
from pyflash.errors import Unsupported
from pyflash.plan import Plan
from pyflash.plan import plan as plan_launches
from pyflash.tiles import FAMILIES, KERNELS

DEVICE = dataclasses.replace(device_of((9, 0)), sm_count=2)
DIRECTIONS = ("forward", "backward")


def kernel_of(family: str, direction: str) -> str:
    return f"{'fwd' if direction == 'forward' else 'bwd'}_{family}"


def taken(family: str, which: Packed, turn: int) -> Packed:
    """In a dtype of the family's."""
    dtypes, case = KERNELS[kernel_of(family, "forward")].dtypes, which.case
    dtype = case.dtype if case.dtype in dtypes else dtypes[turn % len(dtypes)]
    return dataclasses.replace(which, case=dataclasses.replace(case, dtype=dtype))


def inputs(which: Packed, direction: str) -> dict[str, np.ndarray]:
    arrays, more = which.arrays(), {**which.lengths(), **which.whole.feature_arrays()}
    if direction == "forward":
        return {**{name: arrays[name] for name in "qkv"}, **more}
    out, lse = which.reference_forward(arrays)
    return {**arrays, **more, "o": out.astype(arrays["q"].dtype), "lse": lse.astype(which.case.lse_dtype)}


def plan_of(
    family: str, direction: str, which: Packed, arrays: dict[str, np.ndarray], device: Device = DEVICE, **call
) -> Plan:
    problem = plans.make_problem(
        arrays,
        backward=direction == "backward",
        softmax_scale=which.case.softmax_scale,
        options=which.whole.scalars,
        gradients=which.case.differentiated if direction == "backward" else (),
        longest=which.longest if which.bounded else (None, None),
        **call,
    )
    return plan_launches(problem, device, (family,))


def plan_or_skip(family: str, *call, **options) -> Plan:
    try:
        return plan_of(family, *call, **options)
    except Unsupported as reason:
        if family != "sm90":
            raise
        pytest.skip(str(reason))


def check(which: Packed, arrays: dict[str, np.ndarray], results: dict[str, np.ndarray]) -> None:
    if "dout" in arrays:
        which.check_backward(arrays, results)
    else:
        which.check_forward(arrays, results["o"], results.get("lse"))


def unbatched(plan: Plan, results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Results in the shapes of the public functions."""
    return {name: array.reshape(plan.problem.shape(name)) for name, array in results.items()}


def run(plan: Plan, arrays: dict[str, np.ndarray], which: Packed, **options) -> dict[str, np.ndarray]:
    return unbatched(plan, plans.run_plan(plan, arrays, dropout_seed=which.case.dropout_seed, **options))


@pytest.fixture(scope="module", autouse=True)
def built_ahead(request):
    launches = []
    for item in request.session.items:
        found = item.callspec.params if hasattr(item, "callspec") and item.fspath == request.fspath else {}
        if "name" in found:
            family, direction, name = (found[key] for key in ("family", "direction", "name"))
            which = taken(family, PACKED[name], list(PACKED).index(name))
            with contextlib.suppress(Unsupported):
                launches += plan_of(family, direction, which, inputs(which, direction)).launches
    plans.build(launches)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed(family, direction, name):
    turn = list(PACKED).index(name)
    which = taken(family, PACKED[name], turn)
    arrays = inputs(which, direction)
    plan = plan_or_skip(family, direction, which, arrays)
    first = run(plan, arrays, which, seed=turn)
    check(which, arrays, first)
    # Atomic additions come in one order only if CTAs run one after the other.
    call = {"resident": 1 if direction == "backward" else 2, "check_races": plans.draws(family)}
    again = run(plan, arrays, which, seed=turn + 1, **call)
    for key, result in first.items():
        assert key == "dbias" or result.tobytes() == again[key].tobytes(), key


BLOCKS = (("block_mask", "near or first"),)


@pytest.mark.parametrize(("family", "options"), [*((f, CAUSAL) for f in FAMILIES), ("sm90", BLOCKS), ("sm80", BLOCKS)])
def test_deterministic_gradients(family, options):
    which = taken(family, Packed((150, 7, 70), (200, 9, 130), Case(heads_q=4, options=options), room=(0, 5)), 0)
    arrays = inputs(which, "backward")
    plan = plan_or_skip(family, "backward", which, arrays, deterministic=True)
    first, *others = (run(plan, arrays, which, seed=seed, resident=3) for seed in range(3))
    check(which, arrays, first)
    for other in others:
        assert all(first[key].tobytes() == other[key].tobytes() for key in first)


# With heads in a tile, and parts of the keys.
TILED = {
    "few queries": (Packed((1, 5, 0, 9), (700, 300, 3, 0), Case(heads_q=4, heads_kv=1, options=CAUSAL)), 4, 3),
    "gaps, sinks": (
        Packed((5, 70), (300, 640), Case(heads_q=4, options=(*CAUSAL, ("sinks", "of heads"))), room=(3, 7)), 2, 2,
    ),
    "empty sequences": (Packed((0, 70, 0, 65, 0), (9, 400, 0, 365, 0), Case(values="rising"), offsets="int64"), 1, 3),
    "padded, everything": (PACKED["few queries, padded, everything"], 2, 2),
}  # fmt: skip


@pytest.mark.parametrize("case", TILED)
def test_tilings(case):
    """Several heads in a tile, keys in parts: right, and the same bits whatever the timing."""
    which, pack, splits = TILED[case]
    which = taken("sm90", which, list(TILED).index(case))
    arrays = inputs(which, "forward")
    with tiled(pack=pack, splits=splits):
        plan = plan_of("sm90", "forward", which, arrays, device=device_of((9, 0)))
    first, second = (run(plan, arrays, which, seed=seed, resident=2, shuffled=True) for seed in range(2))
    check(which, arrays, first)
    assert all(first[key].tobytes() == second[key].tobytes() for key in first)


LIES = {
    "past the end": [0, 40, 400, 900],
    "far past the end": [0, 2**31 - 1, 2**31 - 1, 2**31 - 1],
    "negative": [-70, -5, -3, 100],
    "falling": [0, 120, 30, 90],
    "short of the end": [0, 10, 20, 50],
    "not from 0 on": [33, 50, 60, 200],
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_offsets_that_lie_touch_nothing_else(family, direction, lie):
    """The emulator would tell of what lies outside of the arrays. Rows behind the last sequence give zero."""
    which = taken(family, Packed((100, 40, 60), (90, 80, 30), Case(options=CAUSAL), bounded=False), 1)
    arrays = inputs(which, direction)
    for side in "qk":
        arrays[f"cu_seqlens_{side}"] = np.array(LIES[lie], "int32")
    plan = plan_or_skip(family, direction, which, arrays)
    results = run(plan, arrays, which, seed=2)
    if lie == "short of the end":
        for name, result in results.items():
            rest = result[:, 50:] if name == "lse" else result[50:]
            assert (rest == (-np.inf if name == "lse" else 0)).all(), name


@pytest.mark.parametrize("lie", ["far past the end", "falling"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_offsets_that_lie_touch_no_other_list(family, direction, lie):
    """Of a block mask, where what no sequence has is longer than any."""
    case = Case(options=(("block_mask", "near or first"),))
    which = taken(family, Packed((10, 140, 50), (20, 150, 30), case), 1)
    arrays = inputs(which, direction)
    for side in "qk":
        arrays[f"cu_seqlens_{side}"] = np.array(LIES[lie], "int32")
    run(plan_or_skip(family, direction, which, arrays), arrays, which, seed=2)
    for side in "qk":
        arrays[f"cu_seqlens_{side}"] = np.array([0, 0, 0, 0], "int32")
    results = run(plan_or_skip(family, direction, which, arrays), arrays, which, seed=2)
    assert not any(result.any() for name, result in results.items() if name != "lse")


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
@pytest.mark.parametrize("options", [(), CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_has_no_influence_on_its_neighbours(family, direction, options, garbage):
    """Whatever it holds, where its rows lie in one tile with theirs."""
    which = taken(family, Packed((70, 100, 60), (90, 130, 40), Case(options=options)), 1)
    arrays = inputs(which, direction)
    expected = run(plan_of(family, direction, which, arrays), arrays, which)
    spoiled = {name: array.copy() for name, array in arrays.items()}
    _, (queries,), (keys,) = list(which.sequences())[1]
    for name, rows in {"q": queries, "k": keys, "dout": queries}.items():
        if name in spoiled:
            spoiled[name][rows] = garbage
    spoiled["v"][keys.start + 3, :, 3] = garbage
    if direction == "backward":
        spoiled["o"][queries], spoiled["lse"][:, queries] = np.nan, np.nan
    results = run(plan_of(family, direction, which, spoiled), spoiled, which)
    tolerance = 0.05 if arrays["q"].dtype.itemsize == 2 else 1e-5
    for name, result in results.items():
        rows = keys if name in ("dk", "dv") else queries
        result, right = (a.T if name == "lse" else a for a in (result, expected[name]))
        others = np.ones(len(result), bool)
        others[rows] = False
        got, right = (a[others].astype(np.float64) for a in (result, right))
        np.testing.assert_allclose(got, right, tolerance, tolerance, err_msg=name)
