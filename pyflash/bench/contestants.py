"""Implementations of attention, each behind the same two calls."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .. import api
from .cases import Case
from .machines import Machine


class Calls(NamedTuple):
    """A case made ready. `forward` gives out; `backward` dq, dk, dv of an earlier forward; `both` makes that first."""

    forward: Callable[[], object]
    backward: Callable[[], tuple]
    both: Callable[[], tuple]


class Contestant:
    name: str
    options = frozenset({"causal"})  # those of `flash_attention` that it can do

    def obstacle(self, case: Case, machine: Machine) -> str | None:
        """Why it cannot take a case, as far as that is known beforehand."""
        on = {name for name, value in case.options if value not in (None, False)}
        missing = on - self.options
        return f"has no {', '.join(sorted(missing))}" if missing else None

    def prepare(self, case: Case, q, k, v, dout) -> Calls:
        raise NotImplementedError


class PyFlash(Contestant):
    name = "PyFlash"

    def obstacle(self, case: Case, machine: Machine) -> str | None:
        return None

    def prepare(self, case: Case, q, k, v, dout) -> Calls:
        options = case.call

        def recorded():
            return api.flash_attention(q, k, v, return_lse=True, **options)

        def backward(out, lse):
            return api.flash_attention_backward(dout, q, k, v, out, lse, **options)

        kept = recorded()
        return Calls(
            lambda: api.flash_attention(q, k, v, **options), lambda: backward(*kept), lambda: backward(*recorded())
        )


class Ordinary(Contestant):
    """The score matrix written out, softmax in float32: three matrix products with what lies between them."""

    name = "ordinary"
    options = frozenset({"causal", "window", "softcap"})

    def obstacle(self, case: Case, machine: Machine) -> str | None:
        # s and p in float32, masked s, p in the type of q; and as much again in the backward. A cap's slope in float32.
        need = case.score_bytes * (4 if case.dtype in ("float32", "float64") else 7)
        need += case.score_bytes * (2 if case.softcap else 0)
        too_much = f"needs {need / 1e9:.0f} GB" if need > machine.ordinary_bytes else None
        return super().obstacle(case, machine) or too_much


class OrdinaryArrays(Ordinary):
    """With NumPy or CuPy."""

    def __init__(self, xp):
        self.xp = xp

    def prepare(self, case: Case, q, k, v, dout) -> Calls:
        group = case.heads // case.heads_kv
        q, k, v, dout = (a.swapaxes(1, 2) for a in (q, k, v, dout))  # (batch, heads, seqlen, head_dim)
        k, v = (a if group == 1 else self.xp.repeat(a, group, axis=1) for a in (k, v))
        low, high = case.band
        lengths, mask = (case.seqlen_q, case.seqlen_k), None
        if high is not None:
            mask = self.xp.tri(*lengths, high, dtype=bool)
        if low is not None:
            above = ~self.xp.tri(*lengths, low - 1, dtype=bool)
            mask = above if mask is None else mask & above

        def recorded():
            return ordinary_forward(self.xp, q, k, v, mask, case.softcap)

        def backward(*kept):
            dq, dk, dv = ordinary_backward(self.xp, dout, q, k, v, *kept)
            dk, dv = (a if group == 1 else _summed(a, case.heads_kv) for a in (dk, dv))
            return tuple(a.swapaxes(1, 2) for a in (dq, dk, dv))

        kept = recorded()
        return Calls(lambda: recorded()[0].swapaxes(1, 2), lambda: backward(*kept), lambda: backward(*recorded()))


def _summed(a, heads_kv: int):
    batch, heads, seqlen, dim = a.shape
    return a.reshape(batch, heads_kv, heads // heads_kv, seqlen, dim).sum(2)


def ordinary_forward(xp, q, k, v, mask, softcap=None):
    """out, the probabilities, and the slope of softcap. Arrays are (..., seqlen, head_dim); the mask, if any, is True
    where a key is seen."""
    real = np.float64 if q.dtype == np.float64 else np.float32
    s = xp.matmul(q, k.swapaxes(-1, -2)).astype(real) * real(q.shape[-1] ** -0.5)
    slope = real(1)
    if softcap is not None:
        s = xp.tanh(s / real(softcap))
        slope = 1 - s * s
        s = s * real(softcap)
    if mask is not None:
        s = xp.where(mask, s, real(-np.inf))
    s = xp.exp(s - s.max(-1, keepdims=True))
    p = (s / s.sum(-1, keepdims=True)).astype(q.dtype)
    return xp.matmul(p, v), p, slope


def ordinary_backward(xp, dout, q, k, v, out, p, slope):
    """dq, dk, dv from what the forward kept."""
    real = np.float64 if q.dtype == np.float64 else np.float32
    dp = xp.matmul(dout, v.swapaxes(-1, -2)).astype(real)
    delta = (dout.astype(real) * out).sum(-1, keepdims=True)
    ds = (p * (dp - delta) * (real(q.shape[-1] ** -0.5) * slope)).astype(q.dtype)
    return xp.matmul(ds, k), xp.matmul(ds.swapaxes(-1, -2), q), xp.matmul(p.swapaxes(-1, -2), dout)


class _Torch(Contestant):
    """A function of torch tensors with gradients."""

    def attention(self, case: Case, q, k, v):
        """`out`; all arrays are (batch, seqlen, heads, head_dim)."""
        raise NotImplementedError

    def prepare(self, case: Case, q, k, v, dout) -> Calls:
        import torch

        leaves = tuple(t.detach().requires_grad_() for t in (q, k, v))
        kept = []

        def forward():
            with torch.no_grad():
                return self.attention(case, q, k, v)

        def backward():
            kept[:] = kept or [self.attention(case, *leaves)]
            return torch.autograd.grad(kept[0], leaves, dout, retain_graph=True)

        return Calls(forward, backward, lambda: torch.autograd.grad(self.attention(case, *leaves), leaves, dout))


class OrdinaryTorch(_Torch, Ordinary):
    def attention(self, case: Case, q, k, v):
        import torch

        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(case.heads // case.heads_kv, 1) for t in (k, v))
        s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if case.softcap:
            s = case.softcap * (s / case.softcap).tanh()
        low, high = case.band
        if (low, high) != (None, None):
            seen = torch.ones(s.shape[-2:], dtype=torch.bool, device=q.device)
            seen = seen if high is None else seen.tril(high)
            seen = seen if low is None else seen.triu(low)
            s = s.masked_fill(~seen, float("-inf"))
        return (s.softmax(-1, torch.promote_types(s.dtype, torch.float32)).to(q.dtype) @ v).transpose(1, 2)


class Sdpa(_Torch):
    """torch's own attention, by one of its backends."""

    def __init__(self, backend: str):
        self.backend, self.name = backend, f"SDPA {backend.removesuffix('_ATTENTION').lower()}"

    def attention(self, case: Case, q, k, v):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.attention.bias import causal_lower_right
        from torch.nn.functional import scaled_dot_product_attention

        square = case.seqlen_q == case.seqlen_k
        bias = causal_lower_right(case.seqlen_q, case.seqlen_k) if case.causal and not square else None
        with sdpa_kernel(getattr(SDPBackend, self.backend)):
            return scaled_dot_product_attention(
                *(t.transpose(1, 2) for t in (q, k, v)),
                attn_mask=bias,
                is_causal=case.causal and square,
                enable_gqa=case.heads != case.heads_kv,
            ).transpose(1, 2)


