"""What torch.compile makes of functions of scores and masks: text, and the tensors that they capture.

`pyflash.torch` imports this where torch.compile looks on, and only there, because it brings in all of torch's compiler.
A function is traced by ours, not by that, once for each graph; what else its trace depends on becomes a condition of
the graph, by being read and compared in the code that torch.compile follows.
"""

from __future__ import annotations

import types

import numpy as np
import torch

from . import captured, graphs, trace
from .features import BLOCK_LISTS, BY_NAME, CAPTURED, check_alone

_CONSTANTS = (bool, int, float, str, type(None))
# Where it goes on without a graph, torch.compile is not to follow how ours traces.
trace.found = torch.compiler.disable(trace.found)


def flat(options: dict[str, object]) -> tuple[dict[str, object], tuple[str, ...]]:
    """The options of a call with text in place of functions, and what these and a block mask hold as options of their
    own; and those by which score_mod is differentiated. torch.compile follows this."""
    options = dict(options)
    score_mod, mask_mod, block_mask = (options.pop(name, None) for name in ("score_mod", "mask_mod", "block_mask"))
    arrays: list[torch.Tensor] = []
    learned: tuple[str, ...] = ()
    if block_mask is not None:
        check_alone(mask_mod)
        blocks, function = BY_NAME["block_mask"].check(block_mask), block_mask.mask_mod
        options |= {"block_mask": blocks[:6], "mask_mod": function.text}
        options |= dict(zip([slot.name for slot in BLOCK_LISTS], blocks.arrays, strict=True))
        arrays += function.arrays
        mask_mod = None
    for name, function in (("mask_mod", mask_mod), ("score_mod", score_mod)):
        if function is not None:
            # To torch.compile, no function is there to be looked at where it cannot say what tensors in it are.
            if isinstance(function, types.FunctionType) and not hasattr(function, "__call__"):  # noqa: B004
                got = "a function that torch.compile sees made, and that captures tensors"
                raise TypeError(f"{name}: got {got}, takes one that is made before, as in __init__")
            found, inside = _read(name, function, len(arrays)), _is_made_inside(name, function)
            for wrong in (found, inside):
                if isinstance(wrong, str):  # raised here, and not there, torch.compile can go on without a graph
                    raise TypeError(wrong)
            options[name], ways, more, constants, others = found
            learned += more
            if not inside:
                if any([captured.reached(function, steps) != value for steps, value in constants]):
                    raise AssertionError
                if any([captured.reached(function, steps) is None for steps in others]):
                    raise AssertionError
            arrays += [captured.reached(function, steps) for steps in ways]
    return options | dict(zip([slot.name for slot in CAPTURED], arrays, strict=False)), learned


_last: list[types.FunctionType | None] = [None]  # that was read


@torch.compiler.assume_constant_result
def _read(name: str, function, first: int) -> tuple | str:
    """The text of a function, the ways to the arrays that it reads, which have places from `first` on, and those of
    them that have gradients; the constants, each with the way to it, and the ways to what else it was made of. Or what
    is wrong with it."""
    try:
        return _traced(name, function, first)
    except Exception as error:  # whatever the function raises, too
        return str(error) or repr(error)


@torch.compiler.assume_constant_result
def _is_made_inside(name: str, function) -> bool | str:
    """Whether what is compiled makes the function. torch.compile hands over another one each time then, and knows when
    what that is made of changes, but for globals: what is wrong is said if there are some."""
    if function is _last[0]:
        return False
    for path, steps, value in captured.everything(function):
        if steps[-1][0] == "__globals__" and (captured.is_array(value) or isinstance(value, _CONSTANTS)):
            takes = "one that torch.compile does not see made, as in __init__"
            return f"{name}: got a function that captures the global {path}, takes {takes}"
    return True


def _traced(name: str, function, first: int) -> tuple:
    _last[0] = function
    mod, ways = trace.found(name, function)
    everything = captured.everything(function)
    try:
        captured.function_key(function)
    except captured.Unknown as error:
        takes = "under torch.compile one that captures numbers, tensors, tuples, modules and functions"
        raise TypeError(f"{name}: got a function that captures {error}, takes {takes}") from None
    for _, _, value in everything:
        if isinstance(value, np.generic):
            raise TypeError(f"{name}: got a function that captures {value!r}, takes a Python number: {value.item()!r}")
    if first + len(ways) > graphs.MAX_ARRAYS:
        got = f"{first + len(ways)} captured arrays"
        raise ValueError(f"score_mod and mask_mod: got {got}, take {graphs.MAX_ARRAYS} together under torch.compile")
    for steps in ways:
        if not isinstance(array := captured.reached(function, steps), torch.Tensor):
            raise TypeError(
                f"{name}: got a function that captures a {type(array).__name__}, takes one of torch tensors"
            )
    mod = graphs.moved(mod, tuple(range(first, first + len(ways))))
    learned = BY_NAME[name].differentiated(mod) if name == "score_mod" else ()
    constants = tuple((steps, value) for _, steps, value in everything if isinstance(value, _CONSTANTS))
    looked_into = (*_CONSTANTS, tuple)
    others = tuple(s for _, s, x in everything if not isinstance(x, looked_into) and not captured.is_array(x))
    return mod.text, ways, learned, constants, others
