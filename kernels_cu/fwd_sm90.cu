// Forward attention on Hopper with wgmma, TMA and warp specialisation:  o = softmax(q kT) v,  lse = log(sum(exp(s))).
//
// A CTA stays on its multiprocessor and takes output tiles of TILE_M query rows of one head in turn. One thread of
// warpgroup 0 loads; each other warpgroup computes 64 rows of the tile, walking the visible keys in tiles of TILE_N.
// Scores and output are accumulators in registers; the probabilities stay in registers too, as operand a of the second
// product. So nothing that is computed passes through shared memory, nor between warps.
//
//   warp roles                                                               keys ->   tile    tile    tile
//     warpgroup 0, thread 0    load     q, k, v by TMA, as far ahead                 +-------+-------+-------+
//                                       as the buffers reach, across     warpgroup 1 |       |       |       | 64 rows
//                                       output tiles                     warpgroup 2 |       |       |       | 64 rows
//     warpgroup 0, warps 1..3  check    v where keys are hidden          ...         +-------+-------+-------+
//     warpgroups 1..           compute  s = q kT, softmax, o += p v; o and lse straight to global memory
//
//   pipeline: one step of a warpgroup, for key tile i of its walk, and what its neighbour does meanwhile
//     tensor cores     s[i] = q k[i]T | o += p[i-1] v[i-1] |    the neighbour's s[i], o    | s[i+1] ...
//     warpgroup 1      its turn       | pass the turn      | p[i] = 2^(s[i] * scale - reference), round | its turn
//     warpgroup 2      p, round                            | its turn       | pass it      | p, round
//   The turns ("ping-pong") keep one warpgroup's exponentials under the other's products. A warpgroup's own second product
//   lies beside its own exponentials too: it is one tile behind.
//   SCORE_EARLY: the first scores of the next output tile are started beside the last product of this one, and o is
//   stored under them. PASS_EARLY: the turn is passed before the last few wgmma of a step are issued.
//
// The reference is a stale maximum (softmax.cuh): no maximum is looked for, and o is not rescaled. The sum of the new
// probabilities tells if a score was too large for that; then, rarely, the warp alone computes its scores anew
// (warp_products) and takes the ordinary step.
//
// A hidden key has no influence whatever its v holds, but 0 * v is NaN where v is inf or NaN. So where keys that exist
// are hidden from some row of the output tile, otherwise idle warps look through v between its arrival and its use and
// replace such values by 0; rows that do see them get them back afterwards (restore_nonfinite).
//
// Shared memory (struct Smem): rings of Q_STAGES tiles of q and STAGES tiles of k and of v, each buffer with a "full"
// mbarrier (bytes landed, and checked) and an "empty" one (an arrival from every warp that has read it).
//
//   q [Q_STAGES][64 rows each] | k [STAGES] | v [STAGES] | which output tile is next (travels with q) | mbarriers
#include "mask.cuh"
#include "softmax.cuh"
#include "tile_sm90.cuh"

using cfg::Element;
using cfg::TILE_M, cfg::TILE_N, cfg::TILE_D, cfg::TILE_DV, cfg::STAGES, cfg::Q_STAGES;

constexpr int WG_ROWS = 64, CONSUMERS = TILE_M / WG_ROWS;  // query rows of a warpgroup; warpgroups that compute
constexpr int D_CHUNKS = (TILE_D + CHUNK - 1) / CHUNK, DV_CHUNKS = (TILE_DV + CHUNK - 1) / CHUNK;
constexpr int D_STEPS = TILE_D / 16, KEY_STEPS = TILE_N / 16;  // steps of a product's summed dimension
constexpr int CONSUMER_WARPS = CONSUMERS * WARPGROUP / WARP;
constexpr bool PING_PONG = CONSUMERS > 1;
static_assert(cfg::NUM_THREADS == (CONSUMERS + 1) * WARPGROUP, "one warpgroup loads, the others compute");
static_assert(TILE_N % 16 == 0 && TILE_D % 16 == 0 && TILE_DV % 16 == 0, "wgmma sums in steps of 16");

// The output tile that a warpgroup computes next, or the end.
struct alignas(16) Work { int m0, head, batch, valid; };

