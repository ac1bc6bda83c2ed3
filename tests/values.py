"""What q, k, v and dout of cases hold: functions (case, rng) that make them in float64, finite in float16 too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np


def _normal(case, rng, factor: float = 1.0) -> dict[str, np.ndarray]:
    return {name: factor * rng.standard_normal(case.shapes[name]) for name in ("q", "k", "v", "dout")}


def _q_zero(case, rng):
    """Every score is equal: the mean of the visible v."""
    made = _normal(case, rng)
    return {**made, "q": np.zeros_like(made["q"])}


def _row_offsets(case, rng):
    """The scores of a row lie around an offset of its own, up to 1e5 * softmax_scale either way (within float16's range
    for float16): softmax must not care. The offset enters through the first component."""
    made = _normal(case, rng)
    size = 250 if case.dtype == "float16" else 316
    made["k"][..., 0] = size
    made["q"][..., 0] = rng.choice([-size, -3, 0, 3, size], made["q"].shape[:-1])
    return made


def _row_levels(case, rng, levels=(-200, 0, 200)):
    """The log-sum-exp of a row lies around one of the levels."""
    made, size = _normal(case, rng), 16
    made["k"][..., 0] = size
    made["q"][..., 0] = rng.choice(levels, made["q"].shape[:-1]) / (size * (case.scale or 1))
    return made


def _all_far_below_zero(case, rng):
    """Every score is the same large negative number."""
    made = _normal(case, rng)
    return {**made, "q": np.full_like(made["q"], 64), "k": np.full_like(made["k"], -64)}


def _sharp(case, rng):
    """Scores of some hundreds: nearly all weight on one key."""
    made = _normal(case, rng)
    return {**made, "q": 40 * made["q"], "k": 10 * made["k"]}


def _rising(case, rng):
    """Scores grow with the key's position, or fall: the running maximum changes in every tile, or never."""
    made = _normal(case, rng)
    ramp = np.linspace(-1, 1, case.seqlen_k)[:, None, None] if case.seqlen_k else 0.0
    signs = rng.choice([-1, 1], (*made["q"].shape[:-1], 1))
    return {**made, "q": made["q"] + 8 * signs, "k": made["k"] + 8 * ramp}


def _some_far(case, rng):
    """Scores of some hundreds, of either sign, of every 29th key; as usual of the others."""
    made = _normal(case, rng)
    made["k"][:, ::29] *= 60
    return made


def _v_constant(case, rng):
    made = _normal(case, rng)
    return {**made, "v": np.full_like(made["v"], 1.5)}


VALUES: dict[str, Callable[..., dict[str, np.ndarray]]] = {
    "normal": _normal,
    "times 3": partial(_normal, factor=3.0),
    "tiny": partial(_normal, factor=1e-3),
    "q zero": _q_zero,
    "row offsets": _row_offsets,
    "row levels": _row_levels,
    "around 24": partial(_row_levels, levels=[24]),
    "around -24": partial(_row_levels, levels=[-24]),
    "all far below zero": _all_far_below_zero,
    "sharp": _sharp,
    "rising": _rising,
    "some far": _some_far,
    "v constant": _v_constant,
}
