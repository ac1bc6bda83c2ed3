"""Gradients of features to which many scores add: those of a bias, and of the arrays that score_mod captures."""

from __future__ import annotations

import math

from . import features
from .errors import Unsupported
from .problem import Problem, Tensor

NAMES = ("dbias", *(f"d{slot.name}" for slot in features.CAPTURED))


def wanted(problem: Problem) -> dict[str, Tensor]:
    """Those of a problem."""
    tensors = dict(problem.tensors)
    return {name: tensors[name] for name in NAMES if name in tensors}


def scatters(problem: Problem) -> int:
    """How many sums a score takes part in for those of what score_mod captures."""
    return len(problem.option("score_mod").scatters) if any(name != "dbias" for name in wanted(problem)) else 0


def check_deterministic(problem: Problem) -> None:
    """Raise where such a sum comes in any order."""
    if scatters(problem):
        raise Unsupported(
            f"deterministic: got True with return_dscore_mod for {problem}, takes False: its sums come in any order"
        )
    bias = wanted(problem).get("dbias")
    if bias and math.prod(bias.shape) < math.prod(problem.sizes):
        raise Unsupported(
            f"deterministic: got True with return_dbias of a bias {bias.shape} that broadcasts to "
            f"{tuple(problem.sizes)}, takes False: its sum comes in any order"
        )


def obstacle_to_weights(problem: Problem) -> str | None:
    """Why some of them does not follow from the products of p and the slope of scores, which is all that bwd_sm90 keeps
    of both where there is a score_mod."""
    score_mod = problem.option("score_mod")
    if score_mod is None or not wanted(problem):
        return None
    asked = "return_dscore_mod" if scatters(problem) else "return_dbias"
    if "softcap" in problem.on:
        return f"does not take softcap and score_mod where {asked} is True"
    if scatters(problem) and not score_mod.adds:
        return f"takes {asked} where score_mod adds to the score what does not depend on it, alone"
    return None
