"""The commands of `python -m pyflash`: each module has `add(parser)`, its options, and `run(args)`, its exit code."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from .. import plots, problem
from ..compile import writable
from ..device import Device, named
from ..feature import Feature
from ..features import FEATURES, HOLDERS
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


def sizes(text: str) -> list[int]:
    """Several lengths: 1k,4k or, each twice the one before, 1k:16k."""
    found = []
    for part in text.split(","):
        first, colon, last = part.partition(":")
        found += doubled(size(first), size(last)) if colon else [size(first)]
    return found


def doubled(first: int, last: int) -> list[int]:
    """The sizes from `first` on, each twice the one before, up to `last`, and `last`."""
    found = [first]
    while 0 < found[-1] < last:
        found.append(min(2 * found[-1], last))
    return found


# The options of a call that can be typed; the others are arrays, functions and block masks.
_TYPED = tuple(feature for feature in FEATURES if not feature.is_array and feature.name not in HOLDERS)


def _typed(feature: Feature) -> Callable[[str], object]:
    """Reads a number, or several with commas between them; `none` is no limit."""

    def read(text: str) -> object:
        try:
            return feature.check(ast.literal_eval(text.lower().replace("none", "None")))
        except (TypeError, ValueError, SyntaxError, MemoryError, RecursionError):
            raise argparse.ArgumentTypeError(f"got {text}, takes {_takes(feature)}") from None

    return read


def _takes(feature: Feature) -> str:
    """As it is typed: a tuple without brackets."""
    return feature.takes.replace("(left, right)", "left,right")


def joined(arguments: list[str]) -> list[str]:
    """Values that begin with a minus sign and a digit in one with their option, or argparse takes them for options."""
    found: list[str] = []
    for text in arguments:
        if found and re.match(r"--[a-z-]+$", found[-1]) and re.match(r"-\.?\d", text):
            found[-1] += f"={text}"
        else:
            found.append(text)
    return found


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}, takes a number from 0 on")
    return value


def add_options(parser) -> None:
    """An argument for each option of a call that can be typed."""
    for feature in _TYPED:
        flag = f"--{feature.name.replace('_', '-')}"
        if feature.default is False:
            parser.add_argument(flag, action="store_true", help=f"as the argument {feature.name} of flash_attention")
        else:
            parser.add_argument(flag, type=_typed(feature), metavar="X", help=_takes(feature))


def options_of(args: argparse.Namespace) -> dict[str, object]:
    """Those of `add_options` that are on, by their keywords."""
    given = {f: getattr(args, f.name) for f in _TYPED}
    return {f.name: value for f, value in given.items() if value not in (None, f.default)}


def file(text: str) -> Path:
    """A file to write to, once all is done: that it can be made is seen before."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    if not (os.access(path, os.W_OK) if path.exists() else writable(path.parent)):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def folder(text: str) -> Path:
    """A folder to write to, which may have to be made."""
    path = Path(text)
    if (path.exists() and not path.is_dir()) or not writable(path):
        raise argparse.ArgumentTypeError(f"{text} cannot be written, or is no folder")
    return path


def add_plot(parser, what: str) -> None:
    parser.add_argument("--plot", type=file, metavar="FILE", help=f"also draw {what}, such as picture.png")


def check_plot(args: argparse.Namespace) -> None:
    """Raise now what a plot would raise after everything else is done."""
    if args.plot and args.plot.suffix and args.plot.suffix[1:].lower() not in plots.formats():
        raise Misused(f"--plot: got a file {args.plot.suffix}, takes .{', .'.join(plots.formats())}")


def add_json(parser) -> None:
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead")


def print_json(value: object) -> None:
    def plain(value: object) -> object:
        if dataclasses.is_dataclass(value):
            return dataclasses.asdict(value)
        return value.item() if hasattr(value, "item") else str(value)

    print(json.dumps(value, default=plain, indent=2))


