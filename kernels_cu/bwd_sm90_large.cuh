// The Hopper backward's schedule for head_dim above 128: warpgroups divide the products (see bwd_sm90_small.cuh).
//
// Here dk and dv of 64 keys fill the registers of a warpgroup each, so two warpgroups share the same 64 keys, and each
// of the five products is one warpgroup's alone. Tiles are (64 keys, 64 queries).
//
//   warps        0        produce tiles      k, v once a key tile; q, do by TMA
//                1, 2     produce values     lse, delta
//                3        check keys         for inf and NaN; pass turns on
//   warpgroups   1        accumulate dq      dq += ds k
//                2        probabilities      s = k qT, pT = exp(s - lse), dv += pT do
//                3        score gradients    dp = v doT, dsT = pT (dpT - delta), dk += dsT q
//
//   step j               tensor core                          other pipes
//     probabilities      dv += pT do[j], s[j+1] = k q[j+1]T   pT[j+1] -> shared memory
//     score gradients    dk += dsT q[j], dp[j+1] = v do[j+1]T                     dsT[j+1] -> shared memory
//     accumulate dq      ds[j] k                                                                    dq[j] -> global
//
// The three run through the steps one behind the other, so that one's elements lie under the others' products. pT is
// handed over rounded, in the order of registers.
//
// Shared memory (struct Smem): k, v; rings of STAGES q, lse and do, delta; two pT and two ds.
#pragma once
#include "bwd_sm90_store.cuh"

