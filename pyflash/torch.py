"""PyFlash as a differentiable function of torch tensors. Imported by itself when a torch tensor comes in."""

from __future__ import annotations

import torch

from . import api


def records_gradient(*tensors: torch.Tensor) -> bool:
    """Whether autograd wants to know what is done with these tensors."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, softmax_scale, causal, deterministic):
        out, lse = api.flash_attention(q, k, v, softmax_scale=softmax_scale, causal=causal, return_lse=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = {"softmax_scale": softmax_scale, "causal": causal, "deterministic": deterministic}
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 6
        if dout is None:
            dout = torch.zeros_like(out)
        dq, dk, dv = api.flash_attention_backward(dout, q, k, v, out, lse, dlse=dlse, **ctx.options)
        needed = ctx.needs_input_grad
        return dq if needed[0] else None, dk if needed[1] else None, dv if needed[2] else None, None, None, None


def attention(q, k, v, softmax_scale=None, causal=False):
    """`pyflash.flash_attention(..., return_lse=True)`, differentiable in q, k and v through out and lse.

    The gradients are deterministic where torch.use_deterministic_algorithms asks for it.
    """
    return _Attention.apply(q, k, v, softmax_scale, causal, torch.are_deterministic_algorithms_enabled())
