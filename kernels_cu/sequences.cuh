// Sequences of their own lengths: which rows of the arrays are whose, and how CTAs find theirs.
//
// PACKED: sequences lie one behind the other in arrays of one batch, sequence s from row cu_seqlens[s] on. GAPS: of each
// only the first seqused[s] rows exist. So the rows, of queries or of keys, are cut into parts: sequences, what is left
// of them, and at last what no sequence has. What is no sequence's is computed as one without keys, or without queries,
// which makes its results zero.
//
//   rows   | sequence 0 ........ | left | sequence 1 .... | left | ...       | rest |
//   part     0                     1      2                 3                  2 * batch     (0, 1, .. batch: no GAPS)
//
// The tiles of part i, of R rows each, are numbered from begin(i) / R + i on. There is room for them before those of the
// next part: ceil(n / R) <= (begin + n) / R - begin / R + 1. So nothing needs to be summed up beforehand: a CTA bisects
// for its part, and a number that the part has no tile for is left out. Offsets and lengths are clamped to the arrays.
#pragma once
#include "dtypes.cuh"

constexpr bool VARLEN = cfg::PACKED || cfg::GAPS;
constexpr int SEQUENCE_PARTS = cfg::GAPS ? 2 : 1;

// A kernel's arguments as they are, or with VARLEN a copy, in which lengths and places are those of a sequence. Tensor
// maps are to be taken of all().
template <bool> struct Own {
  const Params& given;
  Params p;
  __device__ __forceinline__ explicit Own(const Params& given) : given(given), p(given) {}
  __device__ __forceinline__ const Params& all() const { return given; }
};
template <> struct Own<false> {
  const Params& p;
  __device__ __forceinline__ explicit Own(const Params& given) : p(given) {}
  __device__ __forceinline__ const Params& all() const { return p; }
};

// ---- Where a batch's rows are, or the sequence's --------------------------------------------------------------------

// In an array (batch, seqlen, heads, head_dim) of queries, or of keys, with these strides.
__device__ __forceinline__ i64 q_begin(const Params& p, int batch, const i64 (&stride)[4]) {
  if constexpr (!VARLEN) return batch * stride[0];
  return (cfg::PACKED ? 0 : batch * stride[0]) + p.first_q * stride[1];
}
__device__ __forceinline__ i64 k_begin(const Params& p, int batch, const i64 (&stride)[4]) {
  if constexpr (!VARLEN) return batch * stride[0];
  return (cfg::PACKED ? 0 : batch * stride[0]) + p.first_k * stride[1];
}
// In an array (batch, num_heads_q, seqlen_q), of a head; with strides, or contiguous, of one counted through all batches.
__device__ __forceinline__ i64 rows_begin(const Params& p, int batch, int head, const i64 (&stride)[3]) {
  if constexpr (!VARLEN) return batch * stride[0] + head * stride[1];
  return (cfg::PACKED ? 0 : batch * stride[0]) + head * stride[1] + p.first_q * stride[2];
}
__device__ __forceinline__ i64 flat_head(const Params& p, int batch, int head) {
  return (cfg::PACKED ? 0 : (i64)batch * p.num_heads_q) + head;
}
__device__ __forceinline__ i64 rows_begin(const Params& p, i64 flat_head) {
  if constexpr (!VARLEN) return flat_head * p.seqlen_q;
  return flat_head * p.rows_q + p.first_q;
}
// Where its query tile has a flag in `semaphore`.
__device__ __forceinline__ i64 flag_at(const Params& p, i64 flat_head, int m_block) {
  return (VARLEN ? rows_begin(p, flat_head) : flat_head * p.num_m_blocks) + m_block;
}

// ---- Parts ----------------------------------------------------------------------------------------------------------

enum Side { BY_QUERIES, BY_KEYS };