constexpr int CHECKS = STAGES + 1;  // at most STAGES tiles of v wait to be checked, and then the end

struct Smem {
  alignas(1024) Element q[Q_STAGES][CONSUMERS][D_CHUNKS][WG_ROWS][CHUNK];
  Element k[STAGES][D_CHUNKS][TILE_N][CHUNK];
  Element v[STAGES][DV_CHUNKS][TILE_N][CHUNK];
  Work work[Q_STAGES][CONSUMERS];  // travels with q
  u64 q_full[Q_STAGES][CONSUMERS], q_empty[Q_STAGES][CONSUMERS];
  u64 k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  u64 check_full[CHECKS];   // a tile of v has landed that is to be checked before it is full ...
  int check_stage[CHECKS];  // ... the one in this stage; NO_MORE: the end
  int replaced[STAGES];     // how many threads have replaced values of v
};
static_assert(sizeof(Smem) == cfg::SMEM_BYTES, "tiles.py and Smem disagree");
constexpr int NO_MORE = -1;

// Named barriers. TURN + w opens when it is warpgroup w's turn to start products: its own 128 threads sync on it, those
// of the warpgroup before it arrive. CHECKED: the threads that look through a tile of v are done.
enum NamedBarrier { TURN = 1, CHECKED = TURN + CONSUMERS };
constexpr int TURN_THREADS = 2 * WARPGROUP, CHECKERS = WARPGROUP - WARP;

// A walk over the key tiles of a range, in the order that all warpgroups of a CTA keep to.
constexpr int FORWARD = cfg::ASCENDING ? 1 : -1;
__device__ __forceinline__ int first_tile(const TileRange& x) { return cfg::ASCENDING ? x.begin : x.end - 1; }
__device__ __forceinline__ int last_tile(const TileRange& x) { return cfg::ASCENDING ? x.end - 1 : x.begin; }
__device__ __forceinline__ bool is_full(const TileRange& x, int n) { return n >= x.full_begin && n < x.full_end; }

// The key tiles of the warpgroup whose first row is m0: part of those of its output tile. None: all come before its walk.
__device__ __forceinline__ TileRange warpgroup_range(const Params& p, const TileRange& tile, int m0) {
  TileRange own = kv_range(p, m0, WG_ROWS);
  const int none = cfg::ASCENDING ? tile.end : tile.begin;
  if (m0 >= p.seqlen_q || own.begin >= own.end) own = {none, none, none, none};
  return own;
}
// How many tiles of the output tile's walk lie before the warpgroup's own, and behind it.
__device__ __forceinline__ int tiles_before(const TileRange& tile, const TileRange& own) {
  return cfg::ASCENDING ? own.begin - tile.begin : tile.end - own.end;
}
__device__ __forceinline__ int tiles_behind(const TileRange& tile, const TileRange& own) {
  return cfg::ASCENDING ? tile.end - own.end : own.begin - tile.begin;
}

// Output tile number `index` in the order in which they are taken. Heads are taken in sections whose k and v share L2;
// in a section the last query tiles come first, whose causal walk is longest, so that short ones fill the end.
__device__ __forceinline__ Work find_work(const Params& p, unsigned index) {
  if (index >= (unsigned)p.num_tiles) return {0, 0, 0, false};
  const int heads = p.batch * p.num_heads_q;
  const int section = index / (p.heads_per_section * p.num_m_blocks), first_head = section * p.heads_per_section;
  const int place = index - first_head * p.num_m_blocks, width = min(p.heads_per_section, heads - first_head);
  const int row = place / width, flat_head = first_head + place - row * width;
  const int batch = flat_head / p.num_heads_q;
  return {(p.num_m_blocks - 1 - row) * TILE_M, flat_head - batch * p.num_heads_q, batch, true};
}

