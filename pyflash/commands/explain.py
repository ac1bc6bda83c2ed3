"""What would run for a shape on a GPU, why, and what the hardware allows."""

from __future__ import annotations

import argparse

from .. import plots
from ..device import KNOWN
from ..explain import explain
from . import Misused, add_json, add_plot, add_shape, check_plot, known_gpu, present_gpu, print_json, problem_of


def add(parser: argparse.ArgumentParser) -> None:
    add_shape(parser)
    parser.add_argument("--gpu", type=known_gpu, metavar="NAME", help=f"{', '.join(KNOWN)} (default: the one present)")
    add_plot(parser, "the roofline and the memory")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    gpu = args.gpu or present_gpu()
    if gpu is None:
        raise Misused(f"no GPU is present: name one with --gpu ({', '.join(KNOWN)})")
    check_plot(args)
    found = explain(problem_of(args), gpu)
    if args.plot:
        plots.explanation(found, args.plot)
    if args.json:
        print_json(found.facts())
    else:
        print(found)
    return 0
