"""Every kernel, as planned for a whole call, on the CPU: against the oracle, under several schedules.

A family runs every named case that it can. Each run also shows what the emulator asserts: no race, no access out of
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
from cases import CASES, CAUSAL, LAYOUTS, Case, cases, taken
from hypothesis import HealthCheck, given, settings
from problems import device_of
from tilings import TILINGS, tiled

from pyflash import features, reference
from pyflash.errors import Unsupported
from pyflash.plan import Plan
from pyflash.plan import plan as plan_launches
from pyflash.tiles import FAMILIES, KERNELS

# With few multiprocessors, persistent kernels do several output tiles a CTA.
DEVICE = dataclasses.replace(device_of((9, 0)), sm_count=2)

# Enough tiles, both ways, for every stage of the pipelines to be filled several times.
LONG_CASES = {
    "many tiles": Case(1, 210, 700, 2, 1, 64, 64),
    "many tiles, causal": Case(1, 450, 400, 3, 3, 128, 128, options=CAUSAL, values="rising"),
    "many tiles, more keys than queries": Case(1, 140, 900, 2, 1, 80, 96, options=CAUSAL, values="rising"),
    "many tiles, alibi on both sides": Case(
        1, 210, 700, 4, 2, options=(("alibi_slopes", "of heads"),), values="rising"
    ),
    "many tiles of one key tile": Case(4, 128, 100, 2, 2, 64, 64, values="rising"),
    "many tiles, wide heads": Case(1, 130, 390, 1, 1, 192, 256, values="row offsets"),
}
EVERY_CASE = CASES | LONG_CASES
TURN = {name: turn for turn, name in enumerate(EVERY_CASE)}


def kernel_of(family: str, direction: str) -> str:
    return f"{'fwd' if direction == 'forward' else 'bwd'}_{family}"


DIRECTIONS = [
    (family, direction)
    for family in FAMILIES
    for direction in ("forward", "backward")
    if kernel_of(family, direction) in KERNELS
]


def case_for(family: str, direction: str, name: str) -> Case:
    """A named case in a dtype that the kernel takes: its own, or each of the kernel's in turn."""
    case, dtypes = EVERY_CASE[name], KERNELS[kernel_of(family, direction)].dtypes
    return case if case.dtype in dtypes else dataclasses.replace(case, dtype=dtypes[TURN[name] % len(dtypes)])


@cache
def inputs(case: Case, direction: str) -> dict[str, np.ndarray]:
    arrays = case.arrays()
    if direction == "forward":
        return {**{name: arrays[name] for name in "qkv"}, **case.feature_arrays()}
    out, lse = reference.attention(*(arrays[name] for name in "qkv"), **case.call)
    return {**arrays, **case.feature_arrays(), "o": out.astype(arrays["q"].dtype), "lse": lse.astype(case.lse_dtype)}


def plan_of(family: str, direction: str, case: Case, sm_count: int = DEVICE.sm_count, **call) -> Plan:
    problem = plans.make_problem(
        inputs(case, direction),
        backward=direction == "backward",
        softmax_scale=case.softmax_scale,
        options=case.scalars,
        gradients=case.differentiated if direction == "backward" else (),
        **call,
    )
    return plan_launches(problem, dataclasses.replace(DEVICE, sm_count=sm_count), (family,))


def check(case: Case, arrays: dict[str, np.ndarray], results: dict[str, np.ndarray]) -> None:
    q, k, v = (arrays[name] for name in "qkv")
    if "dout" in arrays:
        gradients = [results[f"d{name}"] for name in ("q", "k", "v", *case.differentiated)]
        options = {"dlse": arrays.get("dlse"), "differentiated": case.differentiated, **case.call}
        assert_gradients(gradients, arrays["dout"], q, k, v, **options)
    else:
        assert_attention(results["o"], results.get("lse"), q, k, v, **case.call)


