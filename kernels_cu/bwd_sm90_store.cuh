// The gradients of the Hopper backward on their way out: ds k to dq, by a warpgroup of its own, and dk and dv.
#pragma once
#include "bwd_sm90.cuh"

// ---- dq to global memory --------------------------------------------------------------------------------------------
// dq_accum holds, for each batch and query head, seqlen_q * head_dim floats. Blocks of 64 whole rows lie in them one
// after the other, each in the order of the accumulator of a (64, TILE_D) product: [column / 8][thread][4]. So every
// add is 16 bytes wide and a warp's adds are contiguous. What is left over at the end of a head lies row by row, and so
// does everything if the product is wider than head_dim. bwd_convert_sm90 reads it. Where all keys are one
// tile (ALONE) there is no dq_accum: each product is dq as it is.

__device__ __forceinline__ bool in_fragment_order(const Params& p, int row) {
  return !cfg::RAGGED_D && row / CHUNK * CHUNK + CHUNK <= p.seqlen_q;
}
// Where in a head's floats query row `row` has column `column`.
__device__ __forceinline__ i64 dq_offset(const Params& p, int row, int column) {
  if (!in_fragment_order(p, row)) return (i64)row * p.head_dim + column;
  const int block_row = row % CHUNK, thread = block_row / 16 * WARP + block_row % 8 * 4 + column % 8 / 2;
  return (i64)(row - block_row) * TILE_D + (column / 8 * WARPGROUP + thread) * 4 + block_row / 8 % 2 * 2 + column % 2;
}

// Adds COLUMNS columns, from `column0` on, of the 64 query rows from `row0` on.
template <int COLUMNS>
__device__ __forceinline__ void add_dq(const Params& p, const float (&dq_rmem)[COLUMNS / 2], int batch, int head,
                                       int row0, int column0, int thread) {
  if constexpr (cfg::ALONE) {  // four bytes at a time: to trade columns for 16 would take more registers than there are
    const int column = column0 + thread % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = row0 + thread / WARP * 16 + thread % WARP / 4 + 8 * r;
      if (row >= p.seqlen_q) break;
      Element* dq_gmem = p.dq + batch * p.dq_stride[0] + row * p.dq_stride[1] + head * p.dq_stride[2] + column;
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; j++) {
        const float* x = dq_rmem + 4 * j + 2 * r;
        const u32 pair = pack2<Element>(x[0] * p.softmax_scale, x[1] * p.softmax_scale);
        if (!cfg::RAGGED_D || column + 8 * j < p.head_dim) *reinterpret_cast<u32*>(dq_gmem + 8 * j) = pair;
      }
    }
    return;
  }
  const i64 first_row = rows_begin(p, flat_head(p, batch, head)) + row0;
  if (in_fragment_order(p, row0)) {
    float* block_gmem = p.dq_accum + first_row * TILE_D + (column0 / 8 * WARPGROUP + thread) * 4;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++) {
      const float* x = dq_rmem + 4 * j;
      red_add_v4(block_gmem + j * WARPGROUP * 4, {x[0], x[1], x[2], x[3]});
    }
    return;
  }
  // Lane pairs swap halves, so that each has four neighbours of a row: the even lane of the first, the odd of row + 8.
  const int lane = thread % WARP, odd = lane & 1, row = thread / WARP * 16 + lane / 4 + odd * 8;
  float* row_gmem = p.dq_accum + (first_row + row) * p.head_dim + column0 + lane % 4 / 2 * 4;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j++) {
    const float* x = dq_rmem + 4 * j;
    const float got0 = __shfl_xor_sync(~0u, odd ? x[0] : x[2], 1), got1 = __shfl_xor_sync(~0u, odd ? x[1] : x[3], 1);
    if (row0 + row < p.seqlen_q && column0 + 8 * j < p.head_dim) {
      red_add_v4(row_gmem + 8 * j, {odd ? got0 : x[0], odd ? got1 : x[1], odd ? x[2] : got0, odd ? x[3] : got1});
    }
  }
}

