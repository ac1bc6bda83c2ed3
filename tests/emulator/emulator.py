"""Runs CUDA programs on the CPU, looking for trouble: compiles a program's text with the host's C++ compiler behind
the headers of `device/`, and executes it in `runtime/`, where each CUDA thread is a fiber and a seed decides what a GPU
leaves open: who runs when, and how late or early asynchronous work happens. README.md tells what is found and what not.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

_HERE = Path(__file__).resolve().parent
_DEVICE = _HERE / "device"
_RUNTIME = _HERE / "runtime"
_COMMON_FLAGS = ("-std=c++20", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off")
_RUNTIME_FLAGS = (*_COMMON_FLAGS, "-O3", "-fno-semantic-interposition", "-Wall", "-Wextra")
# The sanitizers' calls end in runtime/hooks.cpp: nothing is linked from the compiler's sanitizer libraries.
_CHECKS = ("-fsanitize=thread,alignment,bounds", "-fno-sanitize-recover=alignment,bounds")
_KERNEL_FLAGS = (*_COMMON_FLAGS, "-w", "-Wno-psabi", "-fno-exceptions", "-fno-rtti", *_CHECKS)
_LINE_FLAGS = ("-g1", "-gdwarf-4")  # they change no code, and would take a quarter of a build
_POISON = 0xFF


class EmulatorError(Exception):
    """What went wrong in an emulated kernel. `kind` is a short name: race, deadlock, out of bounds, ..."""

    def __init__(self, kind: str, text: str):
        super().__init__(f"{kind}: {text}")
        self.kind = kind


def compiler() -> str | None:
    """The C++ compiler, or None."""
    for name in (os.environ.get("CXX"), "g++", "c++"):
        if name and shutil.which(name):
            return shutil.which(name)
    return None


@cache
def unavailable() -> str | None:
    """Why programs cannot be emulated here, or None."""
    if sys.platform != "linux":
        return f"the emulator needs Linux, this is {sys.platform}"
    if compiler() is None:
        return "the emulator needs a C++ compiler (g++ 11 or later): neither $CXX, g++ nor c++ was found"
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.cpp"
        probe.write_text("#include <source_location>\nvoid f(int* p) { *p = 1; }\n")
        try:
            _compile([*_KERNEL_FLAGS, "-c", str(probe), "-o", str(probe.with_suffix(".o"))], probe.name)
        except EmulatorError as error:
            return f"the emulator needs g++ 11 or later, {compiler()} is something else: {error}"
    return None


# ---- building --------------------------------------------------------------------------------------------------------


@cache
def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(root) if root else Path.home() / ".cache") / "pyflash-emulator"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="pyflash-emulator-"))


@cache
def _compiler_version() -> str:
    command = [compiler(), "--version"]
    return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=True).stdout


def _compile(arguments: Sequence[str], what: str) -> None:
    done = subprocess.run([compiler(), *arguments], capture_output=True, encoding="utf-8", errors="replace")
    if done.returncode:
        raise EmulatorError("does not compile", f"{what}:\n{done.stderr[:6000]}")


def _cached(stem: str, parts: Sequence[str], make) -> Path:
    """The cached library made of `parts`; `make(folder, target)` builds it. Safe for threads and processes."""
    digest = hashlib.sha256("\0".join([*parts, _compiler_version()]).encode()).hexdigest()[:24]
    target = _cache_folder() / f"{stem}-{digest}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=_cache_folder()) as folder:
            made = Path(folder) / target.name
            make(Path(folder), made)
            os.replace(made, target)
    return target


@cache
def _sources(folder: Path) -> str:
    paths = (path for path in sorted(folder.iterdir()) if path.is_file())
    return "\0".join(path.name + "\0" + path.read_text(encoding="utf-8") for path in paths)


@cache
def _runtime() -> ctypes.CDLL:
    # Inlining across files makes the checks of plain accesses a third faster. Clang would need another linker for it.
    flags = [*_RUNTIME_FLAGS, *["-flto"] * ("Free Software Foundation" in _compiler_version())]

    def make(folder: Path, target: Path) -> None:
        sources = sorted(_RUNTIME.glob("*.cpp"))
        objects = [str(folder / f"{source.stem}.o") for source in sources]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [
                pool.submit(_compile, [*flags, "-c", str(source), "-o", made], source.name)
                for source, made in zip(sources, objects, strict=True)
            ]
            for job in jobs:
                job.result()
        _compile([*flags, "-shared", "-o", str(target), *objects, "-ldl"], "the emulator's runtime")

    path = _cached("runtime", [_sources(_RUNTIME), _sources(_DEVICE), *flags], make)
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # kernels find the runtime's functions through the loader
    library.emu_allocate.restype = ctypes.c_void_p
    library.emu_allocate.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    library.emu_make_constant.argtypes = [ctypes.c_void_p]
    library.emu_run.argtypes = [
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint64,
        ctypes.c_uint, ctypes.c_int, ctypes.c_int, ctypes.c_int,
    ]  # fmt: skip
    library.emu_share_by_launches.argtypes = [ctypes.c_void_p]
    library.emu_error_kind.restype = library.emu_error_text.restype = ctypes.c_char_p
    return library


def prepare() -> None:
    """Build the runtime; otherwise the first use does."""
    _runtime()


_OWN = "emulator:"  # in front of the names of the emulator's own headers
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)".*$')
_ALIGNED = r"(?:(?:__align__|alignas)\s*\(\s*(?P<alignment>\d+)\s*\)\s*)?"
_DYNAMIC_SHARED = re.compile(rf"\bextern\s+__shared__\s+{_ALIGNED}(?P<type>[\w:\s]+?)\s+(?P<name>\w+)\s*\[\s*\]\s*;")
_STATIC_SHARED = re.compile(
    rf"(?:\bstatic\s+)?\b__shared__\s+{_ALIGNED}(?P<type>[\w:\s]+?)\s+(?P<name>\w+)\s*(?P<extent>(?:\[[^\]]*\]\s*)*);"
)


def _flatten(text: str, headers: Mapping[str, str], name: str, seen: set[str]) -> list[str]:
    """The lines of a program with its headers in place, each once, the emulator's own rather than the GPU's."""
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(text.splitlines(), start=1):
        include = _INCLUDE.match(line)
        if not include:
            lines.append(line)
            continue
        child = include[1]
        if child not in seen:
            seen.add(child)
            own = _DEVICE / child
            text, place = (own.read_text(encoding="utf-8"), _OWN + child) if own.exists() else (headers[child], child)
            lines += _flatten(text, headers, place, seen)
        lines.append(f'#line {number + 1} "{name}"')
    return lines


def _declare_shared(text: str) -> tuple[str, int]:
    """Shared-memory declarations as the emulator's, and the alignment that dynamic shared memory asks for."""

    def static(found: re.Match) -> str:
        element, name, extent = found["type"], found["name"], found["extent"]
        size = f"sizeof({element}{extent}), {found['alignment'] or f'alignof({element})'}"
        place = f"emu::static_shared(__COUNTER__, {size})"
        return f"{element} (&{name}){extent} = *static_cast<{element}(*){extent}>({place});"

    alignments = [int(found["alignment"] or 16) for found in _DYNAMIC_SHARED.finditer(text)]
    text = _DYNAMIC_SHARED.sub(r"\g<type>* const \g<name> = static_cast<\g<type>*>(emu::dynamic_shared());", text)
    return _STATIC_SHARED.sub(static, text), max(alignments, default=16)