// One thread: loads everything, for one output tile after another.
__device__ __forceinline__ void produce(const Params& p, Smem& smem) {
  prefetch_tensor_map(&p.tma_q);
  prefetch_tensor_map(&p.tma_k);
  prefetch_tensor_map(&p.tma_v);
  Ring<Q_STAGES> q;
  Ring<STAGES> k, v;
  Ring<CHECKS> check;
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
      u64* landed = &smem.v_full[v.index];
      if (HIDES_KEYS) {
        smem.replaced[v.index] = 0;
        if (!is_full(range, n)) {
          landed = &smem.check_full[check.index];
          smem.check_stage[check.index] = v.index;
          check.advance();
        }
      }
      mbarrier_arrive_expect_tx(landed, sizeof(smem.v[0]));
      for (int c = 0; c < DV_CHUNKS; c++) {
        tma_load_4d(smem.v[v.index][c], &p.tma_v, landed, c * CHUNK, n * TILE_N, head_kv, work.batch);
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

    if (range.begin < range.end) load_k(first_tile(range));
    for (int w = 0; w < CONSUMERS; w++) send_q(w);
    q.advance();
    if (!work.valid) break;
    round++;
    index = cfg::DYNAMIC ? gridDim.x + atomicAdd(p.tile_counter, 1)
                         : round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    for (int i = range.begin, n = first_tile(range); i < range.end; i++, n += FORWARD) {
      if (i < range.end - 1) load_k(n + FORWARD);
      load_v(n);
    }
  }
  if (HIDES_KEYS) {
    smem.check_stage[check.index] = NO_MORE;
    mbarrier_arrive(&smem.check_full[check.index]);
  }
  if (cfg::DYNAMIC && atomicAdd(p.tile_counter + 1, 1) == (int)gridDim.x - 1) {
    p.tile_counter[0] = p.tile_counter[1] = 0;  // the last to ask leaves zeros for the next launch
  }
}

