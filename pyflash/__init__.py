"""PyFlash: exact attention, forward and backward, on any framework's GPU arrays."""

from . import masks, reference
from .api import block_mask, explain, flash_attention, flash_attention_backward
from .blocks import BlockMask
from .errors import CompileError, LaunchError, Unsupported
from .packed import flash_attention_varlen, flash_attention_varlen_backward
from .trace import abs, cos, exp, floor, log, maximum, minimum, sin, sqrt, tanh, where

__version__ = "0.1.0"

__all__ = [
    "BlockMask",
    "CompileError",
    "LaunchError",
    "Unsupported",
    "abs",
    "block_mask",
    "cos",
    "exp",
    "explain",
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_varlen",
    "flash_attention_varlen_backward",
    "floor",
    "log",
    "masks",
    "maximum",
    "minimum",
    "reference",
    "sin",
    "sqrt",
    "tanh",
    "where",
]