namespace products_divided {

constexpr int P_BUFFERS = 2;

struct Smem {
  alignas(1024) Element k[D_CHUNKS][TILE_N][CHUNK];
  Element v[DV_CHUNKS][TILE_N][CHUNK];
  Element q[STAGES][D_CHUNKS][TILE_M][CHUNK];
  Element dout[STAGES][DV_CHUNKS][TILE_M][CHUNK];
  Element ds[DS_BUFFERS][TILE_M / CHUNK][TILE_N][CHUNK];
  u32 p[P_BUFFERS][M_STEPS][WARPGROUP][4];
  TileValues lse[STAGES], delta[STAGES];
  u64 k_full, k_checked, k_empty, v_full;  // v has the same "empty" barrier
  u64 q_full[STAGES], q_empty[STAGES], dout_full[STAGES], dout_empty[STAGES];  // lse comes with q, delta with do,
  u64 values_full[STAGES];  // and before them for who loads these, if HIDES_KEYS
  u64 p_full[P_BUFFERS], p_empty[P_BUFFERS], ds_full[DS_BUFFERS], ds_empty[DS_BUFFERS];
  u64 added, passed;  // to dq, and to who adds next, if DETERMINISTIC
  Names names;
  int k_nonfinite, lse_nonfinite[STAGES], delta_nonfinite[STAGES], dout_made_finite[STAGES];
};

template <class Smem>
__device__ __forceinline__ void produce_tiles(Own<VARLEN>& own, Smem& smem, int lane) {
  const Params& p = own.p;
  Ring<STAGES> stage;
  Ring<1> keys;
  for_each_step<true>(own, smem.names, lane, [&](const Work& tile, const QueryVisit& visit, bool first, bool) {
    const int at = stage.index, m0 = visit.tile * TILE_M, head = tile.queries.head(visit).head;
    await_as_warp(&smem.q_empty[at], stage.parity ^ 1);
    const bool make_finite = must_be_made_finite(smem, tile, visit, at, stage.parity, lane);
    if (make_finite) {
      load_finite(p, smem.q[at], p.q, p.q_stride, p.head_dim, &smem.q_full[at], m0, head, tile.batch, nullptr, lane);
    } else if (lane == 0) {
      load_tile(smem.q[at], own.all().tma_q, &smem.q_full[at], q_row(p, m0), head, map_batch(tile));
    }
    await_as_warp(&smem.dout_empty[at], stage.parity ^ 1);
    if (make_finite) {
      load_finite(p, smem.dout[at], p.dout, p.dout_stride, p.head_dim_v, &smem.dout_full[at], m0, head, tile.batch,
                  &smem.dout_made_finite[at], lane);
    } else if (lane == 0) {
      if (HIDES_KEYS) smem.dout_made_finite[at] = 0;
      load_tile(smem.dout[at], own.all().tma_dout, &smem.dout_full[at], q_row(p, m0), head, map_batch(tile));
    }
    stage.advance();
    if (!first) return;
    await_as_warp(&smem.k_empty, keys.parity ^ 1);
    if (lane == 0) {
      load_tile(smem.k, own.all().tma_k, &smem.k_full, k_row(p, tile.n0()), tile.head_kv, map_batch(tile));
      load_tile(smem.v, own.all().tma_v, &smem.v_full, k_row(p, tile.n0()), tile.head_kv, map_batch(tile));
    }
    keys.advance();
  });
}

template <class Smem>
__device__ __forceinline__ void compute_probabilities(Own<VARLEN>& own, Smem& smem, int lane) {
  const Params& p = own.p;
  const int thread = threadIdx.x % WARPGROUP, warp_key = thread / WARP * WARP_KEYS;
  const u64 k = descriptor_k_major(smem_u32(smem.k));
  const float scale = exponent_scale(p);
  float dv_rmem[TILE_DV / 2], s_rmem[TILE_M / 2];
  u32 p_rmem[M_STEPS][4], weight_rmem[M_STEPS][4];
  HiddenBits hidden;
  Ahead ahead;
  Ring<STAGES> stage;
  Ring<P_BUFFERS> buffer;
  Ring<1> keys;
  for_each_tile<false>(own, smem.names, lane, [&](const Work& tile) {
    const int steps = tile.steps(), key = tile.n0() + warp_key + lane / 4;
    bool dv_lacks = false;
#pragma unroll
    for (int i = 0; i < TILE_DV / 2; i++) dv_rmem[i] = 0;
    if (steps) {
      mbarrier_wait(&smem.k_full, keys.parity);
      keys.advance();
      mbarrier_wait(&smem.q_full[stage.index], stage.parity);
      wgmma_fence();
      multiply_keys_queries<D_STEPS, TILE_N>(s_rmem, k, descriptor_k_major(smem_u32(smem.q[stage.index])));
      wgmma_wait<0>();
      wgmma_hold(s_rmem);
    }
    QueryVisit visit = tile.queries.start(p);
    for (int step = 1; step <= steps; step++) {
      const int at = stage.index, m0 = visit.tile * TILE_M;
      const bool last = step == steps;
      const Head head = tile.queries.head(visit);
      const bool hides = tile.queries.hides(visit);
      ahead.load(p, head, m0, tile.n0() + warp_key, lane);
      auto lse_of = [&](int s) { return smem.lse[at][s][lane % 4]; };
      exponentiate(p, p_rmem, weight_rmem, hidden, s_rmem, ahead, lse_of, scale, head, m0, key, hides, 0, lane);
      mbarrier_wait(&smem.p_empty[buffer.index], buffer.parity ^ 1);
#pragma unroll
      for (int s = 0; s < M_STEPS; s++) {
        st_shared_v4(smem_u32(smem.p[buffer.index][s][thread]), WEIGHS ? weight_rmem[s] : p_rmem[s]);
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&smem.p_full[buffer.index]);
      buffer.advance();
      mbarrier_wait(&smem.dout_full[at], stage.parity);
      if (HIDES_KEYS && hides) dv_lacks |= smem.dout_made_finite[at];
      stage.advance();

      wgmma_hold(p_rmem);
      wgmma_hold(dv_rmem);
      wgmma_fence();
      accumulate_over_queries<TILE_DV>(dv_rmem, p_rmem,
                                       descriptor_mn_major(smem_u32(smem.dout[at]), sizeof(smem.dout[0][0])));
      wgmma_commit();
      if (!last) mbarrier_wait(&smem.q_full[stage.index], stage.parity);
      wgmma_fence();
      multiply_keys_queries<D_STEPS, TILE_N>(s_rmem, k,
                                             last ? k : descriptor_k_major(smem_u32(smem.q[stage.index])));
      wgmma_wait<0>();
      wgmma_hold(s_rmem);
      wgmma_hold(p_rmem);
      wgmma_hold(dv_rmem);
      if (lane == 0) mbarrier_arrive(&smem.dout_empty[at]);
      tile.queries.advance(p, visit);
    }
    if (steps && lane == 0) mbarrier_arrive(&smem.k_empty);
    store_gradient<TILE_DV>(p, p.dv, p.dv_stride, tile, warp_key, p.seqlen_k, p.head_dim_v, dv_rmem, kept_scale(p),
                            lane);
    if (HIDES_KEYS && dv_lacks) add_nonfinite_to_dv(p, tile, warp_key, lane);
  });
}

template <class Smem>
__device__ __forceinline__ void compute_score_gradients(Own<VARLEN>& own, Smem& smem, int lane) {
  const Params& p = own.p;
  const int thread = threadIdx.x % WARPGROUP, warp_key = thread / WARP * WARP_KEYS;
  const u64 v = descriptor_k_major(smem_u32(smem.v));
  float dk_rmem[TILE_D / 2], dp_rmem[TILE_M / 2];
  u32 ds_rmem[M_STEPS][4];
  Ring<STAGES> stage;
  Ring<P_BUFFERS> p_buffer;
  Ring<DS_BUFFERS> ds_buffer;
  Ring<1> keys;
  for_each_tile<false>(own, smem.names, lane, [&](const Work& tile) {
    const int steps = tile.steps();
#pragma unroll
    for (int i = 0; i < TILE_D / 2; i++) dk_rmem[i] = 0;
    if (steps) {
      mbarrier_wait(&smem.v_full, keys.parity);
      keys.advance();
      mbarrier_wait(&smem.dout_full[stage.index], stage.parity);
      wgmma_fence();
      multiply_keys_queries<DV_STEPS, TILE_N>(dp_rmem, v, descriptor_k_major(smem_u32(smem.dout[stage.index])));
      wgmma_wait<0>();
      wgmma_hold(dp_rmem);
      if (lane == 0) mbarrier_arrive(&smem.dout_empty[stage.index]);
    }
    QueryVisit visit = tile.queries.start(p);
    for (int step = 1; step <= steps; step++) {
      const int at = stage.index, m0 = visit.tile * TILE_M;
      const bool last = step == steps;
      const Head head = tile.queries.head(visit);
      mbarrier_wait(&smem.p_full[p_buffer.index], p_buffer.parity);
      make_ds(p, dp_rmem,
              [&](u32 (&p_rmem)[4], int s) { ld_shared_v4(p_rmem, smem_u32(smem.p[p_buffer.index][s][thread])); },
              [&](int s) { return smem.delta[at][s][lane % 4]; }, smem.lse[at], head, m0,
              tile.n0() + warp_key + lane / 4, lane);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&smem.p_empty[p_buffer.index]);
      p_buffer.advance();
      if (!MARKS_HIDDEN && tile.queries.hides(visit)) hide(dp_rmem, p, m0, tile.n0() + warp_key + lane / 4, lane);
#pragma unroll
      for (int s = 0; s < M_STEPS; s++) {
#pragma unroll
        for (int i = 0; i < 4; i++) ds_rmem[s][i] = pack2<Element>(dp_rmem[8 * s + 2 * i], dp_rmem[8 * s + 2 * i + 1]);
      }
      mbarrier_wait(&smem.ds_empty[ds_buffer.index], ds_buffer.parity ^ 1);
      store_ds(smem.ds[ds_buffer.index], ds_rmem, warp_key, lane);
      fence_proxy_async_shared();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&smem.ds_full[ds_buffer.index]);
      ds_buffer.advance();
      stage.advance();

      wgmma_hold(ds_rmem);
      wgmma_hold(dk_rmem);
      wgmma_fence();
      accumulate_over_queries<TILE_D>(dk_rmem, ds_rmem,
                                      descriptor_mn_major(smem_u32(smem.q[at]), sizeof(smem.q[0][0])));
      wgmma_commit();
      if (!last) mbarrier_wait(&smem.dout_full[stage.index], stage.parity);
      wgmma_fence();
      multiply_keys_queries<DV_STEPS, TILE_N>(dp_rmem, v,
                                              last ? v : descriptor_k_major(smem_u32(smem.dout[stage.index])));
      wgmma_wait<0>();
      wgmma_hold(dp_rmem);
      wgmma_hold(ds_rmem);
      wgmma_hold(dk_rmem);
      if (lane == 0) {
        mbarrier_arrive(&smem.q_empty[at]);
        if (!last) mbarrier_arrive(&smem.dout_empty[stage.index]);
      }
      tile.queries.advance(p, visit);
    }
    if (steps && lane == 0) mbarrier_arrive(&smem.k_empty);
    store_gradient<TILE_D>(p, p.dk, p.dk_stride, tile, warp_key, p.seqlen_k, p.head_dim, dk_rmem, p.softmax_scale,
                           lane);
    if (cfg::ALONE) zero_unvisited_dq(p, tile, thread / WARP, WG_WARPS, lane);
  });
}

