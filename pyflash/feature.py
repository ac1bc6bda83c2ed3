"""What a row of the table of features is, and what it is asked about: a kernel argument, a part of the score matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LOG2_E = math.log2(math.e)  # exponentials are powers of 2


@dataclass(frozen=True)
class Field:
    """A kernel argument."""

    name: str
    kind: str  # a key of params._CTYPES, or "real"
    c_type: str  # how the kernel sees it; {real} is float or double
    note: str
    count: int = 1


class Sizes(NamedTuple):
    """The score matrix of a call."""

    batch: int
    heads_q: int
    seqlen_q: int
    seqlen_k: int


class Place(NamedTuple):
    """A part of the score matrix, whose elements are (batch, head, query, key)."""

    batches: slice
    heads: slice
    queries: slice
    keys: slice
    sizes: Sizes

    @classmethod
    def whole(cls, sizes: Sizes, batch: int | None = None) -> Place:
        """All of it, or what is batch number `batch` of more."""
        place = cls(*(slice(0, size) for size in sizes), sizes)
        return place if batch is None else place._replace(batches=slice(batch, batch + 1))

    def indices(self) -> tuple[np.ndarray, ...]:
        """Of each axis, shaped to broadcast against the part."""
        return tuple(
            np.arange(part.start, part.stop).reshape(-1, *[1] * (3 - axis)) for axis, part in enumerate(self[:4])
        )

    def of(self, array: np.ndarray) -> np.ndarray:
        """The part of an array that broadcasts to the matrix."""
        array = array.reshape(*[1] * (4 - array.ndim), *array.shape)
        return array[tuple(part if n > 1 else slice(None) for part, n in zip(self[:4], array.shape, strict=True))]


class Feature:
    """A row, off where its argument has the default. What a row does not say, it does not do."""

    name: str  # the keyword argument
    default: object = None
    takes: str  # what the argument takes, for messages and the documentation
    is_array = False
    changes_scores = False  # whether there is a score()
    hides_anywhere = False  # whether it hides keys apart from their position
    by_element = False  # whether each element of the score matrix takes much code of its own
    has_gradient = False
    flags: tuple[str, ...]  # cfg:: constants
    fields: tuple[Field, ...] = ()
    kernels: tuple[str, ...] = ()

    def check(self, value: object) -> object:
        """A scalar as the problem keeps it. Raises what the user should read."""
        return value

    def idle(self, value: object) -> bool:
        """Whether a scalar changes nothing, so that no kernel need hear of it."""
        return False

    def shape_error(self, shape: tuple[int, ...], sizes: Sizes) -> str | None:
        """What an array's shape must be, if it is not."""
        return None

    def dtypes(self, dtype: str, real: str) -> tuple[str, ...]:
        """Those that an array may have where q has `dtype`, which is computed in `real`."""
        return (real,)

    def misfit(self, value: object, sizes: Sizes) -> tuple[str, str] | None:
        """What a scalar is and what it must be, if it does not go with the sizes."""
        return None

    def flags_of(self, value: object) -> tuple[str, ...]:
        """Those of `flags` that are true."""
        return self.flags

    def values(self, value: object, softmax_scale: float, sizes: Sizes) -> dict[str, object]:
        """The kernel arguments besides addresses. `value` is the scalar, or what problem.Tensor says of the array."""
        return {}

    def differentiated(self, value: object) -> tuple[str, ...]:
        """The arrays of whose gradients that of the feature is made."""
        return (self.name,)

    def gradient(self, value: object, found: Mapping[str, object]) -> object:
        """It as the public functions return it, from the gradients of arrays by name."""
        return found[f"d{self.name}"]

    # ---- In NumPy. `value` is the scalar or the array.

    def visible(self, value, at: Place) -> np.ndarray | None:
        """Which elements are visible (None: all)."""
        return None

    def score(self, value, s: np.ndarray, at: Place) -> np.ndarray:
        return s

    def slope(self, value, s: np.ndarray, at: Place) -> np.ndarray | float:
        """The derivative of score() at s."""
        return 1.0

    def weight(self, value, at: Place) -> np.ndarray | None:
        """What the probabilities are multiplied with on their way to the values (None: 1)."""
        return None

    def sink(self, value, at: Place) -> np.ndarray | None:
        """A score that takes part in the softmax of each row and has no key."""
        return None


def fail(name: str, value: object, takes: str, error: type[Exception]):
    raise error(f"{name}: got {value!r}, takes {takes}")


def read_number(name: str, value: object, takes: str) -> float:
    if type(value) is float:
        return value
    try:
        return float(fail(name, value, takes, TypeError) if isinstance(value, (bool, str)) else value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        fail(name, value, takes, TypeError)
