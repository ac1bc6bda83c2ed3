"""Sequences of their own lengths on NumPy arrays: what comes out, and what is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
from cases import CAUSAL, Case
from hypothesis import given, settings
from packed import PACKED, Packed, packed

import pyflash
from pyflash import cpu


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_TILE_ROWS", 16)
        patch.setattr(cpu, "_TILE_COLUMNS", 16)
        yield


def check(which: Packed) -> None:
    arrays, call = which.arrays(), {**which.lengths(), **which.whole.call}
    forward, backward = pyflash.flash_attention, pyflash.flash_attention_backward
    if not which.padded:
        forward, backward = pyflash.flash_attention_varlen, pyflash.flash_attention_varlen_backward
        if which.bounded:
            call |= dict(zip(("max_seqlen_q", "max_seqlen_k"), which.longest, strict=True))
    q, k, v = (arrays[name] for name in "qkv")
    out, lse = forward(q, k, v, return_lse=True, **call)
    which.check_forward(arrays, out, lse)
    call |= {"dlse": arrays.get("dlse"), **which.case.returns}
    gradients = backward(arrays["dout"], q, k, v, out, lse, **call)
    names = ("dq", "dk", "dv", *(f"d{name}" for name in which.case.differentiated))
    which.check_backward(arrays, dict(zip(names, gradients, strict=True)))


@pytest.mark.parametrize("name", PACKED)
def test_named_cases(name):
    check(PACKED[name])


@settings(max_examples=40)
@given(packed(tile=16, max_head_dim=24))
def test_any_call(which):
    check(which)


def test_packed_is_as_each_sequence_alone():
    """Bit by bit, with offsets in every form that they may have, and on one's own output."""
    which = Packed((5, 0, 40), (7, 3, 60), Case(heads_q=4, options=CAUSAL))
    arrays, lengths = which.arrays(), which.lengths()
    q, k, v = (arrays[name] for name in "qkv")
    expected = np.zeros_like(q)
    for _, queries, keys in which.sequences():
        expected[queries] = pyflash.flash_attention(*(a[None] for a in (q[queries], k[keys], v[keys])), causal=True)[0]
    forms = (lambda a: a, list, tuple, np.ndarray.tolist, lambda a: a.astype("int64"), lambda a: np.repeat(a, 2)[::2])
    for form in forms:
        given = {name: form(offsets) for name, offsets in lengths.items()}
        assert np.array_equal(pyflash.flash_attention_varlen(q, k, v, **given, causal=True), expected)
    out = np.full_like(q, np.nan)
    assert pyflash.flash_attention_varlen(q, k, v, **lengths, causal=True, out=out) is out
    assert np.array_equal(out, expected)


def test_offsets_of_keys_are_those_of_queries_unless_given():
    q = np.random.default_rng(0).standard_normal((9, 2, 8)).astype(np.float32)
    alone = pyflash.flash_attention_varlen(q, q, q, [0, 4, 9])
    assert np.array_equal(alone, pyflash.flash_attention_varlen(q, q, q, [0, 4, 9], [0, 4, 9]))
    out, lse = pyflash.flash_attention_varlen(q, q, q, [0, 4, 9], return_lse=True)
    assert out.shape == (9, 2, 8) and lse.shape == (2, 9)
    gradients = pyflash.flash_attention_varlen_backward(out, q, q, q, out, lse, [0, 4, 9])
    assert [g.shape for g in gradients] == [(9, 2, 8)] * 3


