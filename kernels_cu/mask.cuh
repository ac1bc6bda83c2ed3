// Everything a kernel knows about masks, and with score.cuh about score modifications. A kernel asks which tiles to
// walk, walks masked / full / masked ranges, calls visible() on the elements of masked tiles and score() on all of them, and
// its gradient on the way back; it never names a feature.
//
// By position, query i sees the keys of a band along the diagonal that ends in the bottom-right corner of the score
// matrix:  i + shift - left <= j <= i + shift + right,  shift = seqlen_k - seqlen_q.  Causal is right = 0.
#pragma once
#include "sequences.cuh"
#include "softmax.cuh"
#include "sums.cuh"

constexpr bool BOUND_LEFT = cfg::WINDOW_LEFT, BOUND_RIGHT = cfg::CAUSAL || cfg::WINDOW_RIGHT;
// Whether kv_range depends on the rows. If not, all warps of a query tile walk the same key tiles.
constexpr bool ROWS_DIFFER = BOUND_LEFT || BOUND_RIGHT;
// Whether a key that exists may be hidden from some row.
constexpr bool HIDES_ANYWHERE = cfg::MASK || cfg::MASK_MOD;  // apart from its position
constexpr bool HIDES_KEYS = ROWS_DIFFER || HIDES_ANYWHERE || VARLEN;  // those behind a sequence are another's
constexpr bool WALKS_DIFFER = VARLEN || cfg::BLOCK_MASK;  // in length, whatever the position
constexpr bool SHARES_FACTS = cfg::FACTS;  // of a function, among the lanes of a warp
// Whether queries of which a function reads the same see the same keys, but for positions.
constexpr bool QUERIES_MAY_BE_ALIKE = cfg::ROW_FACTS && !cfg::MASK;
constexpr bool LISTS_TILES = cfg::BLOCK_MASK;  // whether memory has what a walk visits, and which tiles hide something
// Whether keys that exist may be hidden in any tile: no block mask tells in which.
constexpr bool HIDES_IN_ANY_TILE = cfg::MASK || (cfg::MASK_MOD && !cfg::BLOCK_MASK);
// Whether elements are hidden apart from their position in tiles alone that memory lists: few, which one may look at
// ahead.
constexpr bool HIDES_IN_LISTED_TILES = HIDES_ANYWHERE && !HIDES_IN_ANY_TILE;
// Whether a walk over keys starts at the diagonal, goes to the first key, and then from the last one back: what is
// added to scores, or by a function, is mostly largest there, so that they fall or stay below what was seen.
constexpr bool STARTS_INSIDE = (cfg::ALIBI || cfg::SCORE_MOD) && !HIDES_KEYS;
// Whether scores rise step by step on the way from the last key to the diagonal.
constexpr bool RISES = cfg::ALIBI && !BOUND_RIGHT && !STARTS_INSIDE;
// Whether elements differ in more than their distance from the diagonal: what it takes to compute them is much code.
constexpr bool SCORES_BY_ELEMENT = cfg::BIAS || cfg::SCORE_MOD || cfg::DROPOUT;
constexpr bool BY_ELEMENT = HIDES_ANYWHERE || SCORES_BY_ELEMENT;  // or are hidden
// Whether what an element adds to its score, and whether it is hidden, can be read 16 bytes at a time of a row of keys:
// Hopper's kernels do that ahead of the scores.
constexpr bool ADDENDS_AHEAD = cfg::BIAS && cfg::WIDE_BIAS;
constexpr bool ADDENDS_LAST = cfg::BIAS && !ADDENDS_AHEAD;  // else they are read when the scores are there
constexpr bool HIDDEN_AHEAD = cfg::MASK && cfg::WIDE_MASK && !cfg::MASK_MOD;
// Whether that alone is done by element.
constexpr bool ADDS_ALONE = ADDENDS_AHEAD && !(HIDES_ANYWHERE || cfg::SCORE_MOD || cfg::DROPOUT);
// Whether a score may be -inf though its key is not hidden.
constexpr bool SCORES_HIDE = cfg::BIAS || cfg::SCORE_MOD;

using Real = decltype(Params::scale_log2);

// Which head of the score matrix.
struct Head { int batch, head; };

