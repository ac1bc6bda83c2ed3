"""Every example runs, and its own checks hold."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    for library in ("torch", "jax"):
        if f"import {library}" in path.read_text(encoding="utf-8") and not importlib.util.find_spec(library):
            pytest.skip(f"{library} is not installed")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip(), "an example shows something"
    assert path.read_text(encoding="utf-8").startswith('"""'), "and says what it shows"


def readme_blocks(language: str) -> list[str]:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)


def test_the_readmes_numpy_example():
    (code,) = [block for block in readme_blocks("python") if "import numpy" in block]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode == 0 and "matrix products" in run.stdout, run.stderr


def test_the_readmes_commands():
    """Those that set up a machine end in commands that exist, and what follows can be typed as it stands."""
    commands = [line for block in readme_blocks("sh") for line in block.splitlines()]
    setups = [line for line in commands if line.startswith("python3 -m venv .venv && .venv/bin/pip install ")]
    assert [line.rpartition(" && ")[2] for line in setups] == [
        ".venv/bin/python -m pyflash demo",
        ".venv/bin/python -m pytest",
    ]
    for line in commands:
        if line.startswith("python -m pyflash"):
            run = subprocess.run([sys.executable, *line.split()[1:]], capture_output=True, text=True, cwd=ROOT)
            assert run.returncode == 0, run.stderr


def test_there_are_examples():
    expected = {
        "packed_batch",
        "quickstart",
        "torch_layer",
        "train_gpt",
        "jax_layer",
        "split_keys",
        "long_context",
        "attention_maps",
        "score_mod",
    }
    assert expected <= {path.stem for path in EXAMPLES}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"(examples/{path.name})" in readme for path in EXAMPLES)
