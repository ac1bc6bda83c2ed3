"""Every family against the oracle: the named cases, whatever Hypothesis thinks of, and what is known exactly.

Outputs and workspace start as NaN, and the memory around them is watched.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import runs
from assert_close import assert_attention, assert_gradients
from cases import CASES, HALVES, Case, cases, taken
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import DTYPES, FAMILY_DTYPES, cp, in_dtype

import pyflash
from pyflash import debug
from pyflash.errors import Unsupported

# Hopper's family refuses arrays that its copy engine cannot address; the others refuse nothing of their dtypes.
PICKY = ("sm90",)
# A few extents, so that the same kernels serve many examples: whole, padded, mixed, large.
HEAD_DIMS = ((64, 64), (128, 128), (40, 72), (96, 16), (256, 256))
EXAMPLES = 60


def check_forward(case: Case, family: str) -> None:
    q, k, v = (case.arrays()[name] for name in "qkv")
    assert_attention(*runs.forward(case, family), q, k, v, **case.call)


def check_backward(case: Case, family: str, **options: object) -> None:
    arrays = case.arrays()
    given = [arrays[name] for name in ("dout", "q", "k", "v")]
    more = {"dlse": arrays.get("dlse"), "differentiated": case.differentiated, **case.call}
    assert_gradients(runs.backward(case, family, **options), *given, **more)


@st.composite
def cases_of(draw, family: str) -> Case:
    case = draw(cases(dtypes=DTYPES[family]))
    head_dim, head_dim_v = draw(st.sampled_from(HEAD_DIMS))
    return taken(family, replace(case, head_dim=head_dim, head_dim_v=head_dim_v))


def property_of(family: str, body):
    """`body(case)` for many cases of a family."""

    @settings(max_examples=EXAMPLES)
    @given(cases_of(family))
    def check(case):
        body(case)

    return check


NAMED = [(family, name, in_dtype(case, dtype)) for family, dtype in FAMILY_DTYPES for name, case in CASES.items()]
IDS = [f"{family}-{case.dtype}-{name}" for family, name, case in NAMED]


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead(request):
    """The kernels of the tests that were asked for. Hypothesis draws the same examples here and in its test."""
    calls, bodies = [], {"forward": runs.forward, "backward": runs.backward}
    for item in request.session.items:
        body = bodies.get(getattr(item, "originalname", "").rpartition("_")[2])
        if item.path == request.path and body:
            family, case = item.callspec.params["family"], item.callspec.params.get("case")
            calls.append(partial(body, case, family) if case else property_of(family, partial(body, family=family)))
    runs.compile_ahead(calls)


@pytest.mark.parametrize("family, name, case", NAMED, ids=IDS)
def test_forward(family, name, case):
    try:
        check_forward(case, family)
    except Unsupported as error:
        assert family in PICKY
        pytest.skip(str(error))


@pytest.mark.parametrize("family, name, case", NAMED, ids=IDS)
def test_backward(family, name, case):
    try:
        check_backward(case, family)
    except Unsupported as error:
        assert family in PICKY
        pytest.skip(str(error))


@pytest.mark.parametrize("family", DTYPES)
def test_any_forward(family):
    property_of(family, lambda case: check_forward(case, family))()


@pytest.mark.parametrize("family", DTYPES)
def test_any_backward(family):
    property_of(family, lambda case: check_backward(case, family))()


@pytest.mark.parametrize("family", DTYPES)
def test_deterministic_gradients_are_right_too(family):
    for name in ("causal", "plain", "groups of 4, three of them", "causal, more queries than keys"):
        case = in_dtype(replace(CASES[name], seqlen_q=300, seqlen_k=450), DTYPES[family][0])
        check_backward(case, family, deterministic=True)


# Just short of, at and just past the edges of tiles of any size.
EDGES = ((1, 129), (31, 33), (63, 65), (64, 64), (65, 63), (127, 129), (128, 128), (129, 127))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("family", DTYPES)
def test_gradients_at_the_edges_of_tiles(family, head_dim, causal):
    """With log-sum-exps far below and far above zero."""
    for seqlen_q, seqlen_k in EDGES:
        case = Case(1, seqlen_q, seqlen_k, 2, 1, head_dim, head_dim, DTYPES[family][-1], values="row levels")
        check_backward(replace(case, options=(("causal", True),) if causal else ()), family)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_families_agree(head_dim, dtype):
    """Gradients of the same numbers: the 16-bit families', and in float32."""
    case = Case(2, 300, 450, 4, 2, head_dim, head_dim, dtype, options=(("causal", True),))
    q, k, v, dout = case.arrays(cp).values()

    def gradients(family, *arrays):
        with debug.families(family):
            out, lse = pyflash.flash_attention(*arrays[1:], causal=True, return_lse=True)
            return pyflash.flash_attention_backward(*arrays, out, lse, causal=True)

    expected = gradients("simt", *(a.astype("float32") for a in (dout, q, k, v)))
    rounding = {"float16": 2**-10, "bfloat16": 2**-7}[dtype]
    for family in (family for family, dtypes in DTYPES.items() if dtype in dtypes):
        for got, want in zip(gradients(family, dout, q, k, v), expected, strict=True):
            assert cp.linalg.norm(got.astype("float32") - want) < rounding * cp.linalg.norm(want), family


