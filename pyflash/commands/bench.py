"""PyFlash beside ordinary attention and every other implementation that is installed, in time and memory."""

from __future__ import annotations

import argparse
import itertools

from .. import bench, plots
from ..bench import table
from ..problem import DTYPES
from . import (
    Misused,
    Progress,
    add_json,
    add_options,
    add_plot,
    check_plot,
    chosen,
    file,
    options_of,
    present_gpu,
    print_json,
    seconds,
    size,
    sizes,
)


def add(parser: argparse.ArgumentParser) -> None:
    cases = parser.add_argument_group("the calls; of what takes several values every combination is measured")
    cases.add_argument("--batch", type=size, metavar="N", help="sequences (default: so many that tokens are 16k, 2k)")
    cases.add_argument(
        "--seqlen",
        type=sizes,
        metavar="N,M or N:M",
        help="queries: 1k,4k or, each twice the one before, 1k:16k (default: 1k:16k on a GPU, 256:2k on the CPU)",
    )
    cases.add_argument("--seqlen-k", type=size, metavar="N", help="keys (default: as many as queries)")
    cases.add_argument(
        "--heads", type=size, metavar="N", help="query heads (default: so many that heads x head_dim is 2k, 128)"
    )
    cases.add_argument("--kv-heads", type=size, metavar="N", help="key heads (default: as many as query heads)")
    cases.add_argument("--head-dim", type=sizes, metavar="N,M", help="1 to 256 (default: 128, 64)")
    cases.add_argument("--head-dim-v", type=size, metavar="N", help="head_dim of v (default: that of q)")
    cases.add_argument(
        "--dtype", choices=list(DTYPES), help="default: bfloat16 or float16 on a GPU, float32 on the CPU"
    )
    cases.add_argument("--full", action="store_true", help="without a causal mask (default: both)")
    add_options(cases)
    what = parser.add_argument_group("the measurement")
    what.add_argument("--forward", action="store_true", help="the forward alone (default: both)")
    what.add_argument("--backward", action="store_true", help="the backward alone")
    what.add_argument(
        "--only", action="append", metavar="NAME", help="beside PyFlash, those whose names hold this; repeatable"
    )
    what.add_argument("--seconds", type=seconds, default=0.1, metavar="S", help="for each measurement (default 0.1)")
    what.add_argument("--cpu", action="store_true", help="NumPy even where there is a GPU")
    files = parser.add_argument_group("where to")
    add_json(files)
    files.add_argument("--csv", type=file, metavar="FILE", help="also write every figure here")
    add_plot(files, "time and memory")


def run(args: argparse.Namespace) -> int:
    machine = bench.machine(None if args.cpu else present_gpu())
    cases = _cases(args, machine)
    both = ["forward", "backward"]
    directions = tuple(chosen(args, {name: name for name in both}, both))
    found = bench.line_up(machine)
    if args.only:
        wanted = [c for c in found[1:] if any(text.lower() in c.name.lower() for text in args.only)]
        if not wanted:
            raise Misused(f"--only: got {', '.join(args.only)}, takes parts of: {', '.join(c.name for c in found[1:])}")
        found = [found[0], *wanted]
    check_plot(args)
    with Progress(bench.steps(cases, found)) as progress:
        best, rows = bench.measure(cases, directions, machine, found, budget=args.seconds, step=progress.step)
    if args.json:
        print_json({"machine": best, "rows": [row.flat() for row in rows]})
    else:
        print(table.text(best, rows))
    if args.csv:
        args.csv.write_text(table.csv_text(rows), encoding="utf-8")
    if args.plot:
        plots.bench(best, rows, args.plot)
    return int(any(row.failure for row in rows if row.contestant == found[0].name))


def _cases(args: argparse.Namespace, machine: bench.Machine) -> list[bench.Case]:
    options = options_of(args)
    causals = chosen(args, {"full": False, "causal": True}, [False, True])
    cases = bench.grid(
        seqlens=args.seqlen or machine.seqlens,
        head_dims=args.head_dim or [machine.head_dim],
        options=[tuple({**options, "causal": causal}.items()) for causal in causals],
        dtype=args.dtype or machine.dtype,
        seqlen_k=args.seqlen_k,
        batch=args.batch,
        heads=args.heads,
        heads_kv=args.kv_heads,
        head_dim_v=args.head_dim_v,
        tokens=machine.tokens,
        hidden=machine.hidden,
    )
    if not all(case.batch and case.seqlen_q and case.seqlen_k for case in cases):
        raise Misused("--batch, --seqlen and --seqlen-k take at least 1")
    try:
        for case, backward in itertools.product(cases, (False, True)):
            case.problem(backward)
    except (TypeError, ValueError) as error:
        raise Misused(str(error)) from error
    return cases
