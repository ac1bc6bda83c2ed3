// What fwd_sm90 does where a hidden key has a v that is inf or NaN, which products of whole tiles do not leave out.
#pragma once
#include "fwd_sm90_load.cuh"
#include "softmax.cuh"

// Whether o of a warp is all finite, by one of each lane's rows: a v that is not spoils its column in all of them.
__device__ __forceinline__ bool is_finite(const float (&o_rmem)[TILE_DV / 2]) {
  float zero[2] = {};
#pragma unroll
  for (int i = 0; i < TILE_DV / 2; i++) {
    if (i / 2 % 2 == 0) zero[i % 2] = fmaf(o_rmem[i], 0.f, zero[i % 2]);
  }
  return !__any_sync(~0u, zero[0] + zero[1] != 0);
}

// o of a warp: of its lanes' two rows, over the keys of the walk's positions from `begin` on that they see, against
// references. Slow: key by key, from global memory.
__device__ __forceinline__ void sum_visible_values(const Params& p, float (&o_rmem)[TILE_DV / 2], const int (&queries)[2],
                                                   const Head (&heads)[2], const KeyWalk& range,
                                                   const float (&reference)[2], float scale, int begin, int lane) {
  const int batch = heads[0].batch, head_kv = heads[0].head / p.qheads_per_kv, end = range.keys(p);
  const Element* q_rows[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    q_rows[r] = p.q + q_begin(p, batch, p.q_stride) + min(queries[r], p.seqlen_q - 1) * p.q_stride[1] +
                heads[r].head * p.q_stride[2];
  }
  int key = begin < range.end ? range.key(begin * TILE_N) : 0;
  const Element* k_row = p.k + k_begin(p, batch, p.k_stride) + key * p.k_stride[1] + head_kv * p.k_stride[2];
  const Element* v_row = p.v + k_begin(p, batch, p.v_stride) + key * p.v_stride[1] + head_kv * p.v_stride[2] +
                         lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < TILE_DV / 2; i++) o_rmem[i] = 0;
#pragma unroll 1
  for (int place = begin * TILE_N; place < end; place++) {
    float x[2] = {};  // the key's score, then its probability, in each of the lane's rows
#pragma unroll 1
    for (int d = lane % 4; d < p.head_dim; d += 4) {
#pragma unroll
      for (int r = 0; r < 2; r++) x[r] = fmaf(to_real(q_rows[r][d]), to_real(k_row[d]), x[r]);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Scorer scorer(p, heads[r], queries[r], key);
      x[r] = scorer.score(quad_sum(x[r]), 0, 0);
      x[r] = ex2(fmaf(x[r], scale, -exponent_origin(reference[r])));
      x[r] = kept(scorer.marked(x[r], 0, 0));
      x[r] = to_real(Dtype<Element>::from_real(x[r]));
    }
    const bool seen[2] = {visible(p, queries[0], key, heads[0]),
                          visible(p, queries[1], key, heads[1])};
#pragma unroll
    for (int i = 0; i < TILE_DV / 2; i++) {
      const int r = i / 2 % 2, column = i / 4 * 8 + i % 2;  // of the lane's; 8 columns are all there or none
      if (seen[r] && column < p.head_dim_v) o_rmem[i] = fmaf(x[r], to_real(v_row[column]), o_rmem[i]);
    }
    const int next = place + 1 < end ? range.key(place + 1) : key;
    k_row += (next - key) * p.k_stride[1], v_row += (next - key) * p.v_stride[1];
    key = next;
  }
}
