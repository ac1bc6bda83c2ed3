"""Packed sequences of torch tensors: gradients, torch.compile, and the names of flash-attn."""

from __future__ import annotations

import inspect

import pytest

import pyflash

torch = pytest.importorskip("torch")
from pyflash import flash_attn  # noqa: E402

QUERIES, KEYS = [0, 4, 4, 13], [0, 7, 9, 20]
FORMS = {
    "tensors": lambda offsets: torch.tensor(offsets, dtype=torch.int32),
    "int64 tensors": torch.tensor,
    "lists": list,
}


def tensors(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = (QUERIES[-1], 4, 8), (KEYS[-1], 2, 8), (KEYS[-1], 2, 8)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def one_by_one(q, k, v, **options):
    """Each sequence alone, by the same library."""
    outs, lses = [], []
    for s in range(len(QUERIES) - 1):
        rows, keys = slice(*QUERIES[s : s + 2]), slice(*KEYS[s : s + 2])
        out, lse = pyflash.flash_attention(*(t[None] for t in (q[rows], k[keys], v[keys])), return_lse=True, **options)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def loss(out, lse):
    return (out * torch.arange(out.numel()).view_as(out)).sum() + lse.nan_to_num(0, 0, 0).square().sum()


def assert_same(function, **options):
    """The same as one by one, and so the gradients."""
    given, others = tensors(), tensors()
    found, expected = function(*given), one_by_one(*others, **options)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
    loss(*found).backward()
    loss(*expected).backward()
    for x, y in zip(given, others, strict=True):
        torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("form", FORMS)
def test_gradients(form):
    lengths = FORMS[form](QUERIES), FORMS[form](KEYS)
    assert_same(
        lambda q, k, v: pyflash.flash_attention_varlen(q, k, v, *lengths, causal=True, return_lse=True), causal=True
    )


def test_gradients_where_rows_are_not_used():
    q, k, v = (torch.randn((2, 5, 2, 8), dtype=torch.float64).requires_grad_() for _ in range(3))
    out = pyflash.flash_attention(q, k, v, seqused_q=torch.tensor([3, 5]), seqused_k=[5, 2])
    assert not out[0, 3:].any()
    torch.testing.assert_close(out[1:], pyflash.flash_attention(q[1:], k[1:, :2], v[1:, :2]))
    out.sum().backward()
    assert not q.grad[0, 3:].any() and not k.grad[1, 2:].any() and v.grad[1, :2].all()


def test_compiled():
    offsets = torch.tensor(QUERIES), torch.tensor(KEYS)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(q, k, v):
        return pyflash.flash_attention_varlen(q, k, v, *offsets, max_seqlen_q=9, causal=True, return_lse=True)

    assert_same(function, causal=True)


def test_offsets_in_float_or_with_gradients_are_refused():
    q, k, v = tensors()
    with pytest.raises(TypeError, match="cu_seqlens_q: got dtype float32, takes int32 or int64"):
        pyflash.flash_attention_varlen(q, k, v, torch.tensor([0.0, 13.0]), KEYS)
    with pytest.raises(ValueError, match="cu_seqlens_k: got 19 as the last offset, takes 20"):
        pyflash.flash_attention_varlen(q, k, v, torch.tensor(QUERIES), torch.tensor([0, 7, 9, 19]))


# ---- flash-attn's names

OPTIONS = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic"]
OPTIONS.append("return_attn_probs")
LENGTHS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
DOCUMENTED = {
    "flash_attn_varlen_func": ["q", "k", "v", *LENGTHS, *OPTIONS, "block_table"],
    "flash_attn_varlen_kvpacked_func": ["q", "kv", *LENGTHS, *OPTIONS],
    "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen", *OPTIONS],
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_arguments_are_as_documented(name):
    assert list(inspect.signature(getattr(flash_attn, name)).parameters) == DOCUMENTED[name]


def test_flash_attn_varlen():
    lengths = torch.tensor(QUERIES, dtype=torch.int32), torch.tensor(KEYS, dtype=torch.int32), 9, 11

    def function(q, k, v):
        out, lse, nothing = flash_attn.flash_attn_varlen_func(
            q, k, v, *lengths, causal=True, window_size=(5, 0), return_attn_probs=True
        )
        assert nothing is None
        return out, lse

    assert_same(function, causal=True, window=(5, 0))

    def kvpacked(q, k, v):
        out = flash_attn.flash_attn_varlen_kvpacked_func(q, torch.stack((k, v), 1), *lengths)
        return out, one_by_one(q, k, v)[1]

    assert_same(kvpacked)


def test_flash_attn_varlen_qkvpacked():
    qkv = torch.randn((13, 3, 2, 8), dtype=torch.float64)
    out = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, torch.tensor(QUERIES, dtype=torch.int32), 9, causal=True)
    expected = pyflash.flash_attention_varlen(*qkv.unbind(1), QUERIES, causal=True)
    torch.testing.assert_close(out, expected)
    with pytest.raises(ValueError, match=r"qkv: got shape \(13, 2, 2, 8\), takes \(total, 3, heads, head_dim\)"):
        flash_attn.flash_attn_varlen_qkvpacked_func(qkv[:, :2], torch.tensor([0, 13]), 13)


def test_pages_are_refused():
    q, k, v = tensors()
    with pytest.raises(pyflash.Unsupported, match="block_table: got a table, takes None"):
        flash_attn.flash_attn_varlen_func(q, k, v, QUERIES, KEYS, 9, 11, block_table=torch.zeros(3, 1))