@pytest.mark.parametrize("family, dtype", FAMILY_DTYPES)
def test_equal_scores_give_the_mean_of_v(family, dtype):
    """For every length up to two tiles and more: padding must never enter the denominator."""
    for seqlen_k in (*range(1, 40), *range(40, 290, 7)):
        case = Case(1, 3, seqlen_k, 1, 1, 64, 64, dtype, values="q zero", seed=seqlen_k)
        out, lse = runs.forward(case, family)
        mean = case.arrays()["v"].astype(np.float64).mean(1, keepdims=True)
        np.testing.assert_allclose(out, np.broadcast_to(mean, out.shape), atol=4e-3 if dtype in HALVES else 1e-6)
        np.testing.assert_allclose(lse, np.log(seqlen_k), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family, dtype", FAMILY_DTYPES)
def test_one_key_gives_its_value_exactly(family, dtype):
    case = Case(2, 5, 1, 4, 2, 16, 16, dtype, values="times 3")
    arrays = case.arrays()
    out, _ = runs.forward(case, family)
    expected = np.broadcast_to(np.repeat(arrays["v"], 2, axis=2), out.shape).astype(float)
    # p is 1 up to the rounding of the exponent, which rounding p to 16 bits takes away.
    rtol = {"float32": 4e-6, "float64": 1e-14}.get(dtype, 0)
    np.testing.assert_allclose(out.astype(float), expected, rtol=rtol)
    dq, dk, dv = runs.backward(case, family)
    bound = {"float16": 2e-2, "bfloat16": 2e-1, "float32": 1e-4, "float64": 1e-12}[dtype]
    assert np.abs(dq.astype(float)).max() <= bound and np.abs(dk.astype(float)).max() <= bound
    one = replace(case, seqlen_q=1, heads_kv=4)
    dv, dout = (a.astype(float) for a in (runs.backward(one, family)[2], one.arrays()["dout"]))
    np.testing.assert_allclose(dv, dout, rtol=0 if dtype in HALVES else 1e-6)


@pytest.mark.parametrize("family, dtype", FAMILY_DTYPES)
def test_constant_v_gives_that_constant(family, dtype):
    out, _ = runs.forward(Case(dtype=dtype, values="v constant", options=(("causal", True),)), family)
    np.testing.assert_allclose(out[:, :].astype(np.float64), 1.5, rtol=2e-3 if dtype in HALVES else 1e-6)


@pytest.mark.parametrize("family", DTYPES)
def test_the_order_of_keys_does_not_matter(family):
    case = Case(dtype=DTYPES[family][-1], seqlen_k=300)
    q, k, v, _ = case.arrays(cp).values()
    order = np.random.default_rng(1).permutation(300).tolist()
    with debug.families(family):
        a, b = (pyflash.flash_attention(q, x, y) for x, y in ((k, v), (k[:, order], v[:, order])))
    bound = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6, "float64": 1e-14}[case.dtype]
    np.testing.assert_allclose(cp.asnumpy(a).astype(float), cp.asnumpy(b).astype(float), atol=bound)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("family, dtype", FAMILY_DTYPES)
