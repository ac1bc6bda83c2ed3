// What the Hopper backward kernels share: the loads that TMA does not do, and the products and exponentials of a step.
#pragma once
#include "bwd_sm90_tiles.cuh"
#include "quads.cuh"
#include "softmax.cuh"
#include "tile_sm90.cuh"

// ---- loads ----------------------------------------------------------------------------------------------------------

// Queues the copy of a tile whose first row is `row`, as one arrival on `full`. One thread.
template <int CHUNKS, int ROWS>
__device__ __forceinline__ void load_tile(Element (&tile_smem)[CHUNKS][ROWS][CHUNK], const TensorMap& map, u64* full,
                                          int row, int head, int batch) {
  mbarrier_arrive_expect_tx(full, sizeof(tile_smem));
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) tma_load_4d(tile_smem[c], &map, full, c * CHUNK, row, head, batch);
}

// What is added to scores comes with do where shared memory has room for it (STAGED_ADDENDS), [queries][keys].
constexpr bool STAGED_ADDENDS = ADDENDS_AHEAD && !cfg::LARGE_HEADS;
using AddendTile = PairTile<Element, TILE_M, TILE_N>;
template <bool> struct Addends { AddendTile addends[STAGES]; };
template <> struct Addends<false> { static constexpr AddendTile* addends = nullptr; };
// Whether hidden elements are found before any is computed, as with each of these it would be too much code.
constexpr bool FINDS_HIDDEN = TELLS_HIDDEN ? SCORES_BY_ELEMENT : BY_ELEMENT && !(STAGED_ADDENDS && ADDS_ALONE);
// How many queries have rows of their own.
__device__ __forceinline__ int addend_queries(const Params& p) { return addend_place(p, {}, TILE_M - 1).query + 1; }
// Queues the copy of those of a step, as one arrival on `full`. One thread.
__device__ __forceinline__ void load_addends(const Params& p, AddendTile& tile_smem, u64* full, const Head& head, int m0,
                                             int n0) {
  const auto at = addend_place(p, head, m0);
  mbarrier_arrive_expect_tx(full, addend_queries(p) * TILE_N * sizeof(Element));
#pragma unroll
  for (int c = 0; c < AddendTile::BOXES; c++) {
    tma_load_4d(tile_smem.boxes[c], addend_map(p), full, n0 + c * AddendTile::BOX_COLUMNS, at.query, at.head, at.batch);
  }
}

// Where in tensor maps a tile's queries and keys lie.
__device__ __forceinline__ int q_row(const Params& p, int m0) { return (VARLEN ? p.first_q : 0) + m0; }
__device__ __forceinline__ int k_row(const Params& p, int n0) { return (VARLEN ? p.first_k : 0) + n0; }
__device__ __forceinline__ int map_batch(const Work& tile) { return cfg::PACKED ? 0 : tile.batch; }

__device__ __forceinline__ const float* lse_of(const Params& p, int batch, int head) {
  return p.lse + rows_begin(p, batch, head, p.lse_stride);
}
__device__ __forceinline__ const float* delta_of(const Params& p, int batch, int head) {
  return p.delta + rows_begin(p, flat_head(p, batch, head));
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
  mbarrier_wait(&smem.values_full[at], parity);  // in every visit, as its phases go on in every visit
  return tile.queries.hides(visit) && uniform(lane == 0 ? smem.lse_nonfinite[at] | smem.delta_nonfinite[at] : 0);
}

// Instead of load_tile: the TILE_M queries from m0 on of q or do, copied by hand without inf and NaN, as one arrival on
// `full`. Notes, if asked, whether there were any. A warp's work.
template <int CHUNKS>
__device__ __forceinline__ void load_finite(const Params& p, Element (&tile_smem)[CHUNKS][TILE_M][CHUNK],
                                            const Element* gmem, const i64 (&stride)[4], int columns, u64* full, int m0,
                                            int head, int batch, int* made_finite, int lane) {
  constexpr int ROW_UNITS = CHUNKS * UNITS, AT_ONCE = 4;  // requested before any is stored
  static_assert(TILE_M * ROW_UNITS % (AT_ONCE * WARP) == 0, "lanes have equally many");
  u32 found = 0;
#pragma unroll 1
  for (int first = lane; first < TILE_M * ROW_UNITS; first += AT_ONCE * WARP) {
    u32 x[AT_ONCE][4] = {};
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int at = first + i * WARP, row = m0 + at / ROW_UNITS, column = at % ROW_UNITS * (CHUNK / UNITS);
      const Element* unit_gmem = gmem + q_begin(p, batch, stride) + row * stride[1] + head * stride[2] + column;
      if (row < p.seqlen_q && column < columns) ld_global_v4(x[i], unit_gmem);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const u32 signs = nonfinite<Element>(x[i][e]);
        found |= signs;
        x[i][e] &= ~((signs >> 15) * 0xffff);
      }
      const int at = first + i * WARP;
      st_shared_v4(unit_address(smem_u32(tile_smem), TILE_M, at / ROW_UNITS, at % ROW_UNITS), x[i]);
    }
  }
  fence_proxy_async_shared();
  found = __any_sync(~0u, found);
  __syncwarp();
  if (lane) return;
  if (made_finite) *made_finite = found;
  mbarrier_arrive(full);
}

