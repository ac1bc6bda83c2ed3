"""What PyFlash finds on this machine, a smoke test, and what mends what is missing."""

from __future__ import annotations

import argparse
import ctypes
import itertools
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

import numpy as np

from .. import __version__, api, compile, debug, reference, source
from ..device import present
from ..errors import CompileError, Unsupported
from ..tiles import FAMILIES
from . import add_json, print_json

_BOUNDS = {"float16": 4e-3, "float32": 1e-5, "float64": 1e-12}  # relative to the largest entry


@dataclass(frozen=True)
class _Finding:
    state: str  # ok, absent or BROKEN
    subject: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"  {self.state:8} {self.subject:11} {self.text}"
        return f"{line}\n  {'':8} {'':11} -> {self.remedy}" if self.remedy else line


class _Report:
    """Keeps what is found, and shows it as it is found."""

    def __init__(self, show: Callable[[object], None]):
        self.findings: list[_Finding] = []
        self.show = show

    @property
    def broken(self) -> bool:
        return any(finding.state == "BROKEN" for finding in self.findings)

    def good(self, subject: str, text: str) -> None:
        self._add(_Finding("ok", subject, text))

    def absent(self, subject: str, text: str, remedy: str = "") -> None:
        """Not there, and not needed for what does work."""
        self._add(_Finding("absent", subject, text, remedy))

    def bad(self, subject: str, text: str, remedy: str = "") -> None:
        self._add(_Finding("BROKEN", subject, text, remedy))

    def _add(self, finding: _Finding) -> None:
        self.findings.append(finding)
        self.show(finding)


