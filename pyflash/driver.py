"""The functions of the CUDA driver that CuPy has no word for (CUDA driver API, 6.18 and 6.29)."""

from __future__ import annotations

import ctypes
from functools import cache

_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class LaunchAttribute(ctypes.Structure):
    """A CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint), ("padding", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """A CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


_OVERLAPS = LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, b"", (1,))


def launch_config(grid: int, block: int, smem_bytes: int, overlaps: bool) -> LaunchConfig:
    """Of one dimension, its stream left open. `overlaps`: the kernel may start before the one before it has ended."""
    attributes = ctypes.pointer(_OVERLAPS) if overlaps else None
    return LaunchConfig((grid, 1, 1), (block, 1, 1), smem_bytes, None, attributes, int(overlaps))


@cache
def library() -> ctypes.CDLL:
    found = ctypes.CDLL("nvcuda.dll" if hasattr(ctypes, "WinDLL") else "libcuda.so.1")
    found.cuTensorMapReplaceAddress.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    found.cuLaunchKernelEx.argtypes = (ctypes.c_void_p,) * 4
    return found


def error_name(status: int) -> str:
    """CUDA_ERROR_..."""
    name = ctypes.c_char_p()
    library().cuGetErrorName(status, ctypes.byref(name))
    return (name.value or b"an unknown error").decode()
