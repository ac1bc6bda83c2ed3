// What the Hopper backward kernels share: who computes which tiles, the loads that TMA does not do, the products and
// exponentials of a step, and the gradients on their way out.
#pragma once
#include "mask.cuh"
#include "softmax.cuh"
#include "tile_sm90.cuh"

using cfg::Element;
using cfg::TILE_M, cfg::TILE_N, cfg::TILE_D, cfg::TILE_DV, cfg::STAGES;

constexpr int D_CHUNKS = (TILE_D + CHUNK - 1) / CHUNK, DV_CHUNKS = (TILE_DV + CHUNK - 1) / CHUNK;
constexpr int D_STEPS = TILE_D / 16, DV_STEPS = TILE_DV / 16, M_STEPS = TILE_M / 16;  // steps of a summed dimension
constexpr int WG_WARPS = WARPGROUP / WARP, WG_KEYS = 64, WARP_KEYS = WG_KEYS / WG_WARPS;
constexpr int UNITS = CHUNK_ROW_BYTES / UNIT_BYTES;  // of 8 elements, in a row of a chunk
constexpr u32 STEP_BYTES = 16 * CHUNK_ROW_BYTES;  // 16 rows of a chunk: a step of a sum down the rows
constexpr int DS_BUFFERS = 2;

// Named barriers. DQ_WARPGROUP: the warpgroup of dq alone. TURN + c: consumer c's turn to start its second products.
enum NamedBarrier { DQ_WARPGROUP = 1, TURN = 2 };

__device__ __forceinline__ Pair unpack2(u32 x) {
  return {to_real(Element{(unsigned short)x}), to_real(Element{(unsigned short)(x >> 16)})};
}

// ---- which tiles ----------------------------------------------------------------------------------------------------

// One key tile of one key head, and the query tiles that it visits for every query head of its group.
struct Work {
  int n_block, head_kv, batch;
  bool exists;  // the middle tile of a head has no partner: see find_work
  QueryWalk queries;

  __device__ __forceinline__ int n0() const { return n_block * TILE_N; }
  __device__ __forceinline__ int steps() const { return queries.visits; }
};

// The CTA's `turn`-th piece of work, or false. All warps find it by themselves, so nothing need be communicated.
//
// With a CTA for every tile, tiles are numbered head by head; an ordered sum wants the last of a head first (see
// accumulate_dq). Fewer CTAs take pairs of tiles, the i-th and the i-th last of a head: in causal heads, where tiles
// have less to do the later they come, pairs are alike. When half of the CTAs can take the pairs that are left, all
// share them.
__device__ __forceinline__ bool find_work(const Params& p, int turn, Work& work) {
  const int heads = p.batch * p.num_heads_kv, ctas = gridDim.x, cta = blockIdx.x;
  int head, block, second = 0;
  if (ctas >= heads * p.num_n_blocks) {
    if (turn) return false;
    head = cta / p.num_n_blocks, block = cta - head * p.num_n_blocks;
    if (cfg::DETERMINISTIC) block = p.num_n_blocks - 1 - block;
  } else {
    const int head_pairs = (p.num_n_blocks + 1) / 2, begin = turn / 2 * ctas, left = heads * head_pairs - begin;
    const bool shared = left <= ctas / 2;
    if (shared ? turn % 2 || cta >= 2 * left : cta >= left) return false;
    const int pair = begin + (shared ? cta / 2 : cta);
    second = shared ? cta % 2 : turn % 2;
    head = pair / head_pairs, block = pair - head * head_pairs;
    if (second) block = p.num_n_blocks - 1 - block;
  }
  work.exists = !second || 2 * block + 1 != p.num_n_blocks;
  work.n_block = block;
  work.batch = head / p.num_heads_kv;
  work.head_kv = head - work.batch * p.num_heads_kv;
  work.queries = QueryWalk(p, work.batch, work.head_kv, work.n0());
  return true;
}

