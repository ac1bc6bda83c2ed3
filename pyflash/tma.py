"""Tensor maps: what Hopper's copy engine is told of a tensor, encoded by the driver (CUDA driver API, 6.29)."""

from __future__ import annotations

import ctypes

from . import driver
from .errors import LaunchError
from .problem import DTYPES, Tensor

BYTES = 128
ANY_ADDRESS = 16  # for a map whose address comes later: a legal one
_ALIGNMENT = 64

# CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion
_DATA_TYPES = {"float16": 6, "bfloat16": 9}
_SWIZZLES = {32: 1, 64: 2, 128: 3}
_L2_PROMOTION_256B = 3


def encode(tensor: Tensor, box: tuple[int, ...], address: int, into: int) -> None:
    """Write the map of a (batch, seqlen, heads, head_dim) tensor to the 64-byte aligned host address `into`.

    Its dimensions are (head_dim, seqlen, head, batch), its box is `box` = (columns, rows) or (columns, rows, heads),
    swizzled by the width of a box's row. What a box covers beyond the tensor reads as zero and is not written.
    """
    batch, seqlen, heads, head_dim = tensor.shape
    itemsize = DTYPES[tensor.dtype].itemsize
    extents = (head_dim, seqlen, heads, batch)
    widest = max(abs(s) * n for s, n in zip(tensor.strides, tensor.shape, strict=True))
    strides = (
        # A dimension of one element is never stepped along, but its stride must still be a legal one.
        (stride if extent > 1 else -(-widest * itemsize // 16) * 16 // itemsize) * itemsize
        for stride, extent in zip((tensor.strides[1], tensor.strides[2], tensor.strides[0]), extents[1:], strict=True)
    )
    status = driver.library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(into),
        _DATA_TYPES[tensor.dtype],
        4,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 4)(*extents),
        (ctypes.c_uint64 * 3)(*strides),
        (ctypes.c_uint32 * 4)(*(*box, 1, 1)[:4]),
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),
        0,
        _SWIZZLES[box[0] * itemsize],
        _L2_PROMOTION_256B,
        0,
    )
    if status:
        raise LaunchError(f"cuTensorMapEncodeTiled returned {status} for {tensor} with box {box}")


def address_word(tensor: Tensor, box: tuple[int, ...]) -> int | None:
    """Which 64-bit word of a map is its tensor's address, and nothing else depends on it; None if no word is.

    The layout is the driver's secret, so it is asked: maps of the same tensor at other addresses must differ in one
    word, which must hold the address.
    """
    keep, at = aligned_buffer(BYTES)
    words = (ctypes.c_uint64 * (BYTES // 8)).from_address(at)
    maps = []
    for address in (ANY_ADDRESS, 0x5555_5555_5550, 0x2AAA_AAAA_AAA0, 0x7FFF_FFFF_FFF0):
        encode(tensor, box, address, at)
        maps.append((address, list(words)))
    del keep
    for word in range(BYTES // 8):
        others = [content[:word] + content[word + 1 :] for _, content in maps]
        if all(content[word] == address for address, content in maps) and all(x == others[0] for x in others):
            return word
    return None


def replace_address(tensor_map: int, address: int) -> None:
    """Point an encoded map at another tensor of the same shape, strides and dtype."""
    status = driver.library().cuTensorMapReplaceAddress(tensor_map, address)
    if status:
        raise LaunchError(f"cuTensorMapReplaceAddress returned {status} for address {address:#x}")


def aligned_buffer(size: int) -> tuple[ctypes.Array, int]:
    """A host buffer and the first address in it that a tensor map may start at."""
    buffer = (ctypes.c_char * (size + _ALIGNMENT))()
    start = ctypes.addressof(buffer)
    return buffer, -(-start // _ALIGNMENT) * _ALIGNMENT
