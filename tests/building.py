"""Compiles many kernels at once, in processes: how far NVRTC runs in threads is its own affair."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

from pyflash import compile, source
from pyflash.plan import Launch


def workers() -> ProcessPoolExecutor:
    """As many processes as cores. Spawned, because a forked one may not use CUDA."""
    return ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"))


def build(launch: Launch, arch: str) -> tuple[bytes, str]:
    """Cubin and log, past the cache."""
    return compile.compile_program(source.program(launch), launch.kernel, arch)


def build_into_cache(launch: Launch, arch: str) -> None:
    compile.cubin(launch, arch)
