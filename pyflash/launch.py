"""A plan made ready for one GPU: kernels loaded, arguments packed but for the addresses, launched by number."""

from __future__ import annotations

import ctypes
import itertools
import threading
from functools import cache

from . import compile, debug, driver, params, tma
from .device import Device
from .errors import LaunchError
from .plan import Launch, Plan

WORKSPACE, TILE_COUNTER, SEED = "workspace", "tile_counter", "seed"  # the last a number in place of an address
_PER_THREAD_STREAM = 2  # cudaStreamPerThread: one number, another stream in each thread


class _TileCounters:
    """Zeroed words of a device, for kernels that hand out their tiles by counting.

    A kernel leaves zero behind, so launches that follow each other on a stream share a word. Launches that may run side
    by side must not: each stream has its own, and so has each launch captured into a graph, which may be replayed
    beside anything.
    """

    COUNT = 2**17

    def __init__(self, device_id: int):
        from cupy.cuda import runtime

        self.runtime = runtime
        self.start = runtime.malloc(8 * self.COUNT)
        runtime.memset(self.start, 0, 8 * self.COUNT)
        runtime.deviceSynchronize()
        self.unused = itertools.count()
        self.of_stream: dict[tuple[int, int], int] = {}

    def address(self, stream: int) -> int:
        if self.runtime.streamIsCapturing(stream):
            return self._take()
        owner = stream, threading.get_ident() if stream == _PER_THREAD_STREAM else 0
        found = self.of_stream.get(owner)
        if found is None:
            found = self.of_stream.setdefault(owner, self._take())
        return found

    def _take(self) -> int:
        index = next(self.unused)
        if index >= self.COUNT:
            raise LaunchError(f"more than {self.COUNT} launches with dynamic tile order captured into graphs")
        return self.start + 8 * index


_tile_counters = cache(_TileCounters)


class _Arguments:
    """One packed copy of a launch's Params, to be completed with addresses."""

    def __init__(self, template: bytes, slots: list[tuple[int, str, int]], launch: Launch, plan: Plan):
        self.keep, self.start = tma.aligned_buffer(len(template))
        ctypes.memmove(self.start, template, len(template))
        self.words = (ctypes.c_uint64 * (len(template) // 8)).from_address(self.start)
        self.pointer = ctypes.c_void_p(self.start)
        self.argv = ctypes.addressof(self.pointer)
        self.config = driver.launch_config(launch.grid, launch.block, launch.smem_bytes, launch.overlaps)
        self.config_address = ctypes.addressof(self.config)
        tensors = dict(plan.problem.tensors)
        offsets = params.layout(launch.kernel, launch.real).offsets
        self.tensor_maps = []  # those whose address the driver must replace
        self.slots = list(slots)  # the words that are addresses: which, of what, and how many bytes into it
        for field, spec in launch.tensor_maps:
            tensor, place = spec.tensor or tensors[spec.array], self.start + offsets[field]
            tma.encode(tensor, spec.box, tma.ANY_ADDRESS, place)
            word = tma.address_word(tensor, spec.box)
            if word is None:
                self.tensor_maps.append((place, spec.array))
            else:
                self.slots.append((offsets[field] // 8 + word, spec.array, 0))

    def point(self, addresses: dict[str, int]) -> None:
        words = self.words
        for slot, name, offset in self.slots:
            words[slot] = addresses[name] + offset
        for place, name in self.tensor_maps:
            tma.replace_address(place, addresses[name])


class _Ready:
    """One launch of a plan, loaded."""

    def __init__(self, launch: Launch, plan: Plan, function: int):
        self.launch, self.plan, self.function = launch, plan, function
        layout = params.layout(launch.kernel, launch.real)
        self.template = bytes(layout.pack(dict(launch.values)))
        self.slots = []
        pieces = {b.name: b.offset for b in plan.workspace}
        for field, array in launch.arrays:
            if field in layout.offsets:
                place = (WORKSPACE, pieces[array]) if array in pieces else (array, 0)
                self.slots.append((layout.offsets[field] // 8, *place))
        self.free: list[_Arguments] = []  # list.pop and append are atomic, so threads never share one

    def __call__(self, addresses: dict[str, int], stream: int, launch_kernel) -> None:
        try:
            arguments = self.free.pop()
        except IndexError:
            arguments = _Arguments(self.template, self.slots, self.launch, self.plan)
        arguments.point(addresses)
        arguments.config.stream = stream
        status = launch_kernel(arguments.config_address, self.function, arguments.argv, None)
        self.free.append(arguments)
        if status:
            name, problem = self.launch.kernel, self.plan.problem
            raise LaunchError(f"the driver refused to launch {name} for {problem}: {driver.error_name(status)}")


class Executable:
    """Call it with the arrays' addresses, its device being current, to queue the plan's launches on a stream."""

    def __init__(self, plan: Plan, device: Device, device_id: int):
        debug.log(
            1,
            f"{plan.problem} -> {plan.family}: {', '.join(f'{x.kernel} x{x.grid}' for x in plan.launches)}"
            + "".join(f"; {note}" for note in plan.notes),
        )
        self.plan, self.device_id = plan, device_id
        self._launch_kernel = driver.library().cuLaunchKernelEx
        functions = compile.load(plan.launches, device, device_id)
        self._ready = tuple(_Ready(x, plan, function) for x, function in zip(plan.launches, functions, strict=True))
        counts = any(array == TILE_COUNTER for launch in plan.launches for _, array in launch.arrays)
        self._tile_counters = _tile_counters(device_id) if counts else None

    def __call__(self, addresses: dict[str, int], stream: int) -> None:
        if self._tile_counters:
            addresses[TILE_COUNTER] = self._tile_counters.address(stream)
        for ready in self._ready:
            ready(addresses, stream, self._launch_kernel)
            if debug.LEVEL >= 4:
                self._synchronize(stream, ready)

    def _synchronize(self, stream: int, ready: _Ready) -> None:
        from cupy.cuda import runtime

        try:
            runtime.streamSynchronize(stream)
        except runtime.CUDARuntimeError as error:
            raise LaunchError(f"{ready.launch.kernel} failed for {self.plan.problem}: {error}") from error