// Calls work(tile) for every tile of the CTA.
template <class Do> __device__ __forceinline__ void for_each_tile(const Params& p, Do work) {
  Work tile;
  for (int turn = 0; find_work(p, turn, tile); turn++) {
    if (tile.exists) work(tile);
  }
}

// Calls step(tile, visit, first, last) for every step of the CTA: every query tile that a key tile visits, of
// every query head of its group. `first` and `last` of the key tile.
template <class Do> __device__ __forceinline__ void for_each_step(const Params& p, Do step) {
  for_each_tile(p, [&](const Work& tile) {
    tile.queries.for_each(p, [&](const QueryVisit& visit, bool first, bool last) { step(tile, visit, first, last); });
  });
}

// ---- loads ----------------------------------------------------------------------------------------------------------

// Queues the copy of a tile whose first row is `row`, as one arrival on `full`. One thread.
template <int CHUNKS, int ROWS>
__device__ __forceinline__ void load_tile(Element (&tile_smem)[CHUNKS][ROWS][CHUNK], const TensorMap& map, u64* full,
                                          int row, int head, int batch) {
  mbarrier_arrive_expect_tx(full, sizeof(tile_smem));
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) tma_load_4d(tile_smem[c], &map, full, c * CHUNK, row, head, batch);
}

__device__ __forceinline__ const float* lse_of(const Params& p, int batch, int head) {
  return p.lse + batch * p.lse_stride[0] + head * p.lse_stride[1];
}
__device__ __forceinline__ const float* delta_of(const Params& p, int batch, int head) {
  return p.delta + ((i64)batch * p.num_heads_q + head) * p.seqlen_q;
}

// Queries that do not see a key have no influence on its dk and dv, but 0 * inf and 0 * NaN are NaN. So where there are
// such queries and inf or NaN in their q or do (hardly ever), the tiles that the products sum over are made finite. Of
// a key that is seen, p or ds is NaN anyway, by lse and delta; only p do then lacks something (add_nonfinite_to_dv).

// Whether the queries of a step must be made finite: some do not see all keys of the tile, and lse or delta is not
// finite (or no key is seen, so that lse says nothing of q). A warp's question, of buffer `at`.
template <class Smem>
__device__ __forceinline__ bool must_be_made_finite(Smem& smem, const Work& tile, const QueryVisit& visit, int at, u32 parity,
                                                    int lane) {
  if (!HIDES_KEYS) return false;
  mbarrier_wait(&smem.values_full[at], parity);
  return tile.queries.hides(visit) && uniform(lane == 0 ? smem.lse_nonfinite[at] | smem.delta_nonfinite[at] : 0);
}

// Instead of load_tile: the TILE_M queries from m0 on of q or do, copied by hand without inf and NaN, as one arrival on
// `full`. Notes, if asked, whether there were any. A warp's work.
template <int CHUNKS>
__device__ __forceinline__ void load_finite(const Params& p, Element (&tile_smem)[CHUNKS][TILE_M][CHUNK],
                                            const Element* gmem, const i64 (&stride)[4], int columns, u64* full, int m0,
                                            int head, int batch, int* made_finite, int lane) {
  u32 found = 0;
#pragma unroll 1
  for (int i = lane; i < TILE_M * CHUNKS * UNITS; i += WARP) {
    const int row = i / (CHUNKS * UNITS), unit = i % (CHUNKS * UNITS), column = unit * (CHUNK / UNITS);
    const Element* unit_gmem = gmem + batch * stride[0] + (m0 + row) * stride[1] + head * stride[2] + column;
    u32 x[4] = {};
    if (m0 + row < p.seqlen_q && column < columns) ld_global_v4(x, unit_gmem);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const u32 signs = nonfinite<Element>(x[e]);
      found |= signs;
      x[e] &= ~((signs >> 15) * 0xffff);
    }
    st_shared_v4(unit_address(smem_u32(tile_smem), TILE_M, row, unit), x);
  }
  fence_proxy_async_shared();
  found = __any_sync(~0u, found);
  __syncwarp();
  if (lane) return;
  if (made_finite) *made_finite = found;
  mbarrier_arrive(full);
}

