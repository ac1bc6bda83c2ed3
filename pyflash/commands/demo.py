"""Attention on generated data, forward and backward, checked, and beside ordinary attention in time and memory."""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from .. import api, reference
from ..explain import amount, duration
from . import Misused, present_gpu, size

# Relative to the largest entry of the reference. float16 has 11 significant bits, float32 24.
_BOUNDS = {"float16": 4e-3, "float32": 1e-5}
_RUNS = 5


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seqlen", type=size, metavar="N", help="tokens (default: 4k on a GPU, 2k on the CPU)")
    parser.add_argument("--heads", type=size, metavar="N", help="heads (default: 16 on a GPU, 4 on the CPU)")
    parser.add_argument("--cpu", action="store_true", help="use NumPy even where there is a GPU")


class _Machine:
    """Where the demonstration runs: NumPy's arrays, clock and memory."""

    name, dtype, seqlen, heads, head_dim = "NumPy on the CPU", "float32", 2048, 4, 64
    xp = np

    def put(self, array):
        return array

    def get(self, array):
        return array

    def seconds(self, function: Callable[[], object]) -> float:
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


class _Gpu(_Machine):
    dtype, seqlen, heads, head_dim = "float16", 4096, 16, 128

    def __init__(self, name: str):
        import cupy

        self.name, self.xp = name, cupy

    def put(self, array):
        return self.xp.asarray(array)

    def get(self, array):
        return self.xp.asnumpy(array)

    def seconds(self, function: Callable[[], object]) -> float:
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


def _ordinary_forward(xp, q, k, v):
    """Ordinary causal attention: the whole score matrix, softmax in float32. Arrays are (heads, seqlen, head_dim)."""
    seqlen = q.shape[1]
    s = xp.matmul(q, k.swapaxes(1, 2)).astype(np.float32) * np.float32(q.shape[2] ** -0.5)
    s = xp.where(xp.tri(seqlen, dtype=bool), s, np.float32(-np.inf))
    s = xp.exp(s - s.max(-1, keepdims=True))
    p = (s / s.sum(-1, keepdims=True)).astype(q.dtype)
    return xp.matmul(p, v), p


def _ordinary_both(xp, dout, q, k, v):
    """Ordinary forward, and its gradients from the score matrix that it kept."""
    out, p = _ordinary_forward(xp, q, k, v)
    dp = xp.matmul(dout, v.swapaxes(1, 2)).astype(np.float32)
    delta = (dout.astype(np.float32) * out).sum(-1, keepdims=True)
    ds = (p * (dp - delta) * np.float32(q.shape[2] ** -0.5)).astype(q.dtype)
    return xp.matmul(ds, k), xp.matmul(ds.swapaxes(1, 2), q), xp.matmul(p.swapaxes(1, 2), dout)


def run(args: argparse.Namespace) -> int:
    gpu = None if args.cpu else present_gpu()
    machine = _Gpu(gpu.name) if gpu else _Machine()
    seqlen = machine.seqlen if args.seqlen is None else args.seqlen
    heads = machine.heads if args.heads is None else args.heads
    if not seqlen or not heads:
        raise Misused("--seqlen and --heads take at least 1")
    print(f"Causal attention on {machine.name}: {seqlen} tokens, {heads} heads of {machine.head_dim}, {machine.dtype}")
    rng = np.random.default_rng(0)
    shape = (1, seqlen, heads, machine.head_dim)
    host = [rng.standard_normal(shape, np.float32).astype(machine.dtype) for _ in range(4)]
    q, k, v, dout = (machine.put(a) for a in host)

    def forward():
        return api.flash_attention(q, k, v, causal=True, return_lse=True)

    def both():
        out, lse = forward()
        return out, *api.flash_attention_backward(dout, q, k, v, out, lse, causal=True)

    start = time.perf_counter()
    results = [machine.get(a) for a in both()]
    if gpu:
        print(f"First call, kernels compiled or read from the cache: {duration(time.perf_counter() - start)}")
    good = _check(host, results, _BOUNDS[machine.dtype])
    _compare(machine, forward, both, (q, k, v, dout))
    print("All right." if good else "WRONG RESULTS: please report this with the output of `python -m pyflash doctor`.")
    return 0 if good else 1


def _check(host: list[np.ndarray], results: list[np.ndarray], bound: float) -> bool:
    """Compare one head, which depends on no other, with attention written out in float64."""
    q, k, v, dout = (a[:, :, :1] for a in host)
    expected = (reference.attention(q, k, v, causal=True)[0], *reference.attention_backward(dout, q, k, v, causal=True))
    errors = {
        name: float(np.abs(got[:, :, :1] - want).max() / np.abs(want).max())
        for name, got, want in zip(("out", "dq", "dk", "dv"), results, expected, strict=True)
    }
    print(
        "Largest error against float64: "
        + ", ".join(f"{n} {e:.1e}" for n, e in errors.items())
        + f" (bound {bound:.0e})"
    )
    return all(error <= bound for error in errors.values())  # a NaN is not


def _compare(machine: _Machine, forward: Callable, both: Callable, arrays: tuple) -> None:
    """Print time and memory of PyFlash and of ordinary attention."""
    q, k, v, dout = (a[0].swapaxes(0, 1) for a in arrays)
    rows = {
        "PyFlash": (forward, both),
        "ordinary attention": (
            lambda: _ordinary_forward(machine.xp, q, k, v),
            lambda: _ordinary_both(machine.xp, dout, q, k, v),
        ),
    }
    print(f"\n{'':20}{'forward':>12}{'and backward':>14}{'memory':>12}   (memory: results and all between)")
    figures = []
    for name, (forward, both) in rows.items():
        try:
            memory = machine.peak_bytes(both)
            times = [min(machine.seconds(f) for _ in range(_RUNS)) for f in (forward, both)]
        except Exception as error:  # CuPy without cuBLAS, or out of memory: there is nothing to compare with
            print(f"{name:20}could not run here: {str(error).splitlines()[0]}")
            return
        figures.append((*times, memory))
        print(f"{name:20}{duration(times[0]):>12}{duration(times[1]):>14}{amount(memory, 'B'):>12}")
    ratios = [b / a for a, b in zip(*figures, strict=True)]
    print(f"{'saved':20}{ratios[0]:>11.1f}x{ratios[1]:>13.1f}x{ratios[2]:>11.1f}x\n")
