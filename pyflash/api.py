"""The public functions."""

from __future__ import annotations

import operator
from functools import cache

import numpy as np

from . import arrays, debug, device, entry, feature, features, problem, sequences
from . import explain as explanation
from .blocks import BlockMask, Blocks
from .dispatch import check_sequences, filled, read, run, tensors_of
from .launch import Executable
from .plan_blocks import MaskProblem, plan_blocks
from .tiles import FAMILIES
from .trace import trace

# The objects themselves, which cost the least to recognise.
_NO_WINDOW, _NO_DROPOUT = features.DEFAULTS["window"], features.DEFAULTS["dropout_p"]


@cache
def _glue():
    from . import torch as glue

    return glue


def flash_attention(
    q,
    k,
    v,
    *,
    softmax_scale=None,
    causal=False,
    window=_NO_WINDOW,
    softcap=None,
    alibi_slopes=None,
    bias=None,
    mask=None,
    sinks=None,
    score_mod=None,
    mask_mod=None,
    block_mask=None,
    dropout_p=_NO_DROPOUT,
    seed=None,
    seqused_q=None,
    seqused_k=None,
    return_lse=False,
    out=None,
):
    """Exact attention, softmax(softmax_scale * q k^T) v, without the seqlen_q x seqlen_k matrix.

    Parameters
    ----------
    q : array (batch, seqlen_q, heads_q, head_dim)
        float16, bfloat16, float32 or float64; any strides. CuPy, torch, JAX, NumPy, or any array with ``__dlpack__``.
    k : array (batch, seqlen_k, heads_kv, head_dim)
        heads_q must be a multiple of heads_kv; query head h reads key head h // (heads_q // heads_kv).
    v : array (batch, seqlen_k, heads_kv, head_dim_v)
        head_dim and head_dim_v are 1 to 256, independently.
    softmax_scale : float, optional
        Default 1 / sqrt(head_dim). May be zero or negative.
    causal : bool
        Query i sees key j only if j <= i + seqlen_k - seqlen_q: aligned to the bottom-right corner.
    window : (int or None, int or None)
        (left, right): query i sees key j only if its own position i + seqlen_k - seqlen_q is at most `left` behind and
        `right` before j. None is no limit. Tiles outside of the band are not visited.
    softcap : float, optional
        Scores s become softcap * tanh(s / softcap).
    alibi_slopes : array (heads_q,) or (batch, heads_q), optional
        Adds -slope * |i + seqlen_k - seqlen_q - j| to the score of query i and key j. float32, or float64 for float64
        inputs.
    bias : array, optional
        Added to the scores, to which it broadcasts: (batch, heads_q, seqlen_q, seqlen_k), by sizes of 1 or fewer
        dimensions, with any strides. Of q's dtype, or lse's.
    mask : boolean array, optional
        Which query sees which key; broadcasts as `bias`.
    sinks : array (heads_q,), optional
        A score of each head that takes part in its softmax and has no value: exp(sink) is added to each row's sum. Of
        lse's dtype. Where it is given, lse includes it.
    score_mod : function, optional
        ``f(score, batch, head, q_idx, kv_idx)`` gives what a score becomes after all of the above. It is called once,
        to be traced and compiled into the kernels; its derivative follows by itself. It may use arithmetic,
        comparisons, ``& | ^ ~``, ``// %`` of integers, ``pyflash.where, exp, log, tanh, abs, minimum, maximum, sqrt,
        sin, cos, floor``, and elements of up to four arrays of q's kind that it captures, as in ``table[head, q_idx]``
        (outside of an array is its edge). Python numbers that it captures are constants of the kernel. Indices count
        from 0, and integers have 32 bits but where an int64 array takes part.
    mask_mod : function, optional
        ``f(batch, head, q_idx, kv_idx)``, made in the same way, says which query sees which key.
    block_mask : BlockMask, optional
        What `pyflash.block_mask` made of a mask_mod, in place of that: blocks of the scores that it hides are not
        computed, and the function is not asked about those that it leaves full.
    dropout_p : float
        The probability with which a probability is dropped after the softmax; the others are divided by 1 - dropout_p.
    seed : int, optional
        Which ones: the same seed drops the same (batch, head, query, key). Drawn anew in each call if not given, for
        torch by its generator; the backward must be told, but for torch's.
    seqused_q, seqused_k : integer arrays (batch,), or lists, optional
        How many queries, and keys, of each sequence exist: the first so many. Causal, window and ALiBi are aligned to
        the last that exist. Other queries give 0, and an lse of -inf. For sequences without padding there is
        `flash_attention_varlen`.
    return_lse : bool
        Also return lse, the natural logarithm of the sum of exp(scores) of each row, which the backward needs.
    out : array (batch, seqlen_q, heads_q, head_dim_v), optional
        Where the result is written, instead of a new array.

    Returns
    -------
    out : array (batch, seqlen_q, heads_q, head_dim_v)
        Of q's kind, dtype and device. A query that sees no key gives 0.
    lse : array (batch, heads_q, seqlen_q)
        Only with ``return_lse``. float32, or float64 for float64 inputs. A query that sees no key gives -inf.

    Raises
    ------
    TypeError, ValueError
        An argument is not what it must be; the message names it, what it got and what it takes.
    pyflash.Unsupported
        No kernel does this on this device.

    Notes
    -----
    FlashAttention (Dao et al. 2022, algorithm 1) with the work split of FlashAttention-2 (Dao 2023, section 3). The
    work is queued on the caller's current stream. Torch tensors that require grad are differentiable, torch.compile
    can trace the call, and under torch's autocast q, k and v are cast as for torch's own attention.
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
    lengths = {"seqused_q": seqused_q, "seqused_k": seqused_k}
    return attend(q, k, v, softmax_scale, options, seed, lengths, return_lse, out)


def attend(q, k, v, softmax_scale, options, seed, lengths, return_lse, out, deterministic=False):
    """`flash_attention`, and that of packed sequences: `lengths` are the arguments that say where sequences are.
    `deterministic` is for the gradients of torch tensors."""
    if return_lse is not True and return_lse is not False:
        raise TypeError(f"return_lse: got {return_lse!r}, takes True or False")
    if arrays.traced_by_torch():
        from . import torch as glue

        _refuse(out)
        results = glue.traced(q, k, v, _named(softmax_scale, options, seed, lengths), deterministic)
        return results if return_lse else results[0]
    given = {"q": q, "k": k, "v": v} if out is None else {"q": q, "k": k, "v": v, "o": out}
    call = read(given, softmax_scale, options, seed, lengths)
    if seed is None and options.get("dropout_p"):
        call = call._replace(seed=call.kind.seed())
    if call.kind.autograd:
        glue = _glue()
        recorded, cast = glue.records(given, call.scalars), glue.cast_to(q, k, v)
        if recorded or cast:
            _refuse(out)
            results = glue.attention(call, given, cast, deterministic)
            return results if return_lse else results[0]
    results = run(call, given, wants_lse=return_lse)
    o = results["o"] if out is None else out
    return (o, results["lse"]) if return_lse else o


def _refuse(out) -> None:
    if out is not None:
        raise ValueError(
            "out: got a tensor, takes None where q, k or v requires grad, under autocast, and in torch.compile"
        )


def _named(softmax_scale, options: dict, seed, lengths: dict) -> dict[str, object]:
    """The options of a call that torch traces."""
    seed = None if seed is None else features.check_seed(seed)
    return {"softmax_scale": softmax_scale, **options, "seed": seed, **lengths}


def flash_attention_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    *,
    softmax_scale=None,
    causal=False,
    window=_NO_WINDOW,
    softcap=None,
    alibi_slopes=None,
    bias=None,
    mask=None,
    sinks=None,
    score_mod=None,
    mask_mod=None,
    block_mask=None,
    dropout_p=_NO_DROPOUT,
    seed=None,
    seqused_q=None,
    seqused_k=None,
    dlse=None,
    deterministic=False,
    return_dbias=False,
    return_dsinks=False,
    return_dscore_mod=False,
):
    """The gradients of `flash_attention`: dq, dk, dv, each of the shape, dtype and kind of what it belongs to.

    Parameters
    ----------
    dout : array (batch, seqlen_q, heads_q, head_dim_v)
        The gradient of out; any strides.
    q, k, v, softmax_scale, causal, window, softcap, alibi_slopes, bias, mask, sinks, score_mod, mask_mod,
    block_mask, dropout_p, seed, seqused_q, seqused_k
        As they were in the forward call.
    out, lse
        What the forward call returned.
    dlse : array (batch, heads_q, seqlen_q), optional
        The gradient of lse, where lse itself was used.
    deterministic : bool
        Bitwise the same gradients each time. Otherwise the order in which dq and dbias are summed may vary.
    return_dbias, return_dsinks : bool
        Also return the gradient of `bias`, summed over what was broadcast, and that of `sinks`.
    return_dscore_mod : bool
        Also return a tuple of the gradients of the floating-point arrays that `score_mod` captures, in the order in
        which it first reads them. They are summed in any order, so not where `deterministic` on a GPU.

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
    FlashAttention (Dao et al. 2022, algorithm 4) with the work split of FlashAttention-2: scores are recomputed from
    lse, in O(seqlen) extra memory.
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
    lengths = {"seqused_q": seqused_q, "seqused_k": seqused_k}
    wanted = {"bias": return_dbias, "sinks": return_dsinks, "score_mod": return_dscore_mod}
    return differentiate(dout, q, k, v, out, lse, dlse, softmax_scale, options, seed, lengths, deterministic, wanted)