// Multiplies ds (64 queries) with chunk C of k and those after it, and adds each product to dq. The descriptors are of
// ds and of k as a whole; done() is called when both have been read, begin() when the first product is on its way.
template <int C, class Begin, class Done>
__device__ __forceinline__ void add_ds_k(const Params& p, u64 ds, u64 k, int batch, int head, int row0, int thread,
                                         Begin begin, Done done) {
  constexpr int COLUMNS = TILE_D - C * CHUNK < CHUNK ? TILE_D - C * CHUNK : CHUNK;
  float dq_rmem[COLUMNS / 2];
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < TILE_N / 16; s++) {
    const u64 a = descriptor_at(ds, s * STEP_BYTES);
    const u64 b = descriptor_at(k, C * TILE_N * CHUNK_ROW_BYTES + s * STEP_BYTES);
    if (s) wgmma_ss<Element, COLUMNS, true, true, true>(dq_rmem, a, b);
    else wgmma_ss<Element, COLUMNS, true, true, false>(dq_rmem, a, b);
  }
  wgmma_commit();
  if constexpr (C == 0) begin();
  wgmma_wait<0>();
  wgmma_hold(dq_rmem);
  if constexpr (C == D_CHUNKS - 1) done();
  add_dq<COLUMNS>(p, dq_rmem, batch, head, row0, C * CHUNK, thread);
  if constexpr (C < D_CHUNKS - 1) add_ds_k<C + 1>(p, ds, k, batch, head, row0, thread, begin, done);
}

// The same, element by element and without the keys that a query does not see. Slow: for what happens rarely.
template <class Smem>
__device__ __forceinline__ void add_dq_exactly(const Params& p, const Smem& smem, int buffer, const Work& tile,
                                               int head, int m_block, int thread) {
  auto at = [](const auto& chunks, int row, int column) {
    return to_real(chunks[column / CHUNK][row][(column % CHUNK / 8 ^ row % 8) * 8 + column % 8]);
  };
  const int m0 = m_block * TILE_M, rows = min(TILE_M, p.seqlen_q - m0);
  float* head_gmem = p.dq_accum + rows_begin(p, flat_head(p, tile.batch, head)) * p.head_dim;
  Element* dq_gmem = p.dq + tile.batch * p.dq_stride[0] + m0 * p.dq_stride[1] + head * p.dq_stride[2];
#pragma unroll 1
  for (int i = thread; i < rows * p.head_dim; i += WARPGROUP) {
    const int row = i / p.head_dim, column = i - row * p.head_dim;
    float sum = 0;
#pragma unroll 1
    for (int n = 0; n < TILE_N; n++) {
      if (visible(p, m0 + row, tile.n0() + n, {tile.batch, head})) sum += at(smem.ds[buffer], n, row) * at(smem.k, n, column);
    }
    if (cfg::ALONE) dq_gmem[row * p.dq_stride[1] + column] = Dtype<Element>::from_real(sum * p.softmax_scale);
    else red_add(head_gmem + dq_offset(p, m0 + row, column), sum);
  }
  __syncwarp();
}

// The warpgroup that computes dq: for every step, as soon as all of ds is there, ds k is added to dq.
template <class Smem> __device__ __forceinline__ void accumulate_dq(Own<VARLEN>& own, Smem& smem) {
  const Params& p = own.p;
  await_launches_before();
  const int thread = threadIdx.x % WARPGROUP;
  const u64 k = descriptor_mn_major(smem_u32(smem.k), 0);
  Ring<DS_BUFFERS> buffer;
  [[maybe_unused]] Ring<TOLD_VISITS> told;
  Ring<1> keys, passed;
  auto step = [&](const Work& tile, QueryVisit visit, bool first, bool last) {
    if (first) {
      mbarrier_wait(&smem.k_checked, keys.parity);
      keys.advance();
    }
    mbarrier_wait(&smem.ds_full[buffer.index], buffer.parity);
    if constexpr (TELLS_VISITS) {
      visit = smem.told.visit(told.index);
      told.advance();
    }
    const Head at = tile.queries.head(visit);
    const int head = at.head, m_block = visit.tile;
    const bool hides = TELLS_VISITS ? visit.hidden : tile.queries.hides(visit);
    auto take_turn = [&] {
      if (!cfg::DETERMINISTIC) return;
      const int own = KeyWalk(p, at, m_block * TILE_M).behind(tile.n_block);
      if (thread == 0) while (ld_acquire(turn_at(p, tile, visit)) != own) {}
      named_barrier_sync(DQ_WARPGROUP, WARPGROUP);
    };
    auto done = [&] {
      if (thread % WARP) return;
      mbarrier_arrive(&smem.ds_empty[buffer.index]);
      if (last) mbarrier_arrive(&smem.k_empty);
    };
    if (hides && smem.k_nonfinite) {
      take_turn();
      add_dq_exactly(p, smem, buffer.index, tile, head, m_block, thread);
      done();
    } else {
      const u64 ds = descriptor_mn_major(smem_u32(smem.ds[buffer.index]), 0);
#pragma unroll
      for (int c = 0; c < TILE_M / CHUNK; c++) {
        auto begin = [&] {
          if (c == 0) take_turn();
        };
        auto done_after_last = [&] {
          if (c == TILE_M / CHUNK - 1) done();
        };
        add_ds_k<0>(p, descriptor_at(ds, c * sizeof(smem.ds[0][0])), k, tile.batch, head, m_block * TILE_M + c * CHUNK,
                    thread, begin, done_after_last);
      }
    }
    if (cfg::DETERMINISTIC) {
      mbarrier_wait(&smem.passed, passed.parity ^ 1);  // the turn before this one
      passed.advance();
      __syncwarp();
      if (thread % WARP == 0) mbarrier_arrive(&smem.added);
    }
    buffer.advance();
  };
  for_each_step<false, !TELLS_VISITS>(own, smem.names, thread % WARP, step);
}