// The user's functions, in programs that have them.
namespace mod {
__device__ Real score_mod(const Params& p, Real score, int batch, int head, int q_idx, int kv_idx);
__device__ Real score_mod_slope(const Params& p, Real score, int batch, int head, int q_idx, int kv_idx);
__device__ bool mask_mod(const Params& p, int batch, int head, int q_idx, int kv_idx);
// FACTS: in two steps. What it reads for a key, whatever the query is; and the rest.
__device__ cfg::Fact mask_mod_fact(const Params& p, int batch, int head, int kv_idx);
__device__ bool mask_mod_knowing(const Params& p, int batch, int head, int q_idx, int kv_idx, cfg::Fact fact);
// ROW_FACTS: all by which it depends on a query, but for positions; what of it depends on no more; and, with POSITIONS,
// the rest.
__device__ cfg::RowFact mask_mod_row_fact(const Params& p, int batch, int head, int q_idx);
__device__ bool mask_mod_of_alike(const Params& p, int batch, int head, int kv_idx, cfg::Fact fact, cfg::RowFact row_fact);
__device__ bool mask_mod_position(const Params& p, int batch, int head, int q_idx, int kv_idx);
// Adds to the gradients of what score_mod captures, by cfg::SCATTERS sums, from ds of what it makes of the score.
__device__ void score_mod_scatter(const Params& p, RunningSum<Real>* sums, Real score, Real ds, int batch, int head,
                                  int q_idx, int kv_idx);
}  // namespace mod

__device__ __forceinline__ int window_right(const Params& p) { return cfg::CAUSAL ? 0 : p.window_right; }
// Query i sees keys from i + left_shift on, and up to i + right_shift.
__device__ __forceinline__ int left_shift(const Params& p) { return p.seqlen_k - p.seqlen_q - p.window_left; }
__device__ __forceinline__ int right_shift(const Params& p) {
  return p.seqlen_k - p.seqlen_q + window_right(p);
}

// ---- Which tiles to walk --------------------------------------------------------------------------------------------

// Tiles [begin, end) hold everything visible; those in [full_begin, full_end), if any, are visible throughout.
struct TileRange { int begin, full_begin, full_end, end; };

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// One past the last key that any of the query rows [m0, m0 + rows) sees.
__device__ __forceinline__ int kv_end(const Params& p, int m0, int rows) {
  if constexpr (!BOUND_RIGHT) return p.seqlen_k;
  const int shift = right_shift(p);
  return min(max(min(m0 + rows, p.seqlen_q) + shift, 0), p.seqlen_k);
}

// The key tiles that the query rows [m0, m0 + rows) visit. Between whole tiles of queries and of keys, kv_range and
// q_range tell of the same visits.
__device__ __forceinline__ TileRange kv_range(const Params& p, int m0, int rows = cfg::TILE_M) {
  const int end = (int)(((i64)kv_end(p, m0, rows) + cfg::TILE_N - 1) / cfg::TILE_N);
  TileRange range = {0, 0, p.seqlen_k / cfg::TILE_N, end};
  if constexpr (BOUND_RIGHT) range.full_end = min(range.full_end, max(m0 + right_shift(p) + 1, 0) / cfg::TILE_N);
  if constexpr (BOUND_LEFT) {
    range.begin = min(max(m0 + left_shift(p), 0) / cfg::TILE_N, end);
    range.full_begin = ceil_div(max(min(m0 + rows, p.seqlen_q) - 1 + left_shift(p), 0), cfg::TILE_N);
  }
  if (HIDES_IN_ANY_TILE) range.full_begin = end;
  return range;
}

