"""The same call gives the same result: again, after other calls, from other threads, whatever else the GPU does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from cases import CASES, LARGE_CASES, Case
from runs import DTYPES, cp, in_dtype

import pyflash
from pyflash import debug, dispatch, reference

CAUSAL = (("causal", True),)


def call(arrays: dict, family: str | None = None, **options: object) -> list:
    """out, lse, dq, dk, dv on the GPU."""
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    deterministic = options.pop("deterministic", False)
    families = (family,) if family else tuple(DTYPES)
    with debug.families(*families):
        out, lse = pyflash.flash_attention(q, k, v, return_lse=True, **options)
        gradients = pyflash.flash_attention_backward(dout, q, k, v, out, lse, deterministic=deterministic, **options)
    return [out, lse, *gradients]


def bits(arrays: list) -> list[bytes]:
    return [cp.asnumpy(a).tobytes() for a in arrays]


@pytest.fixture
def busy():
    """A second stream that has something to do for as long as the test runs."""
    stream, block = cp.cuda.Stream(non_blocking=True), cp.zeros(2**25, np.float32)

    def more():
        with stream:
            for _ in range(20):
                cp.cuda.runtime.memsetAsync(block.data.ptr, 1, block.nbytes, stream.ptr)

    yield more
    stream.synchronize()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("family", DTYPES)
def test_deterministic_means_bitwise(family, head_dim, causal, busy):
    arrays = Case(2, 500, 700, 6, 2, head_dim, head_dim, DTYPES[family][-1]).arrays(cp)
    first = bits(call(arrays, family, causal=causal, deterministic=True))
    for _ in range(30):
        busy()
        assert bits(call(arrays, family, causal=causal, deterministic=True)) == first


def assert_differs_by_rounding(dq, other) -> None:
    """dq is summed in any order, in float32, and rounded once: at most a last bit changes."""
    eps = {2: 4e-3, 4: 1e-5, 8: 1e-13}[dq.dtype.itemsize]
    assert float(cp.abs(dq.astype(float) - other.astype(float)).max()) <= eps * float(cp.abs(other.astype(float)).max())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("family", DTYPES)
def test_a_hundred_runs_are_alike(family, head_dim, causal, busy):
    """Bit by bit, but for dq."""
    arrays = Case(2, 500, 700, 6, 2, head_dim, head_dim, DTYPES[family][0]).arrays(cp)
    first = call(arrays, family, causal=causal)
    for run in range(100):
        if run % 10 == 0:
            busy()
        for i, (a, b) in enumerate(zip(call(arrays, family, causal=causal), first, strict=True)):
            if i == 2:
                assert_differs_by_rounding(a, b)
            else:
                assert (a.view(np.uint8) == b.view(np.uint8)).all()


@pytest.mark.parametrize("name", ["many short key ranges", "many long key ranges"])
def test_a_hundred_backward_runs_are_all_right(name):
    """Every CTA's start and end counts, and nothing is read before it is written."""
    arrays, some = LARGE_CASES[name].arrays(cp), [0, 1, -1]
    few = {name: cp.asnumpy(a[some]) for name, a in arrays.items()}
    expected = reference.attention_backward(few["dout"], few["q"], few["k"], few["v"])
    first = None
    for _ in range(100):
        results = call(arrays)[2:]
        if first is None:
            first = results
            for got, want in zip(results, expected, strict=True):
                error = np.abs(cp.asnumpy(got[some]).astype(float) - want).max()
                assert error < 2e-2 * np.abs(want).max()
        for a, b in zip(results, first, strict=True):
            assert_differs_by_rounding(a, b)


def variants() -> list[dict]:
    """Calls of one shape that differ in layout, dtype, broadcasting or alignment."""
    base = Case(2, 70, 90, 4, 2, 64, 64, "float16")
    changed = [
        base,
        replace(base, layouts=("heads first",) * 4),
        replace(base, layouts=("one batch for all",) * 4),
        replace(base, layouts=("one off",) * 4),
        replace(base, layouts=("contiguous", "one off", "heads first", "one number")),
        replace(base, layouts=("backwards",) * 4),
        replace(base, dtype="bfloat16"),
        replace(base, dtype="float32"),
        replace(base, dtype="float64"),
    ]
    return [case.arrays(cp) for case in changed]


def test_the_result_never_depends_on_the_calls_before():
    options = [{"causal": False}, {"causal": True}, {"causal": True, "softmax_scale": -0.1}]
    calls = [(arrays, option) for arrays in variants() for option in options]
    fresh = []
    for arrays, option in calls:
        dispatch._prepared.clear()
        fresh.append(bits(call(arrays, deterministic=True, **option)))
    for order in (range(len(calls)), reversed(range(len(calls))), np.random.default_rng(0).permutation(len(calls))):
        for i in order:
            arrays, option = calls[i]
            assert bits(call(arrays, deterministic=True, **option)) == fresh[i]


def test_new_addresses_are_used():
    """A remembered call runs on the arrays that it is given, not on those that it was first made for."""
    case = in_dtype(CASES["causal"], "float16")
    expected = [bits(call(replace(case, seed=seed).arrays(cp), deterministic=True)) for seed in range(4)]
    keep = [replace(case, seed=seed).arrays(cp) for seed in range(4)]
    assert [bits(call(arrays, deterministic=True)) for arrays in keep] == expected
    assert len({results[0] for results in expected}) == 4


@pytest.mark.parametrize(
    "scale",
    [0.375, np.float64(0.375), np.float32(0.375), np.float16(0.375), np.array(0.375)],
    ids=lambda scale: type(scale).__name__,
)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_kernel_sees_any_scalar(scale, dtype):
    arrays = Case(dtype=dtype, seqlen_k=40).arrays(cp)
    expected = bits(call(arrays, softmax_scale=0.375, deterministic=True))
    assert bits(call(arrays, softmax_scale=scale, deterministic=True)) == expected
    assert bits(call(arrays, softmax_scale=0.5, deterministic=True)) != expected
    doubled = bits(call(arrays, softmax_scale=2.0, deterministic=True))
    assert bits(call(arrays, softmax_scale=2, deterministic=True)) == doubled


def test_threads_do_not_disturb_each_other():
    jobs = []
    for seed in range(24):
        case = Case(1 + seed % 3, 40 + 13 * (seed % 5), 150, 4, 2, 64, 64, ("float16", "float32")[seed % 2], seed=seed)
        jobs.append((case.arrays(cp), {"causal": seed % 3 == 0}))
    expected = [bits(call(arrays, deterministic=True, **options)) for arrays, options in jobs]
    dispatch._prepared.clear()

    def work(job):
        arrays, options = job
        with cp.cuda.Device(0), cp.cuda.Stream(non_blocking=True) as stream:
            for _ in range(5):
                results = call_unforced(arrays, **options)
            stream.synchronize()
            return bits(results)

    cp.cuda.Device().synchronize()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, jobs)) == expected


def call_unforced(arrays: dict, **options: object) -> list:
    """As `call`, without narrowing the families, which is not made for threads."""
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    out, lse = pyflash.flash_attention(q, k, v, return_lse=True, **options)
    return [out, lse, *pyflash.flash_attention_backward(dout, q, k, v, out, lse, deterministic=True, **options)]