def assert_same_bits(results: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> None:
    """But for dbias, to which threads add in any order."""
    for name, result in results.items():
        assert name == "dbias" or result.tobytes() == others[name].tobytes(), name


@pytest.fixture(scope="module", autouse=True)
def built_ahead(request):
    """Compiles what the chosen tests need, on all cores. What does not compile, its own test reports."""
    launches = []
    for item in request.session.items:
        run = item.callspec.params if hasattr(item, "callspec") and item.fspath == request.fspath else {}
        if "name" in run:
            with contextlib.suppress(Unsupported):
                launches += plan_of(run["family"], run["direction"], case_for(**run)).launches
    plans.build(launches)


@pytest.mark.parametrize("name", EVERY_CASE)
@pytest.mark.parametrize(("family", "direction"), DIRECTIONS)
def test_cases(family, direction, name):
    case = case_for(family, direction, name)
    try:
        plan = plan_of(family, direction, case)
    except Unsupported as reason:
        if family != "sm90" and takes(family, direction, case):
            raise
        pytest.skip(str(reason))
    arrays = inputs(case, direction)
    seeds = range(2 * TURN[name], 2 * TURN[name] + 2)
    # Atomic additions come in one order only if CTAs run one after the other.
    resident = 1 if direction == "backward" else 2
    first = plans.run_plan(plan, arrays, seed=seeds[0], dropout_seed=case.dropout_seed)
    check(case, arrays, first)
    for seed in seeds[1:]:
        call = {"resident": resident, "dropout_seed": case.dropout_seed, "check_races": plans.draws(family)}
        assert_same_bits(first, plans.run_plan(plan, arrays, seed=seed, **call))


@pytest.mark.parametrize(("family", "direction"), DIRECTIONS)
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(case=cases(max_head_dim=256))
def test_any_case(family, direction, case):
    case = taken(family, dataclasses.replace(case, batch=min(case.batch, 2)))
    plan, arrays = plan_of(family, direction, case), inputs(case, direction)
    check(case, arrays, plans.run_plan(plan, arrays, seed=case.seed, dropout_seed=case.dropout_seed))


INTERLEAVED = Case(1, 150, 200, 4, 2, 64, 64, options=CAUSAL)


@pytest.mark.parametrize(("family", "direction"), DIRECTIONS)
def test_ctas_in_any_order(family, direction):
    """Several CTAs at a time, started in a random order."""
    dtype = KERNELS[kernel_of(family, direction)].dtypes[0]
    case = dataclasses.replace(INTERLEAVED, dtype=dtype)
    arrays = inputs(case, direction)
    for seed in range(2):
        check(
            case,
            arrays,
            plans.run_plan(plan_of(family, direction, case), arrays, seed=seed, resident=4, shuffled=True),
        )


@pytest.mark.parametrize("family", [family for family, direction in DIRECTIONS if direction == "backward"])
def test_deterministic_gradients(family):
    """The same bits whatever the CTAs' timing. They may wait for tiles that were begun before: those of CTAs that start
    in order, or of any number of CTAs, in any order, where these draw tiles."""
    dtype = KERNELS[f"bwd_{family}"].dtypes[0]
    case = dataclasses.replace(INTERLEAVED, seqlen_k=450, dtype=dtype)
    arrays = inputs(case, "backward")
    plan = plan_of(family, "backward", case, sm_count=5, deterministic=True)
    residents = (5, 2, 4, 1) if plans.draws(family) else (3,) * 4
    first, *others = (
        plans.run_plan(plan, arrays, seed=seed, resident=resident, shuffled=plans.draws(family))
        for seed, resident in enumerate(residents)
    )
    check(case, arrays, first)
    for other in others:
        assert_same_bits(first, other)


def takes(family: str, direction: str, case: Case) -> bool:
    """Whether a family's kernel takes the features of a case."""
    return all(kernel_of(family, direction) in features.BY_NAME[name].kernels for name, _ in case.options)


# What hides keys, with numbers of queries and keys: causal where all keys are one tile, where they are two, and where
# full tiles follow.
HIDING = [
    *((CAUSAL, seqlens, 64) for seqlens in ((90, 100), (70, 150), (150, 250))),
    ((("window", (40, 5)),), (150, 250), 64),
    ((("window", (40, 5)),), (300, 400), 128),  # the next output tile has begun when it shows
    ((("window", (30, None)), ("softcap", 3.0)), (150, 250), 64),
    ((("mask", "of batches and keys"),), (150, 250), 64),
    ((("mask", "of every element"), ("bias", "of keys")), (70, 150), 64),
    ((("mask_mod", "documents"),), (150, 250), 64),
    ((("mask_mod", "prefix"), ("score_mod", "alibi")), (90, 150), 192),
]


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
@pytest.mark.parametrize(("options", "seqlens", "head_dim"), HIDING)
@pytest.mark.parametrize(("family", "direction"), DIRECTIONS)
def test_hidden_keys_have_no_influence(family, direction, options, seqlens, head_dim, garbage):
    """Rows that do not see a key do not notice what it holds; those that do get what the reference gets."""
    dtype = KERNELS[kernel_of(family, direction)].dtypes[-1]
    case = Case(1, *seqlens, 2, 1, head_dim, 64, dtype, options=options)
    if not takes(family, direction, case):
        pytest.skip(f"{family} does not take it")
    arrays = {name: array.copy() for name, array in inputs(case, "backward").items()}
    arrays["v"][0, -50, 0, 3] = garbage
    arrays["k"][0, -20, 0] = garbage
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    out, lse = reference.attention(q, k, v, **case.call)
    if direction == "forward":
        expected, given = {"o": out, "lse": lse}, {"q": q, "k": k, "v": v, **case.feature_arrays()}
    else:
        gradients = reference.attention_backward(dout, q, k, v, **case.call, **case.returns)
        expected = dict(zip(("dq", "dk", "dv", *(f"d{n}" for n in case.differentiated)), gradients, strict=True))
        given = {**arrays, "o": out.astype(q.dtype), "lse": lse.astype(case.lse_dtype)}
    results = plans.run_plan(plan_of(family, direction, case), given, seed=1)
    tolerance = 0.05 if q.dtype.itemsize == 2 else 1e-5
    for name, right in expected.items():
        np.testing.assert_allclose(results[name].astype(np.float64), right, tolerance, tolerance, err_msg=name)


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
@pytest.mark.parametrize("array", ["q", "dout"])
@pytest.mark.parametrize(
    ("head_dim", "seqlens"), [(64, (130, 100)), (64, (230, 200)), (256, (90, 60)), (256, (230, 200))]
)
@pytest.mark.parametrize("family", [family for family, direction in DIRECTIONS if direction == "backward"])
def test_queries_that_do_not_see_a_key_have_no_influence(family, head_dim, seqlens, array, garbage):
    """Garbage in a query that sees no key, in one that sees some, and in one that sees all but a few."""
    dtype = KERNELS[f"bwd_{family}"].dtypes[-1]
    case = Case(1, *seqlens, 2, 1, head_dim, 64, dtype, options=CAUSAL)
    arrays = {name: a.copy() for name, a in case.arrays().items()}
    arrays[array][0, [20, seqlens[0] // 2], 0, 3] = garbage
    arrays[array][0, -20, 1] = garbage
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    with np.errstate(all="ignore"):
        out, lse = reference.attention(q, k, v, causal=True)
        expected = reference.attention_backward(dout, q, k, v, causal=True)
        given = {**arrays, "o": out.astype(q.dtype), "lse": lse.astype(case.lse_dtype)}
        results = plans.run_plan(plan_of(family, "backward", case), given, seed=1)
    tolerance = 0.05 if q.dtype.itemsize == 2 else 1e-5
    for name, right in zip(("dq", "dk", "dv"), expected, strict=True):
        result = results[name].astype(np.float64)
        assert np.array_equal(np.isfinite(result), np.isfinite(right)), name
        seen = np.isfinite(right)
        np.testing.assert_allclose(result[seen], right[seen], tolerance, tolerance, err_msg=name)


def tiled_plan(case: Case, tiling: dict[str, int]) -> Plan:
    problem = plans.make_problem(inputs(case, "forward"), softmax_scale=case.softmax_scale, options=case.scalars)
    with tiled(**tiling):
        return plan_launches(problem, device_of((9, 0)), ("sm90",))


@pytest.mark.parametrize("tiled_case", TILINGS)
def test_tilings(tiled_case):
    """Several heads in a tile, keys in parts: right, and the same bits whatever the timing."""
    case, tiling = TILINGS[tiled_case]
    case = dataclasses.replace(case, dtype=KERNELS["fwd_sm90"].dtypes[len(tiled_case) % 2])
    plan, arrays = tiled_plan(case, tiling), inputs(case, "forward")
    plans.build(plan.launches)
    first = plans.run_plan(plan, arrays)
    check(case, arrays, first)
    for seed in (1, 2):
        assert_same_bits(first, plans.run_plan(plan, arrays, seed=seed, resident=2, shuffled=True))


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
@pytest.mark.parametrize("tiling", [{"pack": 7, "splits": 1}, {"pack": 1, "splits": 3}, {"pack": 7, "splits": 3}])
def test_hidden_keys_have_no_influence_in_any_tiling(tiling, garbage):
    case = Case(1, 70, 400, 7, 1, 64, 64, "float16", options=CAUSAL)
    arrays = {name: array.copy() for name, array in inputs(case, "forward").items()}
    arrays["v"][0, -50, 0, 3] = garbage
    arrays["k"][0, -20, 0] = garbage
    out, lse = reference.attention(*(arrays[name] for name in "qkv"), causal=True)
    results = plans.run_plan(tiled_plan(case, tiling), arrays, seed=1)
    for name, right in {"o": out, "lse": lse}.items():
        np.testing.assert_allclose(results[name].astype(np.float64), right, 0.05, 0.05, err_msg=name)


@pytest.mark.parametrize("family", [family for family, direction in DIRECTIONS if direction == "forward"])
def test_without_lse(family):
    case = dataclasses.replace(CASES["causal"], dtype=KERNELS[f"fwd_{family}"].dtypes[0])
    arrays = inputs(case, "forward")
    results = plans.run_plan(plan_of(family, "forward", case, wants_lse=False), arrays)
    assert set(results) == {"o"}
    check(case, arrays, results)


@pytest.mark.parametrize("family", [family for family, direction in DIRECTIONS if direction == "forward"])
@pytest.mark.parametrize("layout", ["heads first", "wide rows", "one off"])
def test_out_of_any_layout(family, layout):
    """What lies between the elements of the caller's `out` stays as it was."""
    case = dataclasses.replace(CASES["causal"], dtype=KERNELS[f"fwd_{family}"].dtypes[0])
    arrays = inputs(case, "forward")
    out = LAYOUTS[layout].place(np.zeros(case.shapes["dout"], np.float32), arrays["q"].dtype)
    problem = plans.make_problem({**arrays, "o": out}, options=case.scalars)
    try:
        plan = plan_launches(problem, DEVICE, (family,))
    except Unsupported as reason:
        pytest.skip(str(reason))
    check(case, arrays, plans.run_plan(plan, arrays, seed=1, out=out))
