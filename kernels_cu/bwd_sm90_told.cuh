// What consumers are told through shared memory, ahead of their scores, by warps that load, which wait for most of the
// time, while consumers have neither registers for what memory says of elements nor time to wait for it.
//
// Where a block mask lists what key tiles visit, one warp of a CTA reads the lists, and tells the visits. Where
// functions hide elements of some of these tiles, or an array those of any, the warps that load lse and delta find out
// which, and hand it on in bits.
#pragma once
#include "score.cuh"
#include "quads.cuh"

constexpr bool TELLS_VISITS = LISTS_TILES && !cfg::LARGE_HEADS;
constexpr bool TELLS_HIDDEN = (HIDES_IN_LISTED_TILES || HIDDEN_AHEAD) && !cfg::LARGE_HEADS;

// Visits that lie in shared memory at a time. One is told when consumers are done with that STAGES before it, and so
// the warpgroup of dq with ds of those DS_BUFFERS earlier.
constexpr int TOLD_VISITS = 8;
struct alignas(8) ToldVisit { int group_head, tile_and_hidden; };

// Of 16 keys, those of a consumer's warp, and 64 queries, what is hidden: bit i of word q is of key i and query q, bit
// 16 + i of key i and query 32 + q.
constexpr int BITS_KEYS = 16;
struct alignas(16) HiddenBlock { u32 words[WARP]; };
static_assert(!TELLS_HIDDEN || cfg::TILE_M == 2 * WARP, "two queries a lane");

// HIDDEN_AHEAD: bytes of the array, on their way to bits. Of each warp that finds them for FOUND_KEYS keys, two tiles;
// a unit of padding puts the same columns of eight rows in different banks.
constexpr int FINDERS = 2, FOUND_KEYS = cfg::TILE_N / FINDERS;
using VisibleBytes = unsigned char[2][cfg::TILE_M][FOUND_KEYS + UNIT_BYTES];
template <bool> struct Bytes {
  VisibleBytes of[FINDERS];
  __device__ __forceinline__ VisibleBytes& operator[](int finder) { return of[finder]; }
};
template <> struct Bytes<false> {
  VisibleBytes& operator[](int finder);  // not there
};

template <bool> struct alignas(1024) Told {
  Bytes<HIDDEN_AHEAD> bytes;
  ToldVisit visits[TOLD_VISITS];
  HiddenBlock hidden[cfg::STAGES][cfg::TILE_N / BITS_KEYS];

  __device__ __forceinline__ void tell(int at, const QueryVisit& visit, bool hides) {
    visits[at] = {visit.group_head, 2 * visit.tile + hides};
  }
  __device__ __forceinline__ QueryVisit visit(int at) const {
    const ToldVisit told = visits[at];
    return {told.group_head, 0, told.tile_and_hidden >> 1, bool(told.tile_and_hidden & 1)};
  }
};
template <> struct Told<false> {};

// What queries m0 + lane and those 32 further see of keys from n0 on; nothing where they do not exist.
struct LaneQueries {
  VisibleKeys keys[2];
  __device__ __forceinline__ LaneQueries(const Params& p, const Head& at, int m0, int n0, int lane)
    : keys{visible_keys(p, m0 + lane, n0, at), visible_keys(p, m0 + WARP + lane, n0, at)} {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if (m0 + j * WARP + lane >= p.seqlen_q) keys[j].last = {0};
    }
  }
  // Whether some of the FOUND_KEYS keys are hidden from some query by their places.
  __device__ __forceinline__ bool any_by_position() const {
    auto all = [](const VisibleKeys& of) { return of.by_position(0) && of.by_position(FOUND_KEYS - 1); };
    return __any_sync(~0u, !(all(keys[0]) && all(keys[1])));
  }
  // The word of a block that begins at key n0 + first: has(keys, offset, i) says what is seen of key first + i.
  template <class Has> __device__ __forceinline__ u32 hidden(int first, Has has) const {
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < BITS_KEYS; i++) {
#pragma unroll
      for (int j = 0; j < 2; j++) found |= u32(!has(keys[j], first + i, i)) << (j * BITS_KEYS + i);
    }
    return found;
  }
  __device__ __forceinline__ u32 hidden_by_position(int first) const {
    return hidden(first, [](const VisibleKeys& of, int offset, int) { return of.by_position(offset); });
  }
};

