// Backward attention with mma.sync, for every GPU from Ampere on. With p = exp(s - lse) and delta = rowsum(do * o):
//   dv = pT do     dp = do vT     ds = p (dp - delta)     dq = scale ds k     dk = scale dsT q
//
// A CTA owns TILE_N keys of one kv head and walks, for every query head of its group, the query tiles that see them.
// dk and dv stay in registers throughout; dq is added to an fp32 array in global memory.
//
//              queries ->   tile (TILE_M)         scores are computed transposed, keys as the rows of the product:
//            +-----------+-----------+            the accumulators of pT and dsT are, as they lie, the A operands of
//   keys     |           | pT  |     |   TILE_N   dv and dk. A warp owns TILE_N / (half the warps) keys, all queries.
//            +-----------+-----------+
//
// Half of the warps (role 0) compute p and dv, the other half (role 1) ds and dk, so that each holds one gradient and
// has a long way to go between barriers; all share dq. Step i of the walk, i = -1 .. tiles, works on three tiles:
//
//   role 0   pT = 2^(k q[i+1]T scale - lse)   dv += pT do[i+1] ------->  dq[i-1] += ds[i-1] k        load tile i+2
//   role 1   dq[i-1] += ds[i-1] k ------>  dpT = v do[i]T   dsT = pT (dpT - delta)   dk += dsT q[i]  (all)
//            --------------------------------------------------------------------------------- barrier, next step
//
// The products of one step do not depend on each other, so one warp's tensor work covers the other's exponentials and
// atomics. Where a lane cannot hold the gradients of its warp's keys (head_dim > 128), COLUMN_SPLIT = 2 warps share
// their keys: each computes the scores of its own and accumulates both warps' gradients in every other 16 columns.
//
// Shared memory (struct Smem): k, v; rings of three query tiles (q, do, lse, delta: read, read, arriving) and of three
// pT, of which role 0 fills one, role 1 turns one into dsT in place and reads one for dq. dk, dv are staged over k, v.
#include "bwd_sm80.cuh"
#include "score.cuh"
#include "softmax.cuh"

constexpr int RING = cfg::STAGES;  // query tiles and pT in smem

enum Barrier { STEP = 1, ROLE_0, PAIR };  // PAIR + i: the warps that share keys, in either role

template <int VALUE> struct Int { static constexpr int value = VALUE; };
struct alignas(8) Pair { float first, second; };  // of two neighbouring queries

struct Smem {
  Element k[TILE_N * TILE_D];               // later dk
  Element v[TILE_N * TILE_DV];              // later dv
  Element q[RING][TILE_M * TILE_D];
  Element dout[RING][TILE_M * TILE_DV];
  Element pt[RING][TILE_N * TILE_M];        // pT, then dsT
  Pair lse[RING][TILE_M / 2];               // in units of log2
  Pair delta[RING][TILE_M / 2];
  alignas(16) int nonfinite_at[RING];       // the last step that found inf or NaN in q or do of the slot
  bool made_finite;                         // whether dv needs add_nonfinite_to_dv
};
static_assert(sizeof(Smem) == cfg::SMEM_BYTES, "tiles.py and Smem disagree");
static_assert(RING == 3, "tiles i - 1 (then i + 2), i and i + 1");
static_assert(2 * TILE_M <= NUM_THREADS, "a thread fetches one lse or delta");

// x, which is the same in all lanes, so that the compiler knows it.
__device__ __forceinline__ int uniform(int x) { return redux_or(x); }

// A query tile of the walk, and in which slot of the rings it is.
struct QueryTile {
  QueryVisit visit;
  int slot;
  __device__ __forceinline__ int m0() const { return visit.tile * TILE_M; }
};