// Before one lane does what lets the barrier go on to its next phases: no other lane may miss this one.
__device__ __forceinline__ void await_as_warp(u64* barrier, u32 parity) {
  mbarrier_wait(barrier, parity);
  __syncwarp();
}

// What a lane needs to know of 16 query rows: of row 8 * half + 2 * (lane % 4) + e, x[half][e].
struct alignas(16) RowValues { float x[2][2]; };
using TileValues = RowValues[TILE_M / 16][4];

// One warp's work: brings lse or delta of every step's query rows to a ring in shared memory and, where some queries
// may not see all keys, whether all are finite. `gmem(batch, head)` are a head's values, `stride` apart; rows that do
// not exist have `none`; convert() makes of a value what is stored. await(stage) waits until a buffer is free,
// arrive(stage) says that it is full.
template <class Gmem, class Convert, class Await, class Arrive>
__device__ __forceinline__ void produce_values(const Params& p, TileValues (&ring_smem)[STAGES],
                                               int (&nonfinite_smem)[STAGES], Gmem gmem, i64 stride, float none,
                                               Convert convert, Await await, Arrive arrive, int lane) {
  constexpr int LANE_ROWS = TILE_M / WARP;
  Ring<STAGES> stage;
  for_each_step(p, [&](const Work& tile, const QueryVisit& visit, bool, bool) {
    const float* head_gmem = gmem(tile.batch, tile.queries.head(visit).head);
    float value[LANE_ROWS], zero = 0;
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
      const int row = visit.tile * TILE_M + i * WARP + lane;
      value[i] = row < p.seqlen_q ? head_gmem[row * stride] : none;
      if (HIDES_KEYS && row < p.seqlen_q) zero += 0 * value[i];  // or NaN
    }
    await(stage);
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
      const int row = i * WARP + lane;
      ring_smem[stage.index][row / 16][row % 8 / 2].x[row / 8 % 2][row % 2] = convert(value[i]);
    }
    const bool nonfinite = HIDES_KEYS && __any_sync(~0u, zero != 0);
    __syncwarp();  // so one lane may speak for all; racecheck does not know, and reports races
    if (lane == 0) {
      if (HIDES_KEYS) nonfinite_smem[stage.index] = nonfinite;
      arrive(stage.index);
    }
    stage.advance();
  });
}
template <class Smem, class Await, class Arrive>
__device__ __forceinline__ void produce_lse(const Params& p, Smem& smem, Await await, Arrive arrive, int lane) {
  auto gmem = [&](int batch, int head) { return lse_of(p, batch, head); };
  produce_values(p, smem.lse, smem.lse_nonfinite, gmem, p.lse_stride[2], NEG_INF, lse_origin<float>, await, arrive,
                 lane);
}
template <class Smem, class Await, class Arrive>
__device__ __forceinline__ void produce_delta(const Params& p, Smem& smem, Await await, Arrive arrive, int lane) {
  auto gmem = [&](int batch, int head) { return delta_of(p, batch, head); };
  auto as_it_is = [](float x) { return x; };
  produce_values(p, smem.delta, smem.delta_nonfinite, gmem, 1, 0.f, as_it_is, await, arrive, lane);
}

