// Forward attention on Hopper with wgmma, TMA and warp specialisation:  o = softmax(q kT) v,  lse = log(sum(exp(s))).
//
// A CTA stays on its multiprocessor and takes output tiles of TILE_M query rows of one head in turn. One thread of
// warpgroup 0 loads; each other warpgroup computes 64 rows of the tile, walking the visible keys in tiles of TILE_N
// from the last to the first. Scores and output are accumulators in registers; the probabilities stay in registers too,
// as operand a of the second product.
//
//   warp roles      0      produce   q, k, v by TMA, as far ahead as the buffers reach, across output tiles
//                   1..    consume   s = q kT, softmax, o += p v; o and lse straight to global memory
//
//   one step of a consumer, for key tile n (walked downwards)
//     tensor core   s[n] = q k[n]T | o += p[n+1] v[n+1] | (the other warpgroups' products)
//     other pipes                  | p[n] = 2^(s[n] * scale - reference) | round p[n] |
//   PING_PONG: consumers start their products in turn, so that one's exponentials lie under another's products.
//   SCORE_EARLY: the first scores of the next output tile are started beside the last products of this one, and o is
//   stored under them.
//
// The reference is a stale maximum (softmax.cuh): no maximum is looked for, and o is not rescaled. The sum of the new
// probabilities tells if a score was too large for that; then, rarely, the warp alone computes its scores anew
// (warp_products) and takes the ordinary step.
//
// Shared memory (struct Smem): rings of Q_STAGES tiles of q and STAGES tiles of k and of v, each buffer with a "full"
// mbarrier (bytes landed) and an "empty" one (an arrival from every warp that has read it). Which output tile is
// next travels with q.
#include "mask.cuh"
#include "softmax.cuh"
#include "tile_sm90.cuh"

using cfg::Element;
using cfg::TILE_M, cfg::TILE_N, cfg::TILE_D, cfg::TILE_DV, cfg::STAGES, cfg::Q_STAGES;

constexpr int WG_ROWS = 64, CONSUMERS = TILE_M / WG_ROWS;  // query rows of a warpgroup; consumer warpgroups
constexpr int D_CHUNKS = (TILE_D + CHUNK - 1) / CHUNK, DV_CHUNKS = (TILE_DV + CHUNK - 1) / CHUNK;
constexpr int D_STEPS = TILE_D / 16, KEY_STEPS = TILE_N / 16;  // steps of a product's summed dimension
constexpr int CONSUMER_WARPS = CONSUMERS * WARPGROUP / WARP;
constexpr int NARROW_N = (TILE_N / 2 + 15) / 16 * 16;  // columns computed where only the first half can be visible
static_assert(cfg::NUM_THREADS == (CONSUMERS + 1) * WARPGROUP, "one warpgroup loads, the others compute");
static_assert(TILE_N % 16 == 0 && TILE_D % 16 == 0 && TILE_DV % 16 == 0, "wgmma sums in steps of 16");

// The output tile that a warpgroup computes next, or the end.
struct alignas(16) Work { int m0, head, batch, valid; };

struct Smem {
  alignas(1024) Element q[Q_STAGES][CONSUMERS][D_CHUNKS][WG_ROWS][CHUNK];
  Element k[STAGES][D_CHUNKS][TILE_N][CHUNK];
  Element v[STAGES][DV_CHUNKS][TILE_N][CHUNK];
  Work work[Q_STAGES][CONSUMERS];  // travels with q
  u64 q_full[Q_STAGES][CONSUMERS], q_empty[Q_STAGES][CONSUMERS];
  u64 k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};
static_assert(sizeof(Smem) == cfg::SMEM_BYTES, "tiles.py and Smem disagree");

// Named barriers: TURN + w opens when it is warpgroup w's turn to start products: its own 128 threads sync on it, those
// of the warpgroup before it arrive.
enum NamedBarrier { TURN = 1 };
constexpr int TURN_THREADS = 2 * WARPGROUP;

// A value that all lanes of a warp share, so that the compiler knows: it then takes a uniform register.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

template <bool VALUE> struct Bool { static constexpr bool value = VALUE; };

