"""The wheel holds the CUDA sources, and what is installed from it finds them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that the build leaves nothing in the checkout."""
    if not importlib.util.find_spec("setuptools"):
        pytest.skip("setuptools is not installed")
    copy = tmp_path_factory.mktemp("source")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("pyflash", "kernels_cu"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", copy, copy]
    subprocess.run(command, check=True, timeout=300)
    return next(copy.glob("*.whl"))


def test_the_wheel_holds_every_source_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    kernels = {f"pyflash/kernels_cu/{p.name}" for p in (ROOT / "kernels_cu").iterdir() if p.suffix in (".cu", ".cuh")}
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "pyflash").rglob("*.py")}
    assert {name for name in names if ".dist-info/" not in name} == kernels | modules
    assert wheel.name.endswith("-py3-none-any.whl") and wheel.stat().st_size < 300_000


def test_what_is_installed_works_without_the_checkout(wheel, tmp_path):
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, wheel]
    subprocess.run(command, check=True, timeout=300)
    code = (
        "import numpy as np, pyflash; from pyflash import source\n"
        "q = np.ones((1, 4, 1, 8), np.float32); assert (pyflash.flash_attention(q, q, q) == 1).all()\n"
        "print(source.kernels_folder(), len(source.headers('#include \"fwd_simt.cu\"')))"
    )
    environment = {**os.environ, "PYTHONPATH": str(target)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert run.returncode == 0, run.stderr
    folder, files = run.stdout.split()
    assert folder == str(target / "pyflash" / "kernels_cu") and int(files) > 3


def test_the_checkout_works_without_installing():
    """As an editable install does: the sources are found beside the package."""
    code = "from pyflash import source; print(source.kernels_folder())"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", env=environment)
    assert Path(run.stdout.strip()) == ROOT / "kernels_cu", run.stderr