Q, K = np.ones((10, 4, 8), np.float32), np.ones((12, 2, 8), np.float32)
GOOD = {"cu_seqlens_q": [0, 3, 10], "cu_seqlens_k": [0, 9, 12]}
BAD = [
    ({"cu_seqlens_q": [1, 3, 10]}, ValueError, "cu_seqlens_q: got 1 as the first offset, takes 0"),
    ({"cu_seqlens_q": [0, 11, 10]}, ValueError, "cu_seqlens_q: got 10 after 11, at 2, takes offsets that do not"),
    ({"cu_seqlens_q": [0, 3, 9]}, ValueError, "cu_seqlens_q: got 9 as the last offset, takes 10, the tokens of q"),
    ({"cu_seqlens_k": [0, 3, 13]}, ValueError, "cu_seqlens_k: got 13 as the last offset, takes 12, the tokens of k"),
    ({"cu_seqlens_k": None}, ValueError, "cu_seqlens_k: got 10 as the last offset, takes 12"),
    ({"cu_seqlens_k": [0, 12]}, ValueError, "cu_seqlens_k: got shape (2,), takes (3,): (batch + 1,)"),
    ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q: got None, takes an array or a list of batch + 1"),
    ({"cu_seqlens_q": []}, ValueError, "cu_seqlens_q: got shape (0,), takes (batch + 1,)"),
    ({"cu_seqlens_q": [[0, 3, 10]]}, ValueError, "cu_seqlens_q: got 2 dimensions (1, 3), takes 1: (batch + 1,)"),
    ({"cu_seqlens_q": [0.0, 3.0, 10.0]}, TypeError, "cu_seqlens_q: got dtype float64, takes int32 or int64"),
    ({"cu_seqlens_q": np.array([0, 3, 10], "int16")}, TypeError, "cu_seqlens_q: got dtype int16, takes int32 or"),
    ({"cu_seqlens_q": ["a"]}, TypeError, "cu_seqlens_q: got dtype <U1, takes int32 or int64"),
    ({"cu_seqlens_q": 10}, TypeError, "cu_seqlens_q: got builtins.int, takes an array"),
    ({"max_seqlen_q": 6}, ValueError, "max_seqlen_q: got 6, takes None or at least 7, the longest sequence"),
    ({"max_seqlen_k": 8}, ValueError, "max_seqlen_k: got 8, takes None or at least 9, the longest sequence"),
    ({"max_seqlen_q": 7.5}, TypeError, "max_seqlen_q: got 7.5, takes None or an integer from 0 on"),
    ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q: got -1, takes None or an integer from 0 on"),
    ({"max_seqlen_q": True}, TypeError, "max_seqlen_q: got True, takes None or an integer"),
    ({"seqused_q": [4, 7]}, ValueError, "seqused_q: got 4 at 0, takes 0 to 3, the length of the sequence"),
    ({"seqused_k": [9, -1]}, ValueError, "seqused_k: got -1 at 1, takes 0 to 3, the length of the sequence"),
    ({"seqused_k": [9]}, ValueError, "seqused_k: got shape (1,), takes (2,): (batch,)"),
    ({"seqused_k": [9.0, 3.0]}, TypeError, "seqused_k: got dtype float64, takes int32 or int64"),
    ({"bias": np.zeros((2, 1, 10, 12), np.float32)}, ValueError, "bias: got shape (2, 1, 10, 12), takes one that "
     "broadcasts to (2, 4, 7, 9)"),
    ({"alibi_slopes": np.zeros((1, 4), np.float32)}, ValueError, "alibi_slopes: got shape (1, 4), takes (4,) or (2"),
]  # fmt: skip


@pytest.mark.parametrize("change, error, message", BAD, ids=[bad[2] for bad in BAD])
def test_bad_calls(change, error, message):
    with pytest.raises(error, match="^" + re.escape(message)):
        pyflash.flash_attention_varlen(Q, K, K, **{**GOOD, **change})
    with pytest.raises(error, match="^" + re.escape(message)):
        pyflash.flash_attention_varlen_backward(Q, Q, K, K, Q, np.ones((4, 10), np.float32), **{**GOOD, **change})


def test_bad_shapes_of_packed_arrays():
    padded, layout = np.ones((2, 5, 4, 8), np.float32), "(tokens, heads, head_dim)"
    with pytest.raises(ValueError, match=re.escape(f"q: got 4 dimensions (2, 5, 4, 8), takes 3: {layout}")):
        pyflash.flash_attention_varlen(padded, K, K, **GOOD)
    with pytest.raises(ValueError, match=re.escape(f"v: got shape (11, 2, 8), takes (12, 2, 8): {layout}")):
        pyflash.flash_attention_varlen(Q, K, K[:11], **GOOD)
    with pytest.raises(ValueError, match=re.escape("lse: got shape (10, 4), takes (4, 10): (heads_q, tokens)")):
        pyflash.flash_attention_varlen_backward(Q, Q, K, K, Q, np.ones((10, 4), np.float32), **GOOD)
    with pytest.raises(ValueError, match="out: got memory that overlaps q's"):
        pyflash.flash_attention_varlen(Q, K, K, **GOOD, out=Q)
    with pytest.raises(ValueError, match=re.escape("seqused_k: got 8 at 1, takes 0 to 7, the length of the sequence")):
        pyflash.flash_attention(np.ones((2, 5, 2, 8)), np.ones((2, 7, 2, 8)), np.ones((2, 7, 2, 8)), seqused_k=[3, 8])


def test_block_masks_are_of_the_longest_sequence():
    q = np.random.default_rng(0).standard_normal((10, 4, 8), np.float32)

    def blocks(length: int):
        return pyflash.block_mask(lambda batch, head, q_idx, kv_idx: q_idx >= kv_idx, 1, 1, length, length, like=q)

    call = {"cu_seqlens_q": [0, 7, 10]}
    expected = pyflash.flash_attention_varlen(q, q, q, causal=True, **call)
    assert np.array_equal(pyflash.flash_attention_varlen(q, q, q, block_mask=blocks(7), **call), expected)
    call["max_seqlen_q"] = 9
    assert np.array_equal(pyflash.flash_attention_varlen(q, q, q, block_mask=blocks(9), **call), expected)
    message = "block_mask: got one for (1, 1, 7, 7), takes one for (2, 4, 9, 9), or with batch or heads of 1"
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        pyflash.flash_attention_varlen(q, q, q, block_mask=blocks(7), **call)
