// What kernels share that treat every row, the head_dim elements of one query of one head, by itself.
#pragma once
#include "dtypes.cuh"

// Neighbouring elements, moved by one 16-byte access. 16-bit ones stay packed in pairs.
template <class Element, int BYTES = sizeof(Element)> struct alignas(16) Chunk {
  static constexpr int SIZE = 16 / BYTES;
  Element data[SIZE];
  __device__ __forceinline__ void set(int i, Element x) { data[i] = x; }
  __device__ __forceinline__ Element get(int i) const { return data[i]; }
};
template <class Element> struct alignas(16) Chunk<Element, 2> {
  static constexpr int SIZE = 8;
  u32 data[SIZE / 2];
  __device__ __forceinline__ void set(int i, Element x) { data[i / 2] |= u32(x.bits) << (i % 2 * 16); }  // once, from 0
  __device__ __forceinline__ Element get(int i) const { return {(unsigned short)(data[i / 2] >> (i % 2 * 16))}; }
};

// Lanes that share a row of `cols` elements, a chunk each at a time: a power of two, at most a warp.
template <class Element> constexpr int lanes_per_row(int cols) {
  int lanes = 1;
  while (lanes < 32 && lanes * Chunk<Element>::SIZE < cols) lanes *= 2;
  return lanes;
}

__device__ __forceinline__ i64 num_rows(const Params& p) { return (i64)p.batch * p.num_heads_q * p.seqlen_q; }

// The rows in the order in which a tensor with these strides holds them, so that neighbours in the walk are neighbours
// in memory: (batch, query, head) or (batch, head, query). Counted from row `first`.
struct RowWalk {
  bool heads_inside;
  u32 outer_extent, inner_extent, batch, outer, inner;
  struct Row { int batch, outer, inner; };

  __device__ __forceinline__ RowWalk(const Params& p, const long long (&stride)[4], i64 first)
    : heads_inside(stride[2] < stride[1]), outer_extent(heads_inside ? p.seqlen_q : p.num_heads_q),
      inner_extent(heads_inside ? p.num_heads_q : p.seqlen_q) {
    const u64 line = (u64)first / inner_extent;
    inner = (u64)first % inner_extent;
    outer = line % outer_extent;
    batch = line / outer_extent;
  }

  __device__ __forceinline__ Row row(u32 n) const {
    const u32 i = inner + n, line = outer + i / inner_extent;
    return {int(batch + line / outer_extent), int(line % outer_extent), int(i % inner_extent)};
  }
  // Where a tensor holds a row, from its strides.
  __device__ __forceinline__ i64 offset(const Row& row, i64 of_batch, i64 of_query, i64 of_head) const {
    const i64 of_outer = heads_inside ? of_query : of_head, of_inner = heads_inside ? of_head : of_query;
    return row.batch * of_batch + row.outer * of_outer + row.inner * of_inner;
  }
  __device__ __forceinline__ i64 offset(const Row& row, const long long (&stride)[4]) const {
    return offset(row, stride[0], stride[1], stride[2]);
  }
  // Where a contiguous array (batch, num_heads_q, seqlen_q) does.
  __device__ __forceinline__ i64 index(const Row& row, const Params& p) const {
    return offset(row, (i64)p.num_heads_q * p.seqlen_q, 1, p.seqlen_q);
  }
};
