"""Compile kernels ahead of time, into the cache or a folder. Needs no GPU."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from .. import compile
from ..device import KNOWN, Device
from ..plan import Launch, plan
from . import Misused, add_shape, present_gpu, problem_of

_ARCHS = {f"sm_{device.arch}": device for device in KNOWN.values()}


def _arch(text: str) -> Device:
    # The suffix of architecture-specific code is the kernel's own affair.
    device = _ARCHS.get(text.rstrip("af"))
    if device is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not known; choose from {', '.join(_ARCHS)}")
    return device


def add(parser: argparse.ArgumentParser) -> None:
    add_shape(parser)
    parser.add_argument("--arch", type=_arch, action="append", metavar="ARCH",
                        help=f"{', '.join(_ARCHS)}; repeatable (default: the GPU present)")  # fmt: skip
    parser.add_argument(
        "--into", type=Path, metavar="FOLDER", help="also write source, assembler's report and cubin here"
    )


def run(args: argparse.Namespace) -> int:
    gpu = None if args.arch else present_gpu()
    targets = args.arch or ([gpu] if gpu else [])
    if not targets:
        raise Misused(f"no GPU is present: name architectures with --arch ({', '.join(_ARCHS)})")
    print(f"{'kernel':12} {'arch':7} {'registers':>9} {'spilled':>8} {'seconds':>8}  cubin")
    clean = True
    for device in targets:
        for launch in plan(problem_of(args), device).launches:
            clean &= _compile(launch, device, args.into)
    return 0 if clean else 1


def _compile(launch: Launch, device: Device, into: Path | None) -> bool:
    """Compile one kernel and print its row. True if it neither spills nor is warned about."""
    arch, start = compile.arch_of(launch, device), time.perf_counter()
    path = compile.cubin(launch, arch)
    seconds = time.perf_counter() - start
    report = compile.report(path.with_suffix(".log").read_text(encoding="utf-8"))
    print(f"{launch.kernel:12} {arch:7} {report.registers:9} {report.spill_bytes:6} B {seconds:8.2f}  {path}")
    for warning in report.warnings:
        print(f"{'':12} {warning}")
    if into:
        into.mkdir(parents=True, exist_ok=True)
        for suffix in (".cu", ".log", ".cubin"):
            (into / f"{launch.kernel}-{arch}{suffix}").write_bytes(path.with_suffix(suffix).read_bytes())
    return not report.spill_bytes and not report.warnings
