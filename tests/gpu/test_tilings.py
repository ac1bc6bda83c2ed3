"""Hopper's forward with several heads in a tile and keys in parts: right, repeatable, in graphs, and chosen."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import runs
from assert_close import assert_attention
from cases import Case
from runs import DTYPES, cp
from tilings import TILINGS, tiled

import pyflash
from pyflash import reference
from pyflash.device import present

FAMILY = "sm90"


def forward(name: str, dtype: str):
    case, tiling = TILINGS[name]
    with tiled(**tiling):
        return runs.forward(replace(case, dtype=dtype), FAMILY)


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead():
    if present(0).capability != (9, 0):
        pytest.skip("the GPU is no Hopper")
    runs.compile_ahead(partial(forward, name, dtype) for name in TILINGS for dtype in DTYPES[FAMILY])


@pytest.mark.parametrize("dtype", DTYPES[FAMILY])
@pytest.mark.parametrize("name", TILINGS)
def test_forward(name, dtype):
    case = replace(TILINGS[name][0], dtype=dtype)
    assert_attention(*forward(name, dtype), *(case.arrays()[name] for name in "qkv"), **case.call)


@pytest.mark.parametrize("name", ["one query of seven heads", "a head a warp", "parts with no visible key"])
def test_two_hundred_repeats_give_the_same_bits(name):
    case, tiling = TILINGS[name]
    q, k, v, _ = replace(case, dtype="bfloat16").arrays(cp).values()
    with tiled(**tiling):
        out, lse = pyflash.flash_attention(q, k, v, return_lse=True, **case.call)
        for _ in range(200):
            again, lse_again = pyflash.flash_attention(q, k, v, return_lse=True, **case.call)
            assert (again.view(np.uint16) == out.view(np.uint16)).all() and (lse_again == lse).all()


def test_a_graph_of_both_launches_replays_with_new_data():
    case, tiling = TILINGS["a head a warp"]
    data = [list(replace(case, dtype="float16", seed=seed).arrays(cp).values())[:3] for seed in range(2)]
    stream = cp.cuda.Stream(non_blocking=True)
    with tiled(**tiling), stream:
        expected = [cp.asnumpy(pyflash.flash_attention(*arrays, **case.call)) for arrays in data]
        fixed, out = [a.copy() for a in data[0]], cp.empty_like(data[0][0])
        stream.begin_capture()
        pyflash.flash_attention(*fixed, out=out, **case.call)
        graph = stream.end_capture()
        for arrays, want in ((data[1], expected[1]), (data[0], expected[0])):
            for target, array in zip(fixed, arrays, strict=True):
                target[...] = array
            graph.launch(stream)
            stream.synchronize()
            assert np.array_equal(cp.asnumpy(out), want)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_not_seen_has_no_influence(poison):
    case = Case(1, 150, 450, 7, 1, 64, 64, "float16", options=(("causal", True),))
    arrays = case.arrays()
    for name in "kv":
        arrays[name][:, 400:] = poison
    q, k, v = (cp.asarray(arrays[name]) for name in "qkv")
    expected = reference.attention(*(arrays[name][:, : {"q": 100}.get(name, 400)] for name in "qkv"), causal=True)
    for tiling in ({"pack": 7, "splits": 1}, {"pack": 7, "splits": 3}, {"pack": 1, "splits": 3}):
        with tiled(**tiling):
            out, lse = pyflash.flash_attention(q, k, v, causal=True, return_lse=True)
        np.testing.assert_allclose(cp.asnumpy(out[:, :100]).astype(float), expected[0], atol=4e-3)
        np.testing.assert_allclose(cp.asnumpy(lse[..., :100]), expected[1], atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_few_queries_with_many_keys(causal):
    """Such a call is split without being asked for; its output may lie anywhere that the copy engine can reach."""
    case = Case(1, 3, 20000, 8, 2, 128, 128, "bfloat16", options=(("causal", True),) * causal)
    q, k, v, _ = case.arrays(cp).values()
    launches = pyflash.explain(q, k, v, **case.call).plan.launches
    assert [launch.kernel for launch in launches] == ["fwd_sm90", "combine"]
    memory = cp.zeros((1, 8, 3, 256), q.dtype)
    out = memory[..., :128].swapaxes(1, 2)
    _, lse = pyflash.flash_attention(q, k, v, return_lse=True, out=out, **case.call)
    host = [cp.asnumpy(a) for a in (out, lse, q, k, v)]
    assert_attention(*host, **case.call)
    assert not cp.asnumpy(memory[..., 128:]).any()
