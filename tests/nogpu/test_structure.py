"""The rules of the codebase that a machine can hold: imports run downhill, and each thing is said in one place."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE, KERNELS = ROOT / "pyflash", ROOT / "kernels_cu"

# A module may import those of lower rank only. `commands` is the command line's package, `bench` its benchmark.
RANKS = {
    **dict.fromkeys(("errors", "debug", "device", "driver", "entry", "captured", "blocks", "feature", "graphs"), 0),
    **dict.fromkeys(("trace", "softcap"), 0.5),
    **dict.fromkeys(("features", "sequences"), 1),
    **dict.fromkeys(("params", "problem", "tiles"), 2),
    **dict.fromkeys(("sizes", "sums"), 2.5),
    "scores": 2.7,
    **dict.fromkeys(("plan", "reference"), 3),
    **dict.fromkeys(("source", "cpu", "explain", "plan_blocks"), 4),
    **dict.fromkeys(("compile", "tma"), 5),
    "torch_compile": 5.5,
    **dict.fromkeys(("launch", "arrays", "torch"), 6),
    "dispatch": 6.5,
    **dict.fromkeys(("api", "masks"), 7),
    "packed": 7.5,
    "__init__": 8,
    **dict.fromkeys(("jax", "flash_attn", "plots", "bench"), 9),
    "commands": 10,
    "__main__": 11,
}

# CuPy is imported lazily, and by these alone.
CUPY_USERS = {"device", "compile", "launch", "arrays", "commands", "bench"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def rank_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imported(node: ast.AST, path: Path) -> list[str]:
    """The absolute names of the modules that an import statement may bind."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        package = ("pyflash", *path.relative_to(PACKAGE).parts[:-1])
        base = ".".join((*package[: len(package) - node.level + 1], *([base] if base else ())))
    children = [f"{base}.{alias.name}" for alias in node.names]
    return children if node.level and not node.module else [base, *children]


def own_imports(path: Path) -> set[str]:
    """The pyflash modules that a module imports, anywhere in its text, as names of RANKS."""
    names = [name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) for name in imported(node, path)]
    firsts = {rest.partition(".")[0] for top, _, rest in (n.partition(".") for n in names) if top == "pyflash"}
    return {first if first in RANKS else "__init__" for first in firsts}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downhill(path):
    name = rank_name(path)
    assert name in RANKS, f"{path.name} has no rank yet"
    for other in own_imports(path) - {name}:
        assert RANKS[other] < RANKS[name], f"{path.name} (rank {RANKS[name]}) imports {other} (rank {RANKS[other]})"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_array_libraries_are_not_imported_on_the_way(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.Lambda)) for n in ast.walk(f)}
    for node in ast.walk(tree):
        tops = {name.partition(".")[0] for name in imported(node, path)}
        if isinstance(node, ast.ImportFrom) and node.level:
            continue
        name = rank_name(path)
        if name not in ("torch", "torch_compile", "jax", "flash_attn", "bench", "commands"):
            assert not tops & {"torch", "jax"}, f"{path.name}:{node.lineno} imports {tops}: ask sys.modules"
        if "cupy" in tops:
            assert name in CUPY_USERS and id(node) in inside, f"{path.name}:{node.lineno} imports cupy"


