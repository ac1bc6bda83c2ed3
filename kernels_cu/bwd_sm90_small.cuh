// The Hopper backward's schedule for head_dim up to 128: consumers divide the keys.
//
//              queries ->   tile (TILE_M)         Scores are computed transposed, keys as the rows of the products: as
//            +-----------+-----------+            they lie, the accumulators of pT and dsT are the operands a of dv and
//   keys     |           | pT  |     |   TILE_N   dk. A consumer owns 64 keys, all queries. Only ds goes through shared
//            +-----------+-----------+            memory: dq sums over the keys of all consumers.
//
//   warps        0        produce tiles    k, v once a key tile; q, do, as far ahead as the ring reaches, by TMA
//                1, 2     produce values   lse, delta
//                3        check keys       for inf and NaN; pass turns on
//   warpgroups   1        accumulate dq    dq += ds k, straight from registers to global memory, at its own pace: its
//                                          products and adds fill what the consumers leave of tensor cores and time
//                2..      consume          everything else
//
//   step j of a consumer
//     tensor core   dp = v do[j]T | dv += pT do[j]          | dk += dsT q[j], s[j+1] = k q[j+1]T | (others)
//     other pipes                 | dsT = pT (dpT - delta)  |                                    | pT[j+1] = exp(...)
//
// Shared memory is what binds: wgmma takes most of what it can give, and who loads from it, or waits until it has
// stored, waits long. So lse and delta are loaded, and ds is handed over, under products that need neither.
//
// No product is in flight from one step to the next, and all code of a step is straight: else the assembler serialises.
// So the last step also multiplies, for nothing. p is rounded before dsT, and dsT takes the registers of pT once dv is
// done: dk, dv, one score tile and one operand are what registers hold.
//
// Shared memory (struct Smem): k, v; a ring of STAGES q, do, lse, delta, and rows of a bias; two ds. Each buffer has a
// "full" and an "empty" mbarrier; `empty` is of a whole stage.
#pragma once
#include "bwd_sm90_store.cuh"

