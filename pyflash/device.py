"""What the planner needs to know of a GPU."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Device:
    name: str
    capability: tuple[int, int]
    sm_count: int
    smem_bytes: int  # the most shared memory one CTA may have
    l2_bytes: int
    memory_bytes: int
    bandwidth: float  # bytes/s between memory and the chip, by the data sheet
    half_flops: float  # dense float16/bfloat16 FLOP/s of the tensor cores, by the data sheet
    single_flops: float  # float32 FLOP/s, without tensor cores
    double_flops: float  # float64 FLOP/s, without tensor cores; 1/32 or 1/64 of float32's where no data sheet has it

    def flops(self, itemsize: int) -> float | None:
        """FLOP/s of the units that a type of so many bytes is computed on, where the data sheet's figure is known."""
        return {2: self.half_flops, 4: self.single_flops, 8: self.double_flops}[itemsize] or None

    @property
    def arch(self) -> int:
        return self.capability[0] * 10 + self.capability[1]


_KB, _MB, _GB = 2**10, 2**20, 2**30

# GPUs that a problem can be planned for and explained on without having one.
KNOWN = {
    device.name: device
    for device in (
        Device("T4", (7, 5), 40, 64 * _KB, 4 * _MB, 16 * _GB, 320e9, 65e12, 8.1e12, 250e9),
        Device("A100", (8, 0), 108, 163 * _KB, 40 * _MB, 80 * _GB, 2.04e12, 312e12, 19.5e12, 9.7e12),
        Device("RTX 3090", (8, 6), 82, 99 * _KB, 6 * _MB, 24 * _GB, 936e9, 71e12, 35.6e12, 560e9),
        Device("RTX 4090", (8, 9), 128, 99 * _KB, 72 * _MB, 24 * _GB, 1.01e12, 165e12, 82.6e12, 1.29e12),
        Device("L4", (8, 9), 58, 99 * _KB, 48 * _MB, 24 * _GB, 300e9, 121e12, 30.3e12, 470e9),
        Device("H100", (9, 0), 132, 227 * _KB, 50 * _MB, 80 * _GB, 3.35e12, 989e12, 67e12, 34e12),
        Device("H200", (9, 0), 132, 227 * _KB, 60 * _MB, 141 * _GB, 4.8e12, 989e12, 67e12, 34e12),
        Device("B200", (10, 0), 148, 227 * _KB, 126 * _MB, 180 * _GB, 8.0e12, 2250e12, 75e12, 37e12),
        Device("RTX 5090", (12, 0), 170, 99 * _KB, 96 * _MB, 32 * _GB, 1.79e12, 209e12, 104.8e12, 1.64e12),
    )
}


def named(name: str) -> Device:
    """The GPU of KNOWN with this name, in any case of letters."""
    found = next((device for key, device in KNOWN.items() if key.lower() == str(name).lower()), None)
    if found is None:
        raise ValueError(f"gpu: got {name!r}, takes one of {', '.join(KNOWN)}")
    return found


def _listed(driver_name: str, sm_count: int) -> Device | None:
    """The GPU of KNOWN that the driver means. Its name alone may be that of a smaller one: "H100 PCIe"."""
    words = f" {driver_name.upper().partition('-')[0]} "
    return next((d for key, d in KNOWN.items() if f" {key} " in words and d.sm_count == sm_count), None)


@cache
def present(device_id: int) -> Device:
    """The GPU with CuPy's number `device_id`."""
    from cupy.cuda import runtime

    facts = runtime.getDeviceProperties(device_id)
    name = facts["name"].decode()
    listed = _listed(name, facts["multiProcessorCount"])
    # Two transfers a clock; the driver reports kHz, and 0 where it no longer tells.
    bandwidth = 2e3 * facts["memoryClockRate"] * facts["memoryBusWidth"] / 8 if "memoryClockRate" in facts else 0.0
    return Device(
        name=name,
        capability=(facts["major"], facts["minor"]),
        sm_count=facts["multiProcessorCount"],
        smem_bytes=facts["sharedMemPerBlockOptin"],
        l2_bytes=facts["l2CacheSize"],
        memory_bytes=facts["totalGlobalMem"],
        bandwidth=listed.bandwidth if listed else bandwidth,
        half_flops=listed.half_flops if listed else 0.0,
        single_flops=listed.single_flops if listed else 0.0,
        double_flops=listed.double_flops if listed else 0.0,
    )


_thread = threading.local()


@cache
def _runtime():
    from cupy.cuda import runtime

    return runtime


class current:
    """Within the context, `device_id` is the thread's current device; the one before is current again after it."""

    __slots__ = ("device_id", "before")

    def __init__(self, device_id: int):
        self.device_id = device_id

    def __enter__(self) -> None:
        self.before = _runtime().getDevice()
        # A thread has no driver context before its first call that needs one, and a launch does not make it.
        if self.before != self.device_id or not hasattr(_thread, "entered"):
            _runtime().setDevice(self.device_id)
            _thread.entered = True

    def __exit__(self, *error: object) -> None:
        if self.before != self.device_id:
            _runtime().setDevice(self.before)