def in_subprocess(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_import_brings_in_no_array_library_but_numpy():
    tops = in_subprocess("import sys, pyflash; print(*{name.partition('.')[0] for name in sys.modules})").split()
    assert {"pyflash", "numpy"} <= set(tops)
    assert not {"torch", "jax", "cupy", "ml_dtypes"} & set(tops)


def test_import_is_quick():
    # Processor time, and the best of a few: other work on the machine is not the library's.
    code = "import time; t = time.process_time(); import pyflash; print(time.process_time() - t)"
    assert min(float(in_subprocess(code)) for _ in range(5)) < 0.3


def test_import_works_without_cupy():
    code = "import sys; sys.modules['cupy'] = None; import pyflash, numpy as np; q = np.ones((1, 3, 1, 4), np.float32);"
    code += "print(pyflash.flash_attention(q, q, q).shape)"
    assert in_subprocess(code).strip() == "(1, 3, 1, 4)"


def cuda_files() -> list[Path]:
    return sorted([*KERNELS.glob("*.cu"), *KERNELS.glob("*.cuh")])


def code_of(path: Path) -> str:
    """The text without comments, line numbers kept."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", text)


def places(pattern: str, paths: list[Path]) -> list[str]:
    return [
        f"{path.name}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(code_of(path).splitlines(), 1)
        if re.search(pattern, line)
    ]


def test_inline_assembly_lies_in_ptx_headers_only():
    assert places(r"\basm\b", [p for p in cuda_files() if not p.name.startswith("ptx")]) == []


def test_features_are_named_in_mask_only():
    from pyflash.features import FEATURES

    flags = [flag for feature in FEATURES for flag in feature.flags]
    fields = [field.name for feature in FEATURES for field in feature.fields]
    own = {"mask.cuh", "score.cuh", "bwd_sinks.cu"}  # the last is a feature's own kernel
    names = rf"\b({'|'.join(flags)})\b|\bp\.({'|'.join(fields)})\b"
    assert places(names, [path for path in cuda_files() if path.name not in own]) == []
    sides = [KERNELS / "mask.cuh", KERNELS / "score.cuh"]
    missing = [flag for flag in flags if not places(rf"\bcfg::{flag}\b", sides)]
    assert not missing, "a feature without a kernel side"


def test_infinity_is_handled_in_softmax_only():
    pattern = r"(?i)infinity|0x[7f]f800000|0x[7f]ff0000000000000"
    assert places(pattern, [p for p in cuda_files() if p.name != "softmax.cuh"]) == []


def test_no_toolkit_headers():
    assert places(r"^\s*#\s*include\s*<", cuda_files()) == []


def test_every_file_has_its_line_in_the_kernels_page():
    page = (KERNELS / "README.md").read_text(encoding="utf-8")
    assert [p.name for p in cuda_files() if f"`{p.name}`" not in page] == []


def test_headers_are_included_once():
    headers = [path for path in cuda_files() if path.suffix == ".cuh"]
    assert [path.name for path in headers if "#pragma once" not in path.read_text(encoding="utf-8")] == []


def test_an_entry_is_named_like_its_file():
    for path in cuda_files():
        entries = re.findall(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(", code_of(path))
        assert entries == ([path.stem] if path.suffix == ".cu" else []), path.name


def test_smem_is_checked_against_the_host():
    kernels = [p for p in cuda_files() if p.suffix == ".cu" and "struct Smem" in code_of(p)]
    for path in kernels:
        assert re.search(r"static_assert\(sizeof\(Smem\) == (cfg::)?SMEM_BYTES", code_of(path)), path.name


def test_files_are_of_readable_size():
    paths = [*modules(), *cuda_files(), *(ROOT / "tests").rglob("*.py")]
    assert {p.name: n for p in paths if (n := len(p.read_text(encoding="utf-8").splitlines())) > 600} == {}


def test_one_environment_variable():
    """PYFLASH_DEBUG, read in debug.py; the cache folder follows the desktop standard's own variable."""
    found = {}
    for path in modules():
        for name in re.findall(r"environ(?:\.get\(|\[)\s*\"(\w+)\"", path.read_text(encoding="utf-8")):
            found.setdefault(name, set()).add(rank_name(path))
    assert found.get("PYFLASH_DEBUG") == {"debug"}
    assert set(found) <= {"PYFLASH_DEBUG", "XDG_CACHE_HOME"}


def test_no_cuda_in_python_strings():
    for path in modules():
        if path.name not in ("source.py", "params.py"):
            assert "__global__" not in path.read_text(encoding="utf-8"), path.name