// A warp's work: looks for inf and NaN in every k tile of which some queries do not see all keys. 0 * inf is NaN, so
// those queries' dq then needs care (add_dq_exactly).
template <class Smem> __device__ __forceinline__ void check_keys(const Params& p, Smem& smem, int lane) {
  constexpr int K_UNITS = sizeof(smem.k) / UNIT_BYTES;
  Ring<1> keys;
  for_each_tile(p, [&](const Work& tile) {
    if (!tile.steps()) return;
    mbarrier_wait(&smem.k_full, keys.parity);
    u32 found = 0;
    if (tile.queries.hides_some()) {
#pragma unroll 4
      for (int i = lane; i < K_UNITS; i += WARP) {
        u32 unit[4];
        ld_shared_v4(unit, smem_u32(smem.k) + i * UNIT_BYTES);
#pragma unroll
        for (int e = 0; e < 4; e++) found |= nonfinite<Element>(unit[e]);
      }
    }
    const bool any = __any_sync(~0u, found != 0);
    __syncwarp();  // all lanes have read
    if (lane == 0) {
      smem.k_nonfinite = any;
      mbarrier_arrive(&smem.k_checked);
    }
    keys.advance();
  });
}

// ---- scores: (64 keys, TILE_M queries) accumulators -----------------------------------------------------------------
// As the operand a of a product that sums over the queries, such an accumulator is [M_STEPS][4] registers. Register i
// of step s holds, for key lane / 4 + 8 * (i % 2) of the warp's 16, query 16 * s + 8 * (i / 2) + 2 * (lane % 4) and the
// next; they are the accumulator's 8 * s + 2 * i and the next.

// d = a(keys, 16 * STEPS) b(queries, 16 * STEPS)T, where a lies in a tile of A_ROWS rows.
template <int STEPS, int A_ROWS>
__device__ __forceinline__ void multiply_keys_queries(float (&d)[TILE_M / 2], u64 a, u64 b) {
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    const u64 a_step = descriptor_at(a, s / 4 * A_ROWS * CHUNK_ROW_BYTES + s % 4 * 2 * UNIT_BYTES);
    const u64 b_step = descriptor_at(b, s / 4 * TILE_M * CHUNK_ROW_BYTES + s % 4 * 2 * UNIT_BYTES);
    if (s) wgmma_ss<Element, TILE_M, false, false, true>(d, a_step, b_step);
    else wgmma_ss<Element, TILE_M, false, false, false>(d, a_step, b_step);
  }
  wgmma_commit();
}

// Whether ds is made of other numbers than dv: in place of p, what Scorer::weight() makes of it.
constexpr bool WEIGHS = KEEPS_SCORES;
// What HIDES_ANYWHERE is not asked twice: in bits, those of a lane's elements; or, where p or the weight goes
// to another warpgroup, as minus zero, which no other is but one that is as good as hidden.
using HiddenBits = u32[TILE_M / 64];
constexpr bool MARKS_HIDDEN = HIDES_ANYWHERE && cfg::LARGE_HEADS;
constexpr float MARK = -0.f;