class Progress:
    """A bar on standard error, if that is a terminal. Of `total` pieces of work, `step` says which is begun, or
    `finished`, where several are under way at once, which is done."""

    _WIDTH = 24

    def __init__(self, total: int):
        self.total, self.count = total, 0
        self.shown = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        self._show(0, "")
        return self

    def step(self, what: str) -> None:
        self.count += 1
        self._show(self.count - 1, what)

    def finished(self, what: str) -> None:
        self.count += 1
        self._show(self.count, what)

    def _show(self, done: int, what: str) -> None:
        bar = "=" * (self._WIDTH * done // self.total)
        self._write(f"[{bar:{self._WIDTH}}] {self.count}/{self.total} {what}")

    def __exit__(self, *error: object) -> None:
        self._write("")

    def _write(self, text: str) -> None:
        if self.shown:
            print(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)


def _dtypes(text: str) -> list[str]:
    if unknown := set(text.split(",")) - set(DTYPES):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))} is no dtype; choose from {', '.join(DTYPES)}")
    return text.split(",")


def add_shape(parser: argparse.ArgumentParser) -> None:
    """The options that describe a call."""
    shape = parser.add_argument_group("the call")
    shape.add_argument(
        "--seqlen", type=size, default=4096, metavar="N", help="queries, such as 4096 or 4k (default 4k)"
    )
    shape.add_argument("--head-dim", type=size, default=128, metavar="N", help="1 to 256 (default 128)")
    shape.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="default bfloat16")
    shape.add_argument("--backward", action="store_true", help="the gradients instead of the forward pass")
    _add_rest(shape)


def add_shapes(parser: argparse.ArgumentParser) -> None:
    """The options that describe several calls."""
    shapes = parser.add_argument_group("the calls: every combination of what is given, as in --head-dim 64,128")
    shapes.add_argument(
        "--seqlen", type=sizes, default=[4096], metavar="N,M", help="queries: 1k,4k or, doubling, 1k:16k (default 4k)"
    )
    shapes.add_argument("--head-dim", type=sizes, default=[128], metavar="N,M", help="1 to 256 (default 128)")
    shapes.add_argument(
        "--dtype", type=_dtypes, default=["bfloat16"], metavar="T,U", help=f"{', '.join(DTYPES)} (default bfloat16)"
    )
    shapes.add_argument("--full", action="store_true", help="without a causal mask; with --causal: both")
    shapes.add_argument("--forward", action="store_true", help="the forward pass (default); with --backward: both")
    shapes.add_argument("--backward", action="store_true", help="the gradients")
    _add_rest(shapes)


def _add_rest(shape) -> None:
    shape.add_argument("--batch", type=size, default=1, metavar="N", help="sequences (default 1)")
    shape.add_argument("--seqlen-k", type=size, metavar="N", help="keys (default: as many as queries)")
    shape.add_argument("--heads", type=size, default=16, metavar="N", help="query heads (default 16)")
    shape.add_argument("--kv-heads", type=size, metavar="N", help="key heads (default: as many as query heads)")
    shape.add_argument("--head-dim-v", type=size, metavar="N", help="head_dim of v (default: that of q)")
    add_options(shape)
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
    options = options_of(args)
    try:
        made = problem.make(tensors, backward=False, wants_lse=True, options=options)
    except (TypeError, ValueError) as error:
        raise Misused(str(error)) from error
    if args.backward:
        tensors = problem.backward_tensors(made)
        made = problem.make(tensors, backward=True, deterministic=args.deterministic, options=options)
    return made


def problems_of(args: argparse.Namespace) -> list[Problem]:
    """The problems that the options of `add_shapes` describe."""
    choices = {
        "seqlen": args.seqlen,
        "head_dim": args.head_dim,
        "dtype": args.dtype,
        "causal": chosen(args, {"full": False, "causal": True}, [False]),
        "backward": chosen(args, {"forward": False, "backward": True}, [False]),
    }
    one = vars(args)
    return [
        problem_of(argparse.Namespace(**{**one, **dict(zip(choices, values, strict=True))}))
        for values in itertools.product(*choices.values())
    ]


def chosen(args: argparse.Namespace, flags: dict[str, object], otherwise: list) -> list:
    """What the flags that are set stand for."""
    return [value for flag, value in flags.items() if getattr(args, flag)] or otherwise


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
