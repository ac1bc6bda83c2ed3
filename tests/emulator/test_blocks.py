"""Block masks as a GPU makes them, and walks that they make irregular."""

from __future__ import annotations

import numpy as np
import plans
import pytest
from cases import Case
from problems import device_of
from test_kernels import DIRECTIONS, assert_same_bits, check, inputs, kernel_of, plan_of

from pyflash import features, masks, reference
from pyflash.blocks import Blocks
from pyflash.plan_blocks import MaskProblem, plan_blocks
from pyflash.tiles import KERNELS
from pyflash.trace import trace

IDS = np.sort(np.random.default_rng(0).integers(0, 6, (2, 700)), -1).astype(np.int32)
MASKS = {
    "documents": masks.and_masks(masks.documents(IDS), masks.causal()),
    "heads": lambda b, h, i, j: (i // 100 + h) % 3 != j // 90 % 3,
    "corners": lambda b, h, i, j: (i % 128 + j % 64 > 0) & ((i < 300) | (j > 500) | (i % 128 + j % 64 == 190)),
    "nothing": lambda b, h, i, j: i < 0,
}


@pytest.mark.parametrize("sizes", [(2, 2, 700, 690), (1, 1, 0, 5), (2, 1, 65, 1)])
@pytest.mark.parametrize("name", MASKS)
def test_a_gpu_finds_the_blocks_that_numpy_does(name, sizes):
    mod = trace("mask_mod", MASKS[name])
    arrays = features.parted({"mask_mod": mod})[1]
    captured = tuple((slot, plans.tensor_of(array)) for slot, array in arrays.items())
    asked = MaskProblem(Blocks(*sizes, 128, 64), mod._replace(arrays=()), captured)
    expected = asked.evaluate(arrays)
    for seed in (0, 1):
        found = plans.run_plan(plan_blocks(asked, device_of((9, 0))), arrays, seed=seed, resident=3, shuffled=True)
        np.testing.assert_array_equal(found["kinds"], expected["kinds"])
        for lists in ("key_blocks", "query_blocks"):
            counts = expected[lists][..., :1]
            listed = np.arange(expected[lists].shape[-1]) <= counts
            np.testing.assert_array_equal(found[lists][listed], expected[lists][listed])


@pytest.mark.parametrize("family", [f for f, direction in DIRECTIONS if direction == "backward"])
def test_deterministic_gradients(family):
    """CTAs that wait for each other know how many there are where a list leaves some out."""
    if f"bwd_{family}" not in features.BY_NAME["block_mask"].kernels:
        pytest.skip(f"{family} does not take it")
    options = (("window", (330, 10)), ("block_mask", "near or first"))
    case = Case(1, 450, 600, 2, 1, 64, 64, KERNELS[f"bwd_{family}"].dtypes[0], options=options)
    arrays, plan = inputs(case, "backward"), plan_of(family, "backward", case, deterministic=True)
    first, *others = (plans.run_plan(plan, arrays, seed=seed, resident=3) for seed in range(3))
    check(case, arrays, first)
    for other in others:
        assert_same_bits(first, other)


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
@pytest.mark.parametrize(("family", "direction"), DIRECTIONS)
def test_what_blocks_hide_has_no_influence(family, direction, garbage):
    """Nor does what a partial block hides."""
    if kernel_of(family, direction) not in features.BY_NAME["block_mask"].kernels:
        pytest.skip(f"{family} does not take it")
    dtype = KERNELS[kernel_of(family, direction)].dtypes[-1]
    case = Case(1, 300, 400, 2, 1, 64, 64, dtype, options=(("block_mask", "documents"),))
    arrays = {name: array.copy() for name, array in inputs(case, "backward").items()}
    for name, place in (("v", 5), ("v", 390), ("k", 200), ("q", 150), ("dout", 160)):
        arrays[name][0, place, 0, 3] = garbage
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    with np.errstate(all="ignore"):
        out, lse = reference.attention(q, k, v, **case.call)
        if direction == "forward":
            expected, given = {"o": out, "lse": lse}, {"q": q, "k": k, "v": v, **case.feature_arrays()}
        else:
            gradients = reference.attention_backward(dout, q, k, v, **case.call)
            expected = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
            given = {**arrays, "o": out.astype(q.dtype), "lse": lse.astype(case.lse_dtype)}
        results = plans.run_plan(plan_of(family, direction, case), given, seed=1)
    tolerance = 0.05 if q.dtype.itemsize == 2 else 1e-5
    for name, right in expected.items():
        result, seen = results[name].astype(np.float64), np.isfinite(right)
        assert np.array_equal(np.isfinite(result), seen), name
        np.testing.assert_allclose(result[seen], right[seen], tolerance, tolerance, err_msg=name)