// p = exp(s - lse), rounded, weights if WEIGHS, and what is hidden if BY_ELEMENT. `key` is the lane's first.
__device__ __forceinline__ void exponentiate(const Params& p, u32 (&p_rmem)[M_STEPS][4], u32 (&weight_rmem)[M_STEPS][4],
                                             HiddenBits& hidden, const float (&s_rmem)[TILE_M / 2],
                                             const TileValues& lse_smem, float scale, const Head& head, int m0, int key,
                                             bool hides, int lane) {
  auto every_element = [&](auto small, const Scorer& scorer, auto hide) {
#pragma unroll
    for (int s = 0; s < M_STEPS; s++) {
      const RowValues lse = lse_smem[s][lane % 4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float x[2], weight[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int offset = s * 16 + i / 2 * 8 + e, index = 8 * s + 2 * i + e;
          const float qk = scorer.score(s_rmem[index], offset, i % 2 * 8, small);
          x[e] = ex2(fmaf(qk, scale, -lse.x[i / 2][e]));
          hide(x[e], i % 2, offset, index);
          if (WEIGHS) weight[e] = scorer.weight(x[e], s_rmem[index], offset, i % 2 * 8);
        }
        p_rmem[s][i] = pack2<Element>(x[0], x[1]);
        if (WEIGHS) weight_rmem[s][i] = pack2<Element>(weight[0], weight[1]);
      }
      if (BY_ELEMENT) __syncwarp();  // no more elements at a time than registers hold
    }
  };
  if constexpr (BY_ELEMENT) {
    const int q0 = opaque(m0 + lane % 4 * 2);
#pragma unroll
    for (u32& bits : hidden) bits = 0;
    if (hides) {
      const VisibleQueries queries[2] = {visible_queries(p, key, q0, head), visible_queries(p, key + 8, q0, head)};
#pragma unroll
      for (int i = 0; i < TILE_M / 2; i++) {
        hidden[i / 32] |= u32(!queries[i / 2 % 2].has(i / 4 * 8 + i % 2)) << i % 32;
      }
    }
    by_size(p, s_rmem, [&](auto small) {
      every_element(small, Scorer(p, head, q0, key), [&](float& x, int, int, int index) {
        if (hidden[index / 32] >> index % 32 & 1) x = MARK;
      });
    });
  } else {
    by_size(p, s_rmem, [&](auto small) {
      if (hides) {
        const int q0 = m0 + lane % 4 * 2;
        const Scorer scorer(p, head, q0, key);
        const VisibleQueries queries[2] = {visible_queries(p, key, q0), visible_queries(p, key + 8, q0)};
        every_element(small, scorer, [&](float& x, int r, int offset, int) {
          if (!queries[r].has(offset)) x = 0;
        });
      } else {
        every_element(small, Scorer(p, head, m0 + lane % 4 * 2, key), [](float&, int, int, int) {});
      }
    });
  }
}

// ds = p * (dp - delta), and whatever else scores were made with, in dp_rmem; from p as it was rounded, or the weights.
template <class LoadP>
__device__ __forceinline__ void make_ds(const Params& p, float (&dp_rmem)[TILE_M / 2], LoadP load_p,
                                        const TileValues& delta_smem, const TileValues& lse_smem, const Head& head,
                                        int m0, int key, int lane) {
  const Scorer scorer(p, head, m0 + lane % 4 * 2, key);
#pragma unroll
  for (int s = 0; s < M_STEPS; s++) {
    const RowValues delta = delta_smem[s][lane % 4];
    const RowValues& lse = lse_smem[s][lane % 4];  // read only if needed
    u32 p_rmem[4];
    load_p(p_rmem, s);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const Pair x = unpack2(p_rmem[i]);
      float* dp = dp_rmem + 8 * s + 2 * i;
      auto make = [&](float x, int e) {
        const int q_offset = s * 16 + i / 2 * 8 + e, kv_offset = i % 2 * 8;
        const float row_delta = delta.x[i / 2][e];
        if constexpr (WEIGHS) {
          dp[e] = scorer.weighed(x, dp[e], row_delta, q_offset, kv_offset);
        } else {
          dp[e] = scorer.gradient(x, dp[e], row_delta, lse.x[i / 2][e], q_offset, kv_offset);
        }
        if (MARKS_HIDDEN && __float_as_uint(x) == __float_as_uint(MARK)) dp[e] = 0;
      };
      make(x.first, 0);
      make(x.second, 1);
    }
  }
}

// ds of keys that a query does not see: their dp may be inf or NaN.
__device__ __forceinline__ void hide(float (&ds_rmem)[TILE_M / 2], const Params& p, int m0, int key, int lane) {
  const int q0 = m0 + lane % 4 * 2;
  const VisibleQueries queries[2] = {visible_queries(p, key, q0), visible_queries(p, key + 8, q0)};
#pragma unroll
  for (int i = 0; i < TILE_M / 2; i++) {
    if (!queries[i / 2 % 2].has(i / 4 * 8 + i % 2)) ds_rmem[i] = 0;
  }
}

// The same where exponentiate has found out.
__device__ __forceinline__ void hide(float (&ds_rmem)[TILE_M / 2], const HiddenBits& hidden) {
#pragma unroll
  for (int i = 0; i < TILE_M / 2; i++) {
    if (hidden[i / 32] >> i % 32 & 1) ds_rmem[i] = 0;
  }
}

