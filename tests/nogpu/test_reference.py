"""The oracle itself, against loops, finite differences and answers known without computing."""

import math

import numpy as np
import pytest
from cases import CASES, Case, cases
from hypothesis import given, settings
from hypothesis import strategies as st

from pyflash import features, reference

small = cases(tile=5, max_head_dim=9, dtypes=("float64",))


def arrays_of(case: Case):
    arrays = case.arrays()
    return arrays["q"], arrays["k"], arrays["v"], arrays["dout"], arrays.get("dlse")


def philox(counter: tuple[int, int, int, int], key: int) -> list[int]:
    """Philox4x32-10, as its authors define it."""
    x, k = list(counter), [key % 2**32, key >> 32]
    for _ in range(10):
        a, b = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = [b >> 32 ^ x[1] ^ k[0], b % 2**32, a >> 32 ^ x[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return x


def kept(p: float, seed: int, b: int, h: int, i: int, j: int) -> float:
    """What dropout makes of a probability of 1."""
    word = philox((i & ~8, j & ~9, h, b), seed)[(i >> 3 & 1) * 2 + (j >> 3 & 1)]
    threshold = round(p * 65536)
    return 65536 / (65536 - threshold) if (word >> 16 * (j & 1)) % 65536 >= threshold else 0.0


def by_loops(q, k, v, scale: float, causal=False, window=(None, None), softcap=None, alibi_slopes=None, **others):
    """The definition, one row at a time."""
    (batch, seqlen_q, heads, _), (_, seqlen_k, heads_kv, _) = q.shape, k.shape
    out = np.zeros((batch, seqlen_q, heads, v.shape[3]))
    lse = np.full((batch, heads, seqlen_q), -np.inf)
    left, right = window
    whole = batch, heads, seqlen_q, seqlen_k
    bias = np.broadcast_to(others.get("bias", 0.0), whole)
    mask = np.broadcast_to(others.get("mask", True), whole)
    sinks = others.get("sinks", np.full(heads, -np.inf))
    drop, seed = others.get("dropout_p", 0.0), others.get("seed", 0)
    score_mod, mask_mod = others.get("score_mod"), others.get("mask_mod", lambda *_: True)
    if block_mask := others.get("block_mask"):
        mod, names = block_mask.mask_mod, ("batch", "head", "q_idx", "kv_idx")

        def mask_mod(*place):
            return mod.graph.evaluate(dict(zip(names, place, strict=True)), mod.arrays, np.float64)

    def score(b, h, i, j):
        s = scale * math.fsum(q[b, i, h] * k[b, j, h // (heads // heads_kv)])
        if softcap is not None:
            s = softcap * math.tanh(s / softcap)
        if alibi_slopes is not None:
            s -= np.broadcast_to(alibi_slopes, (batch, heads))[b, h] * abs(i + seqlen_k - seqlen_q - j)
        s += bias[b, h, i, j]
        return s if score_mod is None else float(score_mod(s, b, h, i, j))

    for b, i, h in np.ndindex(batch, seqlen_q, heads):
        g, own = h // (heads // heads_kv), i + seqlen_k - seqlen_q
        seen = [j for j in range(seqlen_k) if mask[b, h, i, j] and mask_mod(b, h, i, j) and (not causal or j <= own)]
        seen = [j for j in seen if (left is None or j >= own - left) and (right is None or j <= own + right)]
        s = [score(b, h, i, j) for j in seen]
        if top := [x for x in (*s, sinks[h]) if x > -np.inf]:
            lse[b, h, i] = max(top) + math.log(math.fsum(math.exp(x - max(top)) for x in top))
            weights = [math.exp(x - lse[b, h, i]) for x in s]
            weights = [w * (kept(drop, seed, b, h, i, j) if drop else 1) for w, j in zip(weights, seen, strict=True)]
            out[b, i, h] = sum((w * v[b, j, g] for w, j in zip(weights, seen, strict=True)), np.zeros(v.shape[3]))
    return out, lse


@settings(max_examples=25)
@given(small)
def test_forward_is_the_definition(case):
    q, k, v, _, _ = arrays_of(case)
    out, lse = reference.attention(q, k, v, **case.call)
    expected, expected_lse = by_loops(q, k, v, case.scale, **{**case.call, "softmax_scale": None})
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-12)
    # What one ulp of a score does to its exponential is not the oracle's fault.
    spread = 1e-12 * (1 + np.abs(lse[np.isfinite(lse)]).max(initial=0))
    np.testing.assert_allclose(out, expected, rtol=spread, atol=spread * np.abs(v).max(initial=0))


def test_random_bits_are_those_of_the_paper():
    """Known answers of its authors."""
    ones = 2**32 - 1
    for counter, key, words in (
        ((0,) * 4, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ):
        assert tuple(philox(counter, key)) == words
        assert tuple(int(x) for x in features._philox(tuple(np.array(c) for c in counter), key)) == words


def test_dropout_drops_as_many_as_it_says():
    whole = features.Place.whole(features.Sizes(2, 3, 200, 300))
    for p in (0.1, 0.5, 0.9):
        weight = features.weight({"dropout_p": (p, 11)}, whole)
        assert abs((weight == 0).mean() - p) < 0.005 and abs(weight.mean() - 1) < 0.05
        assert np.abs(np.corrcoef((weight == 0)[:, :, :, 0].reshape(6, -1)) - np.eye(6)).max() < 0.3, "heads differ"


@settings(max_examples=40)
@given(small, st.sampled_from(["q", "k", "v"]), st.integers(0, 2**32 - 1))
def test_gradients_are_finite_differences(case, name, seed):
    """In a random direction of one argument. Values are kept moderate: a difference quotient has few digits."""
    case = Case(**{**case.__dict__, "values": "normal"})
    q, k, v, dout, dlse = arrays_of(case)
    inputs = {"q": q, "k": k, "v": v}

    def loss(arrays):
        out, lse = reference.attention(**arrays, **case.call)
        seen = np.isfinite(lse)
        return (out * dout).sum() + (0 if dlse is None else (lse[seen] * dlse[seen]).sum())

    direction = np.random.default_rng(seed).standard_normal(inputs[name].shape)
    step = 1e-5
    moved = [loss({**inputs, name: inputs[name] + sign * step * direction}) for sign in (1, -1)]
    gradients = reference.attention_backward(dout, q, k, v, dlse=dlse, **case.call)
    slope = (gradients["qkv".index(name)] * direction).sum()
    np.testing.assert_allclose((moved[0] - moved[1]) / (2 * step), slope, rtol=1e-5, atol=1e-5)


def test_free_answers():
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((2, 7, 3, 4)) for _ in range(4))
    out, lse = reference.attention(np.zeros_like(q), k, v)
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(1, keepdims=True), v.shape))
    np.testing.assert_allclose(lse, math.log(7))

    out, _ = reference.attention(q, k, np.ones_like(v), causal=True)
    np.testing.assert_allclose(out, 1)

    out, _ = reference.attention(q[:, :1], k[:, :1], v[:, :1])
    np.testing.assert_array_equal(out, v[:, :1])
    dq, dk, dv = reference.attention_backward(dout[:, :1], q[:, :1], k[:, :1], v[:, :1])
    np.testing.assert_array_equal(np.stack([dq, dk]), 0)
    np.testing.assert_array_equal(dv, dout[:, :1])

    order = rng.permutation(7)
    right = (*reference.attention(q, k, v), *reference.attention_backward(dout, q, k, v))
    permuted = [*reference.attention(q, k[:, order], v[:, order])]
    permuted += reference.attention_backward(dout, q, k[:, order], v[:, order])
    permuted[3:] = [gradient[:, np.argsort(order)] for gradient in permuted[3:]]
    for x, y in zip(right, permuted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["rows with no visible key", "no keys"])
def test_rows_that_see_nothing(name):
    case = CASES[name]
    q, k, v, dout, dlse = arrays_of(case)
    blind = case.seqlen_q - case.seqlen_k
    out, lse = reference.attention(q, k, v, **case.call)
    dq, dk, dv = reference.attention_backward(dout, q, k, v, dlse=dlse, **case.call)
    assert (out[:, :blind] == 0).all() and (dq[:, :blind] == 0).all()
    assert np.isneginf(lse[..., :blind]).all() and np.isfinite(lse[..., blind:]).all()
    assert all(np.isfinite(x).all() for x in (out, dq, dk, dv))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_hidden_row_has_no_influence(value):
    """Query i and key j > i: whatever the key holds must not reach the query, nor the other way round."""
    rng = np.random.default_rng(1)
    q, k, v, dout = (rng.standard_normal((1, 6, 2, 3)) for _ in range(4))
    clean = (*reference.attention(q, k, v, causal=True), *reference.attention_backward(dout, q, k, v, causal=True))
    k[:, 4], v[:, 4] = value, value  # seen by queries 4 and 5
    out, lse = reference.attention(q, k, v, causal=True)
    dq, _, _ = reference.attention_backward(dout, q, k, v, causal=True)
    np.testing.assert_array_equal(out[:, :4], clean[0][:, :4])
    np.testing.assert_array_equal(lse[..., :4], clean[1][..., :4])
    np.testing.assert_array_equal(dq[:, :4], clean[2][:, :4])
    assert np.isnan(out[:, 5]).all()

    k[:, 4], v[:, 4] = 0, 0
    clean = reference.attention_backward(dout, q, k, v, causal=True)
    q[:, 2], dout[:, 2] = value, value  # sees keys 0 to 2
    _, dk, dv = reference.attention_backward(dout, q, k, v, causal=True)
    np.testing.assert_array_equal(dk[:, 3:], clean[1][:, 3:])
    np.testing.assert_array_equal(dv[:, 3:], clean[2][:, 3:])


@given(st.integers(0, 2**32 - 1))
def test_select_matmul_is_a_sum_over_what_is_visible(seed):
    rng = np.random.default_rng(seed)
    m, n, d = rng.integers(1, 6, 3)
    visible = rng.random((m, n)) < 0.6
    weights = np.where(visible, rng.standard_normal((2, m, n)), 0)
    rows = np.where(rng.random((2, n, d)) < 0.2, rng.choice([np.nan, np.inf, -np.inf]), rng.standard_normal((2, n, d)))
    with np.errstate(invalid="ignore"):
        expected = np.zeros((2, m, d))
        for b, i, j in np.ndindex(2, m, n):
            if visible[i, j]:
                expected[b, i] += weights[b, i, j] * rows[b, j]
        np.testing.assert_allclose(reference.select_matmul(weights, rows, visible), expected, rtol=1e-12, atol=1e-12)


def test_unknown_options_are_refused():
    q = np.ones((1, 2, 1, 3))
    with pytest.raises(TypeError, match="casual"):
        reference.attention(q, q, q, casual=True)


def test_gradients_of_what_is_not_there_are_refused():
    q = np.ones((1, 2, 1, 3))
    for name in ("bias", "sinks", "score_mod"):
        wanted = {f"return_d{name}": True}
        for call in (
            lambda wanted=wanted: reference.attention_backward(q, q, q, q, **wanted),
            lambda wanted=wanted: reference.attention_varlen_backward(*[q[0]] * 4, [0, 2], **wanted),
        ):
            with pytest.raises(ValueError, match=f"^return_d{name}: got True, takes False where {name} is None"):
                call()


def test_lists_are_taken():
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 3, 2, 4))
    call, lists = {"bias": q[0, :, 0, :3]}, {"bias": q[0, :, 0, :3].tolist()}
    for got, right in zip(
        (
            *reference.attention(q.tolist(), k.tolist(), v.tolist(), **lists),
            *reference.attention_backward(
                dout.tolist(), q.tolist(), k.tolist(), v.tolist(), return_dbias=True, **lists
            ),
        ),
        (
            *reference.attention(q, k, v, **call),
            *reference.attention_backward(dout, q, k, v, return_dbias=True, **call),
        ),
        strict=True,
    ):
        np.testing.assert_array_equal(got, right)


BAD = [None, "text", [[1.0], [2.0, 3.0]], np.zeros((1, 3, 2, 4), complex), object()]


@pytest.mark.parametrize("bad", BAD, ids=lambda x: type(x).__name__)
def test_what_is_no_array_of_real_numbers_is_refused(bad):
    q = np.zeros((1, 3, 2, 4))
    packed = q[0]
    for call in (
        lambda: reference.attention(q, bad, q),
        lambda: reference.attention_varlen(packed, bad, packed, [0, 3]),
        lambda: reference.attention_backward(q, q, bad, q),
        lambda: reference.attention_varlen_backward(packed, packed, bad, packed, [0, 3]),
    ):
        with pytest.raises(TypeError, match="^k: got .*takes an array of real numbers"):
            call()
    if bad is not None:
        with pytest.raises(TypeError, match="^bias: got .*takes an array of real numbers"):
            reference.attention(q, q, q, bias=bad)
