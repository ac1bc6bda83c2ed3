"""The commands of `python -m pyflash`: each module has `add(parser)`, its options, and `run(args)`, its exit code."""

from __future__ import annotations

import argparse

from .. import problem
from ..device import Device, named
from ..problem import DTYPES, Problem


class Failed(Exception):
    """Ends a command with this message."""

    exit_code = 1


class Misused(Failed):
    """The command was called with arguments that mean nothing."""

    exit_code = 2


def size(text: str) -> int:
    """A length: 4096 or 4k."""
    try:
        value = int(text[:-1]) * 1024 if text[-1:] in ("k", "K") else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; give a number like 4096 or 4k") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def add_shape(parser: argparse.ArgumentParser) -> None:
    """The options that describe a call."""
    shape = parser.add_argument_group("the call")
    shape.add_argument("--batch", type=size, default=1, metavar="N", help="sequences (default 1)")
    shape.add_argument(
        "--seqlen", type=size, default=4096, metavar="N", help="queries, such as 4096 or 4k (default 4k)"
    )
    shape.add_argument("--seqlen-k", type=size, metavar="N", help="keys (default: as many as queries)")
    shape.add_argument("--heads", type=size, default=16, metavar="N", help="query heads (default 16)")
    shape.add_argument("--kv-heads", type=size, metavar="N", help="key heads (default: as many as query heads)")
    shape.add_argument("--head-dim", type=size, default=128, metavar="N", help="1 to 256 (default 128)")
    shape.add_argument("--head-dim-v", type=size, metavar="N", help="head_dim of v (default: that of q)")
    shape.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="default bfloat16")
    shape.add_argument("--causal", action="store_true", help="query i sees key j only if j <= i + seqlen_k - seqlen_q")
    shape.add_argument("--backward", action="store_true", help="the gradients instead of the forward pass")
    shape.add_argument("--deterministic", action="store_true", help="bitwise reproducible gradients")


def problem_of(args: argparse.Namespace) -> Problem:
    """The problem that the options of `add_shape` describe, with contiguous arrays."""
    seqlen_k = args.seqlen if args.seqlen_k is None else args.seqlen_k
    heads_kv = args.heads if args.kv_heads is None else args.kv_heads
    dim_v = args.head_dim if args.head_dim_v is None else args.head_dim_v
    shapes = {
        "q": (args.batch, args.seqlen, args.heads, args.head_dim),
        "k": (args.batch, seqlen_k, heads_kv, args.head_dim),
        "v": (args.batch, seqlen_k, heads_kv, dim_v),
    }
    tensors = {name: problem.contiguous(shape, args.dtype) for name, shape in shapes.items()}
    options = {"causal": args.causal}
    try:
        made = problem.make(tensors, backward=False, wants_lse=True, options=options)
    except ValueError as error:
        raise Misused(str(error)) from error
    if args.backward:
        tensors = problem.backward_tensors(made)
        made = problem.make(tensors, backward=True, deterministic=args.deterministic, options=options)
    return made


def present_gpu() -> Device | None:
    """The current GPU, or None without CuPy, driver or GPU."""
    try:
        import cupy
        from cupy.cuda import runtime

        from ..device import present

        return present(cupy.cuda.Device().id) if runtime.getDeviceCount() else None
    except Exception:  # an ImportError without CuPy, CuPy's own type without a driver
        return None


def known_gpu(name: str) -> Device:
    """An argument that names a GPU."""
    try:
        return named(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