// The query tiles that the key rows [n0, n0 + KEYS) visit. Query rows past seqlen_q count as visible: the kernels
// give them lse = +inf, so that p = exp(s - lse) is 0 there without a predicate. Not so with VARLEN, where they may be
// another sequence's.
template <int KEYS = cfg::TILE_N> __device__ __forceinline__ TileRange q_range(const Params& p, int n0) {
  const int end = (int)(((i64)p.seqlen_q + cfg::TILE_M - 1) / cfg::TILE_M);
  TileRange range = {0, 0, end, end};
  if constexpr (BOUND_RIGHT) {
    const int shift = right_shift(p);
    range.begin = min(max(n0 - shift, 0) / cfg::TILE_M, end);
    range.full_begin = min(ceil_div(max(n0 + KEYS - 1 - shift, 0), cfg::TILE_M), end);
  }
  if constexpr (BOUND_LEFT) {
    const int end_of_last = min(max(min(n0 + KEYS, p.seqlen_k) - left_shift(p), 0), p.seqlen_q);
    const int end_of_first = n0 - left_shift(p) + 1;
    range.end = max(ceil_div(end_of_last, cfg::TILE_M), range.begin);
    range.full_end = end_of_first >= p.seqlen_q ? range.end : max(end_of_first, 0) / cfg::TILE_M;
  }
  if (VARLEN) range.full_end = min(range.full_end, p.seqlen_q / cfg::TILE_M);
  if (n0 + KEYS > p.seqlen_k) range.full_begin = range.end;
  // The compiler shall not know that no tile is full: where it sees no branch, it starts too much at once.
  if (HIDES_IN_ANY_TILE) range.full_begin = opaque(range.end);
  return range;
}

// How many queries, and keys, a block mask is made for; with VARLEN those of the longest sequence.
__device__ __forceinline__ int mask_queries(const Params& p) { return VARLEN ? p.max_seqlen_q : p.seqlen_q; }
__device__ __forceinline__ int mask_keys(const Params& p) { return VARLEN ? p.max_seqlen_k : p.seqlen_k; }

// A block mask lists the blocks of MASK_BLOCK_M queries and MASK_BLOCK_N keys that are not empty, in rising order. Walked
// by tiles, of which PER_BLOCK make a block, position i of a walk is tile i % PER_BLOCK of block i / PER_BLOCK of its list;
// without a block mask it is tile i.
template <int PER_BLOCK> struct BlockList {
  const int* entries;  // 2 * block + (it is full)
  int count;

  BlockList() = default;
  // List number `block` of a head: its length, then the entries, of which there may be `most`.
  __device__ __forceinline__ BlockList(const Params& p, const int* lists, const i64 (&stride)[2], const Head& at, int block,
                                       int most) {
    if constexpr (cfg::BLOCK_MASK) {
      const int* list = lists + at.batch * stride[0] + at.head * stride[1] + block * (i64)(1 + most);
      entries = list + 1, count = VARLEN && p.no_sequence ? 0 : list[0];
    }
  }
  __device__ __forceinline__ int entry(int i) const { return cfg::BLOCK_MASK ? entries[(u32)i / PER_BLOCK] : 0; }
  __device__ __forceinline__ int tile(int i) const { return tile(i, entry(i)); }
  static __device__ __forceinline__ int tile(int i, int entry) {  // of a position, and its entry
    return cfg::BLOCK_MASK ? (entry >> 1) * PER_BLOCK + (u32)i % PER_BLOCK : i;
  }
  static __device__ __forceinline__ bool hides(int entry) { return cfg::BLOCK_MASK && !(entry & 1); }
  // How many positions have tiles before this one.
  __device__ __forceinline__ int before(int tile) const {
    if (!cfg::BLOCK_MASK || tile == 0) return tile;
    const int block = tile / PER_BLOCK;
    auto at = [&](int i) { return entries[i] >> 1; };
    if (count == 0 || at(count - 1) < block) return count * PER_BLOCK;
    int low = 0, high = count - 1;  // the first block from this one on lies in [low, high]
    while (low < high) {
      const int middle = (low + high) / 2;
      if (at(middle) < block) low = middle + 1; else high = middle;
    }
    return low * PER_BLOCK + (at(low) == block ? tile % PER_BLOCK : 0);
  }
};

// The walk of query rows [m0, m0 + rows) of a head over key tiles: positions [begin, end).
struct KeyWalk {
  TileRange range;
  BlockList<cfg::MASK_BLOCK_N / cfg::TILE_N> list;
  // Whether a walk visits whatever its list has, which then need not be looked through.
  static constexpr bool LISTS_ALL = LISTS_TILES && !ROWS_DIFFER && !VARLEN && cfg::MASK_BLOCK_N == cfg::TILE_N;
  int begin, end;
  int ahead = 0;  // STARTS_INSIDE: by how many tiles a position's lies behind the first walk's, around the end

