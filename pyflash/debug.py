"""PYFLASH_DEBUG: 1 plans; 2 and compile times, registers, spills; 3 and source, PTX and cubin dumps;
4 and a synchronise after each launch, so that a fault is reported where it happened."""

import os
import sys
from contextlib import contextmanager

LEVEL = int(os.environ.get("PYFLASH_DEBUG") or 0)


def log(level: int, text: str) -> None:
    if level <= LEVEL:
        print(f"pyflash: {text}", file=sys.stderr, flush=True)


# The kernel families that the planner may choose from; None is all of them.
FAMILIES: tuple[str, ...] | None = None


@contextmanager
def families(*names: str):
    """Within the context, plan with these kernel families only. For tests and benchmarks."""
    global FAMILIES
    before, FAMILIES = FAMILIES, names
    try:
        yield
    finally:
        FAMILIES = before
