"""What kernels are told of softcap: scores softcap * tanh(softmax_scale * product / softcap), mostly by series."""

from __future__ import annotations

import math

import numpy as np

from .feature import LOG2_E

# tanh(x) = x * (a + b x^2 + c x^4 + d x^6) up to some x, with a relative error of 2^-22; with fewer terms where softcap
# is so large that their factors would leave float32's range.
SERIES = (
    (0.45, (0.9999997567469683, -0.3332946720771965, 0.13236369136262635, -0.04602819371729615)),
    (0.125, (1.0, -1 / 3, 2 / 15, 0.0)),
    (0.03125, (1.0, -1 / 3, 0.0, 0.0)),
    (0.0005, (1.0, 0.0, 0.0, 0.0)),
)
# A shorter one, with 2^-21, up to TANH_TINY. It rises everywhere, so no x beyond is taken for one.
TANH_TINY, TANH_SHORT_SERIES = 0.25, (0.999999603462653, -0.33321896988991984, 0.12841433927157822)


def _levels(softcap: float) -> tuple[float, float]:
    """Between which levels the short series served, `softcap` being in units of log2. A level is the log2 of the sum of
    2^score over at most 64 elements.

    Above the upper one a score may be larger than the series is good for. Below the lower one those further below zero
    than that may be off by more than 2^-22 of the sum, which is what 2^x itself is off by.
    """
    x = np.linspace(TANH_TINY, 10, 4000)
    by_series = np.exp2(-softcap * np.polyval(TANH_SHORT_SERIES[::-1], x**2) * x)
    error = 64 * abs(by_series - np.exp2(-softcap * np.tanh(x))).max()
    return math.log2(max(error, 1e-300)) + 22, softcap * math.tanh(TANH_TINY)


def values(softcap: float, softmax_scale: float) -> dict[str, float | tuple[float, ...]]:
    """The arguments of kernels, which are described in features.py."""
    factor, out = softmax_scale / softcap, softcap * LOG2_E

    def scaled(series: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(out * factor ** (2 * i + 1) * x for i, x in enumerate(series))

    def fits(series: tuple[float, ...]) -> bool:
        return abs(factor) <= 1 and all(not x or abs(y) >= 2**-126 for x, y in zip(series, scaled(series), strict=True))

    small, series = next((x for x in SERIES if fits(x[1])), (0.0, (0.0,) * 4))
    return {
        "softcap_in": factor,
        "softcap_out": out,
        "softcap_out_inverse": 1 / out,
        "softcap_small": min(small / abs(factor), 2**63) if small else 0.0,  # the square is finite
        "softcap_series": scaled(series),
        "softcap_short_series": scaled(TANH_SHORT_SERIES),
        "softcap_levels": _levels(out) if series is SERIES[0][1] else (math.inf, -math.inf),
    }