  __device__ __forceinline__ KeyWalk() : begin(0), end(0) {}
  __device__ __forceinline__ KeyWalk(const Params& p, const Head& at, int m0, int rows = cfg::TILE_M)
    : range(kv_range(p, m0, rows)),
      list(p, p.key_blocks, p.key_blocks_stride, at, m0 / cfg::MASK_BLOCK_M, ceil_div(mask_keys(p), cfg::MASK_BLOCK_N)),
      begin(list.before(range.begin)), end(LISTS_ALL ? list.count : list.before(range.end)) {}
  __device__ __forceinline__ int tile(int i) const {
    if (STARTS_INSIDE) return i + ahead < range.end ? i + ahead : i + ahead - range.end;
    return list.tile(i);
  }
  // STARTS_INSIDE: from the tile of key `last` on.
  __device__ __forceinline__ void start_at(int last) {
    ahead = min(max(last, 0) / cfg::TILE_N + 1, range.end);
  }
  // Key number i of those of the tiles in the order of the walk, from position 0 on.
  __device__ __forceinline__ int key(int i) const { return tile(i / cfg::TILE_N) * cfg::TILE_N + i % cfg::TILE_N; }
  // How many keys there are up to the end of the walk; only the last tile of all may lack some.
  __device__ __forceinline__ int keys(const Params& p) const {
    if (!cfg::BLOCK_MASK) return (int)min((i64)end * cfg::TILE_N, (i64)p.seqlen_k);
    return end * cfg::TILE_N - (end ? max((tile(end - 1) + 1) * cfg::TILE_N - p.seqlen_k, 0) : 0);
  }
  // How many tiles are visited behind one that is.
  __device__ __forceinline__ int behind(int tile) const { return end - 1 - list.before(tile); }
  // Whether keys of the tile are hidden from some row.
  __device__ __forceinline__ bool hides(int i) const { return hides(tile(i), list.entry(i)); }
  __device__ __forceinline__ bool hides(int tile, int entry) const { return begins(tile) || ends(tile) || list.hides(entry); }
  // By position: those in front of what a row sees, or those behind.
  __device__ __forceinline__ bool begins(int tile) const { return tile < range.full_begin; }
  __device__ __forceinline__ bool ends(int tile) const { return tile >= range.full_end; }
};

// A query tile that key rows visit: of which head of their group, which tile; and where a block mask lists it: at which
// position of its head's, whether it hides some of it, and where these positions end.
struct QueryVisit {
  int group_head, position, tile;
  bool hidden;
  int end;
};

// The walk of key rows [n0, n0 + TILE_N) over query tiles, those of each query head of a group in turn.
struct QueryWalk {
  TileRange range;
  Head first;  // of the group
  int n_block, visits;

