"""Block masks: what is found of a mask function, what attention makes of it, and what the planner asks of blocks."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from problems import BLOCKS, example

import pyflash
from pyflash import features, masks, reference
from pyflash.device import KNOWN
from pyflash.errors import Unsupported
from pyflash.plan import plan

RNG = np.random.default_rng(0)
Q, DOUT = (RNG.standard_normal((2, 300, 4, 16)) for _ in range(2))
K, V = (RNG.standard_normal((2, 500, 2, 16)) for _ in range(2))
IDS, IDS_K = (np.sort(RNG.integers(0, 5, (2, n)), -1).astype(np.int32) for n in (300, 500))
SHIFT = 200
LENGTHS = np.array([30, 120], np.int32)

MASKS = {
    "causal": masks.causal(SHIFT),
    "window": masks.sliding_window(40, 3, sinks=7, shift=SHIFT),
    "prefix": masks.prefix_lm(70, SHIFT),
    "prefixes": masks.prefix_lm(LENGTHS, SHIFT),
    "documents": masks.documents(IDS, IDS_K),
    "packed": masks.packed_documents(np.array([0, 80, 80, 300]), np.array([0, 10, 400, 500])),
    "both": masks.and_masks(masks.documents(IDS, IDS_K), masks.causal(SHIFT)),
    "either": masks.or_masks(masks.documents(IDS, IDS_K), masks.sliding_window(5, 5), masks.causal(-100)),
    "nothing": lambda b, h, i, j: j < -i,
    "everything": lambda b, h, i, j: j >= 0,
    "own": lambda b, h, i, j: (i // 64 + h + b) % 2 == j // 100 % 2,
}


def written_out(name: str) -> np.ndarray:
    """(batch, heads, queries, keys), without a trace where the function is one of PyFlash's."""
    b, h, i, j = np.ix_(*map(np.arange, (2, 4, 300, 500)))
    place, causal, same = i + SHIFT, j <= i + SHIFT, IDS[b, i] == IDS_K[b, j]
    seen = {
        "causal": causal,
        "window": (j <= place + 3) & ((j >= place - 40) | (j < 7)),
        "prefix": (j < 70) | causal,
        "prefixes": (j < LENGTHS[b]) | causal,
        "documents": same,
        "packed": np.searchsorted([80, 80, 300], i, "right") == np.searchsorted([10, 400, 500], j, "right"),
        "both": same & causal,
        "either": same | (abs(i - j) <= 5) | (j <= i - 100),
    }
    return np.broadcast_to(seen[name] if name in seen else MASKS[name](b, h, i, j), (2, 4, 300, 500))


@pytest.mark.parametrize("sides", [(128, 128), (16, 48), (256, 512)])
@pytest.mark.parametrize("name", MASKS)
def test_blocks_are_what_their_elements_are(name, sides):
    found, seen = (
        pyflash.block_mask(MASKS[name], 2, 4, 300, 500, block_q=sides[0], block_k=sides[1], like=Q),
        written_out(name),
    )
    for place in np.ndindex(found.kinds.shape):
        b, h, m, n = place
        block = seen[b, h, m * sides[0] : (m + 1) * sides[0], n * sides[1] : (n + 1) * sides[1]]
        assert found.kinds[place] == int(block.any()) + int(block.all()), place
    for lists, kinds in zip(found.blocks.arrays, (found.kinds, found.kinds.swapaxes(2, 3)), strict=True):
        for place in np.ndindex(kinds.shape[:3]):
            count, *entries = lists[place]
            blocks = np.flatnonzero(kinds[place])
            assert entries[:count] == [2 * n + (kinds[place][n] == 2) for n in blocks]


@pytest.mark.parametrize("name", MASKS)
def test_attention_is_that_of_the_function(name):
    block_mask = pyflash.block_mask(MASKS[name], 2, 4, 300, 500, block_q=32, block_k=64, like=Q)
    out, lse = pyflash.flash_attention(Q, K, V, block_mask=block_mask, return_lse=True)
    gradients = pyflash.flash_attention_backward(DOUT, Q, K, V, out, lse, block_mask=block_mask)
    options = {"mask": written_out(name)}
    expected = (*reference.attention(Q, K, V, **options), *reference.attention_backward(DOUT, Q, K, V, **options))
    for got, right in zip((out, lse, *gradients), expected, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-9, atol=1e-10)