// The loading warpgroup's other warps: replace inf and NaN in tiles of v by 0 before they count as full.
__device__ __forceinline__ void check_values(Smem& smem) {
  Ring<CHECKS> check;
  const int thread = threadIdx.x - WARP;
  while (true) {
    mbarrier_wait(&smem.check_full[check.index], check.parity);
    const int stage = smem.check_stage[check.index];
    if (stage == NO_MORE) return;
    const u32 v_smem = smem_u32(smem.v[stage]);
    bool found = false;
#pragma unroll 4
    for (int i = thread; i < (int)sizeof(smem.v[0]) / UNIT_BYTES; i += CHECKERS) {
      u32 unit[4];
      ld_shared_v4(unit, v_smem + i * UNIT_BYTES);
      if (!replace_nonfinite<Element>(unit)) continue;
      st_shared_v4(v_smem + i * UNIT_BYTES, unit);
      found = true;
    }
    if (found) atomicAdd(&smem.replaced[stage], 1);
    fence_proxy_async_shared();
    named_barrier_sync(CHECKED, CHECKERS);
    if (thread == 0) mbarrier_arrive(&smem.v_full[stage]);
    check.advance();
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
    for (int i = 0; i < CHECKS; i++) mbarrier_init(&smem.check_full[i], 1);
    mbarrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == 0) {
    setmaxnreg_dec<cfg::PRODUCER_REGS>();
    if (threadIdx.x == 0) produce(p, smem);
    if (HIDES_KEYS && threadIdx.x >= WARP) check_values(smem);
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
  bool replaced;                // whether values of the tile of v last multiplied with were replaced

  // ---- Handing over: output tiles, buffers, turns
  auto receive_work = [&]() {
    mbarrier_wait(&smem.q_full[q.index][wg], q.parity);
    const Work next = smem.work[q.index][wg];
    __syncwarp();  // all lanes have read before one of them releases it, with q
    work = {uniform(next.m0), uniform(next.head), uniform(next.batch), uniform(next.valid)};
    tile_range = kv_range(p, work.m0);
    range = warpgroup_range(p, tile_range, work.m0 + wg * WG_ROWS);
  };
  auto release = [&](u64* empty) {
    if (lane == 0) mbarrier_arrive(empty);
  };
  auto release_k = [&](int n) {  // and q after the last
    release(&smem.k_empty[k.index]);
    if (n == last_tile(range)) release(&smem.q_empty[q.index][wg]);
  };
  auto release_v = [&]() {
    release(&smem.v_empty[v.index]);
    v.advance();
  };
  auto take_turn = [&]() {
    if (PING_PONG) named_barrier_sync(TURN + wg, TURN_THREADS);
  };
  auto pass_turn = [&]() {
    if (PING_PONG) named_barrier_arrive(TURN + (wg + 1) % CONSUMERS, TURN_THREADS);
  };
  auto skip = [&](int tiles) {  // tiles that only other warpgroups need
    for (int i = 0; i < tiles; i++) {
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

  // ---- Products
  auto multiply_scores = [&]() {  // s = q kT
    const u64 a = descriptor_k_major(smem_u32(smem.q[q.index][wg]));
    const u64 b = descriptor_k_major(smem_u32(smem.k[k.index]));
    wgmma_ss<Element, TILE_N, false, false, false>(s_rmem, a, b);
#pragma unroll
    for (int i = 1; i < D_STEPS; i++) {
      const int chunk = i / 4, bytes = i % 4 * 32;
      wgmma_ss<Element, TILE_N, false, false, true>(s_rmem,
                                                    descriptor_at(a, chunk * sizeof(smem.q[0][0][0]) + bytes),
                                                    descriptor_at(b, chunk * sizeof(smem.k[0][0]) + bytes));
    }
    wgmma_commit();
  };
  auto multiply_values = [&](auto pass) {  // o += p v, and perhaps pass the turn
    if (HIDES_KEYS) replaced = smem.replaced[v.index];
    const u64 b = descriptor_mn_major(smem_u32(smem.v[v.index]), sizeof(smem.v[0][0]));
#pragma unroll
    for (int i = 0; i < KEY_STEPS; i++) {
      if (decltype(pass)::value && i == KEY_STEPS - cfg::PASS_EARLY) pass_turn();
      wgmma_rs<Element, TILE_DV, true, true>(o_rmem, p_rmem[i], descriptor_at(b, i * 16 * CHUNK_ROW_BYTES));
    }
    wgmma_commit();
    if (decltype(pass)::value && cfg::PASS_EARLY == 0) pass_turn();
  };
  auto hold_output = [&]() {
    wgmma_hold(o_rmem);
    wgmma_hold(p_rmem);
  };
  auto start_scores = [&]() {  // alone
    mbarrier_wait(&smem.k_full[k.index], k.parity);
    take_turn();
    wgmma_fence();
    multiply_scores();
    pass_turn();
  };
  auto start_output = [&]() {  // alone
    mbarrier_wait(&smem.v_full[v.index], v.parity);
    hold_output();
    wgmma_fence();
    multiply_values(Bool<false>{});
  };
  auto start_step = [&]() {  // both, the scores of this tile and the output of the one before; until the scores are there
    mbarrier_wait(&smem.k_full[k.index], k.parity);
    mbarrier_wait(&smem.v_full[v.index], v.parity);
    take_turn();
    hold_output();
    wgmma_fence();
    multiply_scores();
    multiply_values(Bool<true>{});
    wgmma_wait<1>();
    wgmma_hold(s_rmem);
  };
  auto finish_output = [&]() {
    wgmma_wait<0>();
    hold_output();
    release_v();
  };

  // ---- Softmax
  auto modify = [&](int n) {
    const int q0 = work.m0 + wg * WG_ROWS + warp_row + lane / 4, kv0 = n * TILE_N + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < TILE_N / 2; i++) {
      s_rmem[i] = score(p, s_rmem[i], q0 + i / 2 % 2 * 8, kv0 + i / 4 * 8 + i % 2);
    }
  };
  auto hide = [&](int n) {
    const int q0 = work.m0 + wg * WG_ROWS + warp_row + lane / 4, kv0 = n * TILE_N + lane % 4 * 2;
    const VisibleKeys keys[2] = {visible_keys(p, q0, kv0), visible_keys(p, q0 + 8, kv0)};
#pragma unroll
    for (int i = 0; i < TILE_N / 2; i++) {
      if (!keys[i / 2 % 2].has(i / 4 * 8 + i % 2)) s_rmem[i] = HIDDEN;
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

  // ---- Steps: p of key tile n, beside o += p v of the tile before
  auto first_step = [&](int n) {  // the scores are there, and there is no tile before
    float factor[2];
    release_k(n);
    k.advance();
    modify(n);
    if (!is_full(range, n)) hide(n);
    softmax.take_raised<true>(s_rmem, scale, factor);
    round_p();
  };
  auto masked_step = [&](int n) {
    float factor[2];
    start_step();
    release_k(n);
    k.advance();
    modify(n);
    hide(n);
    softmax.take_raised<true>(s_rmem, scale, factor);
    finish_output();
    rescale(factor);
    round_p();
  };
  auto full_step = [&](int n) {
    start_step();
    modify(n);
    const bool outgrown = softmax.take_stale(s_rmem, scale);
    if (!outgrown) release_k(n);
    finish_output();
    if (outgrown) {
      float factor[2];
      warp_products<Element, WG_ROWS, TILE_N, D_STEPS>(s_rmem, smem_u32(smem.q[q.index][wg]), warp_row,
                                                       smem_u32(smem.k[k.index]), lane);
      fence_proxy_async_shared();
      __syncwarp();
      modify(n);
      softmax.take_raised<false>(s_rmem, scale, factor);
      rescale(factor);
      release_k(n);
    }
    k.advance();
    round_p();
  };
  auto restore_nonfinite = [&](const Work& work, int n) {  // the output with tile n is finished
    const Element* v_gmem = p.v + work.batch * p.v_stride[0] + work.head / p.qheads_per_kv * p.v_stride[2];
    add_nonfinite<TILE_DV>(o_rmem, v_gmem, p.v_stride[1], p.head_dim_v, n * TILE_N, min((n + 1) * TILE_N, p.seqlen_k),
                           lane, [&](int row, int key) {
                             return visible(p, work.m0 + wg * WG_ROWS + warp_row + row, key);
                           });
  };

  // ---- The end of an output tile
  auto finish_rows = [&](float (&inverse)[2]) {  // and their lse
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
  auto store = [&](const Work& work, const float (&inverse)[2]) {
    const int m0 = work.m0 + wg * WG_ROWS + warp_row;
    Element* o_gmem = p.o + work.batch * p.o_stride[0] + m0 * p.o_stride[1] + work.head * p.o_stride[2];
    store_accumulator<TILE_DV>(o_gmem, p.o_stride[1], p.seqlen_q - m0, p.head_dim_v, o_rmem, inverse, lane);
  };

  if (PING_PONG && wg == CONSUMERS - 1) pass_turn();  // the first turn is warpgroup 0's
  bool scored = false;                                // whether the first scores are there already
  receive_work();
  while (work.valid) {
    float inverse[2];
    softmax.reset();
#pragma unroll
    for (int i = 0; i < TILE_DV / 2; i++) o_rmem[i] = 0;
    if (!scored) skip(tiles_before(tile_range, range));
    if (range.begin == range.end) {
      finish_rows(inverse);
      store(work, inverse);
      release(&smem.q_empty[q.index][wg]);
      q.advance();
      receive_work();
      scored = false;
      continue;
    }
    if (!scored) {
      start_scores();
      wgmma_wait<0>();
      wgmma_hold(s_rmem);
    }
    int n = first_tile(range);
    first_step(n);
    while (n != last_tile(range)) {
      n += FORWARD;
      if (is_full(range, n)) {
        full_step(n);
      } else {
        masked_step(n);
      }
      if (HIDES_KEYS && replaced) restore_nonfinite(work, n - FORWARD);
    }

    start_output();
    finish_rows(inverse);
    const Work done = work;
    const int rest = tiles_behind(tile_range, range);
    q.advance();
    scored = false;
    if (cfg::SCORE_EARLY) {
      receive_work();
      scored = rest == 0 && work.valid && range.begin < range.end && tiles_before(tile_range, range) == 0 &&
               !(HIDES_KEYS && replaced);
    }
    if (scored) {
      start_scores();
      wgmma_wait<1>();
      hold_output();
      release_v();
      store(done, inverse);
      wgmma_wait<0>();
      wgmma_hold(s_rmem);
    } else {
      finish_output();
      if (HIDES_KEYS && replaced) restore_nonfinite(done, n);
      skip(rest);
      store(done, inverse);
      if (!cfg::SCORE_EARLY) receive_work();
    }
  }
}