def test_what_is_not_seen_has_no_influence(family, dtype, poison):
    """Keys that a query does not see may hold anything."""
    case = Case(1, 150, 150, 2, 1, 64, 64, dtype, options=(("causal", True),))
    arrays = case.arrays()
    clean, dirty = ({n: cp.asarray(a) for n, a in arrays.items()} for _ in range(2))
    for name in "kv":
        host = arrays[name].copy()
        host[:, 100:] = poison
        dirty[name] = cp.asarray(host)
    with debug.families(family):
        outs = [pyflash.flash_attention(*(x[n] for n in "qkv"), causal=True, return_lse=True) for x in (clean, dirty)]
        for a, b in zip(*outs, strict=True):
            rows = (slice(None), slice(0, 100)) if a.ndim == 4 else (slice(None), slice(None), slice(0, 100))
            a, b = (cp.asnumpy(x)[rows].astype(float) for x in (a, b))
            # sm90 sums the rows of such a tile anew, in another order: they may round differently.
            rounding = {"float16": 2**-10, "bfloat16": 2**-7}[dtype] if family == "sm90" else 0
            np.testing.assert_allclose(a, b, rtol=rounding, atol=rounding / 16)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("poisoned", ["q", "dout"])
@pytest.mark.parametrize("family, dtype", FAMILY_DTYPES)
def test_queries_have_no_influence_on_keys_that_they_do_not_see(family, dtype, poisoned, poison):
    """Query i sees keys up to i - 100, the first 100 of them none: whatever those hold, every gradient stays as it is.
    What a later one holds reaches dk and dv of the keys that it sees, and no others."""
    case = Case(1, 400, 300, 2, 1, 64, 64, dtype, options=(("causal", True),))

    def gradients(rows: slice):
        arrays = case.arrays()
        q, k, v = (cp.asarray(arrays[name]) for name in "qkv")
        with debug.families(family):
            out, lse = pyflash.flash_attention(q, k, v, causal=True, return_lse=True)
            arrays[poisoned][:, rows] = poison
            q, dout = (cp.asarray(arrays[name]) for name in ("q", "dout"))
            if poisoned == "q":
                out, lse = pyflash.flash_attention(q, k, v, causal=True, return_lse=True)
            results = pyflash.flash_attention_backward(dout, q, k, v, out, lse, causal=True, deterministic=True)
        return [cp.asnumpy(a).astype(float) for a in results]

    clean = gradients(slice(0, 0))
    for a, b in zip(gradients(slice(0, 100)), clean, strict=True):
        assert np.array_equal(a, b)
    for row in (100, 163, 290, 399):
        dq, dk, dv = gradients(slice(row, row + 1))
        assert np.isfinite(np.delete(dq, row, axis=1)).all()
        for a, b in ((dk, clean[1]), (dv, clean[2])):
            first_hidden = row - 100 + 1
            assert np.array_equal(a[:, first_hidden:], b[:, first_hidden:])
            assert not np.isfinite(a[:, :first_hidden]).any()


@pytest.mark.parametrize("family, dtype", FAMILY_DTYPES)
def test_arrays_that_lie_otherwise_give_the_same_bits(family, dtype):
    """Layouts that allow wide accesses take the same path as contiguous arrays."""
    case = Case(1, 62, 62, 2, 2, 128, 128, dtype, options=(("causal", True),))
    expected = runs.forward(case, family)
    gradients = runs.backward(case, family, deterministic=True)
    for place in range(3):
        for layout in ("heads first", "packed", "wide rows"):
            layouts = tuple(layout if i == place else "contiguous" for i in range(4))
            for a, b in zip(runs.forward(replace(case, layouts=layouts), family), expected, strict=True):
                assert np.array_equal(a, b), layouts
    for place in range(4):
        layouts = tuple("heads first" if i == place else "contiguous" for i in range(4))
        for a, b in zip(
            runs.backward(replace(case, layouts=layouts), family, deterministic=True), gradients, strict=True
        ):
            assert np.array_equal(a, b), layouts


@pytest.mark.parametrize("family", DTYPES)
def test_out_of_any_layout_is_written_and_nothing_else(family):
    dtype = DTYPES[family][0]
    case = Case(2, 70, 90, 4, 2, 64, 40, dtype)
    q, k, v, _ = case.arrays(cp).values()
    with debug.families(family):
        expected = cp.asnumpy(pyflash.flash_attention(q, k, v))
        memory = cp.full((2, 4, 70, 2, 48), 7, dtype)
        out = memory[:, :, :, 1, :40].swapaxes(1, 2)
        try:
            assert pyflash.flash_attention(q, k, v, out=out) is out
        except Unsupported:
            assert family in PICKY
            return
    host = cp.asnumpy(memory)
    assert np.array_equal(host[:, :, :, 1, :40].swapaxes(1, 2), expected)
    host[:, :, :, 1, :40] = 7
    assert (host == 7).all()