// What a lane needs to know of 16 query rows: of row 8 * half + 2 * (lane % 4) + e, x[half][e].
struct alignas(16) RowValues { float x[2][2]; };
using TileValues = RowValues[M_STEPS][4];

// One warp's work: brings lse or delta of every step's query rows to a ring in shared memory and, where some queries
// may not see all keys, whether all are finite. `gmem(batch, head)` are a head's values, `stride` apart; rows that do
// not exist have `none`; convert() makes of a value what is stored. await(stage) waits until a buffer is free,
// arrive(stage) says that the values are there, finish(tile, visit, first, last, stage) the same of what else is found.
template <class Gmem, class Convert, class Await, class Arrive, class Finish>
__device__ __forceinline__ void produce_values(Own<VARLEN>& own, Names& names, TileValues (&ring_smem)[STAGES],
                                               int (&nonfinite_smem)[STAGES], Gmem gmem, i64 stride, float none,
                                               Convert convert, Await await, Arrive arrive, Finish finish, int lane) {
  constexpr int LANE_ROWS = TILE_M / WARP;
  const Params& p = own.p;
  Ring<STAGES> stage;
  for_each_step<false>(own, names, lane, [&](const Work& tile, const QueryVisit& visit, bool first, bool last) {
    const float* head_gmem = gmem(tile.batch, tile.queries.head(visit).head);
    float value[LANE_ROWS], zero = 0;
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
      const int row = visit.tile * TILE_M + i * WARP + lane;
      value[i] = row < p.seqlen_q ? head_gmem[row * stride] : none;
      if (HIDES_KEYS && row < p.seqlen_q) zero += 0 * value[i];  // or NaN
      // Behind the sequence are rows of another, of which q and do come along.
      if (VARLEN && row >= p.seqlen_q && p.first_q + row < p.rows_q) zero += 0 * head_gmem[row * stride];
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
    finish(tile, visit, first, last, stage.index);
    stage.advance();
  });
}
template <class Smem, class Await, class Arrive, class Finish>
__device__ __forceinline__ void produce_lse(Own<VARLEN>& own, Smem& smem, Await await, Arrive arrive, Finish finish,
                                            int lane) {
  const Params& p = own.p;
  auto gmem = [&](int batch, int head) { return lse_of(p, batch, head); };
  produce_values(own, smem.names, smem.lse, smem.lse_nonfinite, gmem, p.lse_stride[2], NEG_INF, lse_origin<float>, await,
                 arrive, finish, lane);
}
template <class Smem, class Await, class Arrive, class Finish>
__device__ __forceinline__ void produce_delta(Own<VARLEN>& own, Smem& smem, Await await, Arrive arrive, Finish finish,
                                              int lane) {
  const Params& p = own.p;
  auto gmem = [&](int batch, int head) { return delta_of(p, batch, head); };
  auto as_it_is = [](float x) { return x; };
  produce_values(own, smem.names, smem.delta, smem.delta_nonfinite, gmem, 1, 0.f, as_it_is, await, arrive, finish,
                 lane);
}

// One lane's work: hands the query tiles of a key tile on to the next key tile, as soon as the warpgroup for dq has added
// to them. A warp of its own can wait until the sums are where others see them.
template <class Smem>
__device__ __forceinline__ void pass_turns(const Params& p, Smem& smem, const Work& tile, Ring<1>& turn) {
  tile.queries.for_each(p, [&](const QueryVisit& visit, bool, bool) {
    mbarrier_wait(&smem.added, turn.parity);
    red_release_add(turn_at(p, tile, visit), 1);
    mbarrier_arrive(&smem.passed);
    turn.advance();
  });
}