@dataclass(frozen=True)
class Kernel:
    """A built kernel."""

    name: str
    path: Path
    flags: tuple[str, ...]
    smem_alignment: int


def _library(text: Path, flags: Sequence[str], target: Path, what: str) -> None:
    """In two steps, so that no sanitizer's library is linked; what the library calls, Python has loaded."""
    made = target.with_suffix(".o")
    _compile([*flags, "-c", str(text), "-o", str(made)], what)
    _compile(["-shared", "-nostdlib", "-o", str(target), str(made)], what)


def _text_of(path: Path) -> Path:
    """Where the text of a kernel's library lies."""
    return path.with_suffix(".cpp")


def _with_line_numbers(kernel: Kernel) -> Path:
    """A kernel's library once more: the same code at the same addresses, and which lines it comes from."""

    def make(_: Path, target: Path) -> None:
        _library(_text_of(kernel.path), (*kernel.flags, *_LINE_FLAGS), target, kernel.name)

    return _cached(f"{kernel.path.stem}-lines", _LINE_FLAGS, make)


def build(text: str, kernel: str, headers: Mapping[str, str] | None = None, *, optimised: bool = False) -> Kernel:
    """Compile a program for the emulator. `headers` holds the texts of what it includes. A program of instructions,
    whose work is the runtime's, is not worth what it takes to have it `optimised`; one of plain arithmetic is."""
    if reason := unavailable():
        raise EmulatorError("unavailable", reason)
    _runtime()  # whose functions the library will look for
    text = f'#include "cuda.h"\n#line 1\n{text}\nEMU_ENTRY({kernel})\n'
    lines = _flatten(text, headers or {}, f"{kernel}.generated.cu", set())
    source, smem_alignment = _declare_shared("\n".join(lines))
    flags = (*_KERNEL_FLAGS, "-O1" if optimised else "-Og")

    def make(folder: Path, target: Path) -> None:
        text = folder / "kernel.cpp"
        text.write_text(source, encoding="utf-8")
        _library(text, flags, target, kernel)
        os.replace(text, _text_of(_cache_folder() / target.name))

    return Kernel(kernel, _cached(kernel, [source, _sources(_DEVICE), *flags], make), flags, smem_alignment)


