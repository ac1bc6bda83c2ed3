// After a forward whose keys were split: each row's o and lse from those of the parts s, in float32.
//
//   lse = log(sum exp(lse_s))    o = sum exp(lse_s - lse) o_s
//
// Bound by memory: reads the parts once. LANES lanes share a row, and a lane requests its columns of several parts before
// it adds any. Parts are added in their order, so the bits are always the same.
#include "rows.cuh"
#include "softmax.cuh"

using cfg::Element;

constexpr int LANES = lanes_per_row<Element>(cfg::TILE_DV), SIZE = Chunk<Element>::SIZE;  // lanes of a row; their columns
constexpr int LOADS = SIZE / Chunk<float>::SIZE;                                          // 16-byte loads a part
constexpr int PARTS_AT_ONCE = 8 / LOADS;
static_assert(LANES * SIZE >= cfg::TILE_DV, "a lane's columns are one chunk");
static_assert(cfg::TILE_M * LANES <= cfg::NUM_THREADS, "a lane has one row");

extern "C" __global__ void __launch_bounds__(cfg::NUM_THREADS, cfg::MIN_CTAS) combine(const __grid_constant__ Params p) {
  const i64 rows = num_rows(p), begin = blockIdx.x * (i64)cfg::TILE_M;
  const int lane = threadIdx.x % LANES, n = threadIdx.x / LANES, col = lane * SIZE;
  if (n >= cfg::TILE_M || begin + n >= rows || col >= p.head_dim_v) return;
  const RowWalk walk(p, p.o_stride, begin);
  const RowWalk::Row row = walk.row(n);
  const float* lse_gmem = p.lse_partial + walk.index(row, p);                        // of part 0; others each `rows` on
  const float* o_gmem = p.o_partial + walk.index(row, p) * p.head_dim_v + col;

  float top = NEG_INF, sum = 0, o_rmem[SIZE] = {};
#pragma unroll 8
  for (int s = 0; s < p.num_splits; s++) top = fmaxf(top, lse_gmem[s * rows]);
  const float origin = exponent_origin(top);
#pragma unroll PARTS_AT_ONCE
  for (int s = 0; s < p.num_splits; s++) {
    const float weight = ex2((lse_gmem[s * rows] - origin) * float(LOG2_E));
    sum += weight;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const auto x = reinterpret_cast<const Chunk<float>*>(o_gmem + s * rows * p.head_dim_v)[i];
#pragma unroll
      for (int e = 0; e < Chunk<float>::SIZE; e++) {
        float& o = o_rmem[i * Chunk<float>::SIZE + e];
        o = fmaf(weight, x.get(e), o);
      }
    }
  }
  u32 chunk[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    chunk[i] = pack2<Element>(o_rmem[2 * i] * inverse_sum(sum), o_rmem[2 * i + 1] * inverse_sum(sum));
  }
  st_global_v4(p.o + walk.offset(row, p.o_stride) + col, chunk);
  if (p.lse && lane == 0) p.lse[walk.index(row, p)] = top + log_real(sum);
}
