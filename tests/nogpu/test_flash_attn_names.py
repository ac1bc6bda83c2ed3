"""flash-attn's names: its documented arguments, defaults and results, on CPU tensors."""

from __future__ import annotations

import inspect
import re

import pytest

import pyflash
from pyflash.features import FEATURES

torch = pytest.importorskip("torch")
from pyflash import flash_attn  # noqa: E402

OPTIONS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
# What flash-attn 2.7 documents: the tensors, then the options in this order, all of them by position or by name.
DOCUMENTED = {
    "flash_attn_func": ("q", "k", "v"),
    "flash_attn_qkvpacked_func": ("qkv",),
    "flash_attn_kvpacked_func": ("q", "kv"),
}
ABSENT = ["flash_attn_with_kvcache"]
# An option of theirs that is on, and the row of our table that it takes.
ON = {
    "window_size": ((3, 0), "window"),
    "softcap": (15.0, "softcap"),
    "alibi_slopes": (torch.tensor([0.5, 0.25, 0.1, 0.0]), "alibi_slopes"),
    "dropout_p": (0.1, "dropout_p"),
}


def tensors(name: str):
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "flash_attn_func": [(2, 6, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)],
        "flash_attn_qkvpacked_func": [(2, 6, 3, 4, 8)],
        "flash_attn_kvpacked_func": [(2, 6, 4, 8), (2, 9, 2, 2, 8)],
    }[name]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def unpacked(name: str, given):
    return {
        "flash_attn_func": lambda q, k, v: (q, k, v),
        "flash_attn_qkvpacked_func": lambda qkv: tuple(qkv[:, :, i] for i in range(3)),
        "flash_attn_kvpacked_func": lambda q, kv: (q, kv[:, :, 0], kv[:, :, 1]),
    }[name](*given)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_arguments_and_defaults(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    assert tuple(parameters) == (*DOCUMENTED[name], *OPTIONS)
    assert {n: p.default for n, p in parameters.items() if p.default is not p.empty} == OPTIONS
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())


@pytest.mark.parametrize("name", DOCUMENTED)
@pytest.mark.parametrize("causal", [False, True])
def test_results_and_gradients(name, causal):
    given = tensors(name)
    call = getattr(flash_attn, name)
    out = call(*given, 0.0, 0.3, causal)
    expected = pyflash.flash_attention(*unpacked(name, given), softmax_scale=0.3, causal=causal)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), given) for o in (out, expected)))
    out, lse, probabilities = call(*given, return_attn_probs=True)
    assert lse.shape == (2, 4, 6) and lse.dtype == torch.float32 and probabilities is None
    assert isinstance(call(*given), torch.Tensor)


@pytest.mark.parametrize("argument", ON)
@pytest.mark.parametrize("name", DOCUMENTED)
def test_options_do_as_ours_or_name_the_reason(name, argument):
    value, option = ON[argument]
    given = tensors(name)
    call = getattr(flash_attn, name)
    if option not in {feature.name for feature in FEATURES}:
        with pytest.raises(pyflash.Unsupported, match=f"^{argument}: got one, takes its default"):
            call(*given, **{argument: value})
    elif option != "dropout_p":
        expected = pyflash.flash_attention(*unpacked(name, given), **{option: value})
        torch.testing.assert_close(call(*given, **{argument: value}), expected)
    else:
        out = call(*given, dropout_p=value)
        assert out.isfinite().all() and torch.autograd.grad(out.sum(), given)[0].isfinite().all()
        with pytest.raises(pyflash.Unsupported, match="^return_attn_probs: "):
            call(*given, dropout_p=value, return_attn_probs=True)


def test_an_open_window():
    if "window" in {feature.name for feature in FEATURES}:
        q, k, v = tensors("flash_attn_func")
        ours = pyflash.flash_attention(q, k, v, window=(2, None))
        torch.testing.assert_close(flash_attn.flash_attn_func(q, k, v, window_size=(2, -1)), ours)


@pytest.mark.parametrize(
    "size", [3, "ab", None, (None, 0), (1, 2, 3), (1,), (1.0, 2.0), ("a", "b"), (True, 1)], ids=str
)
@pytest.mark.parametrize("name", DOCUMENTED)
def test_bad_windows(name, size):
    with pytest.raises(
        (TypeError, ValueError), match=rf"^window_size: got {re.escape(repr(size))}, takes two integers"
    ):
        getattr(flash_attn, name)(*tensors(name), window_size=size)


def test_windows_that_are_compiled():
    q, k, v = tensors("flash_attn_func")
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn.flash_attn_func, backend="aot_eager", fullgraph=True)
    for size in ((2, 0), (3, -1), [1, 1]):
        torch.testing.assert_close(
            compiled(q, k, v, window_size=size), flash_attn.flash_attn_func(q, k, v, window_size=size)
        )


def test_deterministic_gradients_are_asked_for(monkeypatch):
    from pyflash import entry

    asked = []

    def noted(function):
        return lambda *a, **o: asked.append(o["deterministic"]) or function(*a, **o)

    run, gradients = entry.run, noted(entry.run)
    monkeypatch.setattr(entry, "run", lambda *a, **o: (gradients if o.get("backward") else run)(*a, **o))
    for deterministic in (False, True):
        flash_attn.flash_attn_func(*tensors("flash_attn_func"), deterministic=deterministic).sum().backward()
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn.flash_attn_func, backend="aot_eager", fullgraph=True)
    compiled(*tensors("flash_attn_func"), deterministic=True).sum().backward()
    assert asked == [False, True, True]


@pytest.mark.parametrize("name", ABSENT)
def test_what_is_absent_names_the_reason(name):
    with pytest.raises(pyflash.Unsupported, match=rf"^{name}: .* not implemented; .*"):
        getattr(flash_attn, name)(1, 2, cu_seqlens_q=3)


def test_bad_arguments():
    q, k, v = tensors("flash_attn_func")
    with pytest.raises(TypeError, match="^k: got ndarray, takes a torch tensor"):
        flash_attn.flash_attn_func(q, k.detach().numpy(), v)
    with pytest.raises(
        ValueError, match=r"^qkv: got shape \(2, 6, 4, 8\), takes \(batch, seqlen, 3, heads, head_dim\)"
    ):
        flash_attn.flash_attn_qkvpacked_func(q)
    with pytest.raises(ValueError, match=r"^kv: got shape"):
        flash_attn.flash_attn_kvpacked_func(q, q.unsqueeze(2))
    with pytest.raises(ValueError, match="^k: got shape"):
        flash_attn.flash_attn_func(q, k[:1], v)