# ---- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Buffer:
    """Emulated global memory that holds one array, as strided as the array it was made for."""

    pointer: int  # of element (0, ..., 0)
    array: np.ndarray
    _bytes: np.ndarray

    def check_gaps(self, name: str) -> None:
        """Nothing but the array's own elements may have been written."""
        untouched = np.ones(self._bytes.size, bool)
        if self.array.size:
            base = self._bytes.ctypes.data
            shape, strides = (*self.array.shape, self.array.itemsize), (*self.array.strides, 1)
            np.ndarray(shape, bool, untouched, self.pointer - base, strides)[...] = False
        wrong = np.flatnonzero(self._bytes[untouched] != _POISON)
        if wrong.size:
            where = np.flatnonzero(untouched)[wrong[0]]
            raise EmulatorError("out of bounds", f"byte {where} of {name}, which is no element of it, was written")


def _byte_range(array: np.ndarray) -> tuple[int, int]:
    """The addresses of an array's first byte and past its last."""
    start = array.ctypes.data
    if not array.size:
        return start, start
    reach = [stride * (extent - 1) for stride, extent in zip(array.strides, array.shape, strict=True)]
    return start + sum(r for r in reach if r < 0), start + sum(r for r in reach if r > 0) + array.itemsize


class Memory:
    """Emulated global memory: arrays between pages that fault. Freed at the end of the `with`, runs lie inside it."""

    _lock = threading.RLock()  # there is one emulated GPU

    def __init__(self, seed: int = 0):
        self._right = seed % 2 == 0

    def __enter__(self) -> Memory:
        self._lock.acquire()
        return self

    def __exit__(self, *_) -> None:
        _runtime().emu_free_all()
        self._lock.release()

    def empty_like(self, name: str, array: np.ndarray) -> Buffer:
        """Poison where `array` has elements, at the same distances and equally aligned."""
        low, high = _byte_range(array)
        nbytes, first = high - low, array.ctypes.data - low
        base = _runtime().emu_allocate(name.encode(), nbytes, 16, low % 16, self._right)
        if base is None:
            raise MemoryError(f"the emulator has no room for {name}, {nbytes} bytes")
        raw = np.frombuffer((ctypes.c_ubyte * nbytes).from_address(base), np.uint8) if nbytes else np.empty(0, np.uint8)
        view = np.ndarray(array.shape, array.dtype, raw, first, array.strides) if nbytes else np.empty_like(array)
        return Buffer(base + first, view, raw)

    def empty(self, name: str, shape: int | tuple[int, ...], dtype) -> Buffer:
        return self.empty_like(name, np.empty(shape, dtype))

    def shared_by_launches(self, name: str, nbytes: int) -> Buffer:
        """Bytes in which launches hand each other something."""
        buffer = self.empty(name, nbytes, np.uint8)
        _runtime().emu_share_by_launches(ctypes.c_void_p(buffer.pointer))
        return buffer

    def constant(self, name: str, array: np.ndarray) -> Buffer:
        """A copy of `array` that kernels may not write; what lies between its elements is poison."""
        buffer = self.empty_like(name, array)
        buffer.array[...] = array
        _runtime().emu_make_constant(ctypes.c_void_p(buffer.pointer - (array.ctypes.data - _byte_range(array)[0])))
        return buffer


