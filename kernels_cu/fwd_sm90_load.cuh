// What fwd_sm90 computes from: the order of output tiles, the key tiles of a walk, the buffers in shared memory and how
// they are handed over, the thread that fills them, and the way of o from there.
#pragma once
#include "quads.cuh"
#include "score.cuh"

using cfg::Element;
using cfg::TILE_M, cfg::TILE_N, cfg::TILE_D, cfg::TILE_DV, cfg::STAGES, cfg::V_STAGES, cfg::Q_STAGES;

constexpr int WG_ROWS = 64, CONSUMERS = TILE_M / WG_ROWS;  // rows of a warpgroup; warpgroups that compute
// Rows of a warpgroup: the same WG_QUERIES queries of PACK heads that share k and v, head after head; what is left is
// zero and not stored.
constexpr int WG_QUERIES = WG_ROWS / cfg::PACK, TILE_QUERIES = CONSUMERS * WG_QUERIES;
constexpr int WG_USED_ROWS = WG_QUERIES * cfg::PACK;
constexpr int D_CHUNKS = (TILE_D + CHUNK - 1) / CHUNK, DV_CHUNKS = (TILE_DV + CHUNK - 1) / CHUNK;
constexpr int D_STEPS = TILE_D / 16, KEY_STEPS = TILE_N / 16;  // steps of a product's summed dimension
constexpr int CONSUMER_WARPS = CONSUMERS * WARPGROUP / WARP;
// Not where tiles take differently long.
constexpr bool PING_PONG = cfg::PING_PONG && CONSUMERS > 1 && !LISTS_TILES;
// Whether masks are all that there is of options, so that they hide in products as they come, and the reference may be
// stale where they do.
constexpr bool HIDES_PLAINLY = HIDES_ANYWHERE && !cfg::SCALE_FIRST;
// Whether every step looks for the maximum: a stale reference would be outgrown again and again, or where masks hide
// elements of other scores it would take much code to compute these anew.
constexpr bool RAISES = RISES || (HIDES_IN_ANY_TILE && !HIDES_PLAINLY);
// Whether steps do so after one whose reference was outgrown, until one need not raise it: what scores do along a row
// is anybody's guess.
constexpr bool ADAPTS = SCORES_HIDE && !RAISES;
// Whether the last tile of a walk often hides keys, so that o is looked through when the next output tile has begun.
// What is computed by elements has no registers for it.
constexpr bool ENDS_HIDDEN = BOUND_LEFT && !BY_ELEMENT;
// Whether a mask may hide the same from all rows of a warp, and that is seen.
constexpr bool MAY_BE_ALIKE = QUERIES_MAY_BE_ALIKE && cfg::PACK == 1;
constexpr bool DYNAMIC = cfg::DYNAMIC || WALKS_DIFFER;  // whether tiles are handed out as CTAs get free
// Whether o goes out by TMA, through the place of its q: where a warp's rows are a box of an array that ends with them,
// and registers are enough.
constexpr bool STORES_TMA =
  cfg::STORE_TMA && cfg::PACK == 1 && !cfg::SPLIT && !VARLEN && !ENDS_HIDDEN && DV_CHUNKS <= D_CHUNKS;
static_assert(!STORES_TMA || Q_STAGES > 1 || !cfg::SCORE_EARLY, "the next q has a place before o has left it");
// Who loads: a warpgroup, the first, that leaves its registers to the others, or a warp, the last.
constexpr bool SHARES_REGISTERS = cfg::CONSUMER_REGS > 0;
constexpr int LOADER = SHARES_REGISTERS ? 0 : CONSUMERS;
static_assert(cfg::NUM_THREADS == CONSUMERS * WARPGROUP + (SHARES_REGISTERS ? WARPGROUP : WARP), "they and who computes");
static_assert(TILE_N % 16 == 0 && TILE_D % 16 == 0 && TILE_DV % 16 == 0, "wgmma sums in steps of 16");

