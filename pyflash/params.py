"""The kernels' argument tables: each is written once, here, and read as a C struct and as packed bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache

from . import features
from .features import Field

# C type -> (struct format, bytes, alignment). "real" is float, or double for float64 problems.
_CTYPES = {
    "pointer": ("Q", 8, 8),
    "i64": ("q", 8, 8),
    "u64": ("Q", 8, 8),
    "i32": ("i", 4, 4),
    "float": ("f", 4, 4),
    "double": ("d", 8, 8),
    "tensor_map": ("128s", 128, 64),
}


def _tensor(
    name: str, heads: str, seqlen: str, dim: str, *, const: bool, element: str = "cfg::Element"
) -> tuple[Field, ...]:
    return (
        Field(name, "pointer", f"{'const ' * const}{element}*", f"(batch, {seqlen}, {heads}, {dim})"),
        Field(f"{name}_stride", "i64", "long long", "elements: batch, seqlen, head, head_dim", 4),
    )


_Q = _tensor("q", "num_heads_q", "seqlen_q", "head_dim", const=True)
_K = _tensor("k", "num_heads_kv", "seqlen_k", "head_dim", const=True)
_V = _tensor("v", "num_heads_kv", "seqlen_k", "head_dim_v", const=True)
_O = ("num_heads_q", "seqlen_q", "head_dim_v")
_DOUT = _tensor("dout", *_O, const=True)
_DQ = _tensor("dq", "num_heads_q", "seqlen_q", "head_dim", const=False)
_DK = _tensor("dk", "num_heads_kv", "seqlen_k", "head_dim", const=False)
_DV = _tensor("dv", "num_heads_kv", "seqlen_k", "head_dim_v", const=False)
_ROWS = "(batch, num_heads_q, seqlen_q)"
_LSE_IN = (
    Field("lse", "pointer", "const {real}*", f"{_ROWS}, natural log"),
    Field("lse_stride", "i64", "long long", "elements: batch, head, seqlen", 3),
)
_DELTA_IN = (Field("delta", "pointer", "const {real}*", f"{_ROWS}, contiguous"),)
_SCALE = (
    Field("softmax_scale", "real", "{real}", "s = softmax_scale * q.k"),
    Field("scale_log2", "real", "{real}", "softmax_scale * log2(e)"),
)
_SIZES = tuple(
    Field(name, "i32", "int", note)
    for name, note in (
        ("batch", ""),
        ("seqlen_q", ""),
        ("seqlen_k", ""),
        ("num_heads_q", ""),
        ("num_heads_kv", ""),
        ("qheads_per_kv", "num_heads_q / num_heads_kv"),
        ("head_dim", ""),
        ("head_dim_v", ""),
        ("num_m_blocks", "tiles along seqlen_q"),
        ("num_n_blocks", "tiles along seqlen_k"),
    )
)
_LSE_OUT = Field("lse", "pointer", "{real}*", f"{_ROWS}, contiguous, natural log; null: not wanted")
_FORWARD = (*_Q, *_K, *_V, *_tensor("o", *_O, const=False), _LSE_OUT, *_SCALE, *_SIZES)
# Where keys are split, o and lse have a batch for every part and batch.
_SPLIT_FORWARD = (
    *_Q,
    *_K,
    *_V,
    *_tensor("o", *_O, const=False, element="cfg::Output"),
    _LSE_OUT,
    *_SCALE,
    *_SIZES,
    Field("num_splits", "i32", "int", "parts of the keys; SPLIT"),
)
_TILE_COUNTER = Field("tile_counter", "pointer", "int*", "(2,) tiles drawn and CTAs done, zero at launch, left zero")
_BACKWARD = (
    *_Q,
    *_K,
    *_V,
    *_DOUT,
    *_LSE_IN,
    *_DELTA_IN,
    *_DQ,
    *_DK,
    *_DV,
    Field("dq_accum", "pointer", "float*", "(batch, num_heads_q, seqlen_q, head_dim), contiguous, zeroed by bwd_delta"),
    Field("semaphore", "pointer", "int*", "(batch, num_heads_q, num_m_blocks), zero: whose turn it is to add dq"),
    *_SCALE,
    *_SIZES,
)
_CONVERT = (
    Field("dq_accum", "pointer", "const float*", "(batch, num_heads_q, seqlen_q, head_dim), contiguous"),
    *_DQ,
    *_SCALE,
    *_SIZES,
)


# Where and how long sequences are (sequences.cuh), behind everything else.
_SEQUENCES = (
    Field("cu_seqlens_q", "pointer", "const cfg::CuSeqlensQ*", "(batch + 1), where its queries begin; PACKED"),
    Field("cu_seqlens_k", "pointer", "const cfg::CuSeqlensK*", "(batch + 1), and its keys"),
    Field("seqused_q", "pointer", "const cfg::SeqUsedQ*", "(batch), how many of its queries exist; null: all; GAPS"),
    Field("seqused_k", "pointer", "const cfg::SeqUsedK*", "(batch), and of its keys"),
    *(
        Field(name, "i32", "int", note)
        for name, note in (
            ("rows_q", "queries of a batch of the arrays"),
            ("rows_k", "keys"),
            ("max_seqlen_q", "the most queries that a sequence may have; GAPS"),
            ("max_seqlen_k", "and keys"),
            ("first_q", "the kernels' own: where the queries of their sequence begin"),
            ("first_k", "and its keys"),
            ("no_sequence", "that these are rows that are no sequence's"),
        )
    ),
)

_KINDS = "(batch, num_heads_q, num_m_blocks, num_n_blocks)"  # of blocks


def _map(name: str, box: str) -> Field:
    return Field(f"tma_{name}", "tensor_map", "TensorMap", f"{name} (head_dim, seqlen, head, batch), box {box}")


_BIAS_MAP = Field("tma_bias", "tensor_map", "TensorMap", "bias (seqlen_k, seqlen_q, head, batch); WIDE_BIAS")

TABLES: dict[str, tuple[Field, ...]] = {
    "fwd_simt": _FORWARD + features.FIELDS + _SEQUENCES,
    "fwd_sm80": _FORWARD + features.FIELDS + _SEQUENCES,
    "fwd_sm90": (
        _map("q", "64 x rows of a head x PACK"),
        _map("k", "64 x TILE_N"),
        _map("v", "64 x TILE_N"),
        _map("o", "64 x rows of a warp; STORE_TMA"),
        *_SPLIT_FORWARD,
        _TILE_COUNTER,
        Field("packs_per_section", "i32", "int", "packs of heads whose k and v share L2: the tile order's inner loop"),
        Field("num_tiles", "i32", "int", "output tiles in all, of every split"),
        *features.FIELDS,
        *_SEQUENCES,
        _BIAS_MAP,
    ),
    "combine": (
        *_tensor("o", *_O, const=False),
        _LSE_OUT,
        Field("o_partial", "pointer", "const float*", "(num_splits, batch, num_heads_q, seqlen_q, head_dim_v)"),
        Field("lse_partial", "pointer", "const float*", "(num_splits, batch, num_heads_q, seqlen_q), natural log"),
        *_SIZES,
        Field("num_splits", "i32", "int", "parts of the keys"),
    ),
    "bwd_simt": _BACKWARD + features.FIELDS + _SEQUENCES,
    "bwd_sm80": _BACKWARD + features.FIELDS + _SEQUENCES,
    "bwd_sm90": (
        _map("q", "64 x TILE_M"),
        _map("k", "64 x TILE_N"),
        _map("v", "64 x TILE_N"),
        _map("dout", "64 x TILE_M"),
        *_BACKWARD,
        _TILE_COUNTER,
        Field("heads_per_section", "i32", "int", "heads of k whose queries share L2: the tile order's inner loop"),
        *features.FIELDS,
        *_SEQUENCES,
        _BIAS_MAP,
    ),
    "bwd_delta": (
        *_tensor("o", *_O, const=True),
        *_DOUT,
        Field("dlse", "pointer", "const {real}*", f"{_ROWS}; null: zero"),
        Field("dlse_stride", "i64", "long long", "elements: batch, head, seqlen", 3),
        Field("delta", "pointer", "{real}*", f"{_ROWS}, contiguous: rowsum(do * o) - dlse"),
        Field("dq_accum", "pointer", "float*", "(batch, num_heads_q, seqlen_q, head_dim), contiguous; null: none"),
        Field("semaphore", "pointer", "int*", "(batch, num_heads_q, num_m_blocks) to zero; null: none"),
        *_SIZES,
    ),
    "bwd_sinks": (
        *_LSE_IN,
        *_DELTA_IN,
        *features.BY_NAME["sinks"].fields,
        Field("dsinks", "pointer", "{real}*", "(num_heads_q), contiguous"),
        *_SIZES,
    ),
    "bwd_sums": (
        Field("sum", "pointer", "{real}*", "contiguous"),
        Field("out", "pointer", "cfg::Output*", "contiguous"),
        Field("count", "i64", "long long", "elements"),
    ),
    "block_kinds": (
        Field("kinds", "pointer", "unsigned char*", f"{_KINDS}, contiguous: 0 empty, 1 partial, 2 full"),
        *_SIZES,
        *(field for slot in features.CAPTURED for field in slot.fields),
    ),
    "block_lists": (
        Field("kinds", "pointer", "const unsigned char*", f"{_KINDS}, contiguous"),
        Field("key_blocks", "pointer", "int*", "(batch, num_heads_q, num_m_blocks, 1 + num_n_blocks), contiguous"),
        Field("query_blocks", "pointer", "int*", "(batch, num_heads_q, num_n_blocks, 1 + num_m_blocks), contiguous"),
        *_SIZES,
    ),
    "bwd_convert": _CONVERT,
    "bwd_convert_sm90": _CONVERT + _SEQUENCES,
}


@cache
def computes_scores(kernel: str) -> bool:
    """Whether a kernel has the arguments of the features."""
    return features.FIELDS[0] in TABLES[kernel]


@cache
def by_sequence(kernel: str) -> bool:
    """Whether a kernel may be told where sequences are; others treat every row of the arrays alike."""
    return _SEQUENCES[0] in TABLES[kernel]


@cache
def strided_tensors(kernel: str) -> tuple[str, ...]:
    """The (batch, seqlen, heads, head_dim) arrays of a kernel."""
    own = (f for f in TABLES[kernel] if f not in features.FIELDS)
    return tuple(f.name.removesuffix("_stride") for f in own if f.name.endswith("_stride") and f.count == 4)


@dataclass(frozen=True)
class Layout:
    """A table laid out by C's rules: where each field lies, and how to pack it."""

    fields: tuple[Field, ...]
    formats: dict[str, str]
    offsets: dict[str, int]
    size: int

    def pack(self, values: dict[str, object]) -> bytearray:
        """The struct's bytes. Fields not in `values` are zero: pointers and tensor maps are written at launch."""
        unknown = values.keys() - self.offsets.keys()
        if unknown:
            raise KeyError(f"no such kernel parameter: {sorted(unknown)}")
        data = bytearray(self.size)
        for name, value in values.items():
            items = value if isinstance(value, (tuple, list)) else (value,)
            struct.pack_into(self.formats[name], data, self.offsets[name], *items)
        return data


