"""Measure attention on this machine: PyFlash beside ordinary attention and every other implementation that is here."""

from .cases import Case, grid
from .contestants import line_up
from .machines import Machine, machine
from .run import Figures, Row, measure, steps

__all__ = ["Case", "Figures", "Machine", "Row", "grid", "line_up", "machine", "measure", "steps"]