extern "C" __global__ void __launch_bounds__(cfg::NUM_THREADS, cfg::MIN_CTAS)
bwd_sm80(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int thread = threadIdx.x, lane = thread % 32;
  const int warp = uniform(thread / 32);
  // Key tiles of a head follow each other: they share its queries in L2. Those with most queries come first (causal),
  // but not where they wait for each other's sums: the first to reach a query tile are then the last key tiles that it
  // sees, and a CTA may wait only for smaller blockIdx, which start before it.
  Own<VARLEN> own(params);
  const Params& p = own.p;
  SequenceTile key_tile;
  if constexpr (VARLEN) {
    if (!find_tile<BY_KEYS, TILE_N>(own, params, blockIdx.x, p.num_heads_kv, key_tile)) return;
  } else {
    const u32 head_index = blockIdx.x / u32(p.num_n_blocks), place = blockIdx.x - head_index * p.num_n_blocks;
    key_tile = {int(head_index / u32(p.num_heads_kv)), int(head_index % u32(p.num_heads_kv)), int(place),
                p.num_n_blocks};
  }
  const int n_block = uniform(cfg::DETERMINISTIC ? key_tile.blocks - 1 - key_tile.block : key_tile.block);
  const int batch = uniform(key_tile.batch), kv_head = uniform(key_tile.head);
  const int n0 = n_block * TILE_N, keys = p.seqlen_k - n0;
  const QueryWalk queries(p, batch, kv_head, n0);
  const int tiles = queries.visits;
  const QueryVisit start = queries.start(p);
  auto after = [&](QueryVisit visit) {
    queries.advance(p, visit);
    return visit;
  };
  auto hides = [&](const QueryTile& tile) { return queries.hides(tile.visit); };

  const bool role1 = warp >= ROLE_WARPS;
  const int role_warp = warp % ROLE_WARPS, part = role_warp % SPLIT;
  const int key0 = role_warp * WARP_KEYS, other_key0 = (role_warp ^ (SPLIT - 1)) * WARP_KEYS;
  const int dq_part = warp % DQ_D_WARPS, dq_row = warp / DQ_D_WARPS * DQ_M_BLOCKS * BLOCK;

  // The thread, for what is derived from it on the spot rather than kept in registers all along.
  auto fresh_thread = [&] { return int(opaque(threadIdx.x) % NUM_THREADS); };
  auto fresh_lane = [&] { return fresh_thread() % 32; };

  // Where the next query tile to be requested lies.
  const int first_head = queries.head(start).head, first_row = start.tile * TILE_M;
  struct { const Element *q, *dout; const float *lse, *delta; } source = {
    p.q + q_begin(p, batch, p.q_stride) + first_head * p.q_stride[2] + first_row * p.q_stride[1],
    p.dout + q_begin(p, batch, p.dout_stride) + first_head * p.dout_stride[2] + first_row * p.dout_stride[1],
    p.lse + rows_begin(p, batch, first_head, p.lse_stride) + first_row * p.lse_stride[2],
    p.delta + rows_begin(p, flat_head(p, batch, first_head)) + first_row};
  // Requests it; which one comes then. Its lse and delta are for the threads that requested them to finish.
  auto load_queries = [&](const QueryTile& tile) {
    const int thread = fresh_thread(), row = thread % TILE_M, rows = p.seqlen_q - tile.m0();
    const GmemTile<const Element> q = {source.q, p.q_stride[1], p.q_stride[3], rows, p.head_dim};
    const GmemTile<const Element> dout = {source.dout, p.dout_stride[1], p.dout_stride[3], rows, p.head_dim_v};
    load_tile<TILE_M, TILE_D, cfg::WIDE_Q, RAGGED_D, true, NUM_THREADS>(smem.q[tile.slot], q, thread);
    load_tile<TILE_M, TILE_DV, cfg::WIDE_DOUT, RAGGED_D, true, NUM_THREADS>(smem.dout[tile.slot], dout, thread);
    if (thread < TILE_M) {
      cp_async<4>(smem_u32(smem.lse[tile.slot]) + row * 4, source.lse + row * p.lse_stride[2], row < rows);
    } else if (thread < 2 * TILE_M) {
      cp_async<4>(smem_u32(smem.delta[tile.slot]) + row * 4, source.delta + row, row < rows);
    }
    cp_async_commit();
    const QueryVisit next = after(tile.visit);
    const int heads = next.group_head - tile.visit.group_head, rows_on = (next.tile - tile.visit.tile) * TILE_M;
    source.q += heads * p.q_stride[2] + rows_on * p.q_stride[1];
    source.dout += heads * p.dout_stride[2] + rows_on * p.dout_stride[1];
    source.lse += heads * p.lse_stride[1] + rows_on * p.lse_stride[2];
    source.delta += heads * (i64)(VARLEN ? p.rows_q : p.seqlen_q) + rows_on;
  };
  // lse as origins of exponents. A query that does not exist sees no key.
  auto finish_rows = [&](const QueryTile& tile) {
    if (thread >= TILE_M) return;
    float& lse = reinterpret_cast<float*>(smem.lse[tile.slot])[thread];
    lse = lse_origin(tile.m0() + thread < p.seqlen_q ? lse : NEG_INF);
  };
  auto load_kv = [&] {
    const GmemTile<const Element> k = {p.k + k_begin(p, batch, p.k_stride) + kv_head * p.k_stride[2] + n0 * p.k_stride[1],
                                       p.k_stride[1], p.k_stride[3], keys, p.head_dim};
    const GmemTile<const Element> v = {p.v + k_begin(p, batch, p.v_stride) + kv_head * p.v_stride[2] + n0 * p.v_stride[1],
                                       p.v_stride[1], p.v_stride[3], keys, p.head_dim_v};
    load_tile<TILE_N, TILE_D, cfg::WIDE_K, RAGGED_D, true, NUM_THREADS>(smem.k, k, thread);
    load_tile<TILE_N, TILE_DV, cfg::WIDE_V, RAGGED_D, true, NUM_THREADS>(smem.v, v, thread);
  };

  // Calls step(i, tile i-1, tile i, tile i+1, dirty) for i = -1 .. tiles, behind one barrier each, with tile i+2 on its
  // way. dirty: there are keys that queries of tile i+1 do not see, and inf or NaN in q or do.
  auto walk = [&](auto step) {
    QueryTile previous = {{}, 1}, current = {{}, 2}, next = {start, 0};
    for (int i = -1; i <= tiles; i++) {
      const bool arrived = i + 1 < tiles, mixed = arrived && hides(next);
      cp_async_wait<0>();
      if (arrived) finish_rows(next);
      if (mixed) {
        const int thread = fresh_thread();
        if (loaded_nonfinite<TILE_M, TILE_D, NUM_THREADS>(smem.q[next.slot], thread) ||
            loaded_nonfinite<TILE_M, TILE_DV, NUM_THREADS>(smem.dout[next.slot], thread)) {
          atomicMax(&smem.nonfinite_at[next.slot], i);
        }
      }
      named_barrier_sync(STEP, NUM_THREADS);
      const bool dirty = mixed && smem.nonfinite_at[next.slot] == i;
      const QueryTile requested = {after(next.visit), previous.slot};
      if (i + 2 < tiles) load_queries(requested);
      step(i, previous, current, next, dirty);
      previous = current, current = next, next = requested;
    }
  };
  // Of element e of accumulator (n, m, half) of pT or dsT: its pair of queries, its query within the tile, its key.
  auto pair = [&](int m, int half) { return (m * BLOCK + half * 8) / 2 + lane % 4; };
  auto query = [&](int m, int half, int e) { return pair(m, half) * 2 + e % 2; };
  auto key = [&](int n, int e) { return n0 + key0 + n * BLOCK + e / 2 * 8 + lane / 4; };
  auto head_of = [&](const QueryTile& tile) { return queries.head(tile.visit); };
  auto scorer_of = [&](const QueryTile& tile) {  // of this lane's first element
    return Scorer(p, head_of(tile), tile.m0() + query(0, 0, 0), key(0, 0));
  };
  auto hide = [&](const QueryTile& tile, Scores& x) {
#pragma unroll
    for (int i = 0; i < KEY_BLOCKS * 2; i++) {
      const int n = i / 2, row = i % 2 * 2;  // of the accumulators: elements row and row + 1 are of one key
      const VisibleQueries queries =
          visible_queries(p, key(n, row), tile.m0() + query(0, 0, 0), head_of(tile));
#pragma unroll
      for (int j = 0; j < Q_BLOCKS * 4; j++) {
        const int m = j / 4, half = j / 2 % 2, e = j % 2;
        if (!queries.has(m * BLOCK + half * 8 + e)) x[n][m][half][row + e] = 0;
      }
    }
  };

  if (thread == 0) {
    for (int& step : smem.nonfinite_at) step = -2;
    smem.made_finite = false;
  }
  bool k_dirty = false;  // there are queries that do not see all keys, and inf or NaN in k
  if (tiles > 0) {
    load_kv();
    load_queries({start, 0});
    cp_async_wait<0>();
    k_dirty = __syncthreads_or(queries.hides_some() && loaded_nonfinite<TILE_N, TILE_D, NUM_THREADS>(smem.k, thread));
  }

  // Element (row, col) of a tile in smem.
  auto element = [&](auto cols, Element* tile, int row, int col) -> Element& {
    return tile[Swizzle<decltype(cols)::value>::offset(row, col) / sizeof(Element)];
  };
  // What is hidden has no influence, but 0 * inf and 0 * NaN are NaN. So where tiles with hidden keys hold inf or NaN
  // (hardly ever), dq skips what is hidden, element by element, and q and do are made finite for the products with dsT
  // and pT: s and delta have already spread NaN over all that sees them, but for dv, which is made good at the end.
  auto add_dq_exactly = [&](const QueryTile& tile, float* dst, int row_stride, int rows) {
#pragma unroll 1
    for (int i = fresh_thread(); i < TILE_M * TILE_D; i += NUM_THREADS) {
      const int m = i / TILE_D, d = i % TILE_D;
      float sum = 0;
#pragma unroll 1
      for (int n = 0; n < TILE_N; n++) {
        if (!visible(p, tile.m0() + m, n0 + n, head_of(tile))) continue;
        const float ds = to_real(element(Int<TILE_M>(), smem.pt[tile.slot], n, m));
        sum += ds * to_real(element(Int<TILE_D>(), smem.k, n, d));
      }
      if (m < rows && d < p.head_dim) red_add(dst + m * row_stride + d, sum);
    }
  };
  auto make_finite = [&](Element* tile, int count) {  // by role 0
#pragma unroll 1
    for (int i = fresh_thread(); i < count; i += ROLE_WARPS * 32) {
      if (nonfinite<Element>(tile[i].bits)) tile[i] = Element{0};
    }
  };
  auto add_nonfinite_to_dv = [&] {  // by role 0, to dv staged over v: do that is inf or NaN makes dv so
#pragma unroll 1
    for (int i = fresh_thread(); i < TILE_N * TILE_DV; i += ROLE_WARPS * 32) {
      const int n = i / TILE_DV, d = i % TILE_DV;
      Element& dv = element(Int<TILE_DV>(), smem.v, n, d);
      float sum = to_real(dv);
      QueryTile tile = {start, 0};
      for (int x = 0; d < p.head_dim_v && x < tiles; x++, tile.visit = after(tile.visit)) {
        const int m0 = tile.m0();
        const Head at = head_of(tile);
        const Element* dout = p.dout + q_begin(p, batch, p.dout_stride) + at.head * p.dout_stride[2];
        for (int m = m0; hides(tile) && m < min(m0 + TILE_M, p.seqlen_q); m++) {
          const Element x = dout[m * p.dout_stride[1] + d * p.dout_stride[3]];
          if (nonfinite<Element>(x.bits) && visible(p, m, n0 + n, at)) sum += to_real(x);
        }
      }
      dv = Dtype<Element>::from_real(sum);
    }
  };

  // dq[tile] += ds k. DETERMINISTIC: when all warps of all key tiles behind this one have added theirs.
  auto add_dq = [&](const QueryTile& tile) {
    const int lane = fresh_lane();
    QueryGradient dq;
    multiply_ds_k(dq, block_at<TILE_M>(lane_address<TILE_M, COLS_FIRST>(smem.pt[tile.slot], 0, lane), 0, dq_row),
                  first_block<TILE_D>(smem.k, dq_part, lane), dq_part);
    const Head at = head_of(tile);
    const i64 head = flat_head(p, batch, at.head);
    const int m0 = tile.m0(), rows = p.seqlen_q - m0, row_stride = RAGGED_D ? p.head_dim : TILE_D;
    float* dst = p.dq_accum + (rows_begin(p, head) + m0) * row_stride;  // the tile
    float* warp_dst = dst + dq_row * row_stride + dq_part * BLOCK;    // this warp's part of it
    int* turn = p.semaphore + flag_at(p, head, tile.visit.tile);
    if (cfg::DETERMINISTIC) {
      const int before = KeyWalk(p, at, m0).behind(n_block) * WARPS;
      if (lane == 0) while (ld_acquire(turn) < before) {}
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; TRADE && i < DQ_M_BLOCKS * DQ_COLS; i++) trade_columns(dq[i / DQ_COLS][i % DQ_COLS], lane);
    const int cols = (RAGGED_D ? p.head_dim : TILE_D) - dq_part * BLOCK;
    if (k_dirty && hides(tile)) add_dq_exactly(tile, dst, row_stride, rows);
    else if (rows >= TILE_M) add_rows<false>(warp_dst, row_stride, rows - dq_row, cols, dq, lane);
    else add_rows<true>(warp_dst, row_stride, rows - dq_row, cols, dq, lane);
    if (cfg::DETERMINISTIC) {
      __syncwarp();
      if (lane == 0) red_release_add(turn, 1);
    }
  };

  // This warp's pT or dsT, A operands, into its place in smem.
  auto store_pt = [&](const QueryTile& tile, const Operands& pt) {
    const int lane = fresh_lane();
    const u32 first = smem_u32(smem.pt[tile.slot]) + Swizzle<TILE_M>::offset(key0 + lane / 4, lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < KEY_BLOCKS * Q_BLOCKS * 4; i++) {
      const int n = i / 4 % KEY_BLOCKS, m = i / 4 / KEY_BLOCKS;
      st_shared(block_at<TILE_M>(first, n * BLOCK + i % 2 * 8, m * BLOCK + i / 2 % 2 * 8), pt[n][m][i % 4]);
    }
  };
  auto share_pt = [&] { if (SPLIT > 1) named_barrier_sync(PAIR + warp / SPLIT, SPLIT * 32); };

  if (!role1) {
    float dv[GRAD_BLOCKS][DV_COLS][2][4] = {};
    Kept<KEPT_D> k_kept;
    keep<TILE_D, KEPT_D>(k_kept, lane_address<TILE_D, ROWS_FIRST>(smem.k, key0, lane));
    const float scale = exponent_scale(p);

    auto probabilities = [&](const QueryTile& tile, Operands& pt) {
      const int lane = fresh_lane();
      Scores s;
      multiply_rows<TILE_D, KEPT_D>(s, k_kept, lane_address<TILE_D, ROWS_FIRST>(smem.k, key0, lane),
                                    lane_address<TILE_D, COLS_FIRST>(smem.q[tile.slot], 0, lane));
      const Scorer scorer = scorer_of(tile);
      by_size(p, s, [&](auto size) {
#pragma unroll
        for (int m = 0; m < Q_BLOCKS; m++) {
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const Pair lse = smem.lse[tile.slot][pair(m, half)];
#pragma unroll
            for (int i = 0; i < KEY_BLOCKS * 4; i++) {
              const int n = i / 4, e = i % 4;
              float& x = s[n][m][half][e];
              x = scorer.score(x, m * BLOCK + half * 8 + e % 2, n * BLOCK + e / 2 * 8, size);
              x = ex2(fmaf(x, scale, -(e % 2 ? lse.second : lse.first)));
            }
          }
        }
      });
      if (hides(tile)) hide(tile, s);
#pragma unroll
      for (int i = 0; i < KEY_BLOCKS * Q_BLOCKS * 8; i++) {
        const int n = i / 8 / Q_BLOCKS, m = i / 8 % Q_BLOCKS, half = i / 4 % 2, e = i % 4;
        float& x = s[n][m][half][e];
        x = scorer.marked(x, m * BLOCK + half * 8 + e % 2, n * BLOCK + e / 2 * 8);
      }
#pragma unroll
      for (int m = 0; m < Q_BLOCKS; m++) {
#pragma unroll
        for (int n = 0; n < KEY_BLOCKS; n++) accumulators_to_a<Element>(pt[n][m], s[n][m][0], s[n][m][1]);
      }
      store_pt(tile, pt);
#pragma unroll
      for (int i = 0; i < KEY_BLOCKS * Q_BLOCKS * 4; i++) {
        u32& pair = pt[i / 4 / Q_BLOCKS][i / 4 % Q_BLOCKS][i % 4];
        pair = kept(pair);
      }
      share_pt();
    };
    walk([&](int i, const QueryTile& previous, const QueryTile&, const QueryTile& next, bool dirty) {
      if (i + 1 < tiles) {
        Operands pt;
        probabilities(next, pt);
        if (dirty) {
          named_barrier_sync(ROLE_0, ROLE_WARPS * 32);
          make_finite(smem.q[next.slot], TILE_M * TILE_D);
          make_finite(smem.dout[next.slot], TILE_M * TILE_DV);
          named_barrier_sync(ROLE_0, ROLE_WARPS * 32);
          if (fresh_thread() == 0) smem.made_finite = true;
        }
        const int lane = fresh_lane();
        accumulate<TILE_DV>(dv, pt, lane_address<TILE_M, ROWS_FIRST>(smem.pt[next.slot], other_key0, lane),
                            first_block<TILE_DV>(smem.dout[next.slot], part, lane), part,
                            [](u32 pair) { return kept(pair); });
      }
      if (i > 0) add_dq(previous);
    });
    named_barrier_sync(STEP, NUM_THREADS);
    stage_gradient<TILE_DV>(smem.v, dv, kept_scale(p), key0, other_key0, part, lane);
    if (smem.made_finite) {
      named_barrier_sync(ROLE_0, ROLE_WARPS * 32);
      add_nonfinite_to_dv();
    }
  } else {
    float dk[GRAD_BLOCKS][DK_COLS][2][4] = {};
    Kept<KEPT_DV> v_kept;
    keep<TILE_DV, KEPT_DV>(v_kept, lane_address<TILE_DV, ROWS_FIRST>(smem.v, key0, lane));

    auto score_gradients = [&](const QueryTile& tile, Operands& dst) {
      const int lane = fresh_lane();
      const u32 pt_lane = lane_address<TILE_M, ROWS_FIRST>(smem.pt[tile.slot], key0, lane);
      Scores dp;
      multiply_rows<TILE_DV, KEPT_DV>(dp, v_kept, lane_address<TILE_DV, ROWS_FIRST>(smem.v, key0, lane),
                                      lane_address<TILE_DV, COLS_FIRST>(smem.dout[tile.slot], 0, lane));
      Scores s;  // role 0 has them, too, but there is no room to hand them over
      if constexpr (KEEPS_SCORES) {
        Kept<0> none;
        multiply_rows<TILE_D, 0>(s, none, lane_address<TILE_D, ROWS_FIRST>(smem.k, key0, lane),
                                 lane_address<TILE_D, COLS_FIRST>(smem.q[tile.slot], 0, lane));
      }
      const Scorer scorer = scorer_of(tile);
#pragma unroll
      for (int m = 0; m < Q_BLOCKS; m++) {
        u32 pt[KEY_BLOCKS][4];
#pragma unroll
        for (int n = 0; n < KEY_BLOCKS; n++) ldmatrix_x4(pt[n], block_at<TILE_M>(pt_lane, n * BLOCK, m * BLOCK));
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const Pair delta = smem.delta[tile.slot][pair(m, half)], lse = smem.lse[tile.slot][pair(m, half)];
#pragma unroll
          for (int i = 0; i < KEY_BLOCKS * 4; i++) {
            const int n = i / 4, e = i % 4;
            float& x = dp[n][m][half][e];
            const float prob = to_real(Element{(unsigned short)(pt[n][half * 2 + e / 2] >> (e % 2 * 16))});
            const int q_offset = m * BLOCK + half * 8 + e % 2, kv_offset = n * BLOCK + e / 2 * 8;
            x = scorer.gradient(prob, x, e % 2 ? delta.second : delta.first, e % 2 ? lse.second : lse.first, q_offset,
                                kv_offset, KEEPS_SCORES ? s[n][m][half][e] : 0);
          }
        }
      }
      if (hides(tile)) hide(tile, dp);
      __syncwarp();  // all lanes have read pT, dsT takes its place
#pragma unroll
      for (int m = 0; m < Q_BLOCKS; m++) {
#pragma unroll
        for (int n = 0; n < KEY_BLOCKS; n++) accumulators_to_a<Element>(dst[n][m], dp[n][m][0], dp[n][m][1]);
      }
      store_pt(tile, dst);
      share_pt();
    };
    walk([&](int i, const QueryTile& previous, const QueryTile& current, const QueryTile&, bool) {
      if (i > 0) add_dq(previous);
      if (i >= 0 && i < tiles) {
        Operands dst;
        score_gradients(current, dst);
        const int lane = fresh_lane();
        accumulate<TILE_D>(dk, dst, lane_address<TILE_M, ROWS_FIRST>(smem.pt[current.slot], other_key0, lane),
                           first_block<TILE_D>(smem.q[current.slot], part, lane), part,
                           [](u32 pair) { return pair; });
      }
    });
    named_barrier_sync(STEP, NUM_THREADS);
    stage_gradient<TILE_D>(smem.k, dk, p.softmax_scale, key0, other_key0, part, lane);
  }
  __syncthreads();
  const GmemTile<Element> dk = {p.dk + k_begin(p, batch, p.dk_stride) + kv_head * p.dk_stride[2] + n0 * p.dk_stride[1],
                                p.dk_stride[1], p.dk_stride[3], keys, p.head_dim};
  const GmemTile<Element> dv = {p.dv + k_begin(p, batch, p.dv_stride) + kv_head * p.dv_stride[2] + n0 * p.dv_stride[1],
                                p.dv_stride[1], p.dv_stride[3], keys, p.head_dim_v};
  store_tile<TILE_N, TILE_D, cfg::WIDE_DK, RAGGED_D, NUM_THREADS>(dk, smem.k, thread);
  store_tile<TILE_N, TILE_DV, cfg::WIDE_DV, RAGGED_D, NUM_THREADS>(dv, smem.v, thread);
}
