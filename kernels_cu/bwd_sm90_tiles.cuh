// Which tiles the warps of a Hopper backward CTA compute, and how they agree on it.
#pragma once
#include "bwd_sm90_told.cuh"

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

// Before one lane does what lets the barrier go on to its next phases: no other lane may miss this one.
__device__ __forceinline__ void await_as_warp(u64* barrier, u32 parity) {
  mbarrier_wait(barrier, parity);
  __syncwarp();
}

// One key tile of one key head, and the query tiles that it visits for every query head of its group.
struct Work {
  int n_block, head_kv, batch;
  QueryWalk queries;

  __device__ __forceinline__ int n0() const { return n_block * TILE_N; }
  __device__ __forceinline__ int steps() const { return queries.visits; }
};

// Its name, as one warp of the CTA draws it and tells it to the others; or the end. `batch`: with VARLEN, the part of
// the keys.
struct alignas(16) TileName { int n_block, head_kv, batch; };
constexpr int END = -1;  // in place of n_block

// The CTA's next tile, n_block END behind the last. A warp's work.
//
// Tiles are numbered in the order in which CTAs draw them, as they get free. Heads are taken in sections whose q, do and
// dq share L2; in a section the first key tiles come first, whose causal walk is longest, so that short ones fill the
// end. Ordered sums want the last first (see take_turn): who waits for others' sums waits for tiles with smaller
// numbers. These were drawn before, so somebody can always go on, however few CTAs the GPU runs at a time.
constexpr int SECTION_BYTES = 32 << 20, ROW_BYTES = (TILE_D + TILE_DV) * sizeof(Element) + TILE_D * sizeof(float);
constexpr int SECTION_ROWS = ROWS_DIFFER || cfg::DETERMINISTIC ? SECTION_BYTES / ROW_BYTES : 0;

template <class Own> __device__ __forceinline__ TileName draw_tile(Own& own, int lane) {
  const Params& p = own.all();
  while (true) {
    const u32 number = uniform(lane == 0 ? atomicAdd(p.tile_counter, 1) : 0);
    int n_block, blocks;
    TileName name;
    if constexpr (VARLEN) {
      if (number >= Parts<BY_KEYS>{p}.tiles(TILE_N) * p.num_heads_kv) return {END};
      SequenceTile tile;
      if (!find_tile<BY_KEYS, TILE_N, SECTION_ROWS>(own, p, number, p.num_heads_kv, tile)) continue;
      n_block = tile.block, blocks = tile.blocks, name = {0, tile.head, tile.part};
    } else {
      blocks = p.num_n_blocks;
      const u32 heads = p.batch * p.num_heads_kv;
      if (number >= heads * blocks) return {END};
      const u32 section = number / (p.heads_per_section * blocks), first = section * p.heads_per_section;
      const u32 place = number - first * blocks, width = min(u32(p.heads_per_section), heads - first);
      n_block = place / width;
      const bool shared = ADDENDS_AHEAD && addend_place(p, {1, 0}, 0).batch == 0;  // by batches: they follow each other
      const int head = first + place - n_block * width, batch = shared ? head % p.batch : head / p.num_heads_kv;
      name = {0, shared ? head / p.batch : head - batch * p.num_heads_kv, batch};
    }
    name.n_block = cfg::DETERMINISTIC ? blocks - 1 - n_block : n_block;
    return name;
  }
}

// Where names lie for all warps, and how many visits a tile has, if these are told. The one that draws is the first to
// see them.
template <bool> struct TileNews {
  TileName name;
  int visits;
  __device__ __forceinline__ void tell(const TileName& name, int visits) { this->name = name, this->visits = visits; }
  __device__ __forceinline__ int told_visits() const { return visits; }
};
template <> struct TileNews<false> {
  TileName name;
  __device__ __forceinline__ void tell(const TileName& name, int) { this->name = name; }
  __device__ __forceinline__ int told_visits() const { return 0; }
};
struct Names {
  static constexpr int COUNT = 2;
  TileNews<TELLS_VISITS> news[COUNT];
  u64 full[COUNT], empty[COUNT];

  __device__ __forceinline__ void init() {
    for (int i = 0; i < COUNT; i++) {
      mbarrier_init(&full[i], 1);
      mbarrier_init(&empty[i], cfg::NUM_THREADS / WARP - 1);
    }
  }
};

// Calls work(tile) for every tile of the CTA, which the warp draws, or is told by the one that does. WALKS: whether it
// has a walk of its own over the tile's visits.
template <bool DRAWS, bool WALKS = true, class Own, class Do>
__device__ __forceinline__ void for_each_tile(Own& own, Names& names, int lane, Do work) {
  Ring<Names::COUNT> at;
  for (;; at.advance()) {
    TileName name;
    int visits = 0;
    auto tell = [&] {
      await_as_warp(&names.empty[at.index], at.parity ^ 1);
      if (lane == 0) {
        names.news[at.index].tell(name, visits);
        mbarrier_arrive(&names.full[at.index]);
      }
    };
    if (DRAWS) {
      name = draw_tile(own, lane);
      if (!TELLS_VISITS || name.n_block == END) tell();
    } else {
      mbarrier_wait(&names.full[at.index], at.parity);
      const TileName& told = names.news[at.index].name;
      name = {uniform(told.n_block), uniform(told.head_kv), uniform(told.batch)};
      if (TELLS_VISITS) visits = uniform(names.news[at.index].told_visits());
      if (lane == 0) mbarrier_arrive(&names.empty[at.index]);
    }
    if (name.n_block == END) break;
    Work tile = {name.n_block, name.head_kv, name.batch};
    if constexpr (VARLEN) tile.batch = enter_part<BY_KEYS>(own, own.all(), name.batch);
    if constexpr (WALKS) tile.queries = QueryWalk(own.p, tile.batch, tile.head_kv, tile.n0());
    else tile.queries = QueryWalk(own.p, tile.batch, tile.head_kv, tile.n0(), visits);
    if (DRAWS && TELLS_VISITS) visits = tile.steps(), tell();
    work(tile);
  }
  int* counter = own.all().tile_counter;
  if (DRAWS && lane == 0 && atomicAdd(counter + 1, 1) == (int)gridDim.x - 1) {
    counter[0] = counter[1] = 0;  // the last to ask leaves zeros for the next launch
  }
}

// Calls step(tile, visit, first, last) for every step of the CTA: every query tile that a key tile visits, of
// every query head of its group. `first` and `last` of the key tile. Without a walk, the visits are not known here.
template <bool DRAWS, bool WALKS = true, class Own, class Do>
__device__ __forceinline__ void for_each_step(Own& own, Names& names, int lane, Do step) {
  for_each_tile<DRAWS, WALKS>(own, names, lane, [&](const Work& tile) {
    if constexpr (WALKS) {
      tile.queries.for_each(own.p, [&](const QueryVisit& visit, bool first, bool last) { step(tile, visit, first, last); });
    } else {
      for (int i = 0; i < tile.steps(); i++) step(tile, QueryVisit{}, i == 0, i == tile.steps() - 1);
    }
  });
}

// Ordered sums: the key tiles that visit a query tile add to its dq from the last to the first. Among causal ones the last
// starts there, the one before it comes by some steps later, and so on: nobody waits long. How many have added.
__device__ __forceinline__ int* turn_at(const Params& p, const Work& tile, const QueryVisit& visit) {
  return p.semaphore + flag_at(p, flat_head(p, tile.batch, tile.queries.head(visit).head), visit.tile);
}