def test_the_function_is_not_asked_where_blocks_tell(monkeypatch):
    """Of 256 queries and 1024 keys, which the NumPy path takes together."""
    q = np.zeros((1, 2048, 1, 8), np.float32)
    block_mask = pyflash.block_mask(lambda b, h, i, j: i // 1024 == j // 1024, 1, 1, 2048, 2048, like=q)

    def refused(*_):
        raise AssertionError("the function was evaluated")

    monkeypatch.setattr(features.BY_NAME["mask_mod"], "visible", refused)
    out = pyflash.flash_attention(q, q, q + 1, block_mask=block_mask)
    np.testing.assert_array_equal(out, 1)


def test_broadcast_over_batches_and_heads():
    for batch, heads in ((1, 1), (2, 1), (1, 4), (2, 4)):
        block_mask = pyflash.block_mask(MASKS["causal"], batch, heads, 300, 500, like=Q)
        assert block_mask.kinds.shape == (batch, heads, 3, 4)
        got = pyflash.flash_attention(Q, K, V, block_mask=block_mask)
        np.testing.assert_allclose(got, pyflash.flash_attention(Q, K, V, causal=True), rtol=1e-12, atol=1e-12)


def test_printed_it_shows_how_sparse_it_is():
    block_mask = pyflash.block_mask(masks.causal(), 1, 1, 512, 512, like=Q)
    assert str(block_mask) == (
        "BlockMask((1, 1, 512, 512), blocks of 128 x 128: 37.5 % empty, 25.0 % partial, 37.5 % full)"
    )
    assert block_mask.shares == {"empty": 0.375, "partial": 0.25, "full": 0.375}


def test_memory_is_that_of_the_blocks():
    size = 1 << 14
    tracemalloc.start()
    pyflash.block_mask(masks.causal(), 1, 1, size, size, like=Q)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size * size / 4


def test_every_option_goes_with_it():
    block_mask = pyflash.block_mask(MASKS["both"], 2, 1, 300, 500, block_q=64, block_k=64)
    options = {
        "window": (150, 0), "softcap": 5.0, "alibi_slopes": np.full(4, 0.1), "bias": RNG.standard_normal((4, 1, 500)),
        "mask": RNG.random((300, 500)) < 0.8, "sinks": np.ones(4), "score_mod": lambda s, b, h, i, j: s + IDS[b, i],
        "dropout_p": 0.2, "seed": 3, "block_mask": block_mask,
    }  # fmt: skip
    out, lse = pyflash.flash_attention(Q, K, V, return_lse=True, **options)
    wanted = {"return_dbias": True, "return_dsinks": True}
    found = pyflash.flash_attention_backward(DOUT, Q, K, V, out, lse, **options, **wanted)
    expected = reference.attention_backward(DOUT, Q, K, V, **options, **wanted)
    for got, right in zip((out, lse, *found), (*reference.attention(Q, K, V, **options), *expected), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-9, atol=1e-10)


def test_torch_differentiates_through_it():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(a).requires_grad_() for a in (Q, K, V))
    block_mask = pyflash.block_mask(masks.documents(*map(torch.from_numpy, (IDS, IDS_K))), 2, 1, 300, 500)
    assert type(block_mask.kinds) is torch.Tensor and "partial" in str(block_mask)
    pyflash.flash_attention(q, k, v, block_mask=block_mask).backward(torch.from_numpy(DOUT))
    expected = reference.attention_backward(DOUT, Q, K, V, mask_mod=MASKS["documents"])
    for got, right in zip((q.grad, k.grad, v.grad), expected, strict=True):
        np.testing.assert_allclose(got.numpy(), right, rtol=1e-9, atol=1e-10)


def test_jax_differentiates_through_it():
    jax = pytest.importorskip("jax")
    from pyflash.jax import flash_attention

    q, k, v = (jax.numpy.asarray(a, "float32") for a in (Q, K, V))
    block_mask = pyflash.block_mask(masks.packed_documents(jax.numpy.array([0, 100, 300])), 1, 1, 300, 300)
    assert isinstance(block_mask.kinds, jax.Array)
    loss = lambda q: (flash_attention(q, k[:, :300], v[:, :300], block_mask=block_mask) * DOUT).sum()  # noqa: E731
    right, *_ = reference.attention_backward(
        DOUT, Q, K[:, :300], V[:, :300], mask_mod=masks.packed_documents(np.array([0, 100, 300]))
    )
    np.testing.assert_allclose(jax.grad(loss)(q), right, rtol=1e-4, atol=1e-4)


