"""torch's own attention function and PyFlash's in its place: the same calls, the same numbers."""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import pytest

import pyflash
from pyflash.features import FEATURES

torch = pytest.importorskip("torch")
theirs = torch.nn.functional.scaled_dot_product_attention

OPTIONS = {feature.name for feature in FEATURES}


@pytest.fixture
def ours():
    from pyflash.torch import scaled_dot_product_attention

    return scaled_dot_product_attention


def inputs(front=(2,), heads=4, heads_kv=4, seqlen_q=5, seqlen_k=7, dim=8, dim_v=8):
    shapes = (heads, seqlen_q, dim), (heads_kv, seqlen_k, dim), (heads_kv, seqlen_k, dim_v)
    generator = torch.Generator().manual_seed(0)
    return [torch.randn((*front, *s), generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def agree(ours, arguments, **options):
    results = [f(*arguments, **options) for f in (ours, theirs)]
    torch.testing.assert_close(*results)
    dout = torch.randn_like(results[0])
    torch.testing.assert_close(*(torch.autograd.grad(r, arguments, dout) for r in results))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 7), (7, 5), (6, 6), (1, 4), (4, 1)])
def test_the_same_numbers(ours, lengths, is_causal):
    agree(ours, inputs((2,), 4, 4, *lengths), is_causal=is_causal, scale=0.7)


@pytest.mark.parametrize("front", [(), (2,), (2, 3), (2, 1, 3)])
def test_any_dimensions_in_front(ours, front):
    agree(ours, inputs(front), is_causal=True)