  QueryWalk() = default;
  // Who is told the visits has no walk of its own.
  __device__ __forceinline__ QueryWalk(const Params& p, int batch, int kv_head, int n0, int visits)
    : range(q_range(p, n0)), first{batch, kv_head * p.qheads_per_kv}, n_block(n0 / cfg::MASK_BLOCK_N), visits(visits) {}
  __device__ __forceinline__ QueryWalk(const Params& p, int batch, int kv_head, int n0)
    : range(q_range(p, n0)), first{batch, kv_head * p.qheads_per_kv}, n_block(n0 / cfg::MASK_BLOCK_N) {
    if constexpr (!cfg::BLOCK_MASK) {
      visits = (range.end - range.begin) * p.qheads_per_kv;
    } else {
      const int different = p.query_blocks_stride[1] ? p.qheads_per_kv : 1;  // lists of heads
      visits = 0;
      for (int h = 0; h < different; h++) {
        const List found = list(p, h);
        visits += found.before(range.end) - found.before(range.begin);
      }
      visits *= p.qheads_per_kv / different;
    }
  }
  // That of some of the keys, KEYS from n0 on: all of it where they see nothing.
  template <int KEYS> __device__ __forceinline__ QueryWalk of(const Params& p, int n0) const {
    QueryWalk part = *this;
    const TileRange own = q_range<KEYS>(p, n0);
    if (own.begin < own.end) part.range = own, part.visits = (own.end - own.begin) * p.qheads_per_kv;
    return part;
  }
  __device__ __forceinline__ Head head(const QueryVisit& visit) const { return {first.batch, first.head + visit.group_head}; }
  __device__ __forceinline__ QueryVisit start(const Params& p) const {
    if constexpr (cfg::BLOCK_MASK) return entering(p, 0);
    return {0, 0, range.begin};
  }
  __device__ __forceinline__ void advance(const Params& p, QueryVisit& visit) const {
    if constexpr (!cfg::BLOCK_MASK) {
      if (++visit.tile == range.end) visit.tile = range.begin, visit.group_head++;
    } else if (visit.position + 1 == visit.end) {
      visit = entering(p, visit.group_head + 1);
    } else {
      visit = at(list(p, visit.group_head), visit.group_head, visit.position + 1, visit.end);
    }
  }
  // Calls step(visit, first, last) for every visit.
  template <class Do> __device__ __forceinline__ void for_each(const Params& p, Do step) const {
    if constexpr (cfg::BLOCK_MASK) {
      QueryVisit visit = start(p);
      for (int i = 0; i < visits; i++, advance(p, visit)) step(visit, i == 0, i == visits - 1);
    } else {
      for (int h = 0; h < p.qheads_per_kv; h++) {
        for (int tile = range.begin; tile < range.end; tile++) {
          step(QueryVisit{h, 0, tile}, h == 0 && tile == range.begin, h == p.qheads_per_kv - 1 && tile == range.end - 1);
        }
      }
    }
  }
  // Whether some of the keys are hidden from queries of the tile.
  __device__ __forceinline__ bool hides(const QueryVisit& visit) const {
    return visit.tile < range.full_begin || visit.tile >= range.full_end || (cfg::BLOCK_MASK && visit.hidden);
  }
  // Whether any visit may hide.
  __device__ __forceinline__ bool hides_some() const {
    return cfg::BLOCK_MASK || range.full_begin != range.begin || range.full_end != range.end;
  }

 private:
  using List = BlockList<cfg::MASK_BLOCK_M / cfg::TILE_M>;
  __device__ __forceinline__ List list(const Params& p, int group_head) const {
    return {p, p.query_blocks, p.query_blocks_stride, {first.batch, first.head + group_head}, n_block,
            ceil_div(mask_queries(p), cfg::MASK_BLOCK_M)};
  }
  __device__ __forceinline__ QueryVisit at(const List& list, int group_head, int position, int end) const {
    return {group_head, position, list.tile(position), list.hides(list.entry(position)), end};
  }
  // The first visit of the first head from this one on that has any, or none behind the last.
  __device__ __forceinline__ QueryVisit entering(const Params& p, int group_head) const {
    for (; group_head < p.qheads_per_kv; group_head++) {
      const List found = list(p, group_head);
      const int begin = found.before(range.begin), end = found.before(range.end);
      if (begin < end) return at(found, group_head, begin, end);
    }
    return {group_head, -1};  // and so are all after it
  }
};

// ---- Which elements are visible -------------------------------------------------------------------------------------

// A comparison that is there only if its template argument says so.
template <bool> struct From {
  int begin;
  __device__ __forceinline__ bool has(int offset) const { return offset >= begin; }
};
template <> struct From<false> {
  __device__ __forceinline__ From(int) {}
  __device__ __forceinline__ bool has(int) const { return true; }
};
template <bool> struct Below {
  int end;
  __device__ __forceinline__ bool has(int offset) const { return offset < end; }
};
template <> struct Below<false> {
  __device__ __forceinline__ Below(int) {}
  __device__ __forceinline__ bool has(int) const { return true; }
};

// A row or a column of the array `mask`, from (q_idx, kv_idx) on. Only what exists is looked at.
template <bool> struct Listed {
  const unsigned char* first;
  i64 stride;
  __device__ __forceinline__ Listed(const Params& p, const Head& at, int q_idx, int kv_idx, bool along_keys)
    : first(p.mask + at.batch * p.mask_stride[0] + at.head * p.mask_stride[1] + q_idx * p.mask_stride[2] +
            kv_idx * p.mask_stride[3]),
      stride(!along_keys ? p.mask_stride[2] : cfg::UNIT_MASK ? 1 : p.mask_stride[3]) {}
  __device__ __forceinline__ bool has(int offset) const { return first[offset * stride]; }
};
template <> struct Listed<false> {
  __device__ __forceinline__ Listed(const Params&, const Head&, int, int, bool) {}
  __device__ __forceinline__ bool has(int) const { return true; }
};

