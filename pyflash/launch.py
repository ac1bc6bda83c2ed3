"""A plan made ready for one GPU: kernels loaded, arguments packed but for the addresses, launched by number."""

from __future__ import annotations

import ctypes

from . import compile, debug, params, tma
from .device import Device
from .errors import LaunchError
from .plan import Launch, Plan

WORKSPACE = "workspace"


class _Arguments:
    """One packed copy of a launch's Params, to be completed with addresses."""

    def __init__(self, template: bytes, launch: Launch, plan: Plan):
        self.keep, self.start = tma.aligned_buffer(len(template))
        ctypes.memmove(self.start, template, len(template))
        self.words = (ctypes.c_uint64 * (len(template) // 8)).from_address(self.start)
        self.pointer = ctypes.c_void_p(self.start)
        self.argv = ctypes.addressof(self.pointer)
        tensors = dict(plan.problem.tensors)
        offsets = params.layout(launch.kernel, launch.real).offsets
        self.tensor_maps = [(self.start + offsets[name], spec.array) for name, spec in launch.tensor_maps]
        self.specs = [(tensors[spec.array], spec.box) for _, spec in launch.tensor_maps]
        self.encoded = False

    def point(self, slots: list[tuple[int, str, int]], addresses: dict[str, int]) -> None:
        for slot, name, offset in slots:
            self.words[slot] = addresses[name] + offset
        if self.encoded:
            for place, name in self.tensor_maps:
                tma.replace_address(place, addresses[name])
        else:
            for (place, name), (tensor, box) in zip(self.tensor_maps, self.specs, strict=True):
                tma.encode(tensor, box, addresses[name], place)
            self.encoded = True


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
            arguments = _Arguments(self.template, self.launch, self.plan)
        arguments.point(self.slots, addresses)
        launch = self.launch
        launch_kernel(
            self.function, launch.grid, 1, 1, launch.block, 1, 1, launch.smem_bytes, stream, arguments.argv, 0
        )
        self.free.append(arguments)


class Executable:
    """Call it with the arrays' addresses, its device being current, to queue the plan's launches on a stream."""

    def __init__(self, plan: Plan, device: Device, device_id: int):
        from cupy.cuda import driver

        debug.log(1, f"{plan.problem} -> {plan.family}: {', '.join(f'{x.kernel} x{x.grid}' for x in plan.launches)}"
                     + "".join(f"; {note}" for note in plan.notes))
        self.plan = plan
        self.workspace_bytes = plan.workspace_bytes
        self._launch_kernel = driver.launchKernel
        functions = compile.load(plan.launches, device, device_id)
        self._ready = tuple(_Ready(x, plan, function) for x, function in zip(plan.launches, functions, strict=True))

    def __call__(self, addresses: dict[str, int], stream: int) -> None:
        try:
            for ready in self._ready:
                ready(addresses, stream, self._launch_kernel)
                if debug.LEVEL >= 4:
                    self._synchronize(stream, ready)
        except LaunchError:
            raise
        except Exception as error:  # CuPy has one exception type a library and no common base below Exception
            name = ready.launch.kernel
            raise LaunchError(f"the driver refused to launch {name} for {self.plan.problem}: {error}") from error

    def _synchronize(self, stream: int, ready: _Ready) -> None:
        from cupy.cuda import runtime

        try:
            runtime.streamSynchronize(stream)
        except runtime.CUDARuntimeError as error:
            raise LaunchError(f"{ready.launch.kernel} failed for {self.plan.problem}: {error}") from error
