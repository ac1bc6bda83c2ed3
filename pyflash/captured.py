"""What a Python function finds outside of its arguments: what a trace of it depends on, and the arrays among it.

Functions that it finds are looked into in turn, and so are tuples.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import lru_cache

import numpy as np

_NO_ARRAYS = (np.generic, type, types.ModuleType)
_DEPTH = 4  # of functions and modules in each other, as far as they are looked into
_TRACERS = "pyflash.trace"  # whose functions are taken as they are


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


def _defaults(function: types.FunctionType) -> dict[str, object]:
    """Of arguments."""
    defaults, code = function.__defaults__ or (), function.__code__
    return dict(zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True))


def captured(function: types.FunctionType) -> dict[str, object]:
    """What a function finds outside of its arguments, by name."""
    names, code = _names(function.__code__), function.__code__
    found = {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__}
    found |= dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
    return found | _defaults(function) | (function.__kwdefaults__ or {})


def _inner(value, path: str) -> dict[str, object]:
    """What is looked into of a captured value, by where it lies."""
    if isinstance(value, types.FunctionType) and value.__module__ != _TRACERS:
        return {f"{path}.{name}": x for name, x in captured(value).items()}
    return {f"{path}[{i}]": x for i, x in enumerate(value)} if isinstance(value, tuple) else {}


def arrays(function: types.FunctionType) -> dict[str, object]:
    """The arrays that a function captures, by where they lie: under a name, or a path of names."""
    found, values = {}, captured(function)
    for _ in range(_DEPTH + 1):
        found |= {path: value for path, value in values.items() if is_array(value)}
        values = {path: x for outer, value in values.items() for path, x in _inner(value, outer).items()}
    return found


def standing_in(function: types.FunctionType, table: Callable[[str, object], object]) -> types.FunctionType:
    """The function with table(path, array) in place of its arrays."""

    def replaced(value, path: str, depth: int):
        if is_array(value):
            return table(path, value)
        if depth < _DEPTH and isinstance(value, tuple):
            made = tuple([replaced(x, f"{path}[{i}]", depth + 1) for i, x in enumerate(value)])
            return made if any(x is not y for x, y in zip(made, value, strict=True)) else value
        return inside(value, f"{path}.", depth + 1) if depth < _DEPTH and _inner(value, path) else value

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
        defaults = tuple(changed.get(n, x) for n, x in _defaults(function).items())
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
        inner = (bool, int, float, types.ModuleType)
        return id(value), tuple(
            sorted((name, repr(_key(x, names, depth + 1))) for name, x in found if isinstance(x, inner))
        )
    if isinstance(value, tuple) and depth < _DEPTH:
        return tuple([_key(x, names, depth + 1) for x in value])
    if isinstance(value, types.FunctionType) and value.__module__ != _TRACERS and depth < _DEPTH:
        return function_key(value, depth + 1)
    if isinstance(value, (types.BuiltinFunctionType, np.ufunc)) or getattr(value, "__module__", "") == _TRACERS:
        return id(value)
    raise Unknown