// The same as a function of the user's has it.
template <bool> struct Chosen {
  const Params& p;
  Head at;
  int q_idx, kv_idx;
  bool along_keys;
  __device__ __forceinline__ bool has(int offset) const {
    return mod::mask_mod(p, at.batch, at.head, q_idx + (along_keys ? 0 : offset), kv_idx + (along_keys ? offset : 0));
  }
  __device__ __forceinline__ bool has(int offset, cfg::Fact fact) const {  // along_keys
    return mod::mask_mod_knowing(p, at.batch, at.head, q_idx, kv_idx + offset, fact);
  }
  __device__ __forceinline__ bool by_position(int offset) const {  // along_keys
    return !cfg::POSITIONS || mod::mask_mod_position(p, at.batch, at.head, q_idx, kv_idx + offset);
  }
};
template <> struct Chosen<false> {
  __device__ __forceinline__ Chosen(const Params&, const Head&, int, int, bool) {}
  __device__ __forceinline__ bool has(int) const { return true; }
  __device__ __forceinline__ bool has(int, cfg::Fact) const { return true; }
  __device__ __forceinline__ bool by_position(int) const { return true; }
};

// FACTS: those of COUNT keys from `first` on, of which each lane of a warp reads some.
template <int COUNT> struct Facts {
  static constexpr int LANES = 32, OWN = (COUNT + LANES - 1) / LANES;
  cfg::Fact own[OWN];

  __device__ __forceinline__ Facts(const Params& p, const Head& at, int first, int lane) {
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      if constexpr (SHARES_FACTS) own[i] = mod::mask_mod_fact(p, at.batch, at.head, first + i * LANES + lane);
    }
  }
  // That of `first` + offset, in each lane of a quad two further, as accumulators have them. For all lanes at once.
  __device__ __forceinline__ cfg::Fact of_quad(int offset, int lane) const {
    return __shfl_sync(~0u, own[offset / LANES], offset % LANES + lane % 4 * 2);
  }
  __device__ __forceinline__ cfg::Fact of(int offset) const {
    return __shfl_sync(~0u, own[offset / LANES], offset % LANES);
  }
};

// ROW_FACTS: those of a lane's two queries, if they are the same as those of all lanes of the warp.
struct RowFacts {
  cfg::RowFact of_all;
  bool alike;

  RowFacts() = default;
  __device__ __forceinline__ RowFacts(const Params& p, const Head& at, int first, int second) {
    const auto fact = mod::mask_mod_row_fact(p, at.batch, at.head, first);
    const auto other = mod::mask_mod_row_fact(p, at.batch, at.head, second);
    of_all = __shfl_sync(~0u, fact, 0);
    alike = __all_sync(~0u, (fact == of_all) & (other == of_all));
  }
  // What the function then says of a key to all of them, but for positions.
  __device__ __forceinline__ bool has(const Params& p, const Head& at, int kv_idx, cfg::Fact fact) const {
    if constexpr (!cfg::ROW_FACTS) return true;
    else return mod::mask_mod_of_alike(p, at.batch, at.head, kv_idx, fact, of_all);
  }
};

// HIDDEN_AHEAD: a row of the array, from its first key on; 1 where a key is visible. And how far rows lie apart.
__device__ __forceinline__ const unsigned char* visible_row(const Params& p, const Head& at, int q_idx) {
  return p.mask + at.batch * p.mask_stride[0] + at.head * p.mask_stride[1] + q_idx * p.mask_stride[2];
}
__device__ __forceinline__ i64 visible_row_stride(const Params& p) { return p.mask_stride[2]; }

