// After the backward: dq = softmax_scale * dq_accum, from float to the 16-bit dtype and the strides of dq.
//
// Bound by memory. A CTA has TILE_M rows; LANES lanes share a row, and a lane requests its parts of all its rows before
// it stores any.
#include "rows.cuh"

using cfg::Element;

constexpr int LANES = lanes_per_row<Element>(cfg::TILE_D), ROWS_AT_ONCE = cfg::NUM_THREADS / LANES;
constexpr int LANE_ROWS = (cfg::TILE_M + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;  // rows that a lane has a part of
constexpr int SIZE = Chunk<Element>::SIZE, STEP = LANES * SIZE;             // columns that a row's lanes hold at once
constexpr int CHUNKS = (cfg::TILE_D + STEP - 1) / STEP;                     // chunks of a row that a lane holds
constexpr int PARTS = SIZE / Chunk<float>::SIZE;                            // 16-byte loads a chunk of dq
static_assert(sizeof(Element) == 2, "other dtypes have no dq_accum");

extern "C" __global__ void __launch_bounds__(cfg::NUM_THREADS, cfg::MIN_CTAS)
bwd_convert(const __grid_constant__ Params p) {
  const i64 begin = blockIdx.x * (i64)cfg::TILE_M, left = num_rows(p) - begin;
  const int count = left < cfg::TILE_M ? (int)left : cfg::TILE_M;
  const int lane = threadIdx.x % LANES, first = threadIdx.x / LANES;
  const int head_dim = cfg::RAGGED_D ? p.head_dim : cfg::TILE_D;
  const RowWalk walk(p, p.dq_stride, begin);

  float x[LANE_ROWS][CHUNKS][SIZE];
  RowWalk::Row row[LANE_ROWS];
#pragma unroll
  for (int r = 0; r < LANE_ROWS; r++) {
    row[r] = walk.row(min(first + r * ROWS_AT_ONCE, count - 1));
    const float* accum_gmem = p.dq_accum + walk.index(row[r], p) * head_dim;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const int col = c * STEP + lane * SIZE;
#pragma unroll
      for (int i = 0; i < SIZE; i++) x[r][c][i] = 0;
      if constexpr (cfg::WIDE_DQ) {  // so head_dim is a multiple of SIZE
        if (col >= head_dim) continue;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
          const auto chunk = reinterpret_cast<const Chunk<float>*>(accum_gmem + col)[part];
#pragma unroll
          for (int i = 0; i < Chunk<float>::SIZE; i++) x[r][c][part * Chunk<float>::SIZE + i] = chunk.get(i);
        }
      } else {
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
          if (col + i < head_dim) x[r][c][i] = accum_gmem[col + i];
        }
      }
    }
  }

#pragma unroll
  for (int r = 0; r < LANE_ROWS; r++) {
    if (first + r * ROWS_AT_ONCE >= count) continue;
    Element* dq_gmem = p.dq + walk.offset(row[r], p.dq_stride);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const int col = c * STEP + lane * SIZE;
#pragma unroll
      for (int i = 0; i < SIZE; i++) x[r][c][i] *= p.softmax_scale;
      if constexpr (cfg::WIDE_DQ) {
        u32 chunk[4];
#pragma unroll
        for (int i = 0; i < 4; i++) chunk[i] = pack2<Element>(x[r][c][i * 2], x[r][c][i * 2 + 1]);
        if (col < head_dim) st_global_v4(dq_gmem + col, chunk);
      } else {
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
          if (col + i < head_dim) dq_gmem[(col + i) * p.dq_stride[3]] = Dtype<Element>::from_real(x[r][c][i]);
        }
      }
    }
  }
}