// A warp's work: looks for inf and NaN in every k tile of which some queries do not see all keys. 0 * inf is NaN, so
// those queries' dq then needs care (add_dq_exactly).
template <class Smem> __device__ __forceinline__ void check_keys(Own<VARLEN>& own, Smem& smem, int lane) {
  constexpr int K_UNITS = sizeof(smem.k) / UNIT_BYTES;
  Ring<1> keys, turn;
  for_each_tile<false, !TELLS_VISITS || cfg::DETERMINISTIC>(own, smem.names, lane, [&](const Work& tile) {
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
    if (cfg::DETERMINISTIC && lane == 0) pass_turns(own.p, smem, tile, turn);
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

// Whether ds is made of other numbers than dv, which has what is kept of p: of weights, marked probabilities or what
// Scorer::weight() makes of them.
constexpr bool WEIGHS = KEEPS_SCORES || DROPS;
// What HIDES_ANYWHERE is not asked twice: in bits, those of a lane's elements; or, where p or the weight goes
// to another warpgroup, as minus zero, which no other is but one that is as good as hidden.
using HiddenBits = u32[TILE_M / 64];
// Where the bit of element `index` is.
__device__ __forceinline__ constexpr int hidden_place(int index) {
  return TransposedBits<64>::place(index % 32 / 8, index % 8 / 2, index % 2);
}
constexpr bool MARKS_HIDDEN = HIDES_ANYWHERE && cfg::LARGE_HEADS;
constexpr float MARK = -0.f;

// What lies in memory for each element of a warp's scores, loaded before these are there.
constexpr bool SEEN_AHEAD = HIDDEN_AHEAD && !TELLS_HIDDEN;
struct Ahead {
  TransposedPairs<TILE_M> addends;
  u32 place, step_bytes, at;  // STAGED_ADDENDS: whence the lane reads in a tile; those of 16 queries; in which tile
  TransposedBits<ADDENDS_AHEAD || SEEN_AHEAD ? TILE_M : 64> seen;

  // Of the queries from m0 on, and the warp's keys, of which key0 is the first.
  __device__ __forceinline__ void load(const Params& p, const Head& head, int m0, int key0, int lane) {
    const int rows = p.seqlen_q - m0, keys = p.seqlen_k - key0;
    if constexpr (ADDENDS_AHEAD && !STAGED_ADDENDS) {
      addends.load(addend_row(p, head, m0) + key0, addend_row_stride(p), rows, keys, lane);
    }
    if constexpr (SEEN_AHEAD) {
      seen.load(visible_row(p, head, m0) + key0, visible_row_stride(p), rows, keys, lane);
    }
  }
  __device__ __forceinline__ void start(const Params& p, int warp_key, int lane) {
    if constexpr (STAGED_ADDENDS) {
      const bool alone = addend_queries(p) > 1;
      place = AddendTile::place_transposed(alone ? lane / 16 * 8 + lane % 8 : 0, warp_key, lane);
      step_bytes = alone ? 16 * AddendTile::ROW_BYTES : 0;
    }
  }
  // Those of the elements of 16 queries, before they are asked for.
  __device__ __forceinline__ void enter(int s) {
    if constexpr (STAGED_ADDENDS) ldmatrix_x4_trans(addends.x[s], at + place + s * step_bytes);
  }
  // Of element `index` of the lane's.
  __device__ __forceinline__ float addend(int index) const {
    if constexpr (!ADDENDS_AHEAD) return 0;
    const Pair pair = unpack2(addends.x[index / 8][index % 8 / 2]);
    return index % 2 ? pair.second : pair.first;
  }
};

// p = exp(s - lse), rounded, weights if WEIGHS, and what is hidden if FINDS_HIDDEN. `key` is the lane's first; lse_of(s)
// is what it needs to know of the queries of step s, as delta_of(s) below; `told` what is hidden, if TELLS_HIDDEN and
// `hides`.
template <class LseOf>
__device__ __forceinline__ void exponentiate(const Params& p, u32 (&p_rmem)[M_STEPS][4], u32 (&weight_rmem)[M_STEPS][4],
                                             HiddenBits& hidden, const float (&s_rmem)[TILE_M / 2],
                                             Ahead& ahead, LseOf lse_of, float scale, const Head& head, int m0,
                                             int key, bool hides, u32 told, int lane) {
  auto every_element = [&](auto size, const Scorer& scorer, auto hide) {
#pragma unroll
    for (int s = 0; s < M_STEPS; s++) {
      const RowValues lse = lse_of(s);
      ahead.enter(s);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float x[2], weight[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int offset = s * 16 + i / 2 * 8 + e, index = 8 * s + 2 * i + e;
          const auto known = size.template with<false>(ahead.addend(index));
          x[e] = ex2(scorer.exponent(s_rmem[index], scale, lse.x[i / 2][e], offset, i % 2 * 8, known));
          hide(x[e], i % 2, offset, index);
          const float marked = scorer.marked(x[e], offset, i % 2 * 8);
          if (WEIGHS) weight[e] = KEEPS_SCORES ? scorer.weight(x[e], s_rmem[index], offset, i % 2 * 8) : marked;
          if (DROPS) hide(weight[e], i % 2, offset, index);
          x[e] = kept(marked);
        }
        p_rmem[s][i] = pack2<Element>(x[0], x[1]);
        if (WEIGHS) weight_rmem[s][i] = pack2<Element>(weight[0], weight[1]);
      }
      if (FINDS_HIDDEN) __syncwarp();  // no more elements at a time than registers hold
    }
  };
  auto hide_bits = [&](float& x, int, int, int index) {
    if (hidden[index / 32] >> hidden_place(index) & 1) x = MARK;
  };
  if constexpr (FINDS_HIDDEN) {
    const int q0 = opaque(m0 + lane % 4 * 2) & ~9;  // which share random bits: the compiler knows then
#pragma unroll
    for (u32& bits : hidden) bits = 0;
    if constexpr (ADDENDS_AHEAD && !STAGED_ADDENDS) ahead.addends.arrange();
    if (TELLS_HIDDEN) {
      if (hides) hidden[0] = told;
    } else if (hides) {
      const VisibleQueries queries[2] = {visible_queries(p, key, q0, head), visible_queries(p, key + 8, q0, head)};
      bool any = true;
      if constexpr (SEEN_AHEAD) {
        hidden[0] = ~ahead.seen.bits(lane);
        auto all = [](const VisibleQueries& of_key) { return of_key.by_position(0) && of_key.by_position(TILE_M - 7); };
        any = __any_sync(~0u, !(all(queries[0]) && all(queries[1])));
      }
      if (any) {
#pragma unroll
        for (int i = 0; i < TILE_M / 2; i++) {
          const int r = i / 2 % 2, offset = i / 4 * 8 + i % 2;
          const bool is_seen = SEEN_AHEAD ? queries[r].by_position(offset) : queries[r].has(offset);
          hidden[i / 32] |= u32(!is_seen) << hidden_place(i);
        }
      }
    }
    by_size(p, s_rmem, [&](auto size) { every_element(size, Scorer(p, head, q0, key), hide_bits); });
  } else if constexpr (TELLS_HIDDEN) {
    hidden[0] = told;
    by_size(p, s_rmem, [&](auto size) {
      const Scorer scorer(p, head, m0 + lane % 4 * 2, key);
      if (hides) every_element(size, scorer, hide_bits);
      else every_element(size, scorer, [](float&, int, int, int) {});
    });
  } else {
    by_size(p, s_rmem, [&](auto size) {
      if (hides) {
        const int q0 = m0 + lane % 4 * 2;
        const Scorer scorer(p, head, q0, key);
        const VisibleQueries queries[2] = {visible_queries(p, key, q0), visible_queries(p, key + 8, q0)};
        every_element(size, scorer, [&](float& x, int r, int offset, int) {
          if (!queries[r].has(offset)) x = 0;
        });
      } else {
        every_element(size, Scorer(p, head, m0 + lane % 4 * 2, key), [](float&, int, int, int) {});
      }
    });
  }
}

// ds = p * (dp - delta), and whatever else scores were made with, in dp_rmem; from p as it was rounded, or the weights.
template <class LoadP, class DeltaOf>
__device__ __forceinline__ void make_ds(const Params& p, float (&dp_rmem)[TILE_M / 2], LoadP load_p,
                                        DeltaOf delta_of, const TileValues& lse_smem, const Head& head, int m0, int key,
                                        int lane) {
  const Scorer scorer(p, head, m0 + lane % 4 * 2, key);
#pragma unroll
  for (int s = 0; s < M_STEPS; s++) {
    const RowValues delta = delta_of(s);
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
        if constexpr (KEEPS_SCORES) {
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
    if (hidden[i / 32] >> hidden_place(i) & 1) ds_rmem[i] = 0;
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

// Zeros in the same place.
template <int CHUNKS>
__device__ __forceinline__ void zero_ds(Element (&ds_smem)[CHUNKS][TILE_N][CHUNK], int row, int lane) {
  constexpr int WARP_UNITS = WARP_KEYS * UNITS;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
    for (int i = lane; i < WARP_UNITS; i += WARP) {
      st_shared_v4(smem_u32(ds_smem[c][row]) + i * UNIT_BYTES, {0, 0, 0, 0});
    }
  }
}
