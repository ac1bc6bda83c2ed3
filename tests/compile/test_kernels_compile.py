"""Every kernel, in every tile row and with every feature, compiles to code that spills no more than its kernel may.

The variants follow from the planner and its tables, so a new row or kernel is met without a word here. By default a
choice of them is compiled in which each row meets each type and layout, and each kernel each option and each compute
capability; `-m full` compiles all.
"""

from __future__ import annotations

import locale
from concurrent.futures import Future
from functools import cache

import pytest
from building import build, workers
from nvrtc import Nvrtc
from variants import OPTION_FLAGS, Variant, covering, every

from pyflash import compile, source
from pyflash.tiles import KERNELS

WARPGROUP = 128
REGISTERS_PER_MULTIPROCESSOR, REGISTERS_PER_THREAD = 65536, 255

all_variants = cache(every)
chosen_variants = cache(lambda: covering(all_variants()))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "variant" in metafunc.fixturenames:
        full = metafunc.function.__name__.endswith("full")
        unasked = full and metafunc.config.getoption("markexpr") == "not full"
        variants = [] if unasked else all_variants() if full else chosen_variants()
        metafunc.parametrize("variant", variants, ids=[v.name for v in variants])
    if "library" in metafunc.fixturenames:
        metafunc.parametrize("kernel", sorted(KERNELS))
        metafunc.parametrize("library", metafunc.config.getoption("--nvrtc"))


@pytest.fixture(scope="module")
def builds(request):
    """Name of a variant -> its cubin and log, as a future, of all that will be asked for."""
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    asked = [p["variant"] for p in parameters if "variant" in p and p["variant"].device.arch in _archs()]
    with workers() as pool:
        yield {v.name: pool.submit(build, v.launch, v.arch) for v in asked}
        pool.shutdown(cancel_futures=True)


@cache
def _archs() -> list[int]:
    return compile.supported_archs()


def check(variant: Variant, cubin: bytes, log: str) -> None:
    """The rules of a kernel's machine code."""
    report = compile.report(log)
    assert cubin[:4] == b"\x7fELF"
    kernel, config = KERNELS[variant.launch.kernel], dict(variant.launch.config)
    options = any(config.get(flag) for flag in OPTION_FLAGS)
    assert report.spill_bytes <= max(kernel.spill_bytes, options * kernel.option_spill_bytes), log
    assert not report.warnings, log
    assert 0 < report.registers <= REGISTERS_PER_THREAD
    threads = variant.launch.block
    allocated = -(-report.registers // 8) * 8 * threads
    assert allocated * config["MIN_CTAS"] <= REGISTERS_PER_MULTIPROCESSOR, f"{report.registers} registers: too many"
    if "CONSUMER_REGS" in config:  # setmaxnreg shares out what the CTA has at entry, and hangs if that is not enough
        shared_out = config["PRODUCER_REGS"] * WARPGROUP + config["CONSUMER_REGS"] * (threads - WARPGROUP)
        assert shared_out <= allocated, f"{report.registers} registers at entry are fewer than setmaxnreg hands out"


def compile_and_check(variant: Variant, builds: dict[str, Future]) -> None:
    if variant.name not in builds:
        pytest.skip(f"NVRTC {'.'.join(map(str, compile.nvrtc_version()))} does not know sm_{variant.device.arch}")
    check(variant, *builds[variant.name].result())


def test_variant(variant, builds):
    compile_and_check(variant, builds)


@pytest.mark.full
def test_variant_full(variant, builds):
    compile_and_check(variant, builds)


def test_the_choice_meets_every_row_of_every_kernel():
    met = {v.row for v in chosen_variants()}
    unused = {(name, row.why) for name, kernel in KERNELS.items() for row in kernel.rows if (name, row) not in met}
    assert not unused, "rows that no known GPU ever uses"


def test_the_choice_meets_every_trait():
    chosen, everything = (set().union(*(v.traits for v in vs)) for vs in (chosen_variants(), all_variants()))
    assert chosen == everything


def test_with_another_nvrtc(library, kernel):
    """Each kernel with the compilers that --nvrtc names: the largest head_dims of two architectures."""
    nvrtc = Nvrtc(library)
    variants = [v for v in chosen_variants() if v.launch.kernel == kernel and v.device.arch in nvrtc.archs]
    encoding = locale.getpreferredencoding(False)
    largest = {v.device.arch: v for v in sorted(variants, key=lambda v: v.launch.smem_bytes)}
    assert largest
    for variant in list(largest.values())[-2:]:
        cubin, log = nvrtc.compile(source.program(variant.launch), kernel, variant.arch)
        assert cubin, f"NVRTC {nvrtc.version}: {log}"
        check(variant, cubin, log)
    assert locale.getpreferredencoding(False) == encoding, "compiling changed the thread's locale"