template <Side SIDE> struct Parts {
  const Params& p;
  __device__ __forceinline__ int rows() const { return SIDE == BY_QUERIES ? p.rows_q : p.rows_k; }  // of a batch
  __device__ __forceinline__ int count() const { return p.batch * SEQUENCE_PARTS + cfg::PACKED; }
  // Numbers of tiles of so many rows, for each head.
  __device__ __forceinline__ u32 tiles(int of_rows) const { return u32(begin(count()) / of_rows) + count(); }

  // Where sequence s begins, among the rows of all batches, and how long it is.
  __device__ __forceinline__ i64 sequence(int s) const {
    if (!cfg::PACKED) return (i64)s * rows();
    if (s == 0) return 0;
    const i64 offset = SIDE == BY_QUERIES ? (i64)p.cu_seqlens_q[s] : (i64)p.cu_seqlens_k[s];
    return min(max(offset, i64(0)), (i64)rows());
  }
  __device__ __forceinline__ int length(int s) const {
    int length = max(sequence(s + 1) - sequence(s), i64(0));
    if (cfg::GAPS) {
      length = min(length, SIDE == BY_QUERIES ? p.max_seqlen_q : p.max_seqlen_k);
      const bool told = SIDE == BY_QUERIES ? p.seqused_q != nullptr : p.seqused_k != nullptr;
      if (told) length = min(max(SIDE == BY_QUERIES ? (i64)p.seqused_q[s] : (i64)p.seqused_k[s], i64(0)), (i64)length);
    }
    return length;
  }
  __device__ __forceinline__ i64 begin(int part) const {
    if (part == count()) return cfg::PACKED ? (i64)rows() : sequence(p.batch);
    const int s = part / SEQUENCE_PARTS;
    return sequence(s) + (part % SEQUENCE_PARTS ? length(s) : 0);
  }
};

// Makes the lengths and places in `own` those of a part. Returns the number of its sequence, or one that exists.
template <Side SIDE, class Own> __device__ __forceinline__ int enter_part(Own& own, const Params& p, int part) {
  const Parts<SIDE> parts = {p};
  const Parts<SIDE == BY_QUERIES ? BY_KEYS : BY_QUERIES> others = {p};
  const int s = min(part / SEQUENCE_PARTS, p.batch - 1);
  const bool exists = part % SEQUENCE_PARTS == 0 && part < p.batch * SEQUENCE_PARTS;
  const i64 begin = parts.begin(part);
  const int first = begin - (cfg::PACKED ? 0 : (i64)s * parts.rows());
  const int rows = max(parts.begin(part + 1) - begin, i64(0));
  const int other_first = exists && cfg::PACKED ? others.sequence(s) : 0, other_rows = exists ? others.length(s) : 0;
  own.p.first_q = SIDE == BY_QUERIES ? first : other_first;
  own.p.first_k = SIDE == BY_QUERIES ? other_first : first;
  own.p.seqlen_q = SIDE == BY_QUERIES ? rows : other_rows;
  own.p.seqlen_k = SIDE == BY_QUERIES ? other_rows : rows;
  own.p.no_sequence = !exists;
  return s;
}

// Tile `block` of the `blocks` of a part, in one of the heads. `batch` is the number of its sequence.
struct SequenceTile { int batch, head, block, blocks, part; };

// Makes `own` that of the part which has tile `number`, and says which of its tiles that is; false if there is none.
// Parts come one after the other, in each the tiles of a head, or those of all the heads that together look at no more than
// HEADS_ROWS rows of the other side. `heads` are those of the tiles, several of which may have keys in common.
template <Side SIDE, int ROWS, int HEADS_ROWS = 0, class Own>
__device__ __forceinline__ bool find_tile(Own& own, const Params& p, u32 number, int heads, SequenceTile& tile) {
  const Parts<SIDE> parts = {p};
  const u32 index = number / heads;
  int part = 0;
  for (int end = parts.count(); end - part > 1;) {
    const int middle = (part + end) / 2;
    if (parts.begin(middle) / ROWS + middle <= index) part = middle; else end = middle;
  }
  const int batch = enter_part<SIDE>(own, p, part), rows = SIDE == BY_QUERIES ? own.p.seqlen_q : own.p.seqlen_k;
  const u32 place = number - u32(parts.begin(part) / ROWS + part) * heads, blocks = (rows + i64(ROWS) - 1) / ROWS;
  if (place >= blocks * heads) return false;
  const int together = SIDE == BY_QUERIES ? HEADS_ROWS / max(own.p.seqlen_k, 1) * (heads / p.num_heads_kv)
                                          : HEADS_ROWS / max(own.p.seqlen_q, 1) / p.qheads_per_kv;
  const u32 width = min(max(together, 1), heads);
  const u32 section = place / (width * blocks), first_head = section * width;
  const u32 size = min(width, heads - first_head), in_section = place - first_head * blocks;
  const u32 block = size == 1 ? in_section : in_section / size, head = first_head + in_section - block * size;
  tile = {batch, int(head), int(block), int(blocks), part};
  return true;
}
