"""The cubin cache: keyed by everything that makes a binary, whole or absent, safe for threads and processes.

The compiler is a stand-in that needs no CUDA; `tests/compile` meets the real one.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from problems import example

from pyflash import compile, source
from pyflash.device import KNOWN
from pyflash.errors import CompileError
from pyflash.plan import plan

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'fwd_sm80' for 'sm_90a'
ptxas info    : Function properties for fwd_sm80
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, 500 bytes cmem[0]
"""


class FakeNvrtc:
    """Stands in for cupy.cuda.nvrtc: a program's binary is its text."""

    class NVRTCError(Exception):
        pass

    def __init__(self, version=(13, 0), seconds=0.0):
        self.version, self.seconds, self.compiled = version, seconds, []

    def getVersion(self):
        return self.version

    def getSupportedArchs(self):
        return [75, 80, 86, 89, 90, 100, 120]

    def createProgram(self, text, name, headers, names):
        assert len(headers) == len(names)
        return {"text": text}

    def compileProgram(self, program, options):
        time.sleep(self.seconds)
        if "#error" in program["text"]:
            raise self.NVRTCError("NVRTC_ERROR_COMPILATION (6)")
        self.compiled.append(options)
        program["options"] = options

    def getCUBIN(self, program):
        return (repr(program["options"]) + program["text"]).encode()

    def getProgramLog(self, program):
        return LOG.format(stack=0, stores=0, loads=0, registers=168) if "options" in program else "line 1: error"

    def destroyProgram(self, program):
        pass


@pytest.fixture
def nvrtc(monkeypatch, tmp_path):
    fake = FakeNvrtc()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compile, "_nvrtc", lambda: fake)
    return fake


def launch(**call):
    return plan(example(**call), KNOWN["A100"]).launches[0]


def test_second_time_nothing_is_compiled(nvrtc):
    first = compile.cubin(launch(), "sm_80")
    assert compile.cubin(launch(), "sm_80") == first
    assert len(nvrtc.compiled) == 1
    assert {p.suffix for p in first.parent.iterdir()} == {".cubin", ".cu", ".log"}
    assert first.with_suffix(".cu").read_text(encoding="utf-8") == source.program(launch())


def test_the_key_is_everything_that_makes_the_binary(nvrtc, monkeypatch):
    base = compile.cubin(launch(), "sm_80")
    others = [compile.cubin(launch(causal=True), "sm_80"), compile.cubin(launch(), "sm_90")]
    nvrtc.version = (12, 9)
    others.append(compile.cubin(launch(), "sm_80"))
    nvrtc.version = (13, 0)
    with monkeypatch.context() as patch:
        patch.setattr(compile, "_OPTIONS", (*compile._OPTIONS, "-lineinfo2"))
        others.append(compile.cubin(launch(), "sm_80"))
    with monkeypatch.context() as patch:
        read = source.read
        patch.setattr(source, "read", lambda name: read(name) + "// changed\n" * (name == "mask.cuh"))
        others.append(compile.cubin(launch(), "sm_80"))
    assert len({base, *others}) == 1 + len(others)
    assert len(nvrtc.compiled) == 1 + len(others)


def test_options_of_the_compiler(nvrtc):
    compile.cubin(launch(), "sm_80")
    (options,) = nvrtc.compiled
    assert options[0] == "-arch=sm_80" and sum(o.startswith("-arch") for o in options) == 1
    assert not any("fast" in o or "ftz" in o for o in options), "exact means exact"


def test_arch_specific_binaries_are_for_one_gpu(nvrtc):
    hopper = [x for x in plan(example(), KNOWN["H200"]).launches if x.kernel == "fwd_sm90"]
    for x in hopper:
        assert compile.arch_of(x, KNOWN["H200"]) == "sm_90a"
    assert compile.arch_of(launch(), KNOWN["H200"]) == "sm_90"
    assert compile.arch_of(launch(), KNOWN["B200"]) == "sm_100"


