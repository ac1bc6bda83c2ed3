"""PyFlash: exact attention, forward and backward, on any framework's GPU arrays."""

from . import reference
from .api import explain, flash_attention, flash_attention_backward
from .errors import CompileError, LaunchError, Unsupported

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "LaunchError",
    "Unsupported",
    "explain",
    "flash_attention",
    "flash_attention_backward",
    "reference",
]