namespace keys_divided {

constexpr int CONSUMERS = TILE_N / WG_KEYS;

// Whether lse and delta come to registers under products. Where elements are treated one by one, too few are left.
constexpr bool VALUES_EARLY = !FINDS_HIDDEN && !STAGED_ADDENDS && !WEIGHS;

// Whether a consumer passes over tiles that are hidden from all of its keys: at the ends of a band. It then waits for the
// tile behind while it still holds the one before.
constexpr bool PASSES_OVER = BOUND_LEFT && !LISTS_TILES && cfg::PING_PONG && TILE_M == WG_KEYS && STAGES > 2;

struct Smem : Addends<STAGED_ADDENDS> {
  alignas(1024) Element k[D_CHUNKS][TILE_N][CHUNK];
  Element v[DV_CHUNKS][TILE_N][CHUNK];
  Element q[STAGES][D_CHUNKS][TILE_M][CHUNK];
  Element dout[STAGES][DV_CHUNKS][TILE_M][CHUNK];
  Element ds[DS_BUFFERS][TILE_M / CHUNK][TILE_N][CHUNK];
  TileValues lse[STAGES], delta[STAGES];
  u64 k_full, k_checked, k_empty, v_full, v_empty;
  u64 q_full[STAGES], dout_full[STAGES], empty[STAGES];  // lse, delta and addends arrive with do
  u64 values_full[STAGES];                               // and before it for who loads do, if HIDES_KEYS
  u64 ds_full[DS_BUFFERS], ds_empty[DS_BUFFERS];
  u64 added, passed;  // to dq, and to who adds next, if DETERMINISTIC
  Names names;
  int k_nonfinite, lse_nonfinite[STAGES], delta_nonfinite[STAGES], dout_made_finite[STAGES];
  Told<TELLS_VISITS || TELLS_HIDDEN> told;
};

// What a consumer visits of the tiles that are there for its key tile: of each head's, it passes over the first, or the
// last.
template <bool> struct Visited {
  QueryWalk walk;
  bool front = false, back = false;
  bool in_turn = true;  // where one passes over the first and the other over the last, they take as many turns as it is

  __device__ __forceinline__ Visited(const Params& p, const Work& tile, int consumer) : walk(tile.queries) {
    const TileRange& all = tile.queries.range;
    const QueryWalk first = tile.queries.of<WG_KEYS>(p, tile.n0());
    const QueryWalk second = tile.queries.of<WG_KEYS>(p, tile.n0() + WG_KEYS);
    in_turn = first.range.end == all.end || second.range.begin == all.begin;
    walk = consumer ? second : first;
    front = walk.range.begin != all.begin, back = walk.range.end != all.end;
  }
  __device__ __forceinline__ const QueryWalk& of(const Work&) const { return walk; }
};
template <> struct Visited<false> {
  static constexpr bool front = false, back = false, in_turn = false;
  __device__ __forceinline__ Visited(const Params&, const Work&, int) {}
  __device__ __forceinline__ const QueryWalk& of(const Work& tile) const { return tile.queries; }
};

constexpr int TURN_THREADS = CONSUMERS * WARPGROUP;

template <class Smem>
__device__ __forceinline__ void produce_tiles(Own<VARLEN>& own, Smem& smem, int lane) {
  const Params& p = own.p;
  Ring<STAGES> stage;
  [[maybe_unused]] Ring<TOLD_VISITS> told;
  Ring<1> keys;
  for_each_step<true>(own, smem.names, lane, [&](const Work& tile, const QueryVisit& visit, bool first, bool) {
    const int at = stage.index, m0 = visit.tile * TILE_M, head = tile.queries.head(visit).head;
    await_as_warp(&smem.empty[at], stage.parity ^ 1);
    if constexpr (TELLS_VISITS) {
      if (lane == 0) smem.told.tell(told.index, visit, tile.queries.hides(visit));
      told.advance();
    }
    if (must_be_made_finite(smem, tile, visit, at, stage.parity, lane)) {
      load_finite(p, smem.q[at], p.q, p.q_stride, p.head_dim, &smem.q_full[at], m0, head, tile.batch, nullptr, lane);
      load_finite(p, smem.dout[at], p.dout, p.dout_stride, p.head_dim_v, &smem.dout_full[at], m0, head, tile.batch,
                  &smem.dout_made_finite[at], lane);
    } else if (lane == 0) {
      if (HIDES_KEYS) smem.dout_made_finite[at] = 0;
      load_tile(smem.q[at], own.all().tma_q, &smem.q_full[at], q_row(p, m0), head, map_batch(tile));
      load_tile(smem.dout[at], own.all().tma_dout, &smem.dout_full[at], q_row(p, m0), head, map_batch(tile));
    }
    if constexpr (STAGED_ADDENDS) {
      if (lane == 0) load_addends(own.all(), smem.addends[at], &smem.dout_full[at], {tile.batch, head}, m0, tile.n0());
    }
    stage.advance();
    if (!first) return;
    await_as_warp(&smem.v_empty, keys.parity ^ 1);
    if (lane == 0) load_tile(smem.v, own.all().tma_v, &smem.v_full, k_row(p, tile.n0()), tile.head_kv, map_batch(tile));
    await_as_warp(&smem.k_empty, keys.parity ^ 1);
    if (lane == 0) load_tile(smem.k, own.all().tma_k, &smem.k_full, k_row(p, tile.n0()), tile.head_kv, map_batch(tile));
    keys.advance();
  });
}

template <class Smem>
__device__ __forceinline__ void consume(Own<VARLEN>& own, Smem& smem, int consumer, int lane) {
  const Params& p = own.p;
  const int warp = threadIdx.x / WARP % WG_WARPS, warp_key = consumer * WG_KEYS + warp * WARP_KEYS;
  const u64 k = descriptor_k_major(smem_u32(smem.k) + consumer * WG_KEYS * CHUNK_ROW_BYTES);
  const u64 v = descriptor_k_major(smem_u32(smem.v) + consumer * WG_KEYS * CHUNK_ROW_BYTES);
  const float scale = exponent_scale(p);
  float dk_rmem[TILE_D / 2], dv_rmem[TILE_DV / 2], s_rmem[TILE_M / 2], dp_rmem[TILE_M / 2];
  u32 a_rmem[M_STEPS][4];       // pT, then dsT
  HiddenBits hidden;
  Ahead ahead;
  RowValues lse_rmem[M_STEPS], delta_rmem[M_STEPS];  // if VALUES_EARLY
  u32 weight_rmem[M_STEPS][4];  // if WEIGHS: dv is on its way with pT when weights are needed
  Ring<STAGES> stage;
  Ring<DS_BUFFERS> buffer;
  Ring<TOLD_VISITS> told;
  Ring<1> keys;
  ahead.start(own.all(), warp_key, lane);

  auto multiply_scores = [&](int at) {
    multiply_keys_queries<D_STEPS, TILE_N>(s_rmem, k, descriptor_k_major(smem_u32(smem.q[at])));
  };
  auto multiply_dp_and_dv = [&](int at) {
    wgmma_hold(a_rmem);
    wgmma_hold(dv_rmem);
    wgmma_fence();
    multiply_keys_queries<DV_STEPS, TILE_N>(dp_rmem, v, descriptor_k_major(smem_u32(smem.dout[at])));
    accumulate_over_queries<TILE_DV>(dv_rmem, a_rmem,
                                     descriptor_mn_major(smem_u32(smem.dout[at]), sizeof(smem.dout[0][0])));
    wgmma_commit();
  };
  auto p_of_step = [&](u32 (&p_rmem)[4], int s) {
#pragma unroll
    for (int i = 0; i < 4; i++) p_rmem[i] = WEIGHS ? weight_rmem[s][i] : a_rmem[s][i];
  };
  auto load_early = [&](RowValues (&values_rmem)[M_STEPS], const TileValues& values_smem) {
    if constexpr (VALUES_EARLY) {
#pragma unroll
      for (int s = 0; s < M_STEPS; s++) values_rmem[s] = values_smem[s][lane % 4];
    }
  };
  auto round_ds = [&] {
#pragma unroll
    for (int s = 0; s < M_STEPS; s++) {
#pragma unroll
      for (int i = 0; i < 4; i++) a_rmem[s][i] = pack2<Element>(dp_rmem[8 * s + 2 * i], dp_rmem[8 * s + 2 * i + 1]);
    }
  };

  // Once q of the visit is there.
  auto told_visit = [&] {
    if constexpr (!TELLS_VISITS) return QueryVisit{};
    else return smem.told.visit(told.index);
  };
  auto hides_some_of = [&](const QueryWalk& walk, const QueryVisit& visit) {
    return TELLS_VISITS ? visit.hidden : walk.hides(visit);
  };
  auto behind = [&](bool another) {
    Ring<STAGES> at = stage;
    if (PASSES_OVER && another) at.advance();
    return at;
  };

  auto hidden_told = [&](int at, bool hides) -> u32 {
    if constexpr (!TELLS_HIDDEN) return 0;
    else return hides ? told_bits(smem.told.hidden[at][warp_key / BITS_KEYS], lane) : 0;
  };

  // What is left to do for a tile that is hidden from all of the consumer's keys: the next.
  auto pass_over = [&](bool in_turn) {
    mbarrier_wait(&smem.q_full[stage.index], stage.parity);
    mbarrier_wait(&smem.dout_full[stage.index], stage.parity);
    mbarrier_wait(&smem.ds_empty[buffer.index], buffer.parity ^ 1);
    zero_ds(smem.ds[buffer.index], warp_key, lane);
    fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&smem.ds_full[buffer.index]);
    if (lane == 0) mbarrier_arrive(&smem.empty[stage.index]);
    stage.advance();
    buffer.advance();
    if (!in_turn) return;
    named_barrier_sync(TURN + consumer, TURN_THREADS);
    named_barrier_arrive(TURN + (consumer + 1) % CONSUMERS, TURN_THREADS);
  };