// The output tile that a warpgroup computes next: the queries from m0 on, of PACK heads from `head` on, over part
// `split` of their keys. Or the end. With VARLEN it is that of num_splits times the part of the rows (sequences.cuh), on top.
struct alignas(16) Work {
  int m0, head, batch, split;
  __device__ __forceinline__ bool valid() const { return split >= 0; }
};
constexpr int END = -1;  // in place of a split
__device__ __forceinline__ int keys_part(const Params& p, const Work& work) {
  return !cfg::SPLIT ? 0 : VARLEN ? work.split % p.num_splits : work.split;
}
__device__ __forceinline__ int rows_part(const Params& p, const Work& work) {
  return cfg::SPLIT ? work.split / p.num_splits : work.split;
}

// ADDENDS_AHEAD: what is added to the scores of a key tile travels with its k.
using AddendTile = PairTile<Element, WG_ROWS, TILE_N>;
template <bool> struct Addends { AddendTile addends[STAGES][CONSUMERS]; };
template <> struct Addends<false> { static constexpr AddendTile (*addends)[CONSUMERS] = nullptr; };
// How many queries and heads of a warpgroup's have rows of their own, and which row is that of its `row`.
__device__ __forceinline__ int addend_queries(const Params& p) { return addend_place(p, {}, WG_QUERIES - 1).query + 1; }
__device__ __forceinline__ int addend_heads(const Params& p) { return addend_place(p, {0, cfg::PACK - 1}, 0).head + 1; }
__device__ __forceinline__ int row_of_addends(const Params& p, int row) {
  const auto at = addend_place(p, {0, min(row / WG_QUERIES, cfg::PACK - 1)}, row % WG_QUERIES);
  return at.head * addend_queries(p) + at.query;
}

struct Smem : Addends<ADDENDS_AHEAD> {
  alignas(1024) Element q[Q_STAGES][CONSUMERS][D_CHUNKS][WG_ROWS][CHUNK];
  Element k[STAGES][D_CHUNKS][TILE_N][CHUNK];
  Element v[V_STAGES][DV_CHUNKS][TILE_N][CHUNK];
  Work work[Q_STAGES][CONSUMERS];  // travels with q
  u64 q_full[Q_STAGES][CONSUMERS], q_empty[Q_STAGES][CONSUMERS];
  u64 k_full[STAGES], k_empty[STAGES], v_full[V_STAGES], v_empty[V_STAGES];

  __device__ __forceinline__ void init() {
    for (int i = 0; i < Q_STAGES; i++) {
      for (int w = 0; w < CONSUMERS; w++) {
        mbarrier_init(&q_full[i][w], 1);
        mbarrier_init(&q_empty[i][w], WARPGROUP / WARP);
      }
    }
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(&k_full[i], 1);
      mbarrier_init(&k_empty[i], CONSUMER_WARPS);
    }
    for (int i = 0; i < V_STAGES; i++) {
      mbarrier_init(&v_full[i], 1);
      mbarrier_init(&v_empty[i], CONSUMER_WARPS);
    }
  }
};
static_assert(sizeof(Smem) == cfg::SMEM_BYTES, "tiles.py and Smem disagree");

// Named barriers: TURN + w opens when it is warpgroup w's turn to start products. Its own 128 threads sync on it, those
// of the warpgroup before it arrive.
constexpr int TURN = 1, TURN_THREADS = 2 * WARPGROUP;

// All warpgroups of a CTA walk over key tiles from the last back. What of a walk lies in [begin, end), which is not empty
// in front of 0.
__device__ __forceinline__ KeyWalk clip(KeyWalk x, int begin, int end) {
  auto clipped = [&](int n) { return min(max(n, begin), end); };
  x.begin = clipped(x.begin), x.end = clipped(x.end);
  return x;
}

// The key tiles of an output tile: all that its queries visit, or the part that is its split's.
__device__ __forceinline__ KeyWalk tile_keys(const Params& p, const Work& work) {
  KeyWalk all(p, {work.batch, work.head}, work.m0, TILE_QUERIES);
  if (STARTS_INSIDE) all.start_at(work.m0 + TILE_QUERIES - 1 + p.seqlen_k - p.seqlen_q);
  if (!cfg::SPLIT) return all;
  const int part = ceil_div(all.end - all.begin, p.num_splits), begin = min(all.begin + keys_part(p, work) * part, all.end);
  return clip(all, begin, min(begin + part, all.end));
}