def differentiate(dout, q, k, v, out, lse, dlse, softmax_scale, options, seed, lengths, deterministic, wanted):
    """`flash_attention_backward`, and that of packed sequences."""
    for name, flag in (("deterministic", deterministic), *wanted.items()):
        if flag is not True and flag is not False:
            raise TypeError(f"{'return_d' * (name in wanted)}{name}: got {flag!r}, takes True or False")
    gradients = tuple([name for name, flag in wanted.items() if flag])
    if seed is None and features.BY_NAME["dropout_p"].check(options["dropout_p"]):
        raise ValueError("seed: got None, takes the forward's where there is dropout")
    if arrays.traced_by_torch():
        from . import torch as glue

        options = _named(softmax_scale, options, seed, lengths)
        return tuple(glue.traced_backward(dout, q, k, v, out, lse, dlse, options, deterministic, gradients))
    given = {"q": q, "k": k, "v": v, "dout": dout, "o": out, "lse": lse}
    if dlse is not None:
        given["dlse"] = dlse
    call = read(given, softmax_scale, options, seed, lengths)
    results = run(call, given, backward=True, deterministic=deterministic, gradients=gradients)
    scalars = dict(call.scalars) if gradients else {}
    more = [features.BY_NAME[name].gradient(scalars.get(name), results) for name in gradients]
    return (results["dq"], results["dk"], results["dv"], *more)


