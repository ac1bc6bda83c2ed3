"""The functions of the package flash-attn, by its names, with its arguments, defaults and results, on torch tensors.

    from pyflash.flash_attn import flash_attn_func  # was: from flash_attn import flash_attn_func

What PyFlash cannot do raises `pyflash.Unsupported`, naming the argument.
"""

from __future__ import annotations

import numpy as np
import torch

from . import torch as glue
from .api import attend
from .errors import Unsupported
from .feature import fail

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Attention, differentiable in q, k and v.

    Parameters
    ----------
    q : tensor (batch, seqlen_q, heads, head_dim)
    k, v : tensors (batch, seqlen_k, heads_k, head_dim)
        heads is a multiple of heads_k.
    dropout_p : float
        0.0 in evaluation.
    softmax_scale : float, optional
        Default 1 / sqrt(head_dim).
    causal : bool
        Aligned to the bottom-right corner.
    window_size : (int, int)
        How far a query sees to the left and to the right; -1 is no limit.
    softcap : float
        0.0 is none.
    alibi_slopes : tensor (heads,) or (batch, heads), optional
    deterministic : bool
        Bitwise reproducible gradients.
    return_attn_probs : bool
        Also return the log-sum-exp of each row, and None in place of the probabilities, which are never there.

    Returns
    -------
    out : tensor (batch, seqlen_q, heads, head_dim)
    softmax_lse : tensor (batch, heads, seqlen_q)
        Only with ``return_attn_probs``, as is the None after it.
    """
    call = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return _attention(q, k, v, {}, *call)


def _attention(
    q, k, v, lengths, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
    return_attn_probs,
):  # fmt: skip
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, takes a torch tensor")
    if return_attn_probs and dropout_p:
        raise Unsupported("return_attn_probs: got True with dropout, takes False: what was dropped is not kept")
    # By our names, each with the argument that it comes from.
    window = _window(window_size)
    asked = {
        "window": ("window_size", window if window != (None, None) else None),
        "softcap": ("softcap", softcap or None),
        "alibi_slopes": ("alibi_slopes", alibi_slopes),
        "dropout_p": ("dropout_p", dropout_p or None),
    }
    options = {"causal": causal}
    options |= {glue.existing(o, argument): value for o, (argument, value) in asked.items() if value is not None}
    out, lse = attend(q, k, v, softmax_scale, options, None, lengths, True, None, deterministic)
    return (out, lse, None) if return_attn_probs else out


def _window(sizes) -> tuple[int | None, int | None]:
    """Ours, where theirs has -1 for no limit."""
    takes = "two integers, of which -1 is no limit"
    if not isinstance(sizes, (tuple, list)):
        fail("window_size", sizes, takes, TypeError)
    if len(sizes) != 2:
        fail("window_size", sizes, takes, ValueError)
    # What torch.compile takes for a number that varies is an int, and is asked for nothing but its type.
    if not all(isinstance(size, (int, np.integer)) and not isinstance(size, bool) for size in sizes):
        fail("window_size", sizes, takes, TypeError)
    return tuple(None if size < 0 else size for size in sizes)


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """`flash_attn_func` with k and v in one tensor (batch, seqlen_k, 2, heads_k, head_dim)."""
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_func(q, *_unpacked("kv", kv), *options)


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """`flash_attn_func` with q, k and v in one tensor (batch, seqlen, 3, heads, head_dim)."""
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_func(*_unpacked("qkv", qkv), *options)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """`flash_attn_func` of sequences packed one behind the other.

    Parameters
    ----------
    q : tensor (total_q, heads, head_dim)
    k, v : tensors (total_k, heads_k, head_dim)
    cu_seqlens_q, cu_seqlens_k : int32 tensors (batch + 1,)
        Where each sequence begins, and the last ends.
    max_seqlen_q, max_seqlen_k : int
        The longest sequence.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
        As for `flash_attn_func`.
    block_table
        None: keys in pages are not implemented.

    Returns
    -------
    out : tensor (total_q, heads, head_dim)
    softmax_lse : tensor (heads, total_q)
        Only with ``return_attn_probs``, as is the None after it.
    """
    if block_table is not None:
        raise Unsupported("block_table: got a table, takes None: keys in pages are not implemented")
    lengths = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
    call = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return _attention(q, k, v, lengths, *call)


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """`flash_attn_varlen_func` with k and v in one tensor (total_k, 2, heads_k, head_dim)."""
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_varlen_func(q, *_unpacked("kv", kv, 1), *lengths, *options)


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """`flash_attn_varlen_func` with q, k and v in one tensor (total, 3, heads, head_dim)."""
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_varlen_func(*_unpacked("qkv", qkv, 1), *lengths, *options)


def _unpacked(name: str, tensor, axis: int = 2) -> tuple[torch.Tensor, ...]:
    """The tensors packed along a dimension, one for each letter of the name."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}, takes a torch tensor")
    if tensor.dim() != axis + 3 or tensor.shape[axis] != len(name):
        lead = ("total",) if axis == 1 else ("batch", "seqlen")
        takes = ", ".join((*lead, f"{len(name)}", "heads", "head_dim"))
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, takes ({takes})")
    return tensor.unbind(axis)


def _absent(name: str, why: str):
    def function(*_, **__):
        raise Unsupported(f"{name}: {why}")

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Not implemented: {why}."
    return function


_CACHE = "attention that writes a cache of keys is not implemented; write the cache and call flash_attn_func on it"
flash_attn_with_kvcache = _absent("flash_attn_with_kvcache", _CACHE)