// The key tiles of the warpgroup whose first query is m0: part of those of its output tile. If there are none, all come
// before its walk.
__device__ __forceinline__ KeyWalk warpgroup_keys(const Params& p, const KeyWalk& tile, const Head& head, int m0) {
  KeyWalk own = LISTS_TILES && !ROWS_DIFFER ? tile : KeyWalk(p, head, m0, WG_QUERIES);
  own.ahead = tile.ahead;
  if (cfg::SPLIT) own = clip(own, tile.begin, tile.end);
  if (m0 >= p.seqlen_q || own.begin >= own.end) own.begin = own.end = tile.begin;
  return own;
}
// Output tile number `index` in the order in which they are taken. All tiles' first parts of the keys come first. Packs
// of heads are taken in sections whose k and v share L2; in a section the last query tiles come first, whose causal walk
// is longest, so that short ones fill the end.
__device__ __forceinline__ Work find_work(const Params& p, unsigned index) {
  if (index >= (unsigned)p.num_tiles) return {0, 0, 0, END};
  const int packs_per_batch = p.num_heads_q / cfg::PACK, packs = p.batch * packs_per_batch;
  const int split = cfg::SPLIT ? index / (packs * p.num_m_blocks) : 0;
  index -= split * packs * p.num_m_blocks;
  const int section = index / (p.packs_per_section * p.num_m_blocks), first_pack = section * p.packs_per_section;
  const int place = index - first_pack * p.num_m_blocks, width = min(p.packs_per_section, packs - first_pack);
  const int row = place / width, pack = first_pack + place - row * width;
  if (ADDENDS_AHEAD && addend_place(p, {1, 0}, 0).batch == 0) {
    // Batches share what is added to scores: those of heads that share k and v follow each other, and L2 has it for all.
    const int heads = p.qheads_per_kv / cfg::PACK, group = pack / heads, group_head = pack - group * heads;
    const int head_kv = group / p.batch;
    return {(p.num_m_blocks - 1 - row) * TILE_QUERIES, (head_kv * heads + group_head) * cfg::PACK, group - head_kv * p.batch,
            split};
  }
  const int batch = pack / packs_per_batch;
  return {(p.num_m_blocks - 1 - row) * TILE_QUERIES, (pack - batch * packs_per_batch) * cfg::PACK, batch, split};
}

constexpr int HEADS_KEYS = ROWS_DIFFER ? (64 << 20) / ((TILE_D + TILE_DV) * (int)sizeof(Element)) : 0;
// The same, and the arguments of its sequence, where lengths differ: not every number has a tile, so others are drawn.
template <class Own> __device__ __forceinline__ Work take_work(Own& own, const Params& p, unsigned& index) {
  if constexpr (!VARLEN) {
    return find_work(p, index);
  } else {
    SequenceTile tile;
    const int tiles = cfg::SPLIT ? p.num_tiles / p.num_splits : p.num_tiles, packs = p.num_heads_q / cfg::PACK;
    for (; index < (unsigned)p.num_tiles; index = gridDim.x + atomicAdd(p.tile_counter, 1)) {
      const int split = cfg::SPLIT ? index / tiles : 0;
      if (find_tile<BY_QUERIES, TILE_QUERIES, HEADS_KEYS>(own, p, index - split * tiles, packs, tile)) {
        return {(tile.blocks - 1 - tile.block) * TILE_QUERIES, tile.head * cfg::PACK, tile.batch,
                cfg::SPLIT ? tile.part * p.num_splits + split : tile.part};
      }
    }
    return {0, 0, 0, END};
  }
}
// Where in a tensor map the queries of a warpgroup and the keys of a tile begin, and in which batch.
__device__ __forceinline__ int q_row(const Params& p, const Work& work, int wg) {
  return (VARLEN ? p.first_q : 0) + work.m0 + wg * WG_QUERIES;
}
__device__ __forceinline__ int k_row(const Params& p, int n) { return (VARLEN ? p.first_k : 0) + n * TILE_N; }
__device__ __forceinline__ int map_batch(const Work& work) { return cfg::PACKED ? 0 : work.batch; }

