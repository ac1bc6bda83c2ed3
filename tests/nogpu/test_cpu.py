"""The tiled algorithm on NumPy arrays, against the oracle and against what must not change its result."""

import tracemalloc

import numpy as np
import pytest
from assert_close import assert_attention, assert_gradients
from cases import CASES, LAYOUTS, Case, cases
from hypothesis import given, settings
from hypothesis import strategies as st

from pyflash import cpu, features

TILE = 8  # rows and columns of the tiles in these tests: many tiles in small problems


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_TILE_ROWS", TILE)
        patch.setattr(cpu, "_TILE_COLUMNS", TILE)
        patch.setattr(cpu, "_STACK_SCORES", 3 * TILE * TILE)
        yield


def poison(shape, dtype, layout: str = "contiguous"):
    """An output that has not been written yet."""
    return LAYOUTS[layout].place(np.full(shape, np.nan), np.dtype(dtype))


def on(case: Case) -> dict[str, object]:
    return features.check({name: value for name, value in case.call.items() if name != "softmax_scale"})


def forward(case: Case, arrays: dict[str, np.ndarray], layout: str = "contiguous"):
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    out, lse = poison(case.shapes["dout"], q.dtype, layout), poison_rows(case)
    cpu.forward(q, k, v, out, lse, softmax_scale=case.scale, on=on(case))
    return out, lse


def poison_rows(case: Case):
    return np.full(case.shapes["lse"], np.nan, case.lse_dtype)


def backward(case: Case, arrays: dict[str, np.ndarray], out, lse, layout: str = "contiguous"):
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    gradients = {f"d{name}": poison(arrays[name].shape, arrays[name].dtype, layout) for name in "qkv"}
    more = {f"d{n}": np.full(on(case)[n].shape, np.nan, on(case)[n].dtype) for n in case.differentiated}
    dlse, call = arrays.get("dlse"), {"softmax_scale": case.scale, "on": on(case), "more": more}
    cpu.backward(arrays["dout"], q, k, v, out, lse, dlse, **gradients, **call)
    return [*gradients.values(), *more.values()]


def check(case: Case, layout: str = "contiguous"):
    arrays = case.arrays()
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    out, lse = forward(case, arrays, layout)
    assert_attention(out, lse, q, k, v, **case.call)
    gradients = backward(case, arrays, out, lse, layout)
    options = {"dlse": arrays.get("dlse"), "differentiated": case.differentiated, **case.call}
    assert_gradients(gradients, arrays["dout"], q, k, v, **options)


@pytest.mark.parametrize("name", CASES)
def test_named_cases(name):
    check(CASES[name])


writable = st.sampled_from(sorted(name for name, layout in LAYOUTS.items() if not layout.repeated))


@settings(max_examples=150)
@given(cases(tile=TILE, max_head_dim=40), writable)
def test_any_call(case, layout):
    check(case, layout)


@settings(max_examples=25)
@given(cases(tile=TILE, max_head_dim=40))
def test_layouts_do_not_change_a_bit(case):
    arrays = case.arrays()
    plain = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    outputs = forward(case, plain)
    for x, y in zip(
        (*forward(case, arrays, "every second"), *backward(case, arrays, *outputs, "heads first")),
        (*outputs, *backward(case, plain, *outputs)),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)


@settings(max_examples=25)
@given(cases(tile=TILE, max_head_dim=16), st.sampled_from([np.nan, np.inf, -np.inf]), st.data())
def test_a_hidden_row_has_no_influence(case, value, data):
    """Also where other rows of its tile see it."""
    case = Case(**{**case.__dict__, "options": (("causal", True),), "values": "normal", "layouts": ("contiguous",) * 4})
    if 0 in (case.batch, case.seqlen_q, case.seqlen_k):
        return
    arrays = case.arrays()
    before = [*forward(case, arrays)]
    before += backward(case, arrays, *before)
    shift = case.seqlen_k - case.seqlen_q
    j = data.draw(st.integers(0, case.seqlen_k - 1), "key")
    arrays["k"][:, j] = arrays["v"][:, j] = value
    out, lse = forward(case, arrays)
    dq, _, _ = backward(case, arrays, out, lse)
    blind = slice(0, min(max(j - shift, 0), case.seqlen_q))  # the queries that do not see key j
    for x, y in ((out[:, blind], before[0][:, blind]), (lse[..., blind], before[1][..., blind])):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(dq[:, blind], before[2][:, blind])

    arrays = case.arrays()
    i = data.draw(st.integers(0, case.seqlen_q - 1), "query")
    arrays["q"][:, i] = arrays["dout"][:, i] = value
    _, dk, dv = backward(case, arrays, *forward(case, arrays))
    unseen = slice(max(i + shift + 1, 0), None)  # the keys that query i does not see
    np.testing.assert_array_equal(dk[:, unseen], before[3][:, unseen])
    np.testing.assert_array_equal(dv[:, unseen], before[4][:, unseen])


def test_one_key_is_exact():
    case = CASES["one key"]
    arrays = {**case.arrays(), "dout": np.ones(case.shapes["dout"], case.dtype)}
    out, lse = forward(case, arrays)
    dq, dk, dv = backward(case, arrays, out, lse)
    np.testing.assert_array_equal(out, arrays["v"])
    np.testing.assert_array_equal(dv, arrays["dout"])
    assert not dq.any() and not dk.any()


@pytest.mark.parametrize("seqlen_k", range(1, 2 * TILE + 2))
def test_padding_never_enters_the_denominator(seqlen_k):
    case = Case(seqlen_q=3, seqlen_k=seqlen_k, values="q zero", dtype="float64")
    arrays = case.arrays()
    out, _ = forward(case, arrays)
    np.testing.assert_allclose(out, np.broadcast_to(arrays["v"].mean(1, keepdims=True), out.shape), atol=1e-15)


def test_memory_is_linear_in_the_sequence(monkeypatch):
    monkeypatch.setattr(cpu, "_TILE_ROWS", 64)
    monkeypatch.setattr(cpu, "_TILE_COLUMNS", 64)
    monkeypatch.setattr(cpu, "_STACK_SCORES", 64 * 64)
    case = Case(1, 2048, 2048, 2, 2, 16, 16)
    arrays = case.arrays()
    out, lse = forward(case, arrays)
    tracemalloc.start()
    backward(case, arrays, *forward(case, arrays))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * arrays["q"].nbytes < case.seqlen_q * case.seqlen_k
