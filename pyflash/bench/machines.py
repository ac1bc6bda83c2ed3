"""Where a measurement runs: arrays, a clock, memory in use, and what the machine can do at best, measured."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from .. import arrays
from ..device import Device

_COPY_BYTES = {"cpu": 1 << 28, "gpu": 1 << 30}


class Machine:
    """NumPy on the CPU."""

    name, library, gpu = "NumPy on the CPU", "numpy", None
    xp = np
    # What is measured unless asked for something else.
    dtype, seqlens, head_dim, tokens, hidden = "float32", [256, 512, 1024, 2048], 64, 2048, 128
    ordinary_bytes = 4 << 30  # the most that ordinary attention may take

    def put(self, array: np.ndarray, dtype: str):
        return array.astype(arrays.NUMPY.dtype(dtype))

    def get(self, array) -> np.ndarray:
        return np.asarray(array, np.float32)

    def seconds(self, function: Callable[[], object], budget: float) -> float:
        """The median of calls that take about `budget` seconds in all."""
        function()
        times: list[float] = []
        while len(times) < 2 or sum(times) < budget and len(times) < 100:
            times.append(self._once(function))
        return statistics.median(times)

    def _once(self, function: Callable[[], object]) -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    def peak_bytes(self, function: Callable[[], object]) -> int:
        """The most memory that the function held at once."""
        tracemalloc.start()
        try:
            function()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def matmul_flops(self, dtype: str) -> float:
        """FLOP/s of a large matrix product."""
        n = 1024 if dtype == "float64" else 2048
        a = np.ones((n, n), np.float64 if dtype == "float64" else np.float32)
        return 2 * n**3 / self.seconds(lambda: a @ a, 0.2)

    def copy_bandwidth(self) -> float:
        """Bytes/s read and written by a large copy."""
        source, target = (np.ones(_COPY_BYTES["cpu"], np.uint8) for _ in range(2))
        return 2 * source.size / self.seconds(lambda: np.copyto(target, source), 0.2)

    def is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, MemoryError)

    def release(self) -> None:
        """Give memory back that is kept for later."""


class CupyMachine(Machine):
    library = "cupy"
    dtype, seqlens, head_dim, tokens, hidden = "float16", [1024, 2048, 4096, 8192, 16384], 128, 16384, 2048

    def __init__(self, gpu: Device):
        import cupy

        self.gpu, self.name, self.xp = gpu, gpu.name, cupy
        self.ordinary_bytes = gpu.memory_bytes // 2
        self._flushed = cupy.empty(2 * gpu.l2_bytes, np.uint8)  # writing it leaves nothing else in the L2 cache

    def put(self, array: np.ndarray, dtype: str):
        return self.xp.asarray(array.astype(arrays.CUPY.dtype(dtype)))

    def get(self, array) -> np.ndarray:
        return self.xp.asnumpy(array).astype(np.float32)

    def _once(self, function: Callable[[], object]) -> float:
        self._flushed.fill(0)
        start, end = (self.xp.cuda.Event() for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        return self.xp.cuda.get_elapsed_time(start, end) / 1e3

    def peak_bytes(self, function: Callable[[], object]) -> int:
        pool = self.xp.cuda.MemoryPool()
        with self.xp.cuda.using_allocator(pool.malloc):
            function()
        return pool.total_bytes()

    def matmul_flops(self, dtype: str) -> float:
        dtype = "float16" if dtype == "bfloat16" else dtype  # as fast, and CuPy multiplies it
        n = 8192 if dtype == "float16" else 4096
        a = self.put(np.ones((n, n), np.float32), dtype)
        return 2 * n**3 / self.seconds(lambda: a @ a, 0.1)

    def copy_bandwidth(self) -> float:
        source, target = (self.xp.zeros(_COPY_BYTES["gpu"], np.uint8) for _ in range(2))
        return 2 * source.size / self.seconds(lambda: self.xp.copyto(target, source), 0.1)

    def is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, self.xp.cuda.memory.OutOfMemoryError)

    def release(self) -> None:
        self.xp.get_default_memory_pool().free_all_blocks()


class TorchMachine(CupyMachine):
    """A GPU with torch: its arrays, since most of the others take those alone."""

    library, dtype = "torch", "bfloat16"

    def __init__(self, gpu: Device):
        import torch

        super().__init__(gpu)
        self.torch = torch

    def put(self, array: np.ndarray, dtype: str):
        return self.torch.from_numpy(array).to("cuda", getattr(self.torch, dtype))

    def get(self, array) -> np.ndarray:
        return array.detach().float().cpu().numpy()

    def peak_bytes(self, function: Callable[[], object]) -> int:
        cuda = self.torch.cuda
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        function()
        return cuda.max_memory_allocated() - before

    def is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, self.torch.cuda.OutOfMemoryError) or super().is_out_of_memory(error)

    def release(self) -> None:
        super().release()
        self.torch.cuda.empty_cache()


def machine(gpu: Device | None) -> Machine:
    """The machine to measure on: a GPU through torch, if that is here with CUDA, else through CuPy; or the CPU."""
    if gpu is None:
        return Machine()
    try:
        import torch

        if torch.cuda.is_available():
            return TorchMachine(gpu)
    except ImportError:
        pass
    return CupyMachine(gpu)
