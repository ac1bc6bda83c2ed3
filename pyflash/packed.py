"""The public functions on sequences packed one behind the other."""

from __future__ import annotations

from . import sequences
from .api import attend, differentiate


def flash_attention_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k=None,
    *,
    max_seqlen_q=None,
    max_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    window=(None, None),
    softcap=None,
    alibi_slopes=None,
    bias=None,
    mask=None,
    sinks=None,
    score_mod=None,
    mask_mod=None,
    block_mask=None,
    dropout_p=0.0,
    seed=None,
    return_lse=False,
    out=None,
):
    """`flash_attention` of sequences of their own lengths, packed one behind the other: nothing is padded.

    Parameters
    ----------
    q : array (tokens_q, heads_q, head_dim)
        As for `flash_attention`, but for the shape: the queries of all sequences.
    k, v : arrays (tokens_k, heads_kv, head_dim), (tokens_k, heads_kv, head_dim_v)
        Their keys and values.
    cu_seqlens_q : int32 or int64 array (batch + 1,), or a list
        Sequence s has the queries from cu_seqlens_q[s] up to, but not including, cu_seqlens_q[s + 1]; the first is 0
        and the last tokens_q. Any sequence may be empty. What lies on the GPU is not waited for, so it cannot be
        checked: offsets that are wrong give wrong results, but touch no other memory.
    cu_seqlens_k : the same, optional
        And these keys. Default: as cu_seqlens_q.
    max_seqlen_q, max_seqlen_k : int, optional
        The longest sequence, or more. Never needed but where cu_seqlens_* lie on the GPU and there is a `block_mask`,
        or a `bias` or `mask` that differs along queries or keys; a hint for speed otherwise.
    seqused_q, seqused_k : integer arrays (batch,), or lists, optional
        How many queries, and keys, of each sequence exist: the first so many. The others give 0, an lse of -inf, and
        gradients of 0.
    softmax_scale, causal, window, softcap, alibi_slopes, sinks, score_mod, mask_mod, dropout_p, seed
        As for `flash_attention`: `batch` is the number of sequences, and all positions are those in a sequence.
    bias, mask : arrays, optional
        As for `flash_attention`: they broadcast to (batch, heads_q, max_seqlen_q, max_seqlen_k).
    block_mask : BlockMask, optional
        As for `flash_attention`, made for max_seqlen_q queries and max_seqlen_k keys: of each sequence, from its first
        on. Documents within a sequence are such a mask; sequences see nothing of each other anyway.
    return_lse : bool
        Also return lse.
    out : array (tokens_q, heads_q, head_dim_v), optional
        Where the result is written, instead of a new array.

    Returns
    -------
    out : array (tokens_q, heads_q, head_dim_v)
    lse : array (heads_q, tokens_q)
        Only with ``return_lse``.

    Raises
    ------
    TypeError, ValueError, pyflash.Unsupported
        As `flash_attention`.

    Notes
    -----
    The algorithm of `flash_attention` on the layout of the package flash-attn (Dao et al., `flash_attn_varlen_func`),
    whose `cu_seqlens` these are. A tile is of one sequence; where that lies is read on the GPU.
    """
    options = {
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "bias": bias,
        "mask": mask,
        "sinks": sinks,
        "score_mod": score_mod,
        "mask_mod": mask_mod,
        "block_mask": block_mask,
        "dropout_p": dropout_p,
    }
    lengths = _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    return attend(q, k, v, softmax_scale, options, seed, lengths, return_lse, out)


def flash_attention_varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    cu_seqlens_q,
    cu_seqlens_k=None,
    *,
    max_seqlen_q=None,
    max_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    window=(None, None),
    softcap=None,
    alibi_slopes=None,
    bias=None,
    mask=None,
    sinks=None,
    score_mod=None,
    mask_mod=None,
    block_mask=None,
    dropout_p=0.0,
    seed=None,
    dlse=None,
    deterministic=False,
    return_dbias=False,
    return_dsinks=False,
    return_dscore_mod=False,
):
    """The gradients of `flash_attention_varlen`: dq, dk, dv, each of the shape, dtype and kind of what it belongs to.

    Parameters
    ----------
    dout : array (tokens_q, heads_q, head_dim_v)
        The gradient of out.
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
    softmax_scale, causal, window, softcap, alibi_slopes, bias, mask, sinks, score_mod, mask_mod, block_mask,
    dropout_p, seed
        As they were in the forward call.
    out, lse
        What the forward call returned.
    dlse : array (heads_q, tokens_q), optional
        The gradient of lse, where lse itself was used.
    deterministic, return_dbias, return_dsinks, return_dscore_mod
        As for `flash_attention_backward`.

    Returns
    -------
    dq, dk, dv[, dbias][, dsinks] : arrays
    dscore_mod : tuple of arrays
        Only with ``return_dscore_mod``.

    Raises
    ------
    TypeError, ValueError, pyflash.Unsupported
        As `flash_attention`.

    Notes
    -----
    The algorithm of `flash_attention_backward` on the layout of `flash_attention_varlen`.
    """
    options = {
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "bias": bias,
        "mask": mask,
        "sinks": sinks,
        "score_mod": score_mod,
        "mask_mod": mask_mod,
        "block_mask": block_mask,
        "dropout_p": dropout_p,
    }
    lengths = _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    wanted = {"bias": return_dbias, "sinks": return_dsinks, "score_mod": return_dscore_mod}
    return differentiate(dout, q, k, v, out, lse, dlse, softmax_scale, options, seed, lengths, deterministic, wanted)


def _lengths(cu_seqlens_q, *more) -> dict[str, object]:
    if cu_seqlens_q is None:
        raise TypeError(f"cu_seqlens_q: got None, takes {sequences.TAKES['cu_seqlens_q']}")
    return sequences.named(cu_seqlens_q, *more)