// Columns [FIRST, COLUMNS) of d(64 keys, COLUMNS) += a(64 keys, TILE_M queries) b(TILE_M queries, COLUMNS). A product
// is at most MAX_COLUMNS wide: the assembler wants an instruction to fit the registers that a thread has at launch.
constexpr int MAX_COLUMNS = 128;
template <int COLUMNS, int FIRST = 0>
__device__ __forceinline__ void accumulate_over_queries(float (&d)[COLUMNS / 2], const u32 (&a)[M_STEPS][4], u64 b) {
  constexpr int WIDTH = COLUMNS - FIRST < MAX_COLUMNS ? COLUMNS - FIRST : MAX_COLUMNS, NEXT = FIRST + WIDTH;
  auto& part = reinterpret_cast<float (&)[WIDTH / 2]>(d[FIRST / 2]);
#pragma unroll
  for (int s = 0; s < M_STEPS; s++) {
    const u64 b_step = descriptor_at(b, FIRST / CHUNK * TILE_M * CHUNK_ROW_BYTES + s * STEP_BYTES);
    wgmma_rs<Element, WIDTH, true, true>(part, a[s], b_step);
  }
  if constexpr (NEXT < COLUMNS) accumulate_over_queries<COLUMNS, NEXT>(d, a, b);
}

// ds of the warp's 16 keys into the chunks of a tile of TILE_N keys. `row` is the first of them in the tile.
template <int CHUNKS>
__device__ __forceinline__ void store_ds(Element (&ds_smem)[CHUNKS][TILE_N][CHUNK], const u32 (&ds_rmem)[M_STEPS][4],
                                         int row, int lane) {
  const int lane_bytes = (row + lane % 16) * CHUNK_ROW_BYTES + (lane / 16 ^ lane % 8) * UNIT_BYTES;
#pragma unroll
  for (int s = 0; s < M_STEPS; s++) {
    unsigned char* chunk = reinterpret_cast<unsigned char*>(ds_smem[s / 4]);
    stmatrix_x4(chunk + (lane_bytes ^ s % 4 * 2 * UNIT_BYTES), ds_rmem[s][0], ds_rmem[s][1], ds_rmem[s][2],
                ds_rmem[s][3]);
  }
}

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
  const i64 first_row = ((i64)batch * p.num_heads_q + head) * p.seqlen_q + row0;
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
// ds and of k as a whole; done() is called when both have been read.
template <int C, class Done>
__device__ __forceinline__ void add_ds_k(const Params& p, u64 ds, u64 k, int batch, int head, int row0, int thread,
                                         Done done) {
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
  wgmma_wait<0>();
  wgmma_hold(dq_rmem);
  if constexpr (C == D_CHUNKS - 1) done();
  add_dq<COLUMNS>(p, dq_rmem, batch, head, row0, C * CHUNK, thread);
  if constexpr (C < D_CHUNKS - 1) add_ds_k<C + 1>(p, ds, k, batch, head, row0, thread, done);
}

