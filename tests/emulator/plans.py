"""Runs whole plans in the emulator: a call given by NumPy arrays, planned for some GPU, all its launches."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterable
from functools import cache

import emulator
import numpy as np
from cases import numpy_dtype

from pyflash import params, problem, source
from pyflash.launch import SEED, TILE_COUNTER
from pyflash.plan import Launch, Plan, TensorMap
from pyflash.problem import Problem, Tensor

TMA_ALIGNMENT, TMA_BOX = 16, 256


def draws(family: str) -> bool:
    """Whether CTAs draw their tiles, so that what each does follows from timing. Where not, one run shows all races."""
    return family == "sm90"


def tensor_of(array: np.ndarray) -> Tensor:
    """What the planner is told of an array."""
    strides = tuple(stride // array.itemsize for stride in array.strides)
    address = array.ctypes.data if array.size else 0
    return Tensor(array.shape, strides, array.dtype.name, min(16, address & -address) or 16)


def make_problem(arrays: dict[str, np.ndarray], *, backward: bool = False, wants_lse: bool = True, **call) -> Problem:
    """The problem of `arrays` (q, k, v; for a backward also dout, o, lse and perhaps dlse)."""
    tensors = {name: tensor_of(array) for name, array in arrays.items()}
    return problem.make(tensors, backward=backward, wants_lse=wants_lse and not backward, **call)


@cache
def _built(kernel: str, text: str) -> emulator.Kernel:
    return emulator.build(text, kernel, source.headers(text), optimised=kernel.endswith("_simt"))


def build(launches: Iterable[Launch]) -> None:
    """Compile kernels ahead, several at a time. Errors are kept for when they are run."""
    programs = {(launch.kernel, source.program(launch)) for launch in launches}
    emulator.prepare()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for program in sorted(programs):
            pool.submit(_built, *program)


def _tensor_map(array: np.ndarray, pointer: int, spec: TensorMap) -> bytes:
    """A tensor map as runtime/bulk.cpp reads it, held to the rules of cuTensorMapEncodeTiled."""
    box = spec.box
    if spec.tensor:
        strides = [stride * array.itemsize for stride in spec.tensor.strides]
        array = np.lib.stride_tricks.as_strided(array, spec.tensor.shape, strides)
    array = array[None] if array.ndim == 3 else array  # packed
    batch, seqlen, heads, head_dim = array.shape
    strides = [array.strides[i] for i in (3, 1, 2, 0)]
    extents = (head_dim, seqlen, heads, batch)
    boxes = (*box, 1, 1)[:4]
    legal = (
        pointer % TMA_ALIGNMENT == 0
        and strides[0] == array.itemsize
        and all(s % TMA_ALIGNMENT == 0 and s >= 0 for s, n in zip(strides[1:], extents[1:], strict=True) if n > 1)
        and all(0 < b <= TMA_BOX for b in boxes)
        and all(extents)
    )
    if not legal:
        raise emulator.EmulatorError("tensor map", f"{array.shape} with strides {array.strides} and box {box}")
    return emulator.tensor_map(pointer, strides, extents, boxes, array.itemsize, swizzle_bytes=box[0] * array.itemsize)


def _pack(launch: Launch, buffers: dict[str, emulator.Buffer], seed_word: int) -> bytes:
    layout = params.layout(launch.kernel, launch.real)
    pointers = {f: buffers[a].pointer for f, a in launch.arrays if f in layout.offsets and a != SEED}
    words = {f: seed_word for f, a in launch.arrays if a == SEED}
    data = layout.pack({**dict(launch.values), **pointers, **words})
    for field, spec in launch.tensor_maps:
        buffer = buffers[spec.array]
        start = layout.offsets[field]
        data[start : start + 128] = _tensor_map(buffer.array, buffer.pointer, spec)
    return bytes(data)


def run_plan(
    plan: Plan,
    arrays: dict[str, np.ndarray],
    *,
    seed: int = 0,
    out: np.ndarray | None = None,
    dropout_seed: int = 0,
    **options,
) -> dict[str, np.ndarray]:
    """The plan's outputs. Inputs are constant while it runs; outputs and workspace start as NaN; whatever is written
    besides the outputs' elements is an error. `out` gives the layout of o, if the problem was told of one."""
    tensors = dict(plan.problem.tensors)
    with emulator.Memory(seed) as memory:
        inputs = {name: memory.constant(name, array) for name, array in arrays.items()}
        outputs = {} if out is None else {"o": memory.empty_like("o", out)}
        for name in plan.problem.outputs:
            outputs[name] = memory.empty(name, tensors[name].shape, numpy_dtype(tensors[name].dtype))
        workspace = {piece.name: memory.shared_by_launches(piece.name, piece.nbytes) for piece in plan.workspace}
        counter = memory.empty(TILE_COUNTER, 2, np.int32)
        counter.array[...] = 0
        buffers = inputs | outputs | workspace | {TILE_COUNTER: counter}
        for launch in plan.launches:
            kernel = _built(launch.kernel, source.program(launch))
            params_bytes = _pack(launch, buffers, dropout_seed)
            shape = launch.grid, launch.block, launch.smem_bytes
            emulator.run(kernel, *shape, params_bytes, seed=seed, overlaps=launch.overlaps, **options)
        for name, buffer in outputs.items():
            buffer.check_gaps(name)
        if counter.array.any():
            raise emulator.EmulatorError(
                "misuse", f"{TILE_COUNTER} is left {counter.array}: the next launch needs zeros"
            )
        return {name: buffer.array.copy() for name, buffer in outputs.items()}
