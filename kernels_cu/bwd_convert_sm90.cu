// After bwd_sm90: dq = softmax_scale * dq_accum, from the order in which that kernel adds (see bwd_sm90.cuh) to the
// 16-bit dtype and the strides of dq. Bound by memory: a CTA has 64 query rows of a head, and requests them all before
// it stores any. The last heads come first, being still in L2.
#include "sequences.cuh"
#include "tile_sm90.cuh"

using cfg::Element;
using cfg::TILE_M, cfg::TILE_D;

static_assert(TILE_M == CHUNK && cfg::NUM_THREADS == WARPGROUP, "one block of dq_accum");

extern "C" __global__ void __launch_bounds__(cfg::NUM_THREADS, cfg::MIN_CTAS)
bwd_convert_sm90(const __grid_constant__ Params params) {
  Own<VARLEN> own(params);
  const Params& p = own.p;
  const int thread = threadIdx.x, number = gridDim.x - 1 - blockIdx.x;
  int batch, head, row0;
  i64 place;
  if constexpr (VARLEN) {
    SequenceTile tile;
    if (!find_tile<BY_QUERIES, TILE_M>(own, params, number, p.num_heads_q, tile)) return;
    batch = tile.batch, head = tile.head, row0 = tile.block * TILE_M;
    place = flat_head(p, batch, head);
  } else {
    const int flat_head = number / p.num_m_blocks;
    row0 = (number - flat_head * p.num_m_blocks) * TILE_M;
    batch = flat_head / p.num_heads_q, head = flat_head - batch * p.num_heads_q;
    place = flat_head;
  }
  const float* accum_gmem = p.dq_accum + (rows_begin(p, place) + row0) * p.head_dim;
  Element* dq_gmem = p.dq + q_begin(p, batch, p.dq_stride) + row0 * p.dq_stride[1] + head * p.dq_stride[2];
  await_launches_before();
  if (!cfg::RAGGED_D && row0 + TILE_M <= p.seqlen_q) {
    float dq_rmem[TILE_D / 2];
#pragma unroll
    for (int j = 0; j < TILE_D / 8; j++) {
      u32 x[4];
      ld_global_v4(x, accum_gmem + (j * WARPGROUP + thread) * 4);
#pragma unroll
      for (int i = 0; i < 4; i++) dq_rmem[4 * j + i] = __uint_as_float(x[i]);
    }
    store_accumulator<TILE_D>(dq_gmem + thread / WARP * 16 * p.dq_stride[1], p.dq_stride[1], 16, TILE_D, dq_rmem,
                              {p.softmax_scale, p.softmax_scale}, thread % WARP);
    return;
  }
  const int units = p.head_dim / 8, rows = min(TILE_M, p.seqlen_q - row0);  // 16-byte units of dq in a row
  for (int i = thread; i < rows * units; i += WARPGROUP) {
    const int row = i / units, column = (i - row * units) * 8;
    const float* x = accum_gmem + i * 8;
    u32 unit[4];
#pragma unroll
    for (int e = 0; e < 4; e++) unit[e] = pack2<Element>(x[2 * e] * p.softmax_scale, x[2 * e + 1] * p.softmax_scale);
    st_global_v4(dq_gmem + row * p.dq_stride[1] + column, unit);
  }
}
