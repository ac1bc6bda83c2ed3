"""Every example runs, and its own checks hold."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    for library in ("torch", "jax"):
        if f"import {library}" in path.read_text() and not importlib.util.find_spec(library):
            pytest.skip(f"{library} is not installed")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip(), "an example shows something"
    assert path.read_text().startswith('"""'), "and says what it shows"


def test_there_are_examples():
    assert {"quickstart", "torch_layer", "jax_arrays", "long_context"} <= {path.stem for path in EXAMPLES}
