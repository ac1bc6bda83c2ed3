"""Calls on a GPU, under an allocator that poisons memory and guards its borders; and kernels compiled ahead."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
from building import build_into_cache, workers
from cases import Case

import pyflash
from pyflash import compile, debug, dispatch
from pyflash.errors import Unsupported
from pyflash.tiles import FAMILIES, KERNELS

try:
    import cupy as cp
except ImportError:  # then the tier is skipped
    cp = None

# The families that have kernels, each with its dtypes.
DTYPES = {family: KERNELS[f"fwd_{family}"].dtypes for family in FAMILIES if f"fwd_{family}" in KERNELS}
FAMILY_DTYPES = [(family, dtype) for family, dtypes in DTYPES.items() for dtype in dtypes]

_ZONE = 4096  # bytes before and after each allocation that nobody may touch
_GUARD, _POISON = 0xA5, 0xFF  # 0xFF.. is NaN in every floating-point type


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Within the context CuPy's new memory is NaN, and a write outside of an allocation fails the test."""
    blocks = []

    def malloc(nbytes: int):
        block = cp.get_default_memory_pool().malloc(nbytes + 2 * _ZONE)
        stream = cp.cuda.get_current_stream().ptr
        cp.cuda.runtime.memsetAsync(block.ptr, _GUARD, nbytes + 2 * _ZONE, stream)
        cp.cuda.runtime.memsetAsync(block.ptr + _ZONE, _POISON, nbytes, stream)
        blocks.append((block, nbytes))
        return block + _ZONE

    with cp.cuda.using_allocator(malloc):
        yield
    cp.cuda.Device().synchronize()
    for block, nbytes in blocks:
        for start in (block.ptr, block.ptr + _ZONE + nbytes):
            zone = np.empty(_ZONE, np.uint8)
            cp.cuda.runtime.memcpy(zone.ctypes.data, start, _ZONE, cp.cuda.runtime.memcpyDeviceToHost)
            assert (zone == _GUARD).all(), f"memory around an allocation of {nbytes} bytes was written to"


def forward(case: Case, family: str):
    """`out` and `lse` of a case, computed by a family, as NumPy arrays."""
    with guarded(), debug.families(family):
        arrays = case.arrays(cp)
        results = pyflash.flash_attention(*(arrays[name] for name in "qkv"), return_lse=True, **case.call_of(cp))
        return [cp.asnumpy(a) for a in results]


def backward(case: Case, family: str, **options: object):
    """dq, dk and dv of a case, computed by a family from a forward of any, as NumPy arrays."""
    with guarded():
        arrays = case.arrays(cp)
        q, k, v = (arrays[name] for name in "qkv")
        call = case.call_of(cp)
        out, lse = pyflash.flash_attention(q, k, v, return_lse=True, **call)
        with debug.families(family):
            results = pyflash.flash_attention_backward(
                arrays["dout"], q, k, v, out, lse, dlse=arrays.get("dlse"), **call, **case.returns, **options
            )
        return [cp.asnumpy(a) for a in results]


class _Recorder:
    """Stands in for `launch.Executable`: keeps the plan and launches nothing."""

    def __init__(self, plan, device, device_id):
        self.plan, self.device_id = plan, device_id
        self.needed.update(((launch.kernel, launch.real, launch.config), (launch, device)) for launch in plan.launches)

    def __call__(self, addresses, stream):
        pass


def compile_ahead(calls: Iterable[Callable[[], object]]) -> None:
    """Compile all that some calls will launch, many at a time, where each would compile its own one after another."""
    recorder = type("Recorder", (_Recorder,), {"needed": {}})
    before, dispatch.Executable = dispatch.Executable, recorder
    remembered, dispatch._prepared = dispatch._prepared, {}
    try:
        for call in calls:
            with contextlib.suppress(Unsupported):
                call()
    finally:
        dispatch.Executable, dispatch._prepared = before, remembered
    with workers() as pool:
        for launch, device in recorder.needed.values():
            pool.submit(build_into_cache, launch, compile.arch_of(launch, device))
    # What does not compile, the test that needs it reports.


def in_dtype(case: Case, dtype: str) -> Case:
    return replace(case, dtype=dtype)