  for_each_tile<false, !TELLS_VISITS>(own, smem.names, lane, [&](const Work& tile) {
    const Visited<PASSES_OVER> visited(p, tile, consumer);
    const QueryWalk& walk = visited.of(tile);
    const int steps = walk.visits, key = tile.n0() + warp_key + lane / 4;
#pragma unroll
    for (int i = 0; i < TILE_D / 2; i++) dk_rmem[i] = 0;
#pragma unroll
    for (int i = 0; i < TILE_DV / 2; i++) dv_rmem[i] = 0;
    if (steps) {
      mbarrier_wait(&smem.k_full, keys.parity);
      const Ring<STAGES> at = behind(visited.front);
      mbarrier_wait(&smem.q_full[at.index], at.parity);
      wgmma_fence();
      multiply_scores(at.index);
      if (PASSES_OVER && visited.front) pass_over(visited.in_turn);
      mbarrier_wait(&smem.dout_full[stage.index], stage.parity);
      load_early(lse_rmem, smem.lse[stage.index]);
      wgmma_wait<0>();
      wgmma_hold(s_rmem);
      mbarrier_wait(&smem.v_full, keys.parity);
      keys.advance();
    }
    QueryVisit visit;
    if (!TELLS_VISITS) visit = walk.start(p);
    else if (steps) visit = told_visit();
    if (steps) ahead.load(p, walk.head(visit), visit.tile * TILE_M, tile.n0() + warp_key, lane);
    bool dv_lacks = false;
    for (int step = 1; step <= steps; step++) {
      const int at = stage.index, m0 = visit.tile * TILE_M;
      const bool last = step == steps;
      const Head head = walk.head(visit);
      const bool hides = hides_some_of(walk, visit);
      const bool hides_any = PASSES_OVER ? tile.queries.hides(visit) : hides;  // of both consumers' keys
      if (HIDES_KEYS && hides_any) dv_lacks |= smem.dout_made_finite[at];
      auto lse_of = [&](int s) { return VALUES_EARLY ? lse_rmem[s] : smem.lse[at][s][lane % 4]; };
      auto delta_of = [&](int s) { return VALUES_EARLY ? delta_rmem[s] : smem.delta[at][s][lane % 4]; };
      if constexpr (STAGED_ADDENDS) ahead.at = smem_u32(&smem.addends[at]);
      exponentiate(p, a_rmem, weight_rmem, hidden, s_rmem, ahead, lse_of, scale, head, m0, key, hides,
                   hidden_told(at, hides), lane);
      multiply_dp_and_dv(at);
      load_early(delta_rmem, smem.delta[at]);
      wgmma_wait<1>();
      wgmma_hold(dp_rmem);
      if (last && lane == 0) mbarrier_arrive(&smem.v_empty);
      make_ds(p, dp_rmem, p_of_step, delta_of, smem.lse[at], head, m0, key, lane);
      if (hides) {
        if constexpr (HIDES_ANYWHERE) hide(dp_rmem, hidden);
        else hide(dp_rmem, p, m0, key, lane);
      }
      mbarrier_wait(&smem.ds_empty[buffer.index], buffer.parity ^ 1);
      wgmma_wait<0>();
      wgmma_hold(a_rmem);
      wgmma_hold(dv_rmem);
      wgmma_hold(dp_rmem);
      round_ds();
      store_ds(smem.ds[buffer.index], a_rmem, warp_key, lane);
      stage.advance();
      told.advance();

      if (cfg::PING_PONG) named_barrier_sync(TURN + consumer, TURN_THREADS);
      wgmma_hold(a_rmem);
      wgmma_hold(dk_rmem);
      wgmma_fence();
      accumulate_over_queries<TILE_D>(dk_rmem, a_rmem,
                                      descriptor_mn_major(smem_u32(smem.q[at]), sizeof(smem.q[0][0])));
      wgmma_commit();
      const bool passes_over =
          PASSES_OVER && !last && visit.tile + 1 == walk.range.end && (visited.front || visited.back);
      const Ring<STAGES> next_stage = behind(passes_over);
      if (!last) mbarrier_wait(&smem.q_full[next_stage.index], next_stage.parity);
      wgmma_fence();
      multiply_scores(last ? at : next_stage.index);
      if constexpr (SEEN_AHEAD) {
        QueryVisit next = visit;
        if (!TELLS_VISITS) walk.advance(p, next);
        else if (!last) next = told_visit();
        if (!last) ahead.load(p, walk.head(next), next.tile * TILE_M, tile.n0() + warp_key, lane);
      }
      if (cfg::PING_PONG) named_barrier_arrive(TURN + (consumer + 1) % CONSUMERS, TURN_THREADS);
      fence_proxy_async_shared();  // now that products hide how long it takes
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&smem.ds_full[buffer.index]);
      buffer.advance();
      if (passes_over) pass_over(visited.in_turn);
      if (!last) mbarrier_wait(&smem.dout_full[stage.index], stage.parity);
      load_early(lse_rmem, smem.lse[last ? at : stage.index]);
      wgmma_wait<0>();
      wgmma_hold(s_rmem);
      wgmma_hold(a_rmem);
      wgmma_hold(dk_rmem);
      if (lane == 0) mbarrier_arrive(&smem.empty[at]);
      if (!TELLS_VISITS) walk.advance(p, visit);
      else if (!last) visit = told_visit();
    }
    if (PASSES_OVER && visited.back) pass_over(visited.in_turn);
    if (steps && lane == 0) mbarrier_arrive(&smem.k_empty);
    store_gradient<TILE_DV>(p, p.dv, p.dv_stride, tile, warp_key, p.seqlen_k, p.head_dim_v, dv_rmem, kept_scale(p),
                            lane);
    if (HIDES_KEYS && dv_lacks) add_nonfinite_to_dv(p, tile, warp_key, lane);
    store_gradient<TILE_D>(p, p.dk, p.dk_stride, tile, warp_key, p.seqlen_k, p.head_dim, dk_rmem, p.softmax_scale,
                           lane);
    if (cfg::ALONE) zero_unvisited_dq(p, tile, consumer * WG_WARPS + warp, CONSUMERS * WG_WARPS, lane);
  });
}