_TENSOR_MAP = struct.Struct("<QQ4Q4I4III")  # emu::TensorMap
_TENSOR_MAP_MAGIC, _TENSOR_MAP_BYTES = 0x70616D726F736E65, 128


def tensor_map(
    pointer: int,
    stride_bytes: Sequence[int],
    extents: Sequence[int],
    box: Sequence[int],
    element_bytes: int,
    swizzle_bytes: int = 0,
) -> bytes:
    """The 128 bytes that stand for a CUtensorMap of four dimensions, innermost first."""
    packed = _TENSOR_MAP.pack(_TENSOR_MAP_MAGIC, pointer, *stride_bytes, *extents, *box, element_bytes, swizzle_bytes)
    return packed.ljust(_TENSOR_MAP_BYTES, b"\0")


# ---- running ---------------------------------------------------------------------------------------------------------


@cache
def _entry(path: Path) -> int:
    return ctypes.cast(ctypes.CDLL(str(path)).emu_entry, ctypes.c_void_p).value


def _with_lines(text: str, kernel: Kernel) -> str:
    """Replaces addresses in braces, which the runtime leaves, by source lines."""

    def line(found: re.Match) -> str:
        if shutil.which("addr2line"):
            command = ["addr2line", "-i", "-e", str(_with_line_numbers(kernel)), found[1]]
            places = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace").stdout.split("\n")
            named = [place.split(" ")[0] for place in places if place and "?" not in place and _OWN not in place]
            if named:
                return Path(named[0]).name
        return f"address {found[1]} of {kernel.path.name}"

    return re.sub(r"\{(0x[0-9a-f]+)\}", line, text)


def run(
    kernel: Kernel,
    grid: int,
    block: int,
    smem_bytes: int = 0,
    params: bytes = b"",
    *,
    seed: int = 0,
    resident: int = 1,
    shuffled: bool = False,
    check_races: bool = True,
    overlaps: bool = False,
) -> None:
    """Launch. `params` holds the arguments as CUDA lays them out. `resident` CTAs are interleaved; they start in the
    order of blockIdx unless `shuffled`. A launch that `overlaps` those before it must wait before it touches what
    launches share. Raises EmulatorError for whatever a GPU would do wrong, hang on, or forgive."""
    if block % 32:
        raise ValueError(f"block is {block}: the emulator runs whole warps")
    runtime = _runtime()
    aligned = ctypes.create_string_buffer(len(params) + 64)
    start = -ctypes.addressof(aligned) % 64  # tensor maps among the arguments must be aligned
    aligned[start : start + len(params)] = bytes(params)
    pointer = ctypes.cast(ctypes.addressof(aligned) + start, ctypes.c_char_p)
    shape = grid, block, smem_bytes, kernel.smem_alignment
    if runtime.emu_run(_entry(kernel.path), pointer, *shape, seed, resident, shuffled, check_races, overlaps):
        text = _with_lines(runtime.emu_error_text().decode(), kernel)
        raise EmulatorError(runtime.emu_error_kind().decode(), f"{text} [{kernel.name}, seed {seed}]")