// ADDENDS_AHEAD: has TMA load those of key tile `n` of an output tile to a stage. `full` awaits addend_bytes of them.
__device__ __forceinline__ int addend_bytes(const Params& p) {
  return ADDENDS_AHEAD ? CONSUMERS * addend_heads(p) * addend_queries(p) * TILE_N * (int)sizeof(Element) : 0;
}
__device__ __forceinline__ void load_addends(const Params& params, Smem& smem, int stage, u64* full, const Work& work, int n) {
  for (int w = 0; w < CONSUMERS; w++) {
    const auto at = addend_place(params, {work.batch, work.head}, work.m0 + w * WG_QUERIES);
    for (int c = 0; c < AddendTile::BOXES; c++) {
      tma_load_4d(smem.addends[stage][w].boxes[c], addend_map(params), full, n * TILE_N + c * AddendTile::BOX_COLUMNS,
                  at.query, at.head, at.batch);
    }
  }
}

// One thread: loads everything, for one output tile after another.
__device__ __forceinline__ void produce(const Params& params, Smem& smem) {
  Own<VARLEN> own(params);
  const Params& p = own.p;
  prefetch_tensor_map(&params.tma_q);
  prefetch_tensor_map(&params.tma_k);
  prefetch_tensor_map(&params.tma_v);
  if (ADDENDS_AHEAD) prefetch_tensor_map(addend_map(params));
  PackedRing<Q_STAGES> q;
  Ring<STAGES> k;
  Ring<V_STAGES> v;
  unsigned index = blockIdx.x, round = 0;
  while (true) {
    const Work work = take_work(own, params, index);
    const KeyWalk range = work.valid() ? tile_keys(p, work) : KeyWalk();
    const int head_kv = work.head / p.qheads_per_kv;

    auto load_k = [&](int n) {
      mbarrier_wait(&smem.k_empty[k.index], k.parity ^ 1);
      mbarrier_arrive_expect_tx(&smem.k_full[k.index], sizeof(smem.k[0]) + addend_bytes(params));
      for (int c = 0; c < D_CHUNKS; c++) {
        tma_load_4d(smem.k[k.index][c], &params.tma_k, &smem.k_full[k.index], c * CHUNK, k_row(p, range.tile(n)), head_kv,
                    map_batch(work));
      }
      if constexpr (ADDENDS_AHEAD) load_addends(params, smem, k.index, &smem.k_full[k.index], work, range.tile(n));
      k.advance();
    };
    auto load_v = [&](int n) {
      mbarrier_wait(&smem.v_empty[v.index], v.parity ^ 1);
      mbarrier_arrive_expect_tx(&smem.v_full[v.index], sizeof(smem.v[0]));
      for (int c = 0; c < DV_CHUNKS; c++) {
        tma_load_4d(smem.v[v.index][c], &params.tma_v, &smem.v_full[v.index], c * CHUNK, k_row(p, range.tile(n)), head_kv,
                    map_batch(work));
      }
      v.advance();
    };
    auto send_q = [&](int w) {
      u64* full = &smem.q_full[q.index()][w];
      mbarrier_wait(&smem.q_empty[q.index()][w], q.parity() ^ 1);
      smem.work[q.index()][w] = work;
      if (range.begin == range.end) return mbarrier_arrive(full);
      mbarrier_arrive_expect_tx(full, WG_USED_ROWS * D_CHUNKS * CHUNK_ROW_BYTES);
      for (int c = 0; c < D_CHUNKS; c++) {
        tma_load_4d(smem.q[q.index()][w][c], &params.tma_q, full, c * CHUNK, q_row(p, work, w), work.head,
                    map_batch(work));
      }
    };

    if (range.begin < range.end) load_k(range.end - 1);
    for (int w = 0; w < CONSUMERS; w++) send_q(w);
    q.advance();
    if (!work.valid()) break;
    round++;
    index = DYNAMIC ? gridDim.x + atomicAdd(p.tile_counter, 1)
                         : round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    for (int n = range.end - 1; n >= range.begin; n--) {
      if (n > range.begin) load_k(n - 1);
      load_v(n);
    }
  }
  if (DYNAMIC && atomicAdd(p.tile_counter + 1, 1) == (int)gridDim.x - 1) {
    p.tile_counter[0] = p.tile_counter[1] = 0;  // the last to ask leaves zeros for the next launch
  }
}