__device__ __forceinline__ Work find_work(const Params& p, unsigned index) {
  if (index >= (unsigned)p.num_tiles) return {0, 0, 0, false};
  const int heads = p.batch * p.num_heads_q;
  const int section = index / (p.heads_per_section * p.num_m_blocks), first_head = section * p.heads_per_section;
  const int place = index - first_head * p.num_m_blocks, width = min(p.heads_per_section, heads - first_head);
  const int row = place / width, flat_head = first_head + place - row * width;
  const int batch = flat_head / p.num_heads_q;
  return {(p.num_m_blocks - 1 - row) * TILE_M, flat_head - batch * p.num_heads_q, batch, true};
}

// The key tiles of the warpgroup whose first row is m0.
__device__ __forceinline__ TileRange warpgroup_range(const Params& p, const TileRange& tile, int m0) {
  TileRange own = kv_range(p, m0, WG_ROWS);
  if (m0 >= p.seqlen_q || own.begin >= own.end) own = {tile.begin, tile.begin, tile.begin, tile.begin};
  return own;
}

// Brings q and the first tiles of k and v into L2.
__device__ __forceinline__ void prefetch(const Params& p, const Work& work) {
  if (!work.valid) return;
  const TileRange range = kv_range(p, work.m0);
  const int head_kv = work.head / p.qheads_per_kv;
  for (int n = range.end - 1; n >= max(range.begin, range.end - STAGES); n--) {
    for (int c = 0; c < D_CHUNKS; c++) tma_prefetch_4d(&p.tma_k, c * CHUNK, n * TILE_N, head_kv, work.batch);
    for (int c = 0; c < DV_CHUNKS; c++) tma_prefetch_4d(&p.tma_v, c * CHUNK, n * TILE_N, head_kv, work.batch);
  }
  for (int w = 0; w < CONSUMERS; w++) {
    for (int c = 0; c < D_CHUNKS; c++) {
      tma_prefetch_4d(&p.tma_q, c * CHUNK, work.m0 + w * WG_ROWS, work.head, work.batch);
    }
  }
}

__device__ __forceinline__ void produce(const Params& p, Smem& smem) {
  prefetch_tensor_map(&p.tma_q);
  prefetch_tensor_map(&p.tma_k);
  prefetch_tensor_map(&p.tma_v);
  Ring<Q_STAGES> q;
  Ring<STAGES> k, v;
  unsigned index = blockIdx.x, round = 0;
  while (true) {
    const Work work = find_work(p, index);
    const TileRange range = work.valid ? kv_range(p, work.m0) : TileRange{};
    const int head_kv = work.head / p.qheads_per_kv;

    auto load_k = [&](int n) {
      mbarrier_wait(&smem.k_empty[k.index], k.parity ^ 1);
      mbarrier_arrive_expect_tx(&smem.k_full[k.index], sizeof(smem.k[0]));
      for (int c = 0; c < D_CHUNKS; c++) {
        tma_load_4d(smem.k[k.index][c], &p.tma_k, &smem.k_full[k.index], c * CHUNK, n * TILE_N, head_kv, work.batch);
      }
      k.advance();
    };
    auto load_v = [&](int n) {
      mbarrier_wait(&smem.v_empty[v.index], v.parity ^ 1);
      mbarrier_arrive_expect_tx(&smem.v_full[v.index], sizeof(smem.v[0]));
      for (int c = 0; c < DV_CHUNKS; c++) {
        tma_load_4d(smem.v[v.index][c], &p.tma_v, &smem.v_full[v.index], c * CHUNK, n * TILE_N, head_kv, work.batch);
      }
      v.advance();
    };
    auto send_q = [&](int w) {
      u64* full = &smem.q_full[q.index][w];
      mbarrier_wait(&smem.q_empty[q.index][w], q.parity ^ 1);
      smem.work[q.index][w] = work;
      if (range.begin == range.end) return mbarrier_arrive(full);
      mbarrier_arrive_expect_tx(full, sizeof(smem.q[0][0]));
      for (int c = 0; c < D_CHUNKS; c++) {
        tma_load_4d(smem.q[q.index][w][c], &p.tma_q, full, c * CHUNK, work.m0 + w * WG_ROWS, work.head, work.batch);
      }
    };

    if (range.begin < range.end) load_k(range.end - 1);
    for (int w = 0; w < CONSUMERS; w++) send_q(w);
    q.advance();
    if (!work.valid) break;
    round++;
    index = cfg::DYNAMIC ? gridDim.x + atomicAdd(p.tile_counter, 1)
                         : round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (cfg::PREFETCH) prefetch(p, find_work(p, index));
    for (int n = range.end - 1; n >= range.begin; n--) {
      if (n > range.begin) load_k(n - 1);
      load_v(n);
    }
  }
  if (cfg::DYNAMIC && atomicAdd(p.tile_counter + 1, 1) == (int)gridDim.x - 1) {
    p.tile_counter[0] = p.tile_counter[1] = 0;  // the last to ask leaves zeros for the next launch
  }
}

