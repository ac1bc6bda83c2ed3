"""Program text -> cubin -> loaded kernel, with a cache on disk.

A cubin's name is the hash of everything that made it: text, included headers, compiler options and NVRTC version. So
a changed source, compiler or GPU never meets a stale binary. Beside each cubin lie its source and the assembler's log.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from pathlib import Path

from . import debug, source
from .device import Device
from .errors import CompileError, LaunchError
from .plan import Launch
from .tiles import KERNELS

_OPTIONS = ("-std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v", "-lineinfo")


@dataclass(frozen=True)
class Report:
    """What the assembler said of one kernel."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    warnings: tuple[str, ...]


def _nvrtc():
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        raise CompileError(
            "PyFlash compiles its kernels with NVRTC, which could not be loaded through CuPy; install both with "
            f"pip install 'pyflash[cuda13]' (or [cuda12] for an older driver). Cause: {error}"
        ) from error
    return nvrtc


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "pyflash"


def nvrtc_version() -> tuple[int, int]:
    return tuple(_nvrtc().getVersion())


def supported_archs() -> list[int]:
    """Compute capabilities (as 80, 90, ...) that the installed NVRTC compiles for."""
    return sorted(_nvrtc().getSupportedArchs())


def _options() -> tuple[str, ...]:
    # From 12.9 on NVRTC has a cache of its own, which would answer without the assembler's report.
    return (*_OPTIONS, "-no-cache") if nvrtc_version() >= (12, 9) else _OPTIONS


def report(log: str) -> Report:
    def number(pattern: str) -> int:
        return max((int(x) for x in re.findall(pattern, log)), default=0)

    spilled = [int(a) + int(b) for a, b in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)]
    warnings = tuple(line.strip() for line in log.splitlines() if re.search(r"\bC75\d\d\b|\bwarning\b", line))
    return Report(number(r"Used (\d+) registers"), number(r"(\d+) bytes stack frame"), sum(spilled), warnings)


@contextmanager
def _compiled(text: str, name: str, arch: str):
    """NVRTC and its handle of the program, compiled. Needs no GPU."""
    nvrtc = _nvrtc()
    headers = source.headers(text)
    handle = nvrtc.createProgram(
        text, f"{name}.generated.cu", [h.encode() for h in headers.values()], [n.encode() for n in headers]
    )
    try:
        try:
            nvrtc.compileProgram(handle, (f"-arch={arch}", *_options()))
        except nvrtc.NVRTCError as error:
            raise CompileError(
                f"NVRTC {nvrtc.getVersion()} could not compile {name} for {arch} ({error}):\n"
                f"{nvrtc.getProgramLog(handle)}"
            ) from error
        yield nvrtc, handle
    finally:
        nvrtc.destroyProgram(handle)


def apart(compile: Callable):
    """`compile` in a thread of its own: NVRTC 12 leaves another locale in the thread that it compiled in."""

    @wraps(compile)
    def run(*arguments):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(compile, *arguments).result()

    return run


@apart
def compile_program(text: str, name: str, arch: str) -> tuple[bytes, str]:
    """A program's cubin for `arch` ("sm_90a"), and NVRTC's and the assembler's log."""
    with _compiled(text, name, arch) as (nvrtc, handle):
        # CuPy cuts off the last byte as if it ended a string: a zero, without which NVIDIA's tools reject the file.
        return nvrtc.getCUBIN(handle) + b"\0", nvrtc.getProgramLog(handle)


@apart
def ptx(launch: Launch, arch: str) -> bytes:
    """What the assembler makes the cubin of."""
    with _compiled(source.program(launch), launch.kernel, arch.replace("sm_", "compute_")) as (nvrtc, handle):
        return nvrtc.getPTX(handle)


def _key(text: str, arch: str) -> str:
    digest, headers = hashlib.sha256(), (f"{name}\0{header}" for name, header in source.headers(text).items())
    for part in (text, *headers, arch, *_options(), str(nvrtc_version())):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _write(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(temporary, path)


def writable(folder: Path) -> bool:
    """Whether files can be made in a folder, or in the nearest above it that exists. One is made to find out: what
    permissions say of it is not so for root, and on file systems that are read-only."""
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return True
    except OSError:
        return False


def _folder() -> Path:
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        if writable(cache_folder()):
            return cache_folder()
    except OSError:
        pass
    return _private_folder()


@lru_cache(maxsize=1)
def _private_folder() -> Path:
    """Stands in where the home folder cannot be written: compiled anew in each process."""
    return Path(tempfile.mkdtemp(prefix="pyflash-"))


def cubin(launch: Launch, arch: str) -> Path:
    """The path of a launch's cubin, compiled if the cache does not hold it. Safe for threads and processes."""
    text = source.program(launch)
    key = _key(text, arch)
    path = _folder() / f"{launch.kernel}-{arch}-{key}.cubin"
    if not path.exists():
        start = time.perf_counter()
        binary, log = compile_program(text, launch.kernel, arch)
        _write(path.with_suffix(".cu"), text.encode())
        _write(path.with_suffix(".log"), log.encode())
        _write(path, binary)
        facts = report(log)
        debug.log(
            2,
            f"compiled {launch.kernel} for {arch} in {time.perf_counter() - start:.2f} s: {facts.registers} "
            f"registers, {facts.spill_bytes} bytes spilled{''.join(', ' + w for w in facts.warnings)}",
        )
    debug.log(3, f"{launch.kernel}: {path.with_suffix('.cu')}, .log, .cubin")
    return path


def arch_of(launch: Launch, device: Device) -> str:
    """The architecture to compile for: Hopper's own instructions need the one that matches Hopper alone."""
    specific = "a" if KERNELS[launch.kernel].only_capability else ""
    if device.arch not in supported_archs():
        raise CompileError(
            f"NVRTC {'.'.join(map(str, nvrtc_version()))} does not know {device.name} (sm_{device.arch}); it compiles "
            f"for {supported_archs()}. Install a newer one: pip install --upgrade nvidia-cuda-nvrtc"
        )
    return f"sm_{device.arch}{specific}"


@cache
def _load(path: Path, name: str, smem_bytes: int, device_id: int) -> tuple[int, object]:
    import cupy

    with cupy.cuda.Device(device_id):
        module = cupy.RawModule(path=str(path))
        function = module.get_function(name)
        function.max_dynamic_shared_size_bytes = smem_bytes
        return function.kernel.ptr, module


def load(launches: tuple[Launch, ...], device: Device, device_id: int) -> list[int]:
    """The CUfunctions of some launches on a device, each compiled and loaded at most once."""
    with ThreadPoolExecutor() as pool:  # NVRTC runs outside the interpreter's lock
        paths = list(pool.map(lambda launch: cubin(launch, arch_of(launch, device)), launches))
    functions = []
    for launch, path in zip(launches, paths, strict=True):
        try:
            functions.append(_load(path, launch.kernel, launch.smem_bytes, device_id)[0])
        except Exception as error:  # CuPy has one exception type a library and no common base below Exception
            raise LaunchError(
                f"the driver refused to load {path} on {device.name}: {error}; delete the file to compile it anew"
            ) from error
    return functions