template <class Smem> __device__ __forceinline__ void run(Own<VARLEN>& own, Smem& smem) {
  static_assert(sizeof(Smem) && TILE_M == CHUNK && TILE_N == WG_KEYS && cfg::NUM_THREADS == 4 * WARPGROUP);
  const int warp = uniform(threadIdx.x / WARP), warpgroup = warp / WG_WARPS, lane = threadIdx.x % WARP;
  if (threadIdx.x == 0) {
    mbarrier_init(&smem.k_full, 1);
    mbarrier_init(&smem.k_checked, 1);
    mbarrier_init(&smem.added, WG_WARPS);
    mbarrier_init(&smem.passed, 1);
    mbarrier_init(&smem.v_full, 1);
    mbarrier_init(&smem.k_empty, 3 * WG_WARPS);
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(&smem.q_full[i], 2);
      mbarrier_init(&smem.q_empty[i], WG_WARPS);
      mbarrier_init(&smem.dout_full[i], 2);
      mbarrier_init(&smem.dout_empty[i], 2 * WG_WARPS);
      if (HIDES_KEYS) mbarrier_init(&smem.values_full[i], 2);
    }
    for (int i = 0; i < P_BUFFERS; i++) {
      mbarrier_init(&smem.p_full[i], WG_WARPS);
      mbarrier_init(&smem.p_empty[i], WG_WARPS);
    }
    for (int i = 0; i < DS_BUFFERS; i++) {
      mbarrier_init(&smem.ds_full[i], WG_WARPS);
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
    auto await = [&](const Ring<STAGES>& stage) {  // lse and delta are read by different warpgroups, late in a step
      mbarrier_wait(&smem.q_empty[stage.index], stage.parity ^ 1);
      mbarrier_wait(&smem.dout_empty[stage.index], stage.parity ^ 1);
    };
    auto arrive_with_q = [&](int stage) {
      if (HIDES_KEYS) mbarrier_arrive(&smem.values_full[stage]);
      mbarrier_arrive(&smem.q_full[stage]);
    };
    auto arrive_with_dout = [&](int stage) {
      if (HIDES_KEYS) mbarrier_arrive(&smem.values_full[stage]);
      mbarrier_arrive(&smem.dout_full[stage]);
    };
    auto finish = [](const Work&, const QueryVisit&, bool, bool, int) {};
    if (warp == 0) produce_tiles(own, smem, lane);
    else if (warp == 1) produce_lse(own, smem, await, arrive_with_q, finish, lane);
    else if (warp == 2) produce_delta(own, smem, await, arrive_with_dout, finish, lane);
    else check_keys(own, smem, lane);
  } else if (warpgroup == 1) {
    setmaxnreg_dec<cfg::DQ_REGISTERS>();
    accumulate_dq(own, smem);
  } else if (warpgroup == 2) {
    setmaxnreg_inc<cfg::CONSUMER_REGISTERS>();
    compute_probabilities(own, smem, lane);
  } else {
    setmaxnreg_inc<cfg::CONSUMER_REGISTERS>();
    if (ADDS_TO_SUMS) await_launches_before();
    compute_score_gradients(own, smem, lane);
  }
}

}  // namespace products_divided
