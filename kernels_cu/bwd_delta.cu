// Before the backward: delta = rowsum(do * o) - dlse, for every row; and zero dq_accum and semaphore, where there are.
//
// Bound by memory: reads o and do and writes dq_accum once. A CTA has TILE_M rows; LANES lanes share a row, and a lane
// requests its parts of all its rows before it adds them up. The last rows come first: what the backward begins with is
// then still in L2.
#include "rows.cuh"

using cfg::Element;
using Real = Dtype<Element>::Real;

constexpr int LANES = lanes_per_row<Element>(cfg::TILE_DV), ROWS_AT_ONCE = cfg::NUM_THREADS / LANES;
constexpr int LANE_ROWS = (cfg::TILE_M + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;  // rows that a lane has a part of
constexpr int STEP = LANES * Chunk<Element>::SIZE;                          // columns that a row's lanes hold at once
constexpr int CHUNKS = (cfg::TILE_DV + STEP - 1) / STEP;                    // chunks of a row that a lane holds
static_assert(cfg::TILE_M % Chunk<float>::SIZE == 0, "every CTA's part of dq_accum is aligned");

// Columns [col, col + SIZE) of a row; zeros past head_dim.
template <bool WIDE>
__device__ __forceinline__ Chunk<Element> load_chunk(const Element* row_gmem, i64 col_stride, int col, int head_dim) {
  Chunk<Element> chunk = {};
  if constexpr (WIDE) {
    if (col < head_dim) chunk = *reinterpret_cast<const Chunk<Element>*>(row_gmem + col);
  } else {
#pragma unroll
    for (int i = 0; i < Chunk<Element>::SIZE; i++) {
      if (col + i < head_dim) chunk.set(i, row_gmem[(col + i) * col_stride]);
    }
  }
  return chunk;
}

template <class T> __device__ __forceinline__ void zero(T* data, int count) {
  for (int i = threadIdx.x; i < count; i += cfg::NUM_THREADS) data[i] = T{};
}

extern "C" __global__ void __launch_bounds__(cfg::NUM_THREADS, cfg::MIN_CTAS)
bwd_delta(const __grid_constant__ Params p) {
  let_next_launch_start();
  const i64 rows = num_rows(p), begin = (gridDim.x - 1 - blockIdx.x) * (i64)cfg::TILE_M, left = rows - begin;
  const int count = left < cfg::TILE_M ? (int)left : cfg::TILE_M;
  const int lane = threadIdx.x % LANES, first = threadIdx.x / LANES;
  const int head_dim_v = cfg::RAGGED_D ? p.head_dim_v : cfg::TILE_DV;
  const RowWalk walk(p, p.dout_stride, begin);

  Chunk<Element> o_rmem[LANE_ROWS][CHUNKS], dout_rmem[LANE_ROWS][CHUNKS];
  RowWalk::Row row[LANE_ROWS];
#pragma unroll
  for (int r = 0; r < LANE_ROWS; r++) {
    row[r] = walk.row(min(first + r * ROWS_AT_ONCE, count - 1));
    const Element* o_gmem = p.o + walk.offset(row[r], p.o_stride);
    const Element* dout_gmem = p.dout + walk.offset(row[r], p.dout_stride);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const int col = c * STEP + lane * Chunk<Element>::SIZE;
      o_rmem[r][c] = load_chunk<cfg::WIDE_O>(o_gmem, p.o_stride[3], col, head_dim_v);
      dout_rmem[r][c] = load_chunk<cfg::WIDE_DOUT>(dout_gmem, p.dout_stride[3], col, head_dim_v);
    }
  }

  if (p.dq_accum) {
    float* values = p.dq_accum + begin * p.head_dim;
    const int size = count * p.head_dim, chunks = size / Chunk<float>::SIZE;
    zero(reinterpret_cast<Chunk<float>*>(values), chunks);
    zero(values + chunks * Chunk<float>::SIZE, size % Chunk<float>::SIZE);
  }
  if (p.semaphore) {
    const i64 flags = (i64)p.batch * p.num_heads_q * p.num_m_blocks - begin;  // fewer than rows, or as many
    zero(p.semaphore + begin, flags < count ? (int)flags : count);
  }

#pragma unroll
  for (int r = 0; r < LANE_ROWS; r++) {
    Real sum = 0;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
      for (int i = 0; i < Chunk<Element>::SIZE; i++) {
        sum += to_real(o_rmem[r][c].get(i)) * to_real(dout_rmem[r][c].get(i));
      }
    }
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    if (lane == 0 && first + r * ROWS_AT_ONCE < count) {
      if (p.dlse) sum -= p.dlse[walk.offset(row[r], p.dlse_stride[0], p.dlse_stride[2], p.dlse_stride[1])];
      p.delta[walk.index(row[r], p)] = sum;
    }
  }
}