class FlashAttn(_Torch):
    """flash_attn_func of one of its packages."""

    options = frozenset({"causal", "window", "softcap"})

    def __init__(self, name: str, module: object):
        self.name, self.function = name, module.flash_attn_func

    def attention(self, case: Case, q, k, v):
        options = {"causal": case.causal}
        for name, value in case.options:
            if name == "window":
                options["window_size"] = tuple(-1 if size is None else size for size in value)
            elif name == "softcap" and value is not None:
                options["softcap"] = value
        result = self.function(q, k, v, **options)
        return result[0] if isinstance(result, tuple) else result


_PACKAGES = (
    ("flash-attn 2", "flash_attn"),
    ("flash-attn 3", "flash_attn_interface"),
    ("flash-attn 3", "fa3_fwd_interface"),
    ("flash-attn 4", "flash_attn.cute"),
)
_SDPA = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")


def line_up(machine: Machine) -> list[Contestant]:
    """PyFlash, ordinary attention, and those that are installed here and take the machine's arrays."""
    if machine.library != "torch":
        return [PyFlash(), OrdinaryArrays(machine.xp)]
    found: list[Contestant] = [PyFlash(), OrdinaryTorch(), *(Sdpa(backend) for backend in _SDPA)]
    for name, module in _PACKAGES:
        try:
            found.append(FlashAttn(name, importlib.import_module(module)))
        except (
            ImportError,
            AttributeError,
            OSError,
        ):  # not here, another thing by that name, or for other versions
            continue
    return found