def _kind(field: Field, real: str) -> str:
    return real if field.kind == "real" else field.kind


@cache
def layout(kernel: str, real: str) -> Layout:
    """The memory layout of a kernel's Params. `real` is "float" or "double"."""
    offsets, formats, end, widest = {}, {}, 0, 1
    for field in TABLES[kernel]:
        code, size, alignment = _CTYPES[_kind(field, real)]
        start = -(-end // alignment) * alignment
        offsets[field.name], formats[field.name] = start, f"<{field.count}{code}" if field.count > 1 else f"<{code}"
        end, widest = start + size * field.count, max(widest, alignment)
    return Layout(TABLES[kernel], formats, offsets, -(-end // widest) * widest)


def c_struct(kernel: str, real: str) -> str:
    """`struct Params` as the kernel includes it, with the size that the host packs checked by the compiler."""
    lines = ["struct Params {"]
    for field in TABLES[kernel]:
        extent = f"[{field.count}]" if field.count > 1 else ""
        note = f"  // {field.note}" if field.note else ""
        lines.append(f"  {field.c_type.format(real=real)} {field.name}{extent};{note}")
    lines += ["};", f'static_assert(sizeof(Params) == {layout(kernel, real).size}, "params.py and C disagree");']
    return "\n".join(lines) + "\n"
