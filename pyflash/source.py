"""The program text of a launch: a generated prelude in front of a kernel file, and the headers that it includes.

Pure text. The GPU's compiler and the tests' emulator are given the same text.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from . import params
from .plan import Launch

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@cache
def kernels_folder() -> Path:
    """Where the CUDA sources lie: inside the installed package, or beside it in a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "kernels_cu", here.parent / "kernels_cu"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"PyFlash's CUDA sources are missing: no kernels_cu in {here} or {here.parent}")


@cache
def read(name: str) -> str:
    return (kernels_folder() / name).read_text(encoding="utf-8")


@cache
def includes(name: str) -> tuple[str, ...]:
    """Every file that `name` includes, directly or not, itself included, in order of first use."""
    found: dict[str, None] = {name: None}
    for child in _INCLUDE.findall(read(name)):
        found.update(dict.fromkeys(includes(child)))
    return tuple(found)


def _constant(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"inline constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"inline constexpr int {name} = {value};"
    return f"using {name} = {value};"


def _functions(launch: Launch) -> str:
    if not launch.functions:
        return ""
    texts = (graph.cuda(name, arguments) for name, arguments, graph in launch.functions)
    return "\n".join(['#include "mod.cuh"', "namespace mod {", *texts, "}", ""])


def program(launch: Launch) -> str:
    """The text to compile for `launch`."""
    tables = params.TABLES[launch.kernel]
    headers = ["dtypes.cuh"] + ["ptx_sm90.cuh"] * any(field.kind == "tensor_map" for field in tables)
    return "\n".join(
        [
            *(f'#include "{header}"' for header in headers),
            "namespace cfg {",
            *(_constant(name, value) for name, value in launch.config),
            "}",
            params.c_struct(launch.kernel, launch.real) + _functions(launch) + f'#include "{launch.kernel}.cu"',
            "",
        ]
    )


def headers(text: str) -> dict[str, str]:
    """Name and text of every file that a program includes."""
    names: dict[str, None] = {}
    for name in _INCLUDE.findall(text):
        names.update(dict.fromkeys(includes(name)))
    return {name: read(name) for name in names}
