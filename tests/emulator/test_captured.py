"""Gradients of the arrays that a score_mod captures, by every kernel: against the oracle."""

from __future__ import annotations

import numpy as np
import plans
import pytest
from cases import CAUSAL, Case
from problems import device_of

import pyflash
from pyflash import features, reference
from pyflash.errors import Unsupported
from pyflash.plan import plan
from pyflash.tiles import FAMILIES, KERNELS

RNG = np.random.default_rng(0)
TABLE = RNG.standard_normal((2, 60))
HALF = (0.5 * RNG.standard_normal((2, 40, 2))).astype(np.float16)[:, ::-1]
IDS = np.arange(300, dtype=np.int64) // 9

# Functions; the arrays that have gradients, in the order in which they are read; whether they only add to the score.
LEARNED = {
    "added": (lambda s, b, h, i, j: s + TABLE[h, (i - j) // 4 + 30] + HALF[b, j // 4, h], [TABLE, HALF], True),
    "many ways": (
        lambda s, b, h, i, j: pyflash.tanh(s * TABLE[h, 59]) + pyflash.exp(HALF[b, IDS[i], 1]) * TABLE[h, j // 3],
        [TABLE, HALF],
        False,
    ),
}
CASES = {
    "causal, grouped": Case(2, 150, 200, 2, 1, 64, 64, options=CAUSAL, dlse=True),
    "window, bias, dropout, prefix": Case(
        2, 130, 170, 2, 2, 64, 48, seed=3,
        options=(("window", (90, 40)), ("bias", "of keys"), ("dropout_p", 0.2), ("mask_mod", "prefix")),
    ),
    "blocks, wide heads": Case(1, 200, 150, 2, 2, 192, 256, options=(("block_mask", "near or first"),)),
    "softcap": Case(1, 90, 110, 2, 2, 128, 128, options=(("softcap", 3.0),)),
}  # fmt: skip
BACKWARDS = [family for family in FAMILIES if f"bwd_{family}" in KERNELS]
DEVICE = device_of((9, 0))


def problem_of(case: Case, function, **call):
    """The problem, its arrays, and the options of the oracle."""
    options = {"score_mod": function, **case.call}
    options.pop("softmax_scale")
    scalars, captured = features.parted(features.check({n: x for n, x in options.items() if n != "seed"}))
    arrays = {**case.arrays(), **captured}
    with np.errstate(all="ignore"):
        out, lse = reference.attention(*(arrays[name] for name in "qkv"), **options)
    arrays |= {"o": out.astype(arrays["q"].dtype), "lse": lse.astype(case.lse_dtype)}
    call = {"backward": True, "options": scalars, "gradients": ("score_mod",), **call}
    return plans.make_problem(arrays, **call), arrays, options


RUNS = [("added", name) for name in CASES] + [
    ("many ways", name) for name in ("window, bias, dropout, prefix", "softcap")
]


@pytest.mark.parametrize(("function", "name"), RUNS)
@pytest.mark.parametrize("family", BACKWARDS)
def test_gradients_of_what_a_function_captures(family, function, name):
    dtypes = KERNELS[f"bwd_{family}"].dtypes
    case = Case(**{**CASES[name].__dict__, "dtype": dtypes[list(CASES).index(name) % len(dtypes)]})
    score_mod, learned, adds = LEARNED[function]
    problem, arrays, options = problem_of(case, score_mod)
    if family == "sm90" and ("softcap" in options or not adds):
        with pytest.raises(Unsupported, match="sm90: .*return_dscore_mod"):
            plan(problem, DEVICE, (family,))
        return
    found = plans.run_plan(plan(problem, DEVICE, (family,)), arrays, seed=1, dropout_seed=case.dropout_seed)
    given = (arrays[n].astype(np.float64) for n in ("dout", "q", "k", "v"))
    call = {"dlse": arrays.get("dlse"), "return_dscore_mod": True, **options}
    *others, rights = reference.attention_backward(*given, **call)
    named = features.BY_NAME["score_mod"].differentiated(problem.option("score_mod"))
    made = [found[f"d{name}"] for name in ("q", "k", "v", *named)]
    assert [x.dtype for x in made[3:]] == [array.dtype for array in learned]
    half = arrays["q"].dtype.itemsize == 2
    for got, right in zip(made, (*others, *rights), strict=True):
        size, bar = np.sqrt(np.mean(right**2)), 0.02 if half or got.dtype == np.float16 else 1e-4
        assert np.sqrt(np.mean((got.astype(np.float64) - right) ** 2)) <= bar * size
        assert np.abs(got.astype(np.float64) - right).max() <= 4 * bar * np.abs(right).max()


def test_what_has_no_weight_adds_nothing():
    """Not even where the derivative, or a hidden value, is not a number."""
    case = Case(1, 40, 70, 2, 2, 64, 64, options=(*CAUSAL, ("mask", "of batches and keys")))
    function = lambda s, b, h, i, j: pyflash.where(j < 20, s + TABLE[h, i], -float("inf"))  # noqa: E731
    problem, arrays, options = problem_of(case, function)
    hidden = np.flatnonzero(~options["mask"][0, 0, 0])
    arrays["v"][0, hidden[0]] = np.nan
    found = plans.run_plan(plan(problem, DEVICE, ("simt",)), arrays)
    arrays["v"][0, hidden[0]] = 0
    given = (arrays[n] for n in ("dout", "q", "k", "v"))
    *_, (right,) = reference.attention_backward(*given, return_dscore_mod=True, **options)
    np.testing.assert_allclose(found["dmod_array_0"], right, 1e-4, 1e-5)


@pytest.mark.parametrize("family", BACKWARDS)
def test_sums_have_no_order(family):
    dtype = KERNELS[f"bwd_{family}"].dtypes[0]
    problem, _, _ = problem_of(Case(1, 9, 9, 2, 2, 64, 64, dtype), LEARNED["added"][0], deterministic=True)
    with pytest.raises(Unsupported, match="deterministic: got True with return_dscore_mod.*takes False"):
        plan(problem, DEVICE, (family,))
