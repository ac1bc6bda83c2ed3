"""Compile kernels ahead of time, into the cache and, to be read, a folder. Needs no GPU."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from .. import compile
from ..device import KNOWN, Device
from ..errors import CompileError, Unsupported
from ..plan import Launch, plan
from ..problem import Problem
from . import Failed, Misused, Progress, add_json, add_shapes, folder, present_gpu, print_json, problems_of

_ARCHS = {f"sm_{device.arch}": device for device in KNOWN.values()}
# GPUs that are not in the table of those that can be explained. What is compiled follows from the family and shared
# memory of one that is; of 8.8, whose shared memory NVIDIA does not state, the least that there is from 8.0 on.
_LIKE = {"sm_87": "A100", "sm_88": "RTX 3090", "sm_103": "B200", "sm_110": "B200", "sm_121": "RTX 5090"}
_ARCHS |= {
    arch: dataclasses.replace(KNOWN[name], name=arch, capability=divmod(int(arch[3:]), 10))
    for arch, name in _LIKE.items()
}
_ARCHS = dict(sorted(_ARCHS.items(), key=lambda item: item[1].arch))


def _archs(text: str) -> list[Device]:
    # The suffix of architecture-specific code is the kernel's own affair.
    names = [name.rstrip("af") for name in text.split(",")]
    if unknown := set(names) - set(_ARCHS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))} is not known; choose from {', '.join(_ARCHS)}")
    return [_ARCHS[name] for name in names]


def add(parser: argparse.ArgumentParser) -> None:
    add_shapes(parser)
    parser.add_argument("--arch", type=_archs, action="extend", metavar="A,B",
                        help=f"{', '.join(_ARCHS)} (default: the GPU present)")  # fmt: skip
    parser.add_argument("--into", type=folder, metavar="FOLDER",
                        help="also write source, PTX, assembler's report and cubin here")  # fmt: skip
    add_json(parser)


@dataclass(frozen=True)
class _Compiled:
    """A kernel in the cache, and what the assembler said of it."""

    kernel: str
    variant: str
    arch: str
    seconds: float
    registers: int
    stack_bytes: int
    spill_bytes: int
    warnings: tuple[str, ...]
    cubin: Path


def run(args: argparse.Namespace) -> int:
    gpu = None if args.arch else present_gpu()
    targets = args.arch or ([gpu] if gpu else [])
    if not targets:
        raise Misused(f"no GPU is present: name architectures with --arch ({', '.join(_ARCHS)})")
    wanted, refusals = _wanted(targets, problems_of(args))
    for refusal in refusals if wanted else ():
        print(f"pyflash compile: left out: {refusal}", file=sys.stderr)
    if refusals and not wanted:
        raise Failed("\n".join(refusals))
    if not compile.writable(compile.cache_folder()):
        unkept = f"{compile.cache_folder()} cannot be written: set XDG_CACHE_HOME to a folder that can"
        if not args.into:
            raise Failed(f"{unkept}, or give --into, else nothing that is compiled is kept")
        print(f"pyflash compile: only --into is filled; the cache {unkept}", file=sys.stderr)
    if not wanted:
        raise Misused("nothing is to be compiled: of --seqlen, --seqlen-k and --batch one is 0 in every call")
    with Progress(len(wanted)) as progress, ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(_compile, launch, key[-1], args.into) for key, launch in wanted.items()]
        for job in as_completed(jobs):
            progress.finished(f"{job.result().kernel} for {job.result().arch}")
    found = [job.result() for job in jobs]
    if args.json:
        print_json([dataclasses.asdict(x) for x in found])
    else:
        _print(found)
    return int(bool(refusals))


def _wanted(targets: list[Device], problems: list[Problem]) -> tuple[dict[tuple, Launch], list[str]]:
    """Launches, by kernel and architecture, and what cannot be. Calls that share a kernel have it compiled once."""
    wanted, refusals = {}, {}
    for device, problem in itertools.product(targets, problems):
        try:
            for x in plan(problem, device).launches:
                wanted[x.kernel, x.real, x.config, compile.arch_of(x, device)] = x
        except (CompileError, Unsupported) as error:
            refusals[str(error)] = None
    return wanted, list(refusals)


def _compile(launch: Launch, arch: str, into: Path | None) -> _Compiled:
    start = time.perf_counter()
    path = compile.cubin(launch, arch)
    seconds = time.perf_counter() - start
    report = compile.report(path.with_suffix(".log").read_text(encoding="utf-8"))
    if into:
        into.mkdir(parents=True, exist_ok=True)
        written = {suffix: path.with_suffix(suffix).read_bytes() for suffix in (".cu", ".log", ".cubin")}
        for suffix, data in (written | {".ptx": compile.ptx(launch, arch)}).items():
            (into / f"{path.stem}{suffix}").write_bytes(data)
    return _Compiled(launch.kernel, _variant(launch), arch, seconds, cubin=path, **dataclasses.asdict(report))


def _variant(launch: Launch) -> str:
    """What tells a kernel from others of its name, in short."""
    cfg = dict(launch.config)
    flags = (name.lower() for name, value in cfg.items() if value is True and not name.startswith("WIDE_"))
    tile = f"{cfg['TILE_M']}x{cfg['TILE_N']} of {cfg['TILE_D']}"
    return " ".join([cfg["Element"], tile, *flags])


def _print(found: list[_Compiled]) -> None:
    width, wide = (max(len(getattr(x, name)) for x in found) for name in ("kernel", "variant"))
    print(f"{'kernel':{width}} {'variant':{wide}} {'arch':7} {'registers':>9} {'spilled':>8} {'seconds':>8}  cubin")
    for x in found:
        figures = f"{x.registers:9} {x.spill_bytes:6} B {x.seconds:8.2f}"
        print(f"{x.kernel:{width}} {x.variant:{wide}} {x.arch:7} {figures}  {x.cubin.name}")
        for warning in x.warnings:
            print(f"{'':{width}} {warning}")
    print(f"in {found[0].cubin.parent}")