def test_an_unknown_gpu_is_refused_with_the_remedy(nvrtc):
    future = replace(KNOWN["B200"], name="GPU of tomorrow", capability=(19, 0))
    with pytest.raises(CompileError, match=r"does not know GPU of tomorrow .*190.*pip install"):
        compile.arch_of(launch(), future)


def test_a_failed_compile_leaves_nothing_and_shows_the_log(nvrtc, monkeypatch):
    program = source.program
    with monkeypatch.context() as patch:
        patch.setattr(source, "program", lambda x: program(x) + "#error no\n")
        with pytest.raises(CompileError, match=r"(?s)could not compile fwd_sm80 for sm_80.*line 1: error"):
            compile.cubin(launch(), "sm_80")
    assert not list(compile.cache_folder().glob("*.cubin"))
    assert compile.cubin(launch(), "sm_80").exists()


def test_no_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(CompileError, match=r"pip install 'pyflash\[cuda13\]'"):
        compile.nvrtc_version()


def test_many_threads_one_binary(nvrtc):
    nvrtc.seconds = 0.02
    barrier = threading.Barrier(8)

    def build(_):
        barrier.wait()
        return compile.cubin(launch(), "sm_80").read_bytes()

    with ThreadPoolExecutor(8) as pool:
        binaries = set(pool.map(build, range(8)))
    assert len(binaries) == 1
    assert not [p for p in compile.cache_folder().iterdir() if p.suffix not in (".cubin", ".cu", ".log")]


def test_a_reader_never_meets_half_a_file(tmp_path):
    """While a writer replaces a large file again and again, whoever opens it reads one whole version."""
    path, stop = tmp_path / "kernel.cubin", threading.Event()
    versions = [bytes([n]) * 3_000_000 for n in range(3)]
    compile._write(path, versions[0])

    def write():
        while not stop.is_set():
            for version in versions:
                compile._write(path, version)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            data = path.read_bytes()
            assert len(data) == 3_000_000 and len(set(data[:: 2**16])) == 1
    finally:
        stop.set()
        writer.join()
    assert [p.name for p in tmp_path.iterdir()] == ["kernel.cubin"]


PROCESS = """
import sys, time
sys.path[:0] = {paths!r}
import test_compile_cache as t
from pyflash import compile
fake = t.FakeNvrtc(seconds=0.05)
compile._nvrtc = lambda: fake
start = float(sys.argv[1])
time.sleep(max(0.0, start - time.time()))
data = compile.cubin(t.launch(), "sm_80").read_bytes()
import hashlib
print(hashlib.sha256(data).hexdigest(), len(fake.compiled))
"""


def test_processes_share_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = Path(__file__).parent
    code = PROCESS.format(paths=[str(here), str(here.parent), str(here.parents[1])])
    start = str(time.time() + 1.5)
    racers = [
        subprocess.Popen([sys.executable, "-c", code, start], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    results = [racer.communicate(timeout=60) for racer in racers]
    assert not any(racer.returncode for racer in racers), results
    digests = {out.split()[0] for out, _ in results}
    assert len(digests) == 1
    late = subprocess.run([sys.executable, "-c", code, start], capture_output=True, text=True, timeout=60, check=True)
    assert late.stdout.split() == [*digests, "0"], "a later process compiles nothing"


def test_a_folder_that_cannot_be_written_is_no_obstacle(nvrtc, monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    path = compile.cubin(launch(), "sm_80")
    assert path.exists() and not path.is_relative_to(file)


def test_the_report_is_read_from_the_log():
    log = LOG.format(stack=8, stores=4, loads=12, registers=255)
    log += "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...\n"
    report = compile.report(log)
    assert (report.registers, report.stack_bytes, report.spill_bytes) == (255, 8, 16)
    assert len(report.warnings) == 1 and "C7510" in report.warnings[0]
    clean = compile.report(LOG.format(stack=0, stores=0, loads=0, registers=40))
    assert (clean.registers, clean.spill_bytes, clean.warnings) == (40, 0, ())
