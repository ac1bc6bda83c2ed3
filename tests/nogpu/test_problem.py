"""Validation: what a call may be, and that every refusal names the argument, what it got and what it takes."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyflash import problem
from pyflash.problem import Tensor, contiguous

B, SQ, SK, HQ, HK, D, DV = 2, 5, 7, 6, 3, 16, 24


def call(*, backward: bool = False, dtype: str = "float16", **changed: Tensor | None) -> dict[str, Tensor]:
    """The tensors of a valid call, with some replaced, or left out (None)."""
    real = "float64" if dtype == "float64" else "float32"
    tensors = {
        "q": contiguous((B, SQ, HQ, D), dtype),
        "k": contiguous((B, SK, HK, D), dtype),
        "v": contiguous((B, SK, HK, DV), dtype),
    }
    if backward:
        tensors["dout"] = contiguous((B, SQ, HQ, DV), dtype)
        tensors["o"] = contiguous((B, SQ, HQ, DV), dtype)
        tensors["lse"] = contiguous((B, HQ, SQ), real)
    tensors.update(changed)
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def make(tensors: dict[str, Tensor], backward: bool = False, **options: object) -> problem.Problem:
    return problem.make(tensors, backward=backward, **options)


@pytest.mark.parametrize("dtype", problem.DTYPES)
@pytest.mark.parametrize("backward", [False, True])
def test_a_valid_call_is_taken_as_it_is(dtype, backward):
    made = make(call(backward=backward, dtype=dtype), backward, options={"causal": True})
    assert (made.batch, made.seqlen_q, made.seqlen_k) == (B, SQ, SK)
    assert (made.num_heads_q, made.num_heads_kv, made.qheads_per_kv) == (HQ, HK, 2)
    assert (made.head_dim, made.head_dim_v) == (D, DV)
    assert made.softmax_scale == 1 / math.sqrt(D)
    assert made.option("causal") is True
    hash(made)


def test_a_feature_at_its_default_is_off():
    made = make(call(), options={"causal": False})
    assert made.options == ()
    assert made == make(call())


HALF = "float16"

# (what is wrong, tensors, whether it is a backward, error, argument, what it got, what it takes)
BAD = [
    ("rank of q", call(q=contiguous((SQ, HQ, D), HALF)), 0, ValueError, "q", "3 dimensions", "4: (batch, seqlen"),
    ("rank of k", call(k=contiguous((1, B, SK, HK, D), HALF)), 0, ValueError, "k", "5 dimensions", "4: (batch, seqlen"),
    ("rank of v", call(v=contiguous((), HALF)), 0, ValueError, "v", "0 dimensions", "4: (batch, seqlen"),
    ("integers", call(dtype="int32"), 0, TypeError, "q", "dtype int32", "float16, bfloat16, float32, float64"),
    ("booleans", call(dtype="bool"), 0, TypeError, "q", "dtype bool", "float16, bfloat16, float32, float64"),
    ("complex", call(dtype="complex64"), 0, TypeError, "q", "dtype complex64", "float16"),
    ("float8", call(dtype="float8_e4m3fn"), 0, TypeError, "q", "dtype float8_e4m3fn", "float16"),
    ("dtype of k", call(k=contiguous((B, SK, HK, D), "float32")), 0, TypeError, "k", "dtype float32", "float16, as q"),
    ("dtype of v", call(v=contiguous((B, SK, HK, DV), "bfloat16")), 0, TypeError, "v", "bfloat16", "float16, as q"),
    ("head_dim 0", call(q=contiguous((B, SQ, HQ, 0), HALF)), 0, ValueError, "q", "head_dim 0", "1 to 256"),
    ("head_dim 257", call(q=contiguous((B, SQ, HQ, 257), HALF)), 0, ValueError, "q", "head_dim 257", "1 to 256"),
    ("head_dim_v 0", call(v=contiguous((B, SK, HK, 0), HALF)), 0, ValueError, "v", "head_dim 0", "1 to 256"),
    ("head_dim_v 300", call(v=contiguous((B, SK, HK, 300), HALF)), 0, ValueError, "v", "head_dim 300", "1 to 256"),
    ("no query head", call(q=contiguous((B, SQ, 0, D), HALF)), 0, ValueError, "q", "0 heads", "at least 1"),
    ("no key head", call(k=contiguous((B, SK, 0, D), HALF)), 0, ValueError, "k", "0 heads", "at least 1"),
    ("heads not divisible", call(q=contiguous((B, SQ, 7, D), HALF)), 0, ValueError, "q", "7 heads",
     "multiple of k's 3"),
    ("more key heads", call(q=contiguous((B, SQ, 1, D), HALF)), 0, ValueError, "q", "1 heads", "multiple of k's 3"),
    ("batch of k", call(k=contiguous((1, SK, HK, D), HALF)), 0, ValueError, "k", f"shape (1, {SK}",
     "batch and head_dim"),
    ("head_dim of k", call(k=contiguous((B, SK, HK, 8), HALF)), 0, ValueError, "k", "3, 8)", "batch and head_dim as q"),
    ("batch of v", call(v=contiguous((3, SK, HK, DV), HALF)), 0, ValueError, "v", "shape (3,", "batch as q"),
    ("length of v", call(v=contiguous((B, SK + 1, HK, DV), HALF)), 0, ValueError, "v", "(2, 8",
     "seqlen and heads as k"),
    ("heads of v", call(v=contiguous((B, SK, HQ, DV), HALF)), 0, ValueError, "v", "(2, 7, 6", "seqlen and heads as k"),
    ("a size past 2^31", call(q=Tensor((B, 2**31, HQ, D), (0, 0, 0, 1), HALF)), 0, ValueError, "q",
     "2147483648", "up to"),
    ("out's shape", call(o=contiguous((B, SQ, HQ, D), HALF)), 0, ValueError, "out", "shape (2, 5, 6, 16)",
     "(2, 5, 6, 24)"),
    ("out's rank", call(o=contiguous((B, SQ, HQ), HALF)), 0, ValueError, "out", "3 dimensions", "4: "),
    ("out's dtype", call(o=contiguous((B, SQ, HQ, DV), "float32")), 0, TypeError, "out", "float32", "float16, as q"),
    ("out overlapping", call(o=Tensor((B, SQ, HQ, DV), (0, 1, 1, 0), HALF)), 0, ValueError, "out", "strides",
     "overlap"),
    ("dout's shape", call(backward=True, dout=contiguous((B, SK, HQ, DV), HALF)), 1, ValueError, "dout",
     "(2, 7", "(2, 5"),
    ("dout's dtype", call(backward=True, dout=contiguous((B, SQ, HQ, DV), "float32")), 1, TypeError, "dout", "float32",
     "float16, as q"),
    ("out of another call", call(backward=True, o=contiguous((B, SQ + 1, HQ, DV), HALF)), 1, ValueError, "out", "(2, 6",
     "(2, 5"),
    ("lse of another call", call(backward=True, lse=contiguous((B, HQ, SK), "float32")), 1, ValueError, "lse",
     "(2, 6, 7)", "(2, 6, 5)"),
    ("lse transposed", call(backward=True, lse=contiguous((B, SQ, HQ), "float32")), 1, ValueError, "lse", "(2, 5, 6)",
     "(2, 6, 5): (batch, heads_q, seqlen_q)"),
    ("lse's rank", call(backward=True, lse=contiguous((B, SQ), "float32")), 1, ValueError, "lse",
     "2 dimensions", "3: "),
    ("lse in half", call(backward=True, lse=contiguous((B, HQ, SQ), HALF)), 1, TypeError, "lse", "float16", "float32"),
    ("lse in float for double", call(backward=True, dtype="float64", lse=contiguous((B, HQ, SQ), "float32")), 1,
     TypeError, "lse", "float32", "float64"),
    ("dlse's shape", call(backward=True, dlse=contiguous((B, HQ, SK), "float32")), 1, ValueError, "dlse", "(2, 6, 7)",
     "(2, 6, 5)"),
    ("dlse's dtype", call(backward=True, dlse=contiguous((B, HQ, SQ), "float64")), 1, TypeError, "dlse", "float64",
     "float32"),
]  # fmt: skip


@pytest.mark.parametrize(
    "tensors, backward, error, argument, got, takes", [b[1:] for b in BAD], ids=[b[0] for b in BAD]
)
def test_bad_arrays(tensors, backward, error, argument, got, takes):
    with pytest.raises(error) as caught:
        make(tensors, bool(backward))
    message = str(caught.value)
    assert re.match(rf"{argument}: got .+, takes .+", message), message
    before, _, after = message.partition(", takes ")
    assert got in before and takes in after, message
    for name, tensor in tensors.items():
        shown = "out" if name == "o" else name
        assert f"{shown} {tensor.shape} {tensor.dtype}" in message, "the message carries the whole call"


@pytest.mark.parametrize(
    "scale, error",
    [("0.5", TypeError), ([1.0], TypeError), (object(), TypeError), (True, TypeError), (math.nan, ValueError),
     (math.inf, ValueError), (-math.inf, ValueError), (1j, TypeError), (np.zeros(2), TypeError)],
)  # fmt: skip
def test_bad_scale(scale, error):
    with pytest.raises(error, match=r"softmax_scale: got .*, takes a number from -1e30 to 1e30 or None"):
        make(call(), softmax_scale=scale)


@pytest.mark.parametrize("scale", [0, -2, 0.25, np.float32(0.25), np.float64(-1), np.array(3.0), np.int64(2)])
def test_any_scalar_is_a_scale(scale):
    made = make(call(), softmax_scale=scale)
    assert type(made.softmax_scale) is float
    assert made.softmax_scale == float(scale)


@pytest.mark.parametrize("causal", [None, 1, "yes", 0.0])
def test_bad_flag(causal):
    with pytest.raises(TypeError, match=r"causal: got .*, takes True or False"):
        make(call(), options={"causal": causal})


def test_a_numpy_flag_is_a_flag():
    assert make(call(), options={"causal": np.bool_(True)}) == make(call(), options={"causal": True})


@given(
    shape=st.tuples(*[st.integers(1, 6)] * 4),
    strides=st.tuples(*[st.integers(-40, 40)] * 4),
    itemsize=st.sampled_from([("float16", 2), ("float32", 4), ("float64", 8)]),
    alignment=st.sampled_from([2, 4, 8, 16]),
)
def test_wide_means_every_row_starts_and_ends_on_16_bytes(shape, strides, itemsize, alignment):
    dtype, size = itemsize
    tensor = Tensor(shape, strides, dtype, alignment)
    starts = [sum(i * s for i, s in zip(index, strides[:3], strict=True)) * size for index in np.ndindex(*shape[:3])]
    row = shape[3] * size
    expected = (
        alignment == 16 and (strides[3] == 1 or shape[3] == 1) and row % 16 == 0 and not any(x % 16 for x in starts)
    )
    assert tensor.wide() == expected


@given(shape=st.tuples(*[st.integers(0, 4)] * 4), strides=st.tuples(*[st.integers(-9, 9)] * 4))
def test_an_output_whose_elements_overlap_is_found(shape, strides):
    addresses = [sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(*shape)]
    overlaps = len(set(addresses)) < len(addresses)
    # The test on strides is sufficient for safety: it may refuse an exotic interleaving, and never passes an overlap.
    assert Tensor(shape, strides, "float32").overlaps_itself() or not overlaps


@given(st.permutations(range(4)), st.tuples(*[st.integers(0, 4)] * 4))
def test_transposed_views_do_not_overlap(order, shape):
    base = contiguous(tuple(shape[i] for i in order), "float32")
    strides = tuple(base.strides[order.index(i)] for i in range(4))
    assert not Tensor(shape, strides, "float32").overlaps_itself()


def test_a_size_of_zero_is_valid():
    for shape_q, shape_k in (
        ((0, 5, 6, 16), (0, 7, 3, 16)),
        ((2, 0, 6, 16), (2, 7, 3, 16)),
        ((2, 5, 6, 16), (2, 0, 3, 16)),
    ):
        q, k = contiguous(shape_q, HALF), contiguous(shape_k, HALF)
        made = make({"q": q, "k": k, "v": k})
        assert (made.batch, made.seqlen_q, made.seqlen_k) == (*shape_q[:2], shape_k[1])


def test_problem_is_one_line():
    text = str(make(call(), options={"causal": True}, softmax_scale=0.5))
    assert "\n" not in text
    assert "q (2, 5, 6, 16) float16" in text and "causal=True" in text and "softmax_scale=0.5" in text