def add(parser: argparse.ArgumentParser) -> None:
    parser.description += " The exit code is 1 if something is broken; a machine without a GPU is not."
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    report = _Report((lambda finding: None) if args.json else print)
    report.good("Python", f"{platform.python_version()} on {platform.platform(terse=True)}")
    report.good("pyflash", f"{__version__} in {source.kernels_folder().parent}; NumPy {np.__version__}")
    cuda = _driver(report)
    gpus = _cupy(report, cuda)
    if _nvrtc(report, cuda, required=bool(gpus)):
        _archs(report, cuda, gpus)
    _libraries(report)
    _cache(report)
    _smoke(report, "NumPy", "float32, forward and backward", _data("float32"))
    for gpu in gpus if not report.broken else []:
        _smoke_gpu(report, gpu)
    works = "the GPU works" if gpus else "works on the CPU, through NumPy"
    verdict = "something is broken" if report.broken else works
    if args.json:
        print_json({"broken": report.broken, "verdict": verdict, "findings": report.findings})
    else:
        print(f"\n{verdict}")
    return int(report.broken)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver(report: _Report) -> int | None:
    """The newest CUDA that the driver serves, as 13000; None without driver or GPU. Asked of the driver itself."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        report.absent("driver", "no NVIDIA driver: NumPy and other CPU arrays work, GPU arrays cannot exist here",
                      "for a GPU, install NVIDIA's driver (R525 or later)")  # fmt: skip
        return None
    version, count = ctypes.c_int(), ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDriverGetVersion(ctypes.byref(version))
    status = status or driver.cuDeviceGetCount(ctypes.byref(count))
    if status or not count.value:
        report.absent("driver", f"a driver, but no GPU that it can use (CUDA error {status})")
        return None
    report.good("driver", f"CUDA {version.value // 1000}.{version.value % 1000 // 10}, {count.value} GPU(s)")
    if version.value < 12000:
        report.bad("driver", "too old for CUDA 12", "update NVIDIA's driver (R525 or later)")
    return version.value


def _extra(cuda: int | None) -> str:
    return f"pip install 'pyflash[cuda{12 if cuda is not None and cuda < 13000 else 13}]'"


def _cupy(report: _Report, cuda: int | None) -> list[int]:
    """The GPUs that CuPy can use."""
    say = report.absent if cuda is None else report.bad
    try:
        import cupy
    except ImportError as error:
        say("CuPy", f"cannot be imported ({error})", _extra(cuda))
        return []
    report.good("CuPy", cupy.__version__)
    if cuda is None:
        return []
    try:
        gpus = list(range(cupy.cuda.runtime.getDeviceCount()))
    except cupy.cuda.runtime.CUDARuntimeError as error:
        report.bad("GPU", f"CuPy cannot use it: {error}", f"a CuPy for the driver's CUDA: {_extra(cuda)}")
        return []
    for gpu in gpus:
        facts = present(gpu)
        report.good(f"GPU {gpu}", "{}, compute capability {}.{}, {:.0f} GB".format(
            facts.name, *facts.capability, facts.memory_bytes / 1e9))  # fmt: skip
    return gpus


def _nvrtc(report: _Report, cuda: int | None, required: bool) -> bool:
    try:
        version = compile.nvrtc_version()
    except CompileError as error:
        (report.bad if required else report.absent)("NVRTC", str(error.__cause__ or error), _extra(cuda))
        return False
    report.good(
        "NVRTC", "{}.{}, compiles for sm_{}".format(*version, ", sm_".join(map(str, compile.supported_archs())))
    )
    return True


def _archs(report: _Report, cuda: int | None, gpus: list[int]) -> None:
    for gpu in gpus:
        if present(gpu).arch not in compile.supported_archs():
            report.bad("NVRTC", f"does not know GPU {gpu}'s sm_{present(gpu).arch}",
                       f"{_extra(cuda)} --upgrade")  # fmt: skip


def _libraries(report: _Report) -> None:
    bfloat16 = "bfloat16 in CuPy and NumPy arrays"
    if _version("ml_dtypes"):
        report.good("ml_dtypes", f"{_version('ml_dtypes')}, for {bfloat16}")
    else:
        report.absent("ml_dtypes", f"without it no {bfloat16}; torch and JAX arrays need none", "pip install ml_dtypes")
    for library in ("torch", "jax"):
        if version := _version(library):
            report.good(library, f"{version}; its arrays are taken as they are")
        else:
            report.absent(library, "not installed; optional")
    if version := _version("matplotlib"):
        report.good("matplotlib", f"{version}, for plots")
    else:
        report.absent("matplotlib", "not installed; bench and explain draw with it", "pip install 'pyflash[bench]'")


def _cache(report: _Report) -> None:
    folder = compile.cache_folder()
    kernels = list(folder.glob("*.cubin")) if folder.is_dir() else []
    count = f"{len(kernels)} compiled kernel{'' if len(kernels) == 1 else 's'}"
    used = f"{count}, {sum(k.stat().st_size for k in kernels) / 1e6:.1f} MB"
    if compile.writable(folder):
        report.good("cache", f"{folder}: {used}")
    else:
        report.bad("cache", f"{folder} cannot be written: kernels are compiled anew in each process",
                   "set XDG_CACHE_HOME to a folder that can")  # fmt: skip


def _smoke_gpu(report: _Report, gpu: int) -> None:
    """Every family of kernels that serves the GPU, forward and backward."""
    import cupy

    tried = set()
    with cupy.cuda.Device(gpu):
        for dtype, family in itertools.product(_BOUNDS, FAMILIES):
            arrays = _data(dtype)
            with debug.families(family, *(other for other in FAMILIES if other != family)):
                try:
                    plans = [api.explain(*map(cupy.asarray, arrays[:3]), backward=b).plan for b in (False, True)]
                except Unsupported as error:
                    plans, refusal = [], str(error)
                used = (dtype, *(plan.family for plan in plans))
                if used in tried:
                    continue
                tried.add(used)
                if plans:
                    what = f"{dtype}, {used[1]} forward and {used[2]} backward"
                    _smoke(report, f"GPU {gpu}", what, arrays, cupy.asarray, cupy.asnumpy)
                else:
                    report.absent(f"GPU {gpu}", f"{dtype}: {refusal}")


def _data(dtype: str) -> list[np.ndarray]:
    """q, k, v, dout of a small problem."""
    rng = np.random.default_rng(0)
    shapes = (1, 70, 4, 64), (1, 150, 2, 64), (1, 150, 2, 64), (1, 70, 4, 64)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def _smoke(report: _Report, subject: str, what: str, arrays: list[np.ndarray], put=np.asarray, get=np.asarray) -> None:
    """Forward and backward against the reference."""
    q, k, v, dout = (put(a) for a in arrays)
    out, lse = api.flash_attention(q, k, v, causal=True, return_lse=True)
    results = [out, *api.flash_attention_backward(dout, q, k, v, out, lse, causal=True)]
    q, k, v, dout = arrays
    expected = [reference.attention(q, k, v, causal=True)[0], *reference.attention_backward(dout, q, k, v, causal=True)]
    error = max(np.abs(get(a) - b).max() / np.abs(b).max() for a, b in zip(results, expected, strict=True))
    good = error <= _BOUNDS[str(arrays[0].dtype)]  # a NaN is not
    (report.good if good else report.bad)(subject, f"{what}: within {error:.1e} of the reference")