def test_bad_arguments():
    causal, made = masks.causal(), pyflash.block_mask(masks.causal(), 2, 1, 300, 500, like=Q)
    for call, error, message in (
        (lambda: pyflash.block_mask(None, 1, 1, 4, 4, like=Q), TypeError, "mask_mod: got None, takes a function"),
        (lambda: pyflash.block_mask(causal, 1, 1, 4, 4), ValueError, "like: got None, takes an array, such as q"),
        (lambda: pyflash.block_mask(causal, 1, 0, 4, 4, like=Q), ValueError, "heads: got 0, takes an integer from 1"),
        (lambda: pyflash.block_mask(causal, 1, 1, -4, 4, like=Q), ValueError, "seqlen_q: got -4, takes an integer"),
        (lambda: pyflash.block_mask(causal, 1, 1, 4.0, 4, like=Q), TypeError, "seqlen_q: got 4.0, takes an integer"),
        (lambda: pyflash.block_mask(causal, 1, 1, 4, 4, block_q=100, like=Q), ValueError,
         "block_q: got 100, takes an integer .* a multiple of 16"),
        (lambda: pyflash.block_mask(lambda b, h, i, j: i, 1, 1, 4, 4, like=Q), TypeError, "mask_mod: got a function"),
        (lambda: pyflash.block_mask(causal, 1, 1, 4, 4, like=3), TypeError, "like: got builtins.int"),
        (lambda: pyflash.flash_attention(Q, K, V, block_mask=3), TypeError,
         "block_mask: got 3, takes None or what pyflash.block_mask made"),
        (lambda: pyflash.flash_attention(Q, K, V, block_mask=made, mask_mod=causal), ValueError,
         "mask_mod: got .*, takes None where there is a block_mask"),
        (lambda: pyflash.flash_attention(Q[:1], K[:1], V[:1], block_mask=made), ValueError,
         r"block_mask: got one for \(2, 1, 300, 500\), takes one for \(1, 4, 300, 500\)"),
        (lambda: pyflash.flash_attention(Q, K[:, 1:], V[:, 1:], block_mask=made), ValueError, "300, 499"),
        (lambda: masks.prefix_lm(-1), ValueError, "prefix: got -1, takes an integer from 0"),
        (lambda: masks.prefix_lm(IDS), ValueError, r"prefix: got shape \(2, 300\), takes \(batch,\)"),
        (lambda: masks.causal(0.5), TypeError, "shift: got 0.5, takes an integer"),
        (lambda: masks.documents(IDS, IDS_K[0]), ValueError, "ids_k: got .*, takes .*2 dimensions, as ids"),
        (lambda: masks.documents([1]), TypeError, "ids: got .*, takes an array"),
        (lambda: masks.packed_documents(np.array([1, 5])), ValueError, "cu_seqlens: got .*1, 5.*begin with 0"),
        (lambda: masks.and_masks(), TypeError, "masks: got .*, takes one mask function or more"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_divide_blocks(head_dim, dtype, backward):
    call = {"head_dim": head_dim, "dtype": dtype, "backward": backward}
    for gpu in ("H200", "A100", "RTX 4090"):
        for sides in ((128, 128), (256, 128), (384, 640)):
            blocks = BLOCKS._replace(block_q=sides[0], block_k=sides[1])
            made = plan(example(block_mask=blocks, **call), KNOWN[gpu])
            walking = [dict(launch.config) for launch in made.launches if "MASK_BLOCK_M" in dict(launch.config)]
            assert walking
            for config in walking:
                assert (config["MASK_BLOCK_M"], config["MASK_BLOCK_N"]) == sides
                assert sides[0] % config["TILE_M"] == 0 and sides[1] % config["TILE_N"] == 0


def test_blocks_that_no_tile_divides():
    blocks = BLOCKS._replace(block_q=96, block_k=48)
    with pytest.raises(Unsupported, match="no tile divides block_mask's blocks of 96 x 48, the nearest that work are"):
        plan(example(block_mask=blocks), KNOWN["H200"])
