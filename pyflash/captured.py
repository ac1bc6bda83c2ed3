"""What a Python function finds outside of its arguments: what a trace of it depends on, and the arrays among it.

Functions that it finds are looked into in turn, and so are tuples.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

_NO_ARRAYS = (np.generic, type, types.ModuleType)
_DEPTH = 4  # of functions and modules in each other, as far as they are looked into
_TRACERS = "pyflash.trace"  # whose functions are taken as they are
_OF_MODULES = (bool, int, float, types.ModuleType)  # what is looked at in modules


Steps = tuple[tuple[str, object], ...]  # from a function to what it captures: through which attribute, under which key


class Unknown(Exception):
    """A function captures what may change unseen."""


def is_array(value) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, _NO_ARRAYS)


def dtype_of(array) -> str:
    return getattr(array.dtype, "name", str(array.dtype)).removeprefix("torch.")


@lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> set[str]:
    """What code may look up by name, the code inside of it included."""
    inner = (_names(x) for x in code.co_consts if isinstance(x, types.CodeType))
    return set(code.co_names).union(*inner)


def _defaulted(function: types.FunctionType) -> tuple[str, ...]:
    """The arguments that have defaults."""
    code = function.__code__
    return code.co_varnames[code.co_argcount - len(function.__defaults__ or ()) : code.co_argcount]


def _places(function: types.FunctionType) -> dict[str, tuple[str, object]]:
    """Where a function finds what lies outside of its arguments, by name: the steps that lead from it there."""
    code = function.__code__
    found = {name: ("__globals__", name) for name in sorted(_names(code)) if name in function.__globals__}
    found |= {name: ("__closure__", i) for i, name in enumerate(code.co_freevars)}
    found |= {name: ("__defaults__", i) for i, name in enumerate(_defaulted(function))}
    return found | {name: ("__kwdefaults__", name) for name in function.__kwdefaults__ or ()}


def reached(value, steps: Steps):
    """What lies at the end of some steps. torch.compile follows them, and so knows when that changes."""
    for place, key in steps:
        if place == "item":
            value = value[key]
        elif place == "attribute":
            value = getattr(value, key)
        else:
            value = getattr(value, place)[key]
            value = value.cell_contents if place == "__closure__" else value
    return value


def captured(function: types.FunctionType) -> dict[str, object]:
    """What a function finds outside of its arguments, by name."""
    return {name: reached(function, (place,)) for name, place in _places(function).items()}


class Found(NamedTuple):
    """What a function captures, or what that captures in turn."""

    path: str  # of names
    steps: Steps
    value: object


def _inner(found: Found, names: set[str]) -> list[Found]:
    """What is looked into of it; of a module what `names` can ask for."""
    path, steps, value = found
    if isinstance(value, types.FunctionType) and value.__module__ != _TRACERS:
        inner = {f"{path}.{name}".removeprefix("."): place for name, place in _places(value).items()}
    elif isinstance(value, tuple):
        inner = {f"{path}[{i}]": ("item", i) for i in range(len(value))}
    elif isinstance(value, types.ModuleType):
        inner = {f"{path}.{n}": ("attribute", n) for n in names if isinstance(getattr(value, n, None), _OF_MODULES)}
    else:
        inner = {}
    return [Found(at, (*steps, step), reached(value, (step,))) for at, step in inner.items()]


def everything(function: types.FunctionType) -> list[Found]:
    """All that a function captures, as deep as it is looked into."""
    found, names = [], set()
    last = [Found("", (), function)]
    for _ in range(_DEPTH + 1):
        names = names.union(*(_names(x.value.__code__) for x in last if isinstance(x.value, types.FunctionType)))
        last = [x for outer in last for x in _inner(outer, names)]
        found += last
    return found


def standing_in(function: types.FunctionType, table: Callable[[str, object], object]) -> types.FunctionType:
    """The function with table(path, array) in place of its arrays."""

    def replaced(value, path: str, depth: int):
        if is_array(value):
            return table(path, value)
        if depth < _DEPTH and isinstance(value, tuple):
            made = tuple([replaced(x, f"{path}[{i}]", depth + 1) for i, x in enumerate(value)])
            return made if any(x is not y for x, y in zip(made, value, strict=True)) else value
        looked_into = isinstance(value, types.FunctionType) and value.__module__ != _TRACERS
        return inside(value, f"{path}.", depth + 1) if depth < _DEPTH and looked_into else value

    def inside(function, prefix: str, depth: int):
        found = captured(function)
        values = {name: replaced(value, prefix + name, depth) for name, value in found.items()}
        changed = {name: value for name, value in values.items() if value is not found[name]}
        if not changed:
            return function
        code = function.__code__
        closure = tuple(
            types.CellType(changed[name]) if name in changed else cell
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)
        )
        defaults = tuple(
            changed.get(n, x) for n, x in zip(_defaulted(function), function.__defaults__ or (), strict=True)
        )
        made = types.FunctionType(code, {**function.__globals__, **changed}, function.__name__, defaults, closure)
        made.__kwdefaults__ = {n: changed.get(n, x) for n, x in (function.__kwdefaults__ or {}).items()}
        return made

    return inside(function, "", 0)


def function_key(function: types.FunctionType, depth: int = 0) -> tuple:
    """What a trace of the function depends on. Raises Unknown where that may change unseen."""
    names = _names(function.__code__)
    return function.__code__, tuple([(name, _key(value, names, depth)) for name, value in captured(function).items()])


def _key(value, names: set[str], depth: int):
    if is_array(value):
        return "array", dtype_of(value), len(value.shape)
    if value is None or isinstance(value, (bool, int, float, str, np.generic)):
        return type(value), repr(value)
    if isinstance(value, types.ModuleType) and depth < _DEPTH:
        found = ((name, getattr(value, name, None)) for name in names)
        return id(value), tuple(
            sorted((name, repr(_key(x, names, depth + 1))) for name, x in found if isinstance(x, _OF_MODULES))
        )
    if isinstance(value, tuple) and depth < _DEPTH:
        return tuple([_key(x, names, depth + 1) for x in value])
    if isinstance(value, types.FunctionType) and value.__module__ != _TRACERS and depth < _DEPTH:
        return function_key(value, depth + 1)
    if isinstance(value, (types.BuiltinFunctionType, np.ufunc)) or getattr(value, "__module__", "") == _TRACERS:
        return id(value)
    raise Unknown(f"a {type(value).__name__}")