// What query q_idx sees of the keys kv0 + offset. Made once a row, it takes one comparison or two an element where
// offsets are constants.
struct VisibleKeys {
  Below<true> last;
  From<BOUND_LEFT> first;
  Listed<cfg::MASK> listed;
  Chosen<cfg::MASK_MOD> chosen;
  __device__ __forceinline__ bool by_position(int offset) const { return last.has(offset) && first.has(offset); }
  __device__ __forceinline__ bool has(int offset) const {
    return (by_position(offset) && listed.has(offset)) & chosen.has(offset);  // functions are cheaper without branches
  }
  __device__ __forceinline__ bool has(int offset, cfg::Fact fact) const {
    return (by_position(offset) && listed.has(offset)) & chosen.has(offset, fact);
  }
};
// What functions choose of COUNT keys from `first` on, for a warp whose lanes ask for their queries at once.
template <int COUNT, bool = SHARES_FACTS> struct ChosenKeys {
  Facts<COUNT> facts;
  __device__ __forceinline__ ChosenKeys(const Params& p, const Head& at, int first, int lane)
    : facts(p, at, first, lane) {}
  // Key `first` + i, which is kv0 + offset.
  __device__ __forceinline__ bool has(const VisibleKeys& of_query, int offset, int i) const {
    return of_query.chosen.has(offset, facts.of(i));
  }
};
template <int COUNT> struct ChosenKeys<COUNT, false> {
  __device__ __forceinline__ ChosenKeys(const Params&, const Head&, int, int) {}
  __device__ __forceinline__ bool has(const VisibleKeys& of_query, int offset, int) const {
    return of_query.chosen.has(offset);
  }
};
__device__ __forceinline__ VisibleKeys visible_keys(const Params& p, int q_idx, int kv0, const Head& at = {}) {
  int begin = 0, end = p.seqlen_k;
  if constexpr (BOUND_LEFT) begin = q_idx + left_shift(p) - kv0;
  if constexpr (BOUND_RIGHT) end = min(end, q_idx + right_shift(p) + 1);
  if constexpr (cfg::MASK) end = q_idx < p.seqlen_q ? end : 0;
  return {{end - kv0}, {begin}, {p, at, q_idx, kv0, true}, {p, at, q_idx, kv0, true}};
}

// And for a whole key: which of the queries q0 + offset see key kv_idx.
struct VisibleQueries {
  From<true> first;
  Below<BOUND_LEFT || HIDES_ANYWHERE || VARLEN> last;
  Listed<cfg::MASK> listed;
  Chosen<cfg::MASK_MOD> chosen;
  __device__ __forceinline__ bool by_position(int offset) const { return first.has(offset) && last.has(offset); }
  __device__ __forceinline__ bool has(int offset) const {
    return (by_position(offset) && listed.has(offset)) & chosen.has(offset);
  }
};
__device__ __forceinline__ VisibleQueries visible_queries(const Params& p, int kv_idx, int q0, const Head& at = {}) {
  constexpr int NONE = 0x7fffffff;
  int begin = 0, end = NONE;
  if constexpr (BOUND_RIGHT) begin = kv_idx - right_shift(p);
  if constexpr (BOUND_LEFT) end = kv_idx - left_shift(p) + 1 - q0;
  // A query that does not exist may see a key that no other does.
  if constexpr (HIDES_ANYWHERE || VARLEN) end = min(end, p.seqlen_q - q0);
  return {{kv_idx < p.seqlen_k ? begin - q0 : NONE}, {end}, {p, at, q0, kv_idx, false}, {p, at, q0, kv_idx, false}};
}

// Whether query q_idx sees key kv_idx. True everywhere in the tiles of a full range.
__device__ __forceinline__ bool visible(const Params& p, int q_idx, int kv_idx, const Head& at = {}) {
  return kv_idx < p.seqlen_k && (!BOUND_RIGHT || kv_idx <= q_idx + right_shift(p)) &&
         (!BOUND_LEFT || kv_idx >= q_idx + left_shift(p)) &&
         (!cfg::MASK || (q_idx < p.seqlen_q && Listed<cfg::MASK>(p, at, q_idx, kv_idx, true).has(0))) &&
         Chosen<cfg::MASK_MOD>{p, at, q_idx, kv_idx, true}.has(0);
}

// On which side of the diagonal all keys of a tile lie, for all queries in [q_begin, q_end): 1 in front of it, -1
// behind, 0: neither. It matters to ALIBI alone.
__device__ __forceinline__ int side_of(const Params& p, int q_begin, int q_end, int tile) {
  if (!cfg::ALIBI || cfg::CAUSAL) return 1;
  const int shift = p.seqlen_k - p.seqlen_q, kv0 = tile * cfg::TILE_N;
  return kv0 + cfg::TILE_N - 1 <= q_begin + shift ? 1 : kv0 >= q_end + shift ? -1 : 0;
}