// ---- dk and dv to global memory -------------------------------------------------------------------------------------

// The warp's 16 keys of dk or dv, the first of them `row` of the tile.
template <int COLUMNS>
__device__ __forceinline__ void store_gradient(const Params& p, Element* gmem, const i64 (&stride)[4],
                                               const Work& tile, int row, int seqlen_k, int head_dim,
                                               const float (&acc_rmem)[COLUMNS / 2], float factor, int lane) {
  const int key = tile.n0() + row;
  Element* row_gmem = gmem + k_begin(p, tile.batch, stride) + key * stride[1] + tile.head_kv * stride[2];
  store_accumulator<COLUMNS>(row_gmem, stride[1], seqlen_k - key, head_dim, acc_rmem, {factor, factor}, lane);
}

// dq = 0 for the queries that no key tile visits, where there is but one. Done by all warps of its `warps` together.
__device__ __forceinline__ void zero_unvisited_dq(const Params& p, const Work& tile, int warp, int warps, int lane) {
  const int column = lane * (CHUNK / UNITS);
  const TileRange& visited = tile.queries.range;
  for (int h = 0; h < p.qheads_per_kv; h++) {
    const int head = tile.head_kv * p.qheads_per_kv + h;
    Element* dq_gmem = p.dq + tile.batch * p.dq_stride[0] + head * p.dq_stride[2] + column;
    for (int row = warp; row < p.seqlen_q; row += warps) {
      if (row / TILE_M == visited.begin) row += (visited.end - visited.begin) * TILE_M;
      if (row < p.seqlen_q && column < p.head_dim) st_global_v4(dq_gmem + row * p.dq_stride[1], {0, 0, 0, 0});
    }
  }
}

// What was left out of do, added to dv as stored of the warp's 16 keys, the first of them `row` of the tile.
__device__ __forceinline__ void add_nonfinite_to_dv(const Params& p, const Work& tile, int row, int lane) {
  __syncwarp();
  const QueryWalk& queries = TELLS_VISITS ? QueryWalk(p, tile.batch, tile.head_kv, tile.n0()) : tile.queries;
  const int first = tile.n0() + row, keys = min(WARP_KEYS, p.seqlen_k - first);
  Element* dv_gmem = p.dv + k_begin(p, tile.batch, p.dv_stride) + first * p.dv_stride[1] + tile.head_kv * p.dv_stride[2];
#pragma unroll 1
  for (int i = lane; i < keys * p.head_dim_v; i += WARP) {
    const int key = i / p.head_dim_v, column = i - key * p.head_dim_v;
    float sum = 0;
    QueryVisit visit = queries.start(p);
#pragma unroll 1
    for (int step = 0; step < queries.visits && sum == sum; step++, queries.advance(p, visit)) {
      const Head at = queries.head(visit);
      const Element* dout_gmem = p.dout + q_begin(p, tile.batch, p.dout_stride) + at.head * p.dout_stride[2] + column;
      const int end = queries.hides(visit) ? min((visit.tile + 1) * TILE_M, p.seqlen_q) : 0;
#pragma unroll 4
      for (int m = visit.tile * TILE_M; m < end; m++) {
        const Element x = dout_gmem[m * p.dout_stride[1]];
        if (nonfinite<Element>(x.bits) && visible(p, m, first + key, at)) sum += to_real(x);
      }
    }
    Element& dv = dv_gmem[key * p.dv_stride[1] + column];
    dv = Dtype<Element>::from_real(to_real(dv) + sum);
  }
}
