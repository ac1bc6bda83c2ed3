"""Attention as a differentiable function of torch tensors. Imported by itself when a torch tensor comes in.

The functions that compute it are handed in, since those are what brings a tensor here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def records_gradients() -> bool:
    """Whether autograd is told what is done with tensors that require grad."""
    return torch.is_grad_enabled()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward, backward, q, k, v, options, deterministic):
        out, lse = forward(q, k, v, return_lse=True, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.backward_call, ctx.options = backward, {**options, "deterministic": deterministic}
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        gradients = (None, None, None)
        if dout is not None or dlse is not None:
            dout = torch.zeros_like(out) if dout is None else dout
            gradients = ctx.backward_call(dout, q, k, v, out, lse, dlse=dlse, **ctx.options)
        wanted = (g if needed else None for g, needed in zip(gradients, ctx.needs_input_grad[2:5], strict=True))
        return None, None, *wanted, None, None


def attention(forward: Callable, backward: Callable, q, k, v, options: dict[str, object]):
    """`out` and `lse`, differentiable in q, k and v through both.

    `forward` and `backward` are called as `flash_attention` and `flash_attention_backward`. The gradients are
    deterministic where torch.use_deterministic_algorithms asks for it.
    """
    return _Attention.apply(forward, backward, q, k, v, options, torch.are_deterministic_algorithms_enabled())
