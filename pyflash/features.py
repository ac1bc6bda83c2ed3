"""The table of mask and score features: each is stated once, here, and once for the kernels, in `mask.cuh`.

A row gives a keyword argument of the public functions, its default, its validation, the flag that compiles it into
the kernels, and its term in the oracle. Everything else loops over the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    name: str  # the keyword argument
    default: object  # the value that turns it off
    check: Callable[[object], object]  # the value as the problem keeps it; raises what the user should read
    flag: str  # cfg:: constant, true where the feature is on
    visible: Callable[..., object]  # oracle: (value, i, j, seqlen_q, seqlen_k) -> which query i sees which key j


def _flag(value: object) -> bool:
    if isinstance(value, bool) or type(value).__name__ == "bool_" or type(value).__name__ == "bool":
        return bool(value)
    raise TypeError(f"causal: got {value!r}, takes True or False")


FEATURES: tuple[Feature, ...] = (
    Feature(
        name="causal",
        default=False,
        check=_flag,
        flag="CAUSAL",
        visible=lambda value, i, j, seqlen_q, seqlen_k: j <= i + seqlen_k - seqlen_q,
    ),
)


def check(options: dict[str, object]) -> tuple[tuple[str, object], ...]:
    """The features that are on, with their checked values, in the order of the table."""
    checked = ((f.name, f.check(options[f.name])) for f in FEATURES if f.name in options)
    defaults = {f.name: f.default for f in FEATURES}
    return tuple((name, value) for name, value in checked if value != defaults[name])