def explain(
    q,
    k,
    v,
    *,
    softmax_scale=None,
    causal=False,
    window=_NO_WINDOW,
    softcap=None,
    alibi_slopes=None,
    bias=None,
    mask=None,
    sinks=None,
    score_mod=None,
    mask_mod=None,
    block_mask=None,
    dropout_p=_NO_DROPOUT,
    seed=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    backward=False,
    deterministic=False,
    gpu=None,
):
    """What a call would run, why, and what the hardware could do at best. Nothing is launched.

    Parameters
    ----------
    q, k, v, softmax_scale, causal, window, softcap, alibi_slopes, bias, mask, sinks, score_mod, mask_mod,
    block_mask, dropout_p, seed, seqused_q, seqused_k
        As for `flash_attention`. Of a `block_mask` of NumPy, without causal and window, the blocks that are not empty
        are counted; what else masks hide is not.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As for `flash_attention_varlen`, which is explained then. What lies on the GPU is waited for.
    backward : bool
        Explain the backward, with contiguous dout and out.
    deterministic : bool
        As for `flash_attention_backward`.
    gpu : str, optional
        Plan for this GPU, one of ``pyflash.device.KNOWN``, instead of the one that the arrays lie on.

    Returns
    -------
    Explanation
        Print it to read it; its attributes hold the plan and the figures.

    Raises
    ------
    TypeError, ValueError, pyflash.Unsupported
        As the call itself; ValueError also for a gpu that is not known.
    """
    for name, flag in (("backward", backward), ("deterministic", deterministic)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: got {flag!r}, takes True or False")
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
    given = {"q": q, "k": k, "v": v}
    lengths = sequences.named(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    lengths = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in lengths.items()}
    asked = read(given, softmax_scale, options, seed, lengths)
    kind = asked.kind
    seen = arrays.Inspected(kind, given)
    tensors = tensors_of(kind, seen.keys)
    tensors |= {name: problem.contiguous(host.shape, "int32") for name, host in asked.hosts.items()}
    call = {"softmax_scale": asked.softmax_scale, "options": dict(asked.scalars), "longest": asked.longest}
    made = problem.make(tensors, backward=False, wants_lse=True, **call)
    check_sequences(asked, made)
    if backward:
        made = problem.make(problem.backward_tensors(made), backward=True, deterministic=deterministic, **call)
    here = device.present(seen.device_id()) if kind.gpu else None
    here = here if gpu is None else device.named(gpu)
    kinds = block_mask.kinds if isinstance(getattr(block_mask, "kinds", None), np.ndarray) else None
    return explanation.explain(made, here, debug.FAMILIES or FAMILIES, asked.hosts, kinds)


def block_mask(mask_mod, batch, heads, seqlen_q, seqlen_k, *, block_q=128, block_k=128, like=None):
    """Evaluate a mask function once, by blocks, so that attention skips those that it hides.

    Parameters
    ----------
    mask_mod : function
        As for `flash_attention`. What it captures must not change as long as the result is used.
    batch, heads : int
        Those of q; or 1, if the function does not depend on them.
    seqlen_q, seqlen_k : int
        Those of q and k.
    block_q, block_k : int
        Queries and keys of a block, multiples of 16. The kernels' tiles must divide them: 128 and multiples work
        everywhere.
    like : array, optional
        One of the kind, and on the device, that attention will be computed with, such as q. Not needed where mask_mod
        captures arrays.

    Returns
    -------
    BlockMask
        The `block_mask` of `flash_attention` and `flash_attention_backward`. Printed, it says how sparse it is. Its
        memory is in proportion to the number of blocks.

    Raises
    ------
    TypeError, ValueError, pyflash.Unsupported
        As `flash_attention`.
    """
    sizes = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    sizes = {name: _count(name, value, 1 if name == "heads" else 0) for name, value in sizes.items()}
    sides = {"block_q": block_q, "block_k": block_k}
    sides = {name: _count(name, value, 16, 16) for name, value in sides.items()}
    if mask_mod is None:
        raise TypeError("mask_mod: got None, takes a function (batch, head, q_idx, kv_idx) -> bool")
    mod, made = trace("mask_mod", mask_mod), Blocks(**sizes, **sides)
    given = features.parted({"mask_mod": mod})[1] | ({} if like is None else {"like": like})
    if not given:
        raise ValueError("like: got None, takes an array, such as q, where mask_mod captures none")
    kind = arrays.common_kind(given)
    seen, like = arrays.Inspected(kind, given), next(reversed(given.values()))
    tensors = {name: tensor for name, tensor in tensors_of(kind, seen.keys).items() if name != "like"}
    asked = MaskProblem(made, mod._replace(arrays=()), tuple(tensors.items()))
    if kind.gpu:
        device_id = seen.device_id()
        gpu = device.present(device_id)
        executable = Executable(plan_blocks(asked, gpu), gpu, device_id)
        forms = {n: kind.form(t.shape, t.dtype) for n, t in asked.tensors if n in asked.outputs}
        outputs = filled(kind, executable, seen, forms, like, None)
    else:
        outputs = asked.evaluate({name: seen.views[name] for name in tensors})
    kinds, *lists = (kind.wrap(view, like) for view in outputs.values())
    return BlockMask(mod, made._replace(arrays=tuple(lists)), kinds)


def _count(name: str, value: object, least: int, step: int = 1) -> int:
    takes = f"an integer from {least} to {problem.MAX_SIZE}" + f", a multiple of {step}" * (step > 1)
    try:
        number = operator.index(feature.fail(name, value, takes, TypeError) if isinstance(value, bool) else value)
    except TypeError:
        feature.fail(name, value, takes, TypeError)
    return (
        number
        if least <= number <= problem.MAX_SIZE and number % step == 0
        else feature.fail(name, value, takes, ValueError)
    )


entry.forward, entry.backward = flash_attention, flash_attention_backward
