"""JAX: attention that jax.grad and jax.vjp differentiate.

Eagerly only. PyFlash launches kernels of its own, which jax.jit, jax.vmap and what is built on them (jax.checkpoint,
jax.lax loops, a derivative of the derivative) cannot trace: inside them it raises `pyflash.Unsupported`. What surrounds
the attention may well be jitted, before it and after it.
"""

from __future__ import annotations

import inspect
import secrets
from functools import partial

import jax

from . import api, packed, sequences
from .arrays import kind_of
from .features import BY_NAME, CAPTURED, FEATURES, FUNCTIONS, check, parted
from .problem import argument

_ARRAYS = (*(feature.name for feature in FEATURES if feature.is_array), *sequences.ARRAYS)

# The options that have gradients, in the order in which `flash_attention_backward` returns them.
_DIFFERENTIABLE = tuple(
    name.removeprefix("return_d")
    for name in inspect.signature(api.flash_attention_backward).parameters
    if name.startswith("return_d")
)


def flash_attention(q, k, v, *, return_lse: bool = False, deterministic: bool = False, **options):
    """`pyflash.flash_attention` of JAX arrays, differentiable in reverse mode.

    Parameters
    ----------
    q, k, v, return_lse
        As for `pyflash.flash_attention`.
    deterministic : bool
        Bitwise the same gradients each time.
    options
        The options of `pyflash.flash_attention`.

    Returns
    -------
    out : array
    lse : array
        Only with ``return_lse``; it may be differentiated, too.

    Raises
    ------
    TypeError, ValueError, pyflash.Unsupported
        As `pyflash.flash_attention`; ValueError also for an option that has no gradient where one is asked for,
        Unsupported inside jax.jit and jax.vmap.
    """
    for name, value in {**options, "return_lse": return_lse, "deterministic": deterministic}.items():
        if name not in _ARRAYS and any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
            raise ValueError(f"{name}: got a value that is traced, takes one that is not: it has no gradient")
    if options.get("dropout_p") and options.get("seed") is None:
        options["seed"] = secrets.randbits(63)  # the backward needs the same
    q, k, v = map(jax.numpy.asarray, (q, k, v))
    arrays = {name: _jax_array(name, options[name]) for name in _ARRAYS if options.get(name) is not None}
    functions, captured = parted(check({name: options[name] for name in FUNCTIONS if options.get(name) is not None}))
    if any(isinstance(array, jax.core.Tracer) for array in captured.values()):
        options, arrays = options | functions, arrays | captured
    differentiable = (*_DIFFERENTIABLE, *_learned(functions))
    for name, array in arrays.items():
        if name not in differentiable and isinstance(array, jax.core.Tracer):
            kind_of(jax.lax.stop_gradient(array), name)  # raises if more is traced than a gradient
            takes = "one that is not: it has no gradient"
            raise ValueError(f"{argument(name)}: got an array that is traced, takes {takes}")
    scalars = tuple((name, value) for name, value in options.items() if name not in arrays)
    out, lse = _attention(scalars, deterministic, return_lse, q, k, v, arrays)
    return (out, lse) if return_lse else out


def flash_attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k=None, **options):
    """`pyflash.flash_attention_varlen` of JAX arrays, differentiable in reverse mode.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k
        As for `pyflash.flash_attention_varlen`.
    options
        Its options, and `deterministic`.

    Returns
    -------
    out : array
    lse : array
        Only with ``return_lse``; it may be differentiated, too.

    Raises
    ------
    TypeError, ValueError, pyflash.Unsupported
        As `flash_attention`.
    """
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    return flash_attention(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)


def _jax_array(name: str, value: object):
    """What says where sequences are is checked as it is, before it is an array of JAX, where int64 may be int32."""
    if name in sequences.ARRAYS and (host := sequences.on_host(name, value)) is not None:
        value = host
    return jax.numpy.asarray(value)


def _learned(scalars: dict[str, object]) -> tuple[str, ...]:
    """What score_mod captures that has gradients."""
    return BY_NAME["score_mod"].differentiated(scalars["score_mod"]) if "score_mod" in scalars else ()


def _options(scalars, arrays) -> dict[str, object]:
    """Those of a call, in which functions hold what they capture, if that is among the arrays."""
    options = {**dict(scalars), **arrays}
    captured = tuple(options.pop(slot.name) for slot in CAPTURED if slot.name in options)
    if captured:
        functions = [name for name in FUNCTIONS if options.get(name) is not None]
        options |= {name: options[name]._replace(arrays=captured) for name in functions}
    return options


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(scalars, deterministic, lse_is_used, q, k, v, arrays):
    function = packed.flash_attention_varlen if "cu_seqlens_q" in arrays else api.flash_attention
    return function(q, k, v, return_lse=True, **_options(scalars, arrays))


def _forward(scalars, deterministic, lse_is_used, q, k, v, arrays):
    results = _attention(scalars, deterministic, lse_is_used, q, k, v, arrays)
    return results, (q, k, v, *results, arrays)


def _backward(scalars, deterministic, lse_is_used, kept, gradients):
    *tensors, arrays = kept
    dout, dlse = map(jax.numpy.asarray, gradients)  # those that a caller of jax.vjp gives may be NumPy's
    learned = _learned(dict(scalars)) if CAPTURED[0].name in arrays else ()
    wanted = [name for name in _DIFFERENTIABLE if name in arrays or (name == "score_mod" and learned)]
    varlen = "cu_seqlens_q" in arrays
    function = packed.flash_attention_varlen_backward if varlen else api.flash_attention_backward
    dq, dk, dv, *rest = function(
        dout,
        *tensors,
        dlse=dlse if lse_is_used else None,
        deterministic=deterministic,
        **_options(scalars, arrays),
        **{f"return_d{name}": True for name in wanted},
    )
    found = dict(zip(wanted, rest, strict=True))
    found |= dict(zip(learned, found.get("score_mod", ()), strict=True))
    return dq, dk, dv, {name: found.get(name) for name in arrays}  # None: no gradient


_attention.defvjp(_forward, _backward)