extern "C" __global__ void __launch_bounds__(cfg::NUM_THREADS, cfg::MIN_CTAS)
fwd_sm90(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int warpgroup = uniform(threadIdx.x / WARPGROUP);

  if (threadIdx.x == 0) {
    for (int i = 0; i < Q_STAGES; i++) {
      for (int w = 0; w < CONSUMERS; w++) {
        mbarrier_init(&smem.q_full[i][w], 1);
        mbarrier_init(&smem.q_empty[i][w], WARPGROUP / WARP);
      }
    }
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(&smem.k_full[i], 1);
      mbarrier_init(&smem.v_full[i], 1);
      mbarrier_init(&smem.k_empty[i], CONSUMER_WARPS);
      mbarrier_init(&smem.v_empty[i], CONSUMER_WARPS);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == 0) {
    setmaxnreg_dec<cfg::PRODUCER_REGS>();
    if (threadIdx.x == 0) produce(p, smem);
    return;
  }
  setmaxnreg_inc<cfg::CONSUMER_REGS>();
  const int wg = warpgroup - 1, lane = threadIdx.x % WARP, warp_row = threadIdx.x % WARPGROUP / WARP * 16;
  const float scale = exponent_scale(p);

  float s_rmem[TILE_N / 2], o_rmem[TILE_DV / 2];  // accumulators (64, TILE_N) and (64, TILE_DV)
  u32 p_rmem[KEY_STEPS][4];                       // probabilities as operand a (64, TILE_N)
  TileSoftmax softmax;
  Ring<Q_STAGES> q;
  Ring<STAGES> k, v;
  Work work;
  TileRange tile_range, range;  // key tiles of the output tile, and of this warpgroup's rows
  bool narrow = false;          // whether only the first NARROW_N keys of the scores or probabilities count

  // ---- phases
  auto receive = [&]() {
    mbarrier_wait(&smem.q_full[q.index][wg], q.parity);
    const Work next = smem.work[q.index][wg];
    __syncwarp();  // all lanes have read before one of them releases it, with q
    work = {uniform(next.m0), uniform(next.head), uniform(next.batch), uniform(next.valid)};
    tile_range = kv_range(p, work.m0);
    range = warpgroup_range(p, tile_range, work.m0 + wg * WG_ROWS);
    narrow = cfg::NARROW && kv_end(p, work.m0 + wg * WG_ROWS, WG_ROWS) - (range.end - 1) * TILE_N <= NARROW_N;
  };
  auto release = [&](u64* empty) {
    if (lane == 0) mbarrier_arrive(empty);
  };
  auto take_turn = [&]() {
    if (cfg::PING_PONG) named_barrier_sync(TURN + wg, TURN_THREADS);
  };
  auto pass_turn = [&]() {
    if (cfg::PING_PONG) named_barrier_arrive(TURN + (wg + 1) % CONSUMERS, TURN_THREADS);
  };
  auto multiply_scores = [&](auto& s) {  // s = q kT, for the first keys
    constexpr int N = sizeof(s) / sizeof(float) * 2;
    const u64 a = descriptor_k_major(smem_u32(smem.q[q.index][wg]));
    const u64 b = descriptor_k_major(smem_u32(smem.k[k.index]));
    wgmma_ss<Element, N, false, false, false>(s, a, b);
#pragma unroll
    for (int i = 1; i < D_STEPS; i++) {
      const int chunk = i / 4, bytes = i % 4 * 32;
      wgmma_ss<Element, N, false, false, true>(s, descriptor_at(a, chunk * sizeof(smem.q[0][0][0]) + bytes),
                                               descriptor_at(b, chunk * sizeof(smem.k[0][0]) + bytes));
    }
  };
  auto start_scores = [&](auto& s) {
    mbarrier_wait(&smem.k_full[k.index], k.parity);
    take_turn();
    wgmma_fence();
    multiply_scores(s);
    wgmma_commit();
    pass_turn();
  };
  auto finish_scores = [&]() {
    wgmma_wait<0>();
    wgmma_hold(s_rmem);
    wgmma_hold(o_rmem);
    wgmma_hold(p_rmem);
  };
  auto first_scores = [&]() {
    if (cfg::NARROW && narrow) {
#pragma unroll
      for (int i = NARROW_N / 2; i < TILE_N / 2; i++) s_rmem[i] = 0;
      start_scores(reinterpret_cast<float(&)[NARROW_N / 2]>(s_rmem));
      finish_scores();
    } else {
      start_scores(s_rmem);
      finish_scores();
    }
  };
  auto start_output = [&](auto pass) {  // o += p v
    const u64 b = descriptor_mn_major(smem_u32(smem.v[v.index]), sizeof(smem.v[0][0]));
    const bool half = narrow;
    narrow = false;
#pragma unroll
    for (int i = 0; i < KEY_STEPS; i++) {
      if (cfg::NARROW_PV && i == NARROW_N / 16 && half) break;
      if (i == KEY_STEPS - cfg::PASS_EARLY && decltype(pass)::value && !cfg::NARROW_PV) pass_turn();
      wgmma_rs<Element, TILE_DV, true, true>(o_rmem, p_rmem[i], descriptor_at(b, i * 16 * CHUNK_ROW_BYTES));
    }
    wgmma_commit();
    if (decltype(pass)::value && (cfg::NARROW_PV || cfg::PASS_EARLY == 0)) pass_turn();
  };
  auto modify = [&](auto masked, int n) {
    const int q0 = work.m0 + wg * WG_ROWS + warp_row + lane / 4, kv0 = n * TILE_N + lane % 4 * 2;
    const VisibleKeys keys[2] = {visible_keys(p, q0, kv0), visible_keys(p, q0 + 8, kv0)};
#pragma unroll
    for (int i = 0; i < TILE_N / 2; i++) {
      const int row = i / 2 % 2, offset = i / 4 * 8 + i % 2;
      s_rmem[i] = score(p, s_rmem[i], q0 + row * 8, kv0 + offset);
      if (decltype(masked)::value && !keys[row].has(offset)) s_rmem[i] = HIDDEN;
    }
  };
  auto round_p = [&]() {
#pragma unroll
    for (int i = 0; i < KEY_STEPS * 4; i++) p_rmem[i / 4][i % 4] = pack2<Element>(s_rmem[2 * i], s_rmem[2 * i + 1]);
  };
  auto rescale = [&](const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < TILE_DV / 2; i++) o_rmem[i] *= factor[i / 2 % 2];
  };
  auto release_k = [&](int n) {  // and q after the last
    release(&smem.k_empty[k.index]);
    if (n == range.begin) release(&smem.q_empty[q.index][wg]);
  };
  auto release_v = [&]() {
    release(&smem.v_empty[v.index]);
    v.advance();
  };
  auto start_step = [&]() {
    mbarrier_wait(&smem.k_full[k.index], k.parity);
    mbarrier_wait(&smem.v_full[v.index], v.parity);
    take_turn();
    wgmma_hold(o_rmem);
    wgmma_hold(p_rmem);
    wgmma_fence();
    multiply_scores(s_rmem);
    wgmma_commit();
    start_output(Bool<true>{});
    wgmma_wait<1>();
    wgmma_hold(s_rmem);
  };
  auto finish_output = [&]() {
    wgmma_wait<0>();
    wgmma_hold(o_rmem);
    wgmma_hold(p_rmem);
    release_v();
  };
  auto masked_step = [&](int n) {
    float factor[2];
    start_step();
    release_k(n);
    k.advance();
    modify(Bool<true>{}, n);
    softmax.take_raised<true>(s_rmem, scale, factor);
    finish_output();
    rescale(factor);
    round_p();
  };
  auto full_step = [&](int n) {
    start_step();
    modify(Bool<false>{}, n);
    const bool outgrown = softmax.take_stale(s_rmem, scale);
    if (!outgrown) release_k(n);
    finish_output();
    if (outgrown) {
      float factor[2];
      warp_products<Element, WG_ROWS, TILE_N, D_STEPS>(s_rmem, smem_u32(smem.q[q.index][wg]), warp_row,
                                                       smem_u32(smem.k[k.index]), lane);
      fence_proxy_async_shared();
      __syncwarp();
      modify(Bool<false>{}, n);
      softmax.take_raised<false>(s_rmem, scale, factor);
      rescale(factor);
      release_k(n);
    }
    k.advance();
    round_p();
  };
  auto skip = [&](int count) {
    for (int i = 0; i < count; i++) {
      mbarrier_wait(&smem.k_full[k.index], k.parity);
      take_turn();
      pass_turn();
      __syncwarp();  // a lane that still waits would miss the phase when a release lets the ring go round
      release(&smem.k_empty[k.index]);
      k.advance();
      mbarrier_wait(&smem.v_full[v.index], v.parity);
      __syncwarp();
      release_v();
    }
  };
  auto store = [&](const Work& work, const float (&inverse)[2]) {
    const int m0 = work.m0 + wg * WG_ROWS + warp_row;
    Element* o_gmem = p.o + work.batch * p.o_stride[0] + m0 * p.o_stride[1] + work.head * p.o_stride[2];
    store_accumulator<TILE_DV>(o_gmem, p.o_stride[1], p.seqlen_q - m0, p.head_dim_v, o_rmem, inverse, lane);
  };

  auto finish_rows = [&](float (&inverse)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float lse;
      const int row = work.m0 + wg * WG_ROWS + warp_row + lane / 4 + r * 8;
      softmax.finish(r, inverse[r], lse);
      if (p.lse && lane % 4 == 0 && row < p.seqlen_q) {
        p.lse[((i64)work.batch * p.num_heads_q + work.head) * p.seqlen_q + row] = lse;
      }
    }
  };

  if (cfg::PING_PONG && wg == CONSUMERS - 1) pass_turn();
  bool scored = false;
  receive();
  while (work.valid) {
    softmax.reset();
#pragma unroll
    for (int i = 0; i < TILE_DV / 2; i++) o_rmem[i] = 0;
    const bool any = range.begin < range.end;
    if (!scored) {
      skip(tile_range.end - range.end);
      if (any) {
        first_scores();
      }
    }
    if (any) {
      int n = range.end - 1;
      float factor[2];
      release_k(n);
      k.advance();
      modify(Bool<true>{}, n);
      softmax.take_raised<true>(s_rmem, scale, factor);
      round_p();
      for (n--; n >= range.begin; n--) {
        if (n < range.full_end && n >= range.full_begin) {
          full_step(n);
        } else {
          masked_step(n);
        }
      }

      mbarrier_wait(&smem.v_full[v.index], v.parity);
      wgmma_hold(o_rmem);
      wgmma_hold(p_rmem);
      wgmma_fence();
      start_output(Bool<false>{});
      float inverse[2];
      finish_rows(inverse);
      const Work done = work;
      const int rest = range.begin - tile_range.begin;
      q.advance();
      scored = false;
      if (cfg::SCORE_EARLY) {
        receive();
        scored = rest == 0 && work.valid && range.begin < range.end && range.end == tile_range.end;
      }
      if (scored) {
        if (cfg::NARROW) {
          first_scores();
          release_v();
          store(done, inverse);
        } else {
          start_scores(s_rmem);
          wgmma_wait<1>();
          wgmma_hold(o_rmem);
          wgmma_hold(p_rmem);
          release_v();
          store(done, inverse);
          wgmma_wait<0>();
          wgmma_hold(s_rmem);
        }
      } else {
        finish_output();
        skip(rest);
        store(done, inverse);
        if (!cfg::SCORE_EARLY) receive();
      }
    } else {
      float inverse[2];
      finish_rows(inverse);
      store(work, inverse);
      release(&smem.q_empty[q.index][wg]);
      q.advance();
      receive();
      scored = false;
    }
  }
}