template <class Smem> __device__ __forceinline__ void run(Own<VARLEN>& own, Smem& smem) {
  static_assert(sizeof(Smem) && cfg::NUM_THREADS == (CONSUMERS + 2) * WARPGROUP);
  const int warp = uniform(threadIdx.x / WARP), warpgroup = warp / WG_WARPS, lane = threadIdx.x % WARP;
  if (threadIdx.x == 0) {
    mbarrier_init(&smem.k_full, 1);
    mbarrier_init(&smem.k_checked, 1);
    mbarrier_init(&smem.added, WG_WARPS);
    mbarrier_init(&smem.passed, 1);
    mbarrier_init(&smem.k_empty, (CONSUMERS + 1) * WG_WARPS);
    mbarrier_init(&smem.v_full, 1);
    mbarrier_init(&smem.v_empty, CONSUMERS * WG_WARPS);
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(&smem.q_full[i], 1);
      mbarrier_init(&smem.dout_full[i], 3 + STAGED_ADDENDS);
      mbarrier_init(&smem.empty[i], CONSUMERS * WG_WARPS);
      if (HIDES_KEYS) mbarrier_init(&smem.values_full[i], 2);
    }
    for (int i = 0; i < DS_BUFFERS; i++) {
      mbarrier_init(&smem.ds_full[i], CONSUMERS * WG_WARPS);
      mbarrier_init(&smem.ds_empty[i], WG_WARPS);
    }
    smem.names.init();
    mbarrier_init_fence();
  }
  let_next_launch_start();
  __syncthreads();
  if (warpgroup == 0) {
    setmaxnreg_dec<cfg::PRODUCER_REGISTERS>();
    if (warp == 2 || (cfg::DETERMINISTIC && warp == 3)) await_launches_before();  // for delta, and turns
    auto await = [&](const Ring<STAGES>& stage) { mbarrier_wait(&smem.empty[stage.index], stage.parity ^ 1); };
    auto arrive = [&](int stage) {
      if (HIDES_KEYS) mbarrier_arrive(&smem.values_full[stage]);
      if (!TELLS_HIDDEN) mbarrier_arrive(&smem.dout_full[stage]);
    };
    // Each of the two that load values looks at half of the keys.
    [[maybe_unused]] int buffer = 0;
    auto finish = [&](const Work& tile, const QueryVisit& visit, bool first, bool last, int stage) {
      if constexpr (TELLS_HIDDEN) {
        const int finder = warp - 1, n0 = tile.n0() + finder * FOUND_KEYS, m0 = visit.tile * TILE_M;
        HiddenBlock* hidden = smem.told.hidden[stage] + finder * (FOUND_KEYS / BITS_KEYS);
        const Head at = tile.queries.head(visit);
        if constexpr (HIDDEN_AHEAD) {
          VisibleBytes& bytes = smem.told.bytes[finder];
          if (first) request_bytes(own.p, bytes, buffer, at, m0, n0, lane);
          QueryVisit next = visit;
          tile.queries.advance(own.p, next);
          if (last) cp_async_commit();
          else request_bytes(own.p, bytes, buffer ^ 1, tile.queries.head(next), next.tile * TILE_M, n0, lane);
          cp_async_wait<1>();
          __syncwarp();
          find_in_bytes(own.p, hidden, bytes, buffer, at, m0, n0, lane);
          buffer ^= 1;
        } else if (tile.queries.hides(visit)) {
          find_hidden(own.p, hidden, at, m0, n0, lane);
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&smem.dout_full[stage]);
      }
    };
    if (warp == 0) produce_tiles(own, smem, lane);
    else if (warp == 1) produce_lse(own, smem, await, arrive, finish, lane);
    else if (warp == 2) produce_delta(own, smem, await, arrive, finish, lane);
    else check_keys(own, smem, lane);
  } else if (warpgroup == 1) {
    setmaxnreg_dec<cfg::DQ_REGISTERS>();
    accumulate_dq(own, smem);
  } else {
    setmaxnreg_inc<cfg::CONSUMER_REGISTERS>();
    if (ADDS_TO_SUMS) await_launches_before();
    if (cfg::PING_PONG && warpgroup == CONSUMERS + 1) named_barrier_arrive(TURN, TURN_THREADS);
    consume(own, smem, warpgroup - 2, lane);
  }
}

}  // namespace keys_divided