// A warp's work: what of FOUND_KEYS keys from n0 on is hidden from the queries of a tile.
__device__ __forceinline__ void find_hidden(const Params& p, HiddenBlock* hidden, const Head& at, int m0, int n0,
                                            int lane) {
  const LaneQueries queries(p, at, m0, n0, lane);
  const bool by_position = queries.any_by_position();
  if constexpr (QUERIES_MAY_BE_ALIKE) {
    const RowFacts row_facts(p, at, m0 + lane, m0 + WARP + lane);
    if (row_facts.alike) {
      const Facts<FOUND_KEYS> facts(p, at, n0, lane);
      u32 votes[facts.OWN];
#pragma unroll
      for (int i = 0; i < facts.OWN; i++) {
        votes[i] = __ballot_sync(~0u, !row_facts.has(p, at, n0 + i * WARP + lane, facts.own[i]));
      }
      auto seen = [](const VisibleKeys& of, int offset, int) { return of.chosen.by_position(offset); };
#pragma unroll 1
      for (int first = 0; first < FOUND_KEYS; first += BITS_KEYS) {
        u32 found = ((first < WARP ? votes[0] : votes[facts.OWN - 1]) >> first % WARP & 0xffff) * 0x10001;
        if (cfg::POSITIONS) found |= queries.hidden(first, seen);
        if (by_position) found |= queries.hidden_by_position(first);
        hidden[first / BITS_KEYS].words[lane] = found;
      }
      return;
    }
  }
#pragma unroll 1
  for (int first = 0; first < FOUND_KEYS; first += BITS_KEYS) {
    const ChosenKeys<BITS_KEYS> chosen(p, at, n0 + first, lane);
    auto has = [&](const VisibleKeys& of, int offset, int i) { return chosen.has(of, offset, i); };
    u32 found = queries.hidden(first, has);
    if (by_position) found |= queries.hidden_by_position(first);
    hidden[first / BITS_KEYS].words[lane] = found;
  }
}

// The same of an array, in two steps, the first of which does not wait.
__device__ __forceinline__ void request_bytes(const Params& p, VisibleBytes& bytes, int buffer, const Head& at, int m0,
                                              int n0, int lane) {
  constexpr int UNITS = FOUND_KEYS / UNIT_BYTES, ROWS = WARP / UNITS;
  const int first = lane / UNITS, column = lane % UNITS * UNIT_BYTES;
  const unsigned char* row = visible_row(p, at, m0 + first) + n0 + column;
#pragma unroll
  for (int i = 0; i < cfg::TILE_M; i += ROWS) {
    const bool exists = m0 + first + i < p.seqlen_q && n0 + column < p.seqlen_k;
    cp_async<UNIT_BYTES>(smem_u32(&bytes[buffer][first + i][column]), row, exists);
    row += ROWS * visible_row_stride(p);
  }
  cp_async_commit();
}
__device__ __forceinline__ void find_in_bytes(const Params& p, HiddenBlock* hidden, const VisibleBytes& bytes,
                                              int buffer, const Head& at, int m0, int n0, int lane) {
  const LaneQueries queries(p, at, m0, n0, lane);
  const bool by_position = queries.any_by_position();
#pragma unroll
  for (int first = 0; first < FOUND_KEYS; first += BITS_KEYS) {
    u32 x[2][4];
#pragma unroll
    for (int j = 0; j < 2; j++) ld_shared_v4(x[j], smem_u32(&bytes[buffer][j * WARP + lane][first]));
    u32 found = ~(bits_of(x[0]) | bits_of(x[1]) << BITS_KEYS);
    if (by_position) found |= queries.hidden_by_position(first);
    hidden[first / BITS_KEYS].words[lane] = found;
  }
  __syncwarp();
}

struct alignas(8) WordPair { u32 x[2]; };
// Those of a lane's elements of a transposed accumulator, each at its place (TransposedBits).
__device__ __forceinline__ u32 told_bits(const HiddenBlock& hidden, int lane) {
  constexpr int AT_ONCE = TELLS_VISITS ? 1 : 4;  // else registers spill
  u32 found = 0;
#pragma unroll AT_ONCE
  for (int j = 0; j < 8; j += 2) {
    const auto& pair = *reinterpret_cast<const WordPair*>(&hidden.words[j / 2 * 8 + lane % 4 * 2]);
    found |= (pair.x[0] >> lane / 4 & 0x01010101) << j | (pair.x[1] >> lane / 4 & 0x01010101) << (j + 1);
  }
  return found;
}
