"""A stand-in for CuPy with two GPUs made of host memory, whose driver writes down what it is asked to launch.

With it the whole way of a GPU call, but for the kernels, runs on a machine without a GPU.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import types
from dataclasses import dataclass

import numpy as np

from pyflash import compile, device, dispatch, driver, launch, tma

PROGRAMMATIC_STREAM_SERIALIZATION = 6


@dataclass
class Call:
    """What the driver was asked."""

    function: int
    grid: int
    block: int
    smem_bytes: int
    stream: int
    overlaps: bool  # with the kernel before it
    device_id: int
    arguments: int  # address of the struct, valid during the call

    def read(self, struct: type[ctypes.Structure]) -> ctypes.Structure:
        return struct.from_buffer_copy(ctypes.string_at(self.arguments, ctypes.sizeof(struct)))


class FakeCuPy:
    """The modules `cupy` and `cupy.cuda`, and what they keep."""

    def __init__(self):
        self.current, self.stream, self.captures = 0, 0, False
        self.memory: list[np.ndarray] = []
        self.calls: list[Call] = []
        self.on_launch = self.calls.append
        world = self

        class ndarray:
            def __init__(self, shape, dtype, offset: int = 0, strides=None):
                self.shape, self.dtype = tuple(shape), np.dtype(dtype)
                size = int(np.prod(shape)) * self.dtype.itemsize
                self.host = np.zeros(size + 512 + offset, np.uint8)
                start = -(-self.host.ctypes.data // 256) * 256 + offset
                steps = (int(np.prod(shape[i + 1 :])) * self.dtype.itemsize for i in range(len(shape)))
                self.strides = tuple(strides or steps)
                self.data = types.SimpleNamespace(ptr=start, device_id=world.current)
                self.device = types.SimpleNamespace(id=world.current)

        runtime = types.SimpleNamespace(
            getDevice=lambda: self.current,
            setDevice=lambda number: setattr(self, "current", number),
            getDeviceCount=lambda: 2,
            getDeviceProperties=self.properties,
            malloc=self.malloc,
            memset=lambda address, value, size: ctypes.memset(address, value, size),
            deviceSynchronize=lambda: None,
            streamSynchronize=lambda stream: None,
            streamIsCapturing=lambda stream: self.captures,
            CUDARuntimeError=RuntimeError,
        )
        self.library = types.SimpleNamespace(cuLaunchKernelEx=self.launch, cuGetErrorName=self.error_name)
        self.cuda = types.SimpleNamespace(
            runtime=runtime, get_current_stream=lambda: types.SimpleNamespace(ptr=self.stream)
        )

        def asarray(host: np.ndarray):
            array = ndarray(host.shape, host.dtype)
            ctypes.memmove(array.data.ptr, np.ascontiguousarray(host).ctypes.data, host.nbytes)
            return array

        self.module = types.SimpleNamespace(ndarray=ndarray, asarray=asarray, cuda=self.cuda)
        self.ndarray = ndarray

    def properties(self, number: int) -> dict[str, object]:
        return {
            "name": b"NVIDIA H200", "major": 9, "minor": 0, "multiProcessorCount": 132, "l2CacheSize": 60 * 2**20,
            "sharedMemPerBlockOptin": 227 * 2**10, "totalGlobalMem": 141 * 2**30,
        }  # fmt: skip

    def malloc(self, size: int) -> int:
        self.memory.append(np.full(size, 0xFF, np.uint8))
        return self.memory[-1].ctypes.data

    def launch(self, config_address, function, argv, extra) -> int:
        config = driver.LaunchConfig.from_address(config_address)
        assert (*config.grid[1:], *config.block[1:], extra) == (1, 1, 1, 1, None)
        attributes = [(a.id, a.value[0]) for a in config.attributes[: config.num_attributes]]
        assert attributes in ([], [(PROGRAMMATIC_STREAM_SERIALIZATION, 1)])
        (arguments,) = (ctypes.c_void_p * 1).from_address(argv)
        shape = config.grid[0], config.block[0], config.smem_bytes, config.stream or 0
        status = self.on_launch(Call(function, *shape, bool(attributes), self.current, arguments))
        return status or 0

    def error_name(self, status, name) -> None:
        name._obj.value = b"CUDA_ERROR_%d" % status

    def install(self, monkeypatch) -> None:
        """Put it in CuPy's place, with loading and tensor maps faked, and nothing remembered from before."""
        for name, module in (("cupy", self.module), ("cupy.cuda", self.cuda), ("cupy.cuda.runtime", self.cuda.runtime)):
            monkeypatch.setitem(sys.modules, name, module)
        numbers = itertools.count(1000)
        self.functions: dict[int, object] = {}

        def load(launches, gpu, device_id):
            found = [next(numbers) for _ in launches]
            self.functions.update(zip(found, launches, strict=True))
            return found

        def encode(tensor, box, address, into):
            ctypes.memset(into, 0, tma.BYTES)
            ctypes.c_uint64.from_address(into).value = address

        monkeypatch.setattr(compile, "load", load)
        monkeypatch.setattr(driver, "library", lambda: self.library)
        monkeypatch.setattr(tma, "encode", encode)
        monkeypatch.setattr(dispatch, "_prepared", {})
        for cached in (device.present, device._runtime, launch._tile_counters):
            cached.cache_clear()
        monkeypatch.setattr(device, "_thread", types.SimpleNamespace())

    def uninstall(self) -> None:
        for cached in (device.present, device._runtime, launch._tile_counters):
            cached.cache_clear()