// Whether all rows of a warp see by their positions all keys of a tile, which they look at from the lane's first key on.
__device__ __forceinline__ bool all_by_position(const VisibleKeys (&keys)[2]) {
  auto all = [](const VisibleKeys& row) { return row.by_position(0) && row.by_position(TILE_N - 7); };
  return __all_sync(~0u, all(keys[0]) && all(keys[1]));
}

// MAY_BE_ALIKE: which elements of a tile, whose first key is `first`, a function hides from all rows of a warp, but by
// position, or do not exist. Each lane looks at some keys, and votes make the bits.
template <class Bits>
__device__ __forceinline__ u32 hidden_alike(const Params& p, const Head& at, int first, const Facts<TILE_N>& facts,
                                            const RowFacts& row_facts, int lane) {
  u32 found[4] = {};
#pragma unroll
  for (int i = 0; i < facts.OWN; i++) {
    const int key = first + i * WARP + lane;
    const bool is_seen = row_facts.has(p, at, key, facts.own[i]);
    found[i] = __ballot_sync(~0u, !(is_seen & (key < p.seqlen_k)));
  }
  return Bits::of_words(found, lane);
}

// HIDES_ANYWHERE: marks in bits which elements of a tile are hidden from the lane's two rows, but for those that are
// HIDDEN_AHEAD. `first` is the tile's first key.
template <class Bits>
__device__ __forceinline__ void note_hidden(const Params& p, u32 (&hidden)[2], const VisibleKeys (&keys)[2], const Head& at,
                                            int first, const RowFacts& row_facts, int lane) {
  const Facts<TILE_N> facts(p, at, first, lane);
  auto note = [&](int i, bool is_seen) { hidden[i / 2 % 2] |= u32(!is_seen) << Bits::place(i / 4, i % 2); };
  auto note_all = [&](auto is_seen) {
#pragma unroll
    for (int i = 0; i < TILE_N / 2; i++) note(i, is_seen(keys[i / 2 % 2], i / 4 * 8 + i % 2));
  };
  if (MAY_BE_ALIKE && row_facts.alike) {
    hidden[0] = hidden[1] = hidden_alike<Bits>(p, at, first, facts, row_facts, lane);
    if (cfg::POSITIONS) note_all([](const VisibleKeys& row, int offset) { return row.chosen.by_position(offset); });
    if (ROWS_DIFFER && !all_by_position(keys)) {
      note_all([](const VisibleKeys& row, int offset) { return row.by_position(offset); });
    }
  } else if constexpr (SHARES_FACTS && cfg::PACK == 1) {
#pragma unroll
    for (int i = 0; i < TILE_N / 2; i += i % 2 ? 3 : 1) {  // of the lane's first row
      const auto fact = facts.of_quad(i / 4 * 8 + i % 2, lane);
      note(i, keys[0].has(i / 4 * 8 + i % 2, fact));
      note(i + 2, keys[1].has(i / 4 * 8 + i % 2, fact));
    }
  } else {
    note_all([](const VisibleKeys& row, int offset) {
      return HIDDEN_AHEAD ? row.by_position(offset) : row.has(offset);
    });
  }
}

// STORES_TMA: queues the copy of a warp's 16 rows of o, from `warp_row` on of a warpgroup's, through the place of their q,
// which is free again when that has been read (bulk_wait_read).
__device__ __forceinline__ void store_by_tma(const Params& params, Element (&o_smem)[D_CHUNKS][WG_ROWS][CHUNK],
                                             const float (&o_rmem)[TILE_DV / 2], const float (&factor)[2],
                                             const Work& work, int wg_row, int warp_row, int lane) {
  accumulator_to_smem<TILE_DV, Element>(o_smem, warp_row, o_rmem, factor, lane);
  fence_proxy_async_shared();
  __syncwarp();
  if (lane > 0) return;
  for (int c = 0; c < DV_CHUNKS; c++) {
    tma_store_4d(&params.tma_o, o_smem[c][warp_row], c * CHUNK, work.m0 + wg_row + warp_row, work.head, work.batch);
  }
  bulk_commit();
}