@pytest.mark.parametrize("ranks", [(2, 2, 2), (3, 2, 2), (2, 3, 3)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_without_heads(ours, ranks, is_causal):
    tensors = [t.detach()[0] for t in inputs((), 1, 1)]
    arguments = [t[None][(0,) * (3 - rank)].requires_grad_() for t, rank in zip(tensors, ranks, strict=True)]
    agree(ours, arguments, is_causal=is_causal)
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) > 0.3
    agree(ours, arguments, attn_mask=mask)


def test_everything_dropped(ours):
    agree(ours, inputs(), dropout_p=1.0)
    agree(ours, [t.detach()[0].requires_grad_() for t in inputs((), 1, 1)], dropout_p=1, is_causal=True)


def test_grouped_heads(ours):
    arguments = inputs(heads_kv=2)
    agree(ours, arguments, enable_gqa=True)
    with pytest.raises(ValueError, match="^query: got 4 heads, takes 2, as key, or enable_gqa=True"):
        ours(*arguments)


@pytest.mark.parametrize("heads", [(4, 1, 1), (1, 4, 4), (4, 4, 1), (4, 1, 4), (1, 1, 4)], ids=str)
def test_heads_broadcast(ours, heads):
    arguments = [inputs((2,), h, h)[i] for i, h in enumerate(heads)]
    agree(ours, arguments)
    agree(ours, arguments, is_causal=True)


def test_head_dim_of_v(ours):
    agree(ours, inputs(dim_v=12))


def test_the_signature(ours):
    parameters = inspect.signature(ours).parameters
    assert list(parameters) == [
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"
    ]  # fmt: skip
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    assert defaults == {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


MASKS = {"matrix": (5, 7), "keys": (1, 7), "heads": (4, 5, 7), "batch": (2, 1, 5, 7)}


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("boolean", [True, False])
def test_masks(ours, boolean, shape):
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = mask > -0.5 if boolean else mask
    if ("mask" if boolean else "bias") in OPTIONS:
        agree(ours, inputs(), attn_mask=mask)
    else:
        with pytest.raises(pyflash.Unsupported, match="^attn_mask: "):
            ours(*inputs(), attn_mask=mask)


def test_dropout(ours):
    if "dropout_p" not in OPTIONS:
        with pytest.raises(pyflash.Unsupported, match="^dropout_p: "):
            ours(*inputs(), dropout_p=0.5)
        return
    torch.manual_seed(0)
    mean = torch.stack([ours(*inputs(), dropout_p=0.5) for _ in range(400)]).mean(0)
    torch.testing.assert_close(mean, theirs(*inputs()), atol=0.5, rtol=0.2)


def test_what_is_refused(ours):
    q, k, v = inputs()
    both = {"attn_mask": torch.ones(5, 7, dtype=torch.bool), "is_causal": True}
    with pytest.raises(ValueError, match="^attn_mask: .*is_causal"):
        ours(q, k, v, **both)
    with pytest.raises(TypeError, match="^key: got ndarray, takes a tensor"):
        ours(q, k.detach().numpy(), v)
    with pytest.raises(ValueError, match="^value: got 1 dimensions, takes a tensor of 2 or more"):
        ours(q, k, v[0, 0, 0])
    for p in (1.5, 2, -0.1, float("nan")):
        with pytest.raises(ValueError, match=f"^dropout_p: got {p}, takes a number from 0 to 1$"):
            ours(q, k, v, dropout_p=p)
    with pytest.raises(ValueError, match=r"^query, key, value: got \(2, .*takes shapes that broadcast"):
        ours(q, torch.cat((k, k[:1])), torch.cat((v, v[:1])))
    with pytest.raises(TypeError, match="^attn_mask: got ndarray, takes a torch tensor"):
        ours(q, k, v, attn_mask=np.ones((5, 7), bool))


@pytest.mark.parametrize(
    "change, start",
    [
        (lambda q, k, v: {"query": q.int()}, "query: got dtype int32"),
        (lambda q, k, v: {"key": k[..., :4]}, "key: got shape"),
        (lambda q, k, v: {"value": v[:, :, :3]}, "value: got shape"),
        (lambda q, k, v: {"value": v.float()}, "value: got dtype float32"),
        (lambda q, k, v: {"query": q[:, :3], "key": k[:, :2], "value": v[:, :2], "enable_gqa": True}, "query: got 3 "),
        (lambda q, k, v: {"attn_mask": torch.ones(3, 3, dtype=q.dtype)}, r"attn_mask: got shape \(3, 3\)"),
        (lambda q, k, v: {"attn_mask": torch.ones(3, 3) > 0}, r"attn_mask: got shape \(3, 3\)"),
        (lambda q, k, v: {"attn_mask": torch.ones(5, 7, dtype=torch.int32)}, "attn_mask: got dtype int32"),
        (lambda q, k, v: {"scale": "x"}, "scale: got 'x'"),
        (lambda q, k, v: {"is_causal": "y"}, "is_causal: got 'y'"),
        (lambda q, k, v: {"dropout_p": "z"}, "dropout_p: got 'z'"),
        (lambda q, k, v: {"key": torch._neg_view(k)}, "key: got a tensor with the negative bit set"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("gradient", [True, False])
def test_errors_name_the_arguments_of_torch(ours, change, start, gradient):
    tensors = [t if gradient else t.detach() for t in inputs()]
    given = dict(zip(("query", "key", "value"), tensors, strict=True)) | change(*tensors)
    with pytest.raises((TypeError, ValueError, pyflash.Unsupported), match=f"^{start}.*, takes "):
        ours(**given)


SHAPES_BEFORE_HEADS = [((2,), (1,)), ((2, 3), (2, 3)), ((2, 3), (3,)), ((2, 3), (1, 3)), ((1, 3), (2, 1))]


@pytest.mark.parametrize("before_q, before_k", SHAPES_BEFORE_HEADS)
@pytest.mark.parametrize("before_mask", [None, (), (1,), "as q"])
def test_shapes_before_the_heads_broadcast(ours, before_q, before_k, before_mask):
    q, k, v = (torch.randn(*before, 4, n, 8) for before, n in ((before_q, 5), (before_k, 7), (before_k, 7)))
    mask = None
    if before_mask is not None:
        mask = torch.randn(*(before_q if before_mask == "as q" else before_mask), 1, 5, 7)
    torch.testing.assert_close(ours(q, k, v, attn_mask=mask), theirs(q, k, v, attn_mask=mask), rtol=1e-4, atol=1e-5)


def test_pairs_that_do_not_match_are_refused(ours):
    q, k, v = (torch.randn(*before, 4, 5, 8) for before in ((2, 3), (3, 2), (3, 2)))
    with pytest.raises(ValueError, match="^query, key, value: got"):
        ours(q, k, v)
    for before in ((6,), (3, 2)):
        with pytest.raises(ValueError, match="^attn_mask: got .*takes what broadcasts to"):
            ours(q, q, q, attn_mask=torch.ones(*before, 1, 5, 5, dtype=torch.bool))


def test_compiled(ours):
    torch._dynamo.reset()
    arguments = inputs(seqlen_q=7, seqlen_k=5)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments, is_causal=True), theirs(*arguments, is_causal=True))


def test_a_model_moves_over(ours, monkeypatch):
    """torch's own encoder layer, with its function replaced."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 9, 32)
    expected = layer(x)
    calls = itertools.count()

    def replaced(q, k, v, mask, dropout_p, is_causal):
        next(calls)
        return ours(q, k, v, mask, dropout_p, is_causal)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", replaced)
    torch.testing.assert_close(layer(x), expected)
    assert next(calls) == 1
