"""The command line, the examples and the cache, as a user on a machine with a GPU meets them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **environment}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=env)


def test_demo():
    done = run("-m", "pyflash", "demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NumPy" not in done.stdout and done.stdout.rstrip().endswith("All right.")


def test_doctor():
    done = run("-m", "pyflash", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BROKEN" not in done.stdout and done.stdout.rstrip().endswith("the GPU works")


def test_bench(tmp_path):
    size = ("--seqlen", "256,1k", "--batch", "1", "--heads", "2", "--head-dim", "64", "--causal", "--seconds", "0.01")
    some = ("--only", "ordinary", "--only", "flash")
    done = run("-m", "pyflash", "bench", *size, *some, "--json", "--csv", tmp_path / "figures.csv")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    failures = {(row["contestant"], row["direction"]): row["failure"] for row in rows if row["failure"]}
    assert not {name for name, _ in failures} & {"PyFlash", "ordinary"}, failures
    long = {row["contestant"]: row for row in rows if row["direction"] == "backward" and row["seqlen_q"] == 1024}
    assert long["ordinary"]["memory_bytes"] > long["PyFlash"]["memory_bytes"] > 0
    assert (tmp_path / "figures.csv").read_text().count("\n") == 1 + len(rows)


def test_explain_and_compile_take_the_gpu_that_is_there(tmp_path):
    done = run("-m", "pyflash", "explain", "--causal")
    assert done.returncode == 0 and "family" in done.stdout, done.stderr
    done = run("-m", "pyflash", "compile", "--head-dim", "64", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0 and list((tmp_path / "pyflash").glob("*.cubin")), done.stdout + done.stderr


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    for library in ("torch", "jax"):
        if f"import {library}" in path.read_text(encoding="utf-8") and not importlib.util.find_spec(library):
            pytest.skip(f"{library} is not installed")
    done = run(path)
    assert done.returncode == 0, done.stdout + done.stderr


CALL = """
import cupy, numpy as np, pyflash
q = cupy.asarray(np.random.default_rng(0).standard_normal((1, 100, 2, 64)).astype(np.float16))
out, lse = pyflash.flash_attention(q, q, q, causal=True, return_lse=True)
dq, dk, dv = pyflash.flash_attention_backward(out, q, q, q, out, lse, causal=True, deterministic=True)
print(hash(b"".join(cupy.asnumpy(a).tobytes() for a in (out, lse, dq, dk, dv))))
"""


def test_a_second_process_compiles_nothing(tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PYFLASH_DEBUG": "2", "PYTHONHASHSEED": "0"}
    first, second = (run("-c", CALL, **environment) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stderr.count("compiled ") >= 3 and second.stderr.count("compiled ") == 0
    assert first.stdout == second.stdout


def test_a_binary_that_is_no_binary_is_reported(tmp_path):
    """With the path, so that it can be deleted; never loaded as something else."""
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    assert run("-c", CALL, **environment).returncode == 0
    for path in (tmp_path / "pyflash").glob("fwd_*.cubin"):
        path.write_bytes(b"not a cubin")
    done = run("-c", CALL, **environment)
    assert done.returncode != 0 and "LaunchError" in done.stderr and str(tmp_path) in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_compute_sanitizer(tool):
    import shutil

    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        pytest.skip("compute-sanitizer is not installed")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", CALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT, env=env)
    assert done.returncode == 0 and "ERROR SUMMARY: 0 errors" in done.stdout, done.stdout[-4000:]
