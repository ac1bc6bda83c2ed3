"""Forwards of Hopper in tilings that a test wants: several heads in a tile, keys in parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cases import CAUSAL, Case

from pyflash import dispatch, plan


@contextlib.contextmanager
def tiled(**wanted: object) -> Iterator[None]:
    """Within the context the first tiling that has the `wanted` attributes: `row`, `pack`, `splits`."""
    chosen, remembered = plan._best, dispatch._prepared

    def choose(tilings):
        return next(t for t in tilings if all(getattr(t, name) == value for name, value in wanted.items()))

    plan._best, dispatch._prepared = choose, {}
    try:
        yield
    finally:
        plan._best, dispatch._prepared = chosen, remembered


# Cases, each with the heads in its tiles and the parts of its keys.
TILINGS: dict[str, tuple[Case, dict[str, int]]] = {
    "one query of seven heads": (Case(1, 1, 700, 7, 1, 64, 64), {"pack": 7, "splits": 5}),
    "parts alone": (Case(2, 70, 600, 2, 2, 128, 128, values="rising"), {"pack": 1, "splits": 5}),
    "parts of walks from the diagonal, heads that share tiles": (
        Case(1, 70, 600, 4, 2, 64, 64, options=(("alibi_slopes", "of heads"),), values="rising"),
        {"pack": 2, "splits": 3},
    ),
    "documents in parts, heads that share tiles": (
        Case(1, 70, 600, 4, 2, 64, 64, options=(("mask_mod", "documents"),)),
        {"pack": 2, "splits": 3},
    ),
    "documents in parts": (
        Case(1, 150, 600, 2, 2, 64, 64, options=(("mask_mod", "documents"),)),
        {"pack": 1, "splits": 3},
    ),
    "heads alone": (Case(2, 70, 300, 4, 1, 128, 128, options=CAUSAL), {"pack": 4, "splits": 1}),
    "a head a warp": (Case(2, 70, 600, 4, 1, 64, 64, options=CAUSAL), {"pack": 4, "splits": 3}),
    "heads that share warps": (
        Case(1, 40, 800, 16, 1, 128, 64, options=CAUSAL, values="rising"),
        {"pack": 16, "splits": 7},
    ),
    "some of the heads": (
        Case(1, 130, 900, 4, 1, 80, 96, options=CAUSAL, values="row offsets"),
        {"pack": 2, "splits": 4},
    ),
    "as many heads as rows": (Case(1, 3, 260, 64, 1, 64, 64, options=CAUSAL), {"pack": 64, "splits": 1}),
    "more heads than rows": (Case(1, 2, 260, 130, 1, 64, 64, options=CAUSAL), {"pack": 26, "splits": 2}),
    "rows with no visible key": (Case(1, 300, 130, 5, 1, 64, 64, options=CAUSAL), {"pack": 5, "splits": 2}),
    "parts with no visible key": (Case(1, 400, 400, 2, 2, 64, 64, options=CAUSAL), {"pack": 1, "splits": 4}),
    "rows of a bias, heads that share tiles": (
        Case(2, 20, 520, 7, 1, 64, 64, options=(("bias", "of heads, queries and keys, in q's type"),)),
        {"pack": 7, "splits": 3},
    ),
    "bias of keys, heads that share tiles": (
        Case(2, 9, 520, 4, 1, 128, 128, options=(("bias", "of batches and keys, in q's type"),)),
        {"pack": 4, "splits": 1},
    ),
    "scale negative": (Case(2, 3, 520, 6, 2, 256, 256, softmax_scale=-0.1), {"pack": 3, "splits": 5}),
    "all logits far below zero": (
        Case(1, 1, 400, 2, 1, 128, 128, values="all far below zero"),
        {"pack": 2, "splits": 3},
    ),
}
