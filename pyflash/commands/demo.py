"""Attention on generated data, forward and backward, checked, and beside ordinary attention in time and memory."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from .. import api, reference
from ..bench.contestants import ordinary_backward, ordinary_forward
from ..bench.machines import CupyMachine, Machine
from ..explain import amount, duration
from . import Misused, add_json, present_gpu, print_json, size

# Relative to the largest entry of the reference, or to _LEAST where all are smaller, as a gradient may be exactly 0.
# float16 has 11 significant bits, float32 24.
_BOUNDS = {"float16": 4e-3, "float32": 1e-5}
_LEAST = 0.01
_SHAPES = {"float16": (4096, 16, 128), "float32": (2048, 4, 64)}  # seqlen, heads, head_dim
_SECONDS = 0.2  # for each measurement


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seqlen", type=size, metavar="N", help="tokens (default: 4k on a GPU, 2k on the CPU)")
    parser.add_argument("--heads", type=size, metavar="N", help="heads (default: 16 on a GPU, 4 on the CPU)")
    parser.add_argument("--cpu", action="store_true", help="use NumPy even where there is a GPU")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    gpu = None if args.cpu else present_gpu()
    machine = CupyMachine(gpu) if gpu else Machine()
    seqlen, heads, head_dim = _SHAPES[machine.dtype]
    seqlen = seqlen if args.seqlen is None else args.seqlen
    heads = heads if args.heads is None else args.heads
    if not seqlen or not heads:
        raise Misused("--seqlen and --heads take at least 1")
    say = (lambda text: None) if args.json else print
    say(f"Causal attention on {machine.name}: {seqlen} tokens, {heads} heads of {head_dim}, {machine.dtype}")
    rng = np.random.default_rng(0)
    shape = (1, seqlen, heads, head_dim)
    host = [rng.standard_normal(shape, np.float32).astype(machine.dtype) for _ in range(4)]
    q, k, v, dout = (machine.put(a, machine.dtype) for a in host)

    def forward():
        return api.flash_attention(q, k, v, causal=True, return_lse=True)

    def both():
        out, lse = forward()
        return out, *api.flash_attention_backward(dout, q, k, v, out, lse, causal=True)

    start = time.perf_counter()
    results = [machine.get(a) for a in both()]
    first = time.perf_counter() - start
    if gpu:
        say(f"First call, kernels compiled or read from the cache: {duration(first)}")
    bound, errors = _BOUNDS[machine.dtype], _errors(host, results)
    shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    say(f"Largest error against float64: {shown} (bound {bound:.0e})")
    good = all(error <= bound for error in errors.values())  # a NaN is not
    measured = _compared(machine, forward, both, (q, k, v, dout), say)
    say("All right." if good else "WRONG RESULTS: please report this with the output of `python -m pyflash doctor`.")
    if args.json:
        call = {"machine": machine.name, "seqlen": seqlen, "heads": heads, "head_dim": head_dim, "dtype": machine.dtype}
        print_json({**call, "good": good, "bound": bound, "errors": errors, "first_seconds": first, **measured})
    return 0 if good else 1


def _errors(host: list[np.ndarray], results: list[np.ndarray]) -> dict[str, float]:
    """Of one head, which depends on no other, against attention written out in float64."""
    q, k, v, dout = (a[:, :, :1] for a in host)
    expected = (reference.attention(q, k, v, causal=True)[0], *reference.attention_backward(dout, q, k, v, causal=True))
    return {
        name: float(np.abs(got[:, :, :1] - want).max() / max(np.abs(want).max(), _LEAST))
        for name, got, want in zip(("out", "dq", "dk", "dv"), results, expected, strict=True)
    }


def _compared(machine: Machine, forward: Callable, both: Callable, arrays: tuple, say: Callable) -> dict[str, object]:
    """Time and memory of PyFlash and of ordinary attention, and how much is saved."""
    q, k, v, dout = (a[0].swapaxes(0, 1) for a in arrays)

    def ordinary():
        return ordinary_forward(machine.xp, q, k, v, machine.xp.tri(q.shape[1], dtype=bool))

    rows = {
        "PyFlash": (forward, both),
        "ordinary attention": (ordinary, lambda: ordinary_backward(machine.xp, dout, q, k, v, *ordinary())),
    }
    say(f"\n{'':20}{'forward':>12}{'and backward':>14}{'memory':>12}   (memory: results and all between)")
    found = {}
    for name, (forward, both) in rows.items():
        try:
            memory = machine.peak_bytes(both)
            times = [machine.seconds(f, _SECONDS) for f in (forward, both)]
        except Exception as error:  # CuPy without cuBLAS, or out of memory: there is nothing to compare with
            say(f"{name:20}could not run here: {str(error).splitlines()[0]}")
            return found
        found[name] = {"forward_seconds": times[0], "both_seconds": times[1], "memory_bytes": memory}
        say(f"{name:20}{duration(times[0]):>12}{duration(times[1]):>14}{amount(memory, 'B'):>12}")
    ours, theirs = (row.values() for row in found.values())
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    say(f"{'saved':20}{ratios[0]:>11.1f}x{ratios[1]:>13.1f}x{ratios[2]:>11.1f}x\n")
    return found