// The same, element by element and without the keys that a query does not see. Slow: for what happens rarely.
template <class Smem>
__device__ __forceinline__ void add_dq_exactly(const Params& p, const Smem& smem, int buffer, const Work& tile,
                                               int head, int m_block, int thread) {
  auto at = [](const auto& chunks, int row, int column) {
    return to_real(chunks[column / CHUNK][row][(column % CHUNK / 8 ^ row % 8) * 8 + column % 8]);
  };
  const int m0 = m_block * TILE_M, rows = min(TILE_M, p.seqlen_q - m0);
  float* head_gmem = p.dq_accum + ((i64)tile.batch * p.num_heads_q + head) * p.seqlen_q * p.head_dim;
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
template <class Smem> __device__ __forceinline__ void accumulate_dq(const Params& p, Smem& smem) {
  await_launches_before();
  const int thread = threadIdx.x % WARPGROUP;
  const u64 k = descriptor_mn_major(smem_u32(smem.k), 0);
  Ring<DS_BUFFERS> buffer;
  Ring<1> keys;
  for_each_step(p, [&](const Work& tile, const QueryVisit& visit, bool first, bool last) {
    const Head at = tile.queries.head(visit);
    const int head = at.head, m_block = visit.tile;
    if (first) {
      mbarrier_wait(&smem.k_checked, keys.parity);
      keys.advance();
    }
    mbarrier_wait(&smem.ds_full[buffer.index], buffer.parity);
    // Ordered sums: the key tiles that visit a query tile add to its dq from the last to the first. Among causal ones
    // the last starts there, the one before it comes by some steps later, and so on: nobody waits long. A tile waits
    // for tiles that find_work numbers before it, so somebody can always go on.
    int* turn = p.semaphore + ((i64)tile.batch * p.num_heads_q + head) * p.num_m_blocks + m_block;
    if (cfg::DETERMINISTIC) {
      const int own = KeyWalk(p, at, m_block * TILE_M).behind(tile.n_block);
      if (thread == 0) while (ld_acquire(turn) != own) {}
      named_barrier_sync(DQ_WARPGROUP, WARPGROUP);
    }
    auto done = [&] {
      if (thread % WARP) return;
      mbarrier_arrive(&smem.ds_empty[buffer.index]);
      if (last) mbarrier_arrive(&smem.k_empty);
    };
    if (tile.queries.hides(visit) && smem.k_nonfinite) {
      add_dq_exactly(p, smem, buffer.index, tile, head, m_block, thread);
      done();
    } else {
      const u64 ds = descriptor_mn_major(smem_u32(smem.ds[buffer.index]), 0);
#pragma unroll
      for (int c = 0; c < TILE_M / CHUNK; c++) {
        auto done_after_last = [&] {
          if (c == TILE_M / CHUNK - 1) done();
        };
        add_ds_k<0>(p, descriptor_at(ds, c * sizeof(smem.ds[0][0])), k, tile.batch, head, m_block * TILE_M + c * CHUNK,
                    thread, done_after_last);
      }
    }
    if (cfg::DETERMINISTIC) {
      named_barrier_sync(DQ_WARPGROUP, WARPGROUP);
      if (thread == 0) red_release_add(turn, 1);
    }
    buffer.advance();
  });
}

// ---- dk and dv to global memory -------------------------------------------------------------------------------------

// The warp's 16 keys of dk or dv, the first of them `row` of the tile.
template <int COLUMNS>
__device__ __forceinline__ void store_gradient(Element* gmem, const i64 (&stride)[4], const Work& tile, int row,
                                               int seqlen_k, int head_dim, const float (&acc_rmem)[COLUMNS / 2],
                                               float factor, int lane) {
  const int key = tile.n0() + row;
  Element* row_gmem = gmem + tile.batch * stride[0] + key * stride[1] + tile.head_kv * stride[2];
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
  const int first = tile.n0() + row, keys = min(WARP_KEYS, p.seqlen_k - first);
  Element* dv_gmem = p.dv + tile.batch * p.dv_stride[0] + first * p.dv_stride[1] + tile.head_kv * p.dv_stride[2];
#pragma unroll 1
  for (int i = lane; i < keys * p.head_dim_v; i += WARP) {
    const int key = i / p.head_dim_v, column = i - key * p.head_dim_v;
    float sum = 0;
    QueryVisit visit = tile.queries.start(p);
#pragma unroll 1
    for (int step = 0; step < tile.steps() && sum == sum; step++, tile.queries.advance(p, visit)) {
      const Head at = tile.queries.head(visit);
      const Element* dout_gmem = p.dout + tile.batch * p.dout_stride[0] + at.head * p.dout_stride[2] + column;
      const int end = tile.queries.hides(visit) ? min((visit.tile + 1) * TILE_M, p.seqlen_q) : 0;
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
