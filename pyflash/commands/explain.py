"""What would run for a shape on a GPU, why, and what the hardware allows."""

from __future__ import annotations

import argparse

from ..device import KNOWN
from ..explain import explain
from . import Misused, add_shape, known_gpu, present_gpu, problem_of


def add(parser: argparse.ArgumentParser) -> None:
    add_shape(parser)
    parser.add_argument("--gpu", type=known_gpu, metavar="NAME", help=f"{', '.join(KNOWN)} (default: the one present)")


def run(args: argparse.Namespace) -> int:
    gpu = args.gpu or present_gpu()
    if gpu is None:
        raise Misused(f"no GPU is present: name one with --gpu ({', '.join(KNOWN)})")
    print(explain(problem_of(args), gpu))
    return 0
