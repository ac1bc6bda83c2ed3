// What fwd_sm90 computes from: the order of output tiles and of a walk over key tiles, the buffers in shared memory and
// how they are handed over, the thread that fills them, and the warps that look through v.
#pragma once
#include "mask.cuh"
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

// The key tiles of the warpgroup whose first row is m0: part of those of its output tile. If there are none, all come
// before its walk.
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
