"""The command line, through its real entry point, on a machine without a GPU."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyflash import compile
from pyflash.commands import Progress
from pyflash.errors import CompileError

ROOT = Path(__file__).parents[2]
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def pyflash(*arguments: str, before: str = "", **environment: str) -> subprocess.CompletedProcess:
    """python -m pyflash, after the statements `before`, on a machine that shows no GPU."""
    command = ["-m", "pyflash", *arguments]
    if before:
        code = f"{before}\nimport sys, runpy\nsys.argv[1:] = {list(arguments)!r}\n"
        code += "runpy.run_module('pyflash', None, '__main__')"
        command = ["-c", code]
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, **NO_GPU, **environment},
    )


WITHOUT_CUPY = "import sys; sys.modules['cupy'] = None"


@pytest.mark.parametrize("command", ["demo", "bench", "doctor", "explain", "compile"])
def test_help(command):
    run = pyflash(command, "--help")
    assert run.returncode == 0 and f"python -m pyflash {command}" in run.stdout
    assert command in pyflash("--help").stdout


def test_version():
    assert pyflash("--version").stdout.startswith("pyflash ")


MISUSES = [
    "",
    "dance",
    "demo --no-such-option",
    "demo --seqlen many",
    "demo --seqlen -4",
    "demo --seqlen 0",
    "bench --seqlen 4k:many",
    "bench --seqlen 0",
    "bench --seqlen 64 --seqlen-k 0",
    "bench --seqlen 64 --heads 0",
    "bench --seqlen 64 --batch 0",
    "bench --seqlen 64 --heads 3 --kv-heads 2",
    "bench --seqlen 64 --head-dim 300",
    "bench --seqlen 64 --only abacus",
    "explain",
    "explain --dtype int8",
    "explain --gpu abacus",
    "explain --gpu H200 --head-dim 300",
    "explain --gpu H200 --heads 6 --kv-heads 4",
    "explain --gpu H200 --softcap 0",
    "explain --gpu H200 --window 0",
    "bench --seqlen 64 --softcap 0",
    "compile",
    "compile --arch sm_1",
    "compile --arch sm_80,sm_1",
    "compile --arch sm_80 --dtype int8",
    "compile --arch sm_80 --seqlen 0 --head-dim 64",
    "compile --arch sm_80 --into /proc/there",
    "compile --arch sm_80 --into README.md",
    "explain --gpu H200 --plot /nonexistent/a.png",
    "explain --gpu H200 --plot pyflash",
    "bench --seqlen 64 --csv /nonexistent/a.csv",
    "bench --seqlen 64 --csv /proc/a.csv",
    "bench --seqlen 64 --plot /nonexistent/a.png",
    "bench --seqlen 64 --seconds nan",
]


@pytest.mark.parametrize("line", MISUSES)
def test_misuse_is_said_briefly(line):
    run = pyflash(*line.split(), before=WITHOUT_CUPY)
    assert run.returncode == 2 and not run.stdout
    assert "Traceback" not in run.stderr and 1 <= len(run.stderr.splitlines()) <= 12


@pytest.mark.parametrize(
    "line, choices",
    [("bench --seconds -1", "argument --seconds: got -1, takes a number from 0 on"),
     ("explain --window abc", "argument --window: got abc, takes left,right, each None or an integer from 0 on"),
     ("explain --window -5,0", "argument --window: got -5,0, takes left,right, each None"),
     ("bench --softcap x", "argument --softcap: got x, takes None or a number"),
     ("compile --dropout-p 1", "argument --dropout-p: got 1, takes a number from 0"),
     ("bench --csv /no/a.csv", "argument --csv: "), ("explain --plot /no/a.png", "argument --plot: "),
     ("compile --into /proc/a", "argument --into: "), ("compile --arch sm_80 --seqlen 0", "--seqlen"),
     ("explain --gpu abacus", "H200"), ("explain", "H200"), ("compile --arch sm_1", "sm_90"), ("compile", "sm_90"),
     ("explain --dtype int8", "bfloat16"), ("bench --seqlen 64 --only abacus", "ordinary")],
)  # fmt: skip
def test_misuse_is_told_the_choices(line, choices):
    assert choices in pyflash(*line.split(), before=WITHOUT_CUPY).stderr


@pytest.mark.parametrize("line", ["explain --gpu H200", "bench --seqlen 64"])
def test_a_plot_of_an_unknown_kind_is_refused_before_all_else(line, tmp_path):
    pytest.importorskip("matplotlib")
    run = pyflash(*line.split(), "--plot", str(tmp_path / "a.xyz"))
    assert run.returncode == 2 and not run.stdout
    assert "--plot: got a file .xyz" in run.stderr and ".png" in run.stderr and "Traceback" not in run.stderr


@pytest.mark.parametrize("before", ["", WITHOUT_CUPY], ids=["as installed", "without CuPy"])
def test_demo(before):
    run = pyflash("demo", "--seqlen", "512", "--heads", "2", before=before)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert "NumPy on the CPU" in lines[0] and "512 tokens" in lines[0]
    assert "dq" in lines[1] and "bound" in lines[1]
    table = {line[:20].strip(): line[20:].split() for line in lines if line[:1].isalpha()}
    assert {"PyFlash", "ordinary attention", "saved"} <= table.keys()
    assert all(float(x.rstrip("x")) > 0 for x in table["saved"])
    assert lines[-1] == "All right." and len(lines) < 12


def test_demo_fails_on_wrong_results():
    before = "import pyflash.api as a; f = a.flash_attention_backward\n"
    before += "def wrong(*x, **o):\n  dq, dk, dv = f(*x, **o); return dk, dq, dv\n"
    before += "a.flash_attention_backward = wrong"
    run = pyflash("demo", "--cpu", "--seqlen", "64", "--heads", "1", before=before)
    assert run.returncode == 1 and "WRONG RESULTS" in run.stdout


SMALL = ("bench", "--seqlen", "16:64", "--batch", "1", "--heads", "2", "--seconds", "0")


def test_bench(tmp_path):
    pytest.importorskip("matplotlib")
    files = {suffix: tmp_path / f"figures.{suffix}" for suffix in ("csv", "png")}
    run = pyflash(*SMALL, "--csv", str(files["csv"]), "--plot", str(files["png"]))
    assert run.returncode == 0, run.stderr
    assert not run.stderr, "a bar is for terminals"
    lines = run.stdout.splitlines()
    assert lines[0].startswith("NumPy on the CPU: a large matrix product makes")
    for direction in ("forward", "backward"):
        (start,) = (n for n, line in enumerate(lines) if line.startswith(direction))
        assert "PyFlash" in lines[start - 1] and "ordinary" in lines[start - 1]
        assert [line.split(",")[0] for line in lines[start + 1 : start + 7]] == 2 * ["1 x 16", "1 x 32", "1 x 64"]
    assert files["csv"].read_text().count("\n") == 1 + 3 * 2 * 2 * 2 and files["png"].stat().st_size > 10_000


def test_bench_json():
    run = pyflash(*SMALL, "--json", "--causal", "--forward", before=WITHOUT_CUPY)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["machine"]["machine"] == "NumPy on the CPU" and len(found["rows"]) == 3 * 2
    assert all(row["options"] == "causal=True" and row["direction"] == "forward" for row in found["rows"])


def test_bench_fails_on_wrong_results():
    before = "import pyflash.api as a; f = a.flash_attention\na.flash_attention = lambda *x, **o: 2 * f(*x, **o)"
    run = pyflash(*SMALL, "--forward", before=before)
    assert run.returncode == 1 and "PyFlash, forward, 6 of the cases: wrong by" in run.stdout


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path):
    run = pyflash(*SMALL, "--plot", str(tmp_path / "x.png"), before="import sys; sys.modules['matplotlib'] = None")
    assert run.returncode == 1 and "pip install 'pyflash[bench]'" in run.stderr and not run.stdout


def test_a_bar_on_a_terminal():
    """Through a pseudo-terminal: drawn while it runs, gone at the end."""
    pty = pytest.importorskip("pty")
    reader, writer = pty.openpty()
    command = [sys.executable, "-m", "pyflash", *SMALL, "--forward", "--full"]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=writer, cwd=ROOT, env={**os.environ, **NO_GPU})
    os.close(writer)
    shown = os.read(reader, 1 << 16).decode()
    os.close(reader)
    assert run.returncode == 0 and "1/7" in shown and "7/7" in shown and shown.endswith("\r\x1b[K")


def test_doctor():
    run = pyflash("doctor")
    assert run.returncode == 0, run.stdout + run.stderr
    for subject in ("Python", "pyflash", "driver", "CuPy", "NVRTC", "ml_dtypes", "torch", "jax", "cache", "NumPy"):
        assert any(subject == line[11:22].strip() for line in run.stdout.splitlines()), subject
    assert "within" in run.stdout and run.stdout.rstrip().endswith("works on the CPU, through NumPy")


def test_doctor_json():
    found = json.loads(pyflash("doctor", "--json", before=WITHOUT_CUPY).stdout)
    assert found["broken"] is False and {f["state"] for f in found["findings"]} <= {"ok", "absent"}
    assert any("pyflash[cuda13]" in f["remedy"] for f in found["findings"] if f["subject"] == "CuPy")


def test_demo_json():
    found = json.loads(pyflash("demo", "--cpu", "--seqlen", "64", "--heads", "1", "--json").stdout)
    assert found["good"] and found["errors"].keys() == {"out", "dq", "dk", "dv"}
    assert found["PyFlash"]["memory_bytes"] > 0 and found["ordinary attention"]["forward_seconds"] > 0


def test_doctor_says_what_to_install():
    run = pyflash("doctor", before=WITHOUT_CUPY)
    assert run.returncode == 0
    assert "pip install 'pyflash[cuda13]'" in run.stdout


def test_doctor_finds_a_broken_cache_folder(tmp_path):
    (tmp_path / "file").write_text("")
    run = pyflash("doctor", XDG_CACHE_HOME=str(tmp_path / "file"))
    assert run.returncode == 1 and "BROKEN   cache" in run.stdout and "XDG_CACHE_HOME" in run.stdout


NOT_FOLDERS = ["/proc", "README.md"]  # root may write to the first, by its permissions


@pytest.mark.parametrize("folder", NOT_FOLDERS)
def test_doctor_tries_to_write_to_the_cache(folder):
    run = pyflash("doctor", XDG_CACHE_HOME=folder)
    assert run.returncode == 1 and "BROKEN   cache" in run.stdout


@pytest.mark.parametrize("folder", NOT_FOLDERS)
def test_compile_says_that_nothing_would_be_kept(folder):
    run = pyflash("compile", "--arch", "sm_80", XDG_CACHE_HOME=folder)
    if "pyflash[cuda13]" in run.stderr:
        pytest.skip("no NVRTC")
    assert run.returncode == 1 and not run.stdout
    assert f"{folder}/pyflash" in run.stderr and "XDG_CACHE_HOME" in run.stderr and "--into" in run.stderr


def test_a_bar_begins_at_none_and_ends_full(monkeypatch):
    shown = io.StringIO()
    shown.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", shown)
    with Progress(2) as progress:
        assert shown.getvalue().endswith("[" + " " * 24 + "] 0/2 ")
        progress.finished("one")
        assert shown.getvalue().endswith("[" + "=" * 12 + " " * 12 + "] 1/2 one")
        progress.step("another")
        assert shown.getvalue().endswith("[" + "=" * 12 + " " * 12 + "] 2/2 another")


def test_explain():
    run = pyflash("explain", "--gpu", "h200", "--seqlen", "8k", "--heads", "32", "--kv-heads", "8", "--causal")
    assert run.returncode == 0, run.stderr
    assert "q (1, 8192, 32, 128)" in run.stdout and "k (1, 8192, 8, 128)" in run.stdout
    for label in (
        "GPU",
        "family",
        "kernel",
        "  why",
        "  CTAs",
        "work",
        "traffic",
        "intensity",
        "roofline",
        "memory",
        "longest",
    ):
        assert any(line.startswith(label) for line in run.stdout.splitlines()), label
    backward = pyflash("explain", "--gpu", "A100", "--backward", "--deterministic")
    assert backward.returncode == 0 and backward.stdout.startswith("backward")


@pytest.mark.parametrize("gpu", ["A100", "H100", "H200", "RTX 4090", "L4", "T4", "B200"])
def test_explain_named_gpus(gpu):
    run = pyflash("explain", "--gpu", gpu, "--dtype", "float32", "--seqlen", "8k", "--json")
    assert run.returncode == 0, run.stderr
    facts = json.loads(run.stdout)
    assert facts["gpu"]["name"] == gpu and facts["longest_seqlen"] > 10 * facts["ordinary_longest_seqlen"]


def test_explain_plot(tmp_path):
    pytest.importorskip("matplotlib")
    run = pyflash("explain", "--gpu", "H200", "--plot", str(tmp_path / "x.png"))
    assert run.returncode == 0 and (tmp_path / "x.png").stat().st_size > 10_000


def test_explain_what_is_not_supported():
    run = pyflash("explain", "--gpu", "T4")
    assert run.returncode == 1 and "8.0" in run.stderr and "Traceback" not in run.stderr


def test_compile_lists(tmp_path):
    """Each kernel of all the combinations once, with its report."""
    try:
        compile.nvrtc_version()
    except CompileError as error:
        pytest.skip(str(error).partition("\n")[0])
    lists = "--arch sm_75,sm_80 --dtype float32 --head-dim 8,16 --seqlen 64,4k --full --causal --forward"
    run = pyflash("compile", *lists.split(), "--json", XDG_CACHE_HOME=str(tmp_path))
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    kernels = [(x["kernel"], x["variant"], x["arch"]) for x in found]
    assert len(set(kernels)) == len(kernels) and {x[2] for x in kernels} == {"sm_75", "sm_80"}
    assert all(x["registers"] > 0 and Path(x["cubin"]).is_file() for x in found)


def test_compile_leaves_out_what_no_kernel_serves(tmp_path):
    """And says so, by the exit code too."""
    try:
        compile.nvrtc_version()
    except CompileError as error:
        pytest.skip(str(error).partition("\n")[0])
    run = pyflash("compile", "--arch", "sm_75,sm_80", "--head-dim", "64", "--json", XDG_CACHE_HOME=str(tmp_path))
    assert run.returncode == 1 and [x["arch"] for x in json.loads(run.stdout)] == ["sm_80"]
    assert run.stderr.startswith("pyflash compile: left out: no kernel serves") and "T4" in run.stderr
    none = pyflash("compile", "--arch", "sm_75", "--head-dim", "64", XDG_CACHE_HOME=str(tmp_path))
    assert none.returncode == 1 and not none.stdout and none.stderr.startswith("pyflash compile: no kernel serves")


def test_compile_knows_the_architectures_that_nvrtc_does():
    try:
        known = compile.supported_archs()
    except CompileError as error:
        pytest.skip(str(error).partition("\n")[0])
    said = pyflash("compile", "--arch", "sm_1").stderr
    # No GPU of compute capability 8.8 has been described.
    assert all(f"sm_{arch}" in said for arch in known if arch in (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121))


def test_compile_without_a_compiler_says_what_to_install():
    run = pyflash("compile", "--arch", "sm_80", before=WITHOUT_CUPY)
    assert run.returncode == 1 and "pip install 'pyflash[cuda13]'" in run.stderr and "Traceback" not in run.stderr


def test_compile_fills_the_cache(tmp_path):
    try:
        compile.nvrtc_version()
    except CompileError as error:
        pytest.skip(str(error).partition("\n")[0])
    cache, into = tmp_path / "cache", tmp_path / "into"
    arguments = ("compile", "--arch", "sm_80", "--head-dim", "64", "--into", str(into))
    run = pyflash(*arguments, XDG_CACHE_HOME=str(cache))
    assert run.returncode == 0, run.stdout + run.stderr
    (stem,) = {path.stem for path in into.iterdir()}
    assert stem.startswith("fwd_sm80-sm_80-")
    files = {path.suffix: path.read_bytes() for path in into.iterdir()}
    assert files.keys() == {".cu", ".log", ".cubin", ".ptx"}
    assert files[".cubin"][:4] == b"\x7fELF" and b".target sm_80" in files[".ptx"] and b"registers" in files[".log"]
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.cubin")}
    assert pyflash(*arguments, XDG_CACHE_HOME=str(cache)).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.cubin")} == before != {}
