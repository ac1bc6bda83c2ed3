// Everything a kernel knows about masks and score modifications. A kernel asks which tiles to walk, walks
// masked / full / masked ranges, and calls visible() on the elements of masked tiles and score() on all of them; it
// never names a feature. Causal masks are aligned to the bottom-right corner of the score matrix: query i sees key j
// iff j <= i + seqlen_k - seqlen_q.
#pragma once

// Tiles [begin, end) hold everything visible; those in [full_begin, full_end) are visible throughout.
// begin <= full_begin <= full_end <= end.
struct TileRange { int begin, full_begin, full_end, end; };

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// One past the last key that any of the query rows [m0, m0 + rows) sees.
__device__ __forceinline__ int kv_end(const Params& p, int m0, int rows) {
  const int shift = p.seqlen_k - p.seqlen_q;
  return cfg::CAUSAL ? min(max(min(m0 + rows, p.seqlen_q) + shift, 0), p.seqlen_k) : p.seqlen_k;
}

// The key tiles that the query rows [m0, m0 + rows) visit.
__device__ __forceinline__ TileRange kv_range(const Params& p, int m0, int rows = cfg::TILE_M) {
  const int end = (int)(((i64)kv_end(p, m0, rows) + cfg::TILE_N - 1) / cfg::TILE_N);
  TileRange range = {0, 0, p.seqlen_k / cfg::TILE_N, end};
  if (cfg::CAUSAL) range.full_end = min(range.full_end, max(m0 + p.seqlen_k - p.seqlen_q + 1, 0) / cfg::TILE_N);
  return range;
}

// Whether kv_range depends on the rows. If not, all warps of a query tile walk the same key tiles.
constexpr bool ROWS_DIFFER = cfg::CAUSAL;
// Whether a key that exists may be hidden from some row.
constexpr bool HIDES_KEYS = cfg::CAUSAL;

// The query tiles that the key rows [n0, n0 + TILE_N) visit. Query rows past seqlen_q count as visible: the kernels
// give them lse = +inf, so that p = exp(s - lse) is 0 there without a predicate.
__device__ __forceinline__ TileRange q_range(const Params& p, int n0) {
  const int end = (int)(((i64)p.seqlen_q + cfg::TILE_M - 1) / cfg::TILE_M);
  TileRange range = {0, 0, end, end};
  if (cfg::CAUSAL) {
    const int shift = p.seqlen_k - p.seqlen_q;
    range.begin = min(max(n0 - shift, 0) / cfg::TILE_M, end);
    range.full_begin = min(ceil_div(max(n0 + cfg::TILE_N - 1 - shift, 0), cfg::TILE_M), end);
  }
  if (n0 + cfg::TILE_N > p.seqlen_k) range.full_begin = end;
  return range;
}

// Whether query q_idx sees key kv_idx. True everywhere in the tiles of a full range.
__device__ __forceinline__ bool visible(const Params& p, int q_idx, int kv_idx) {
  return kv_idx < p.seqlen_k && (!cfg::CAUSAL || kv_idx <= q_idx + p.seqlen_k - p.seqlen_q);
}

// The same for a whole row: what query q_idx sees of the keys kv0 + offset. Made once a row, it takes one comparison an
// element where offsets are constants.
struct VisibleKeys {
  int end;
  __device__ __forceinline__ bool has(int offset) const { return offset < end; }
};
__device__ __forceinline__ VisibleKeys visible_keys(const Params& p, int q_idx, int kv0) {
  const int end = cfg::CAUSAL ? min(p.seqlen_k, q_idx + p.seqlen_k - p.seqlen_q + 1) : p.seqlen_k;
  return {end - kv0};
}

// And for a whole key: which of the queries q0 + offset see key kv_idx.
struct VisibleQueries {
  int begin;
  __device__ __forceinline__ bool has(int offset) const { return offset >= begin; }
};
__device__ __forceinline__ VisibleQueries visible_queries(const Params& p, int kv_idx, int q0) {
  constexpr int NONE = 0x7fffffff;
  const int begin = cfg::CAUSAL ? kv_idx - p.seqlen_k + p.seqlen_q : 0;
  return {kv_idx < p.seqlen_k ? begin - q0 : NONE};
}

// The score of one element in units of log2, and what an exponent multiplies it with. A positive scale alone commutes
// with the maximum, so it is folded into the exponent's fused multiply-add; everything else is applied here first.
template <class Real>
__device__ __forceinline__ Real score(const Params& p, Real qk, int q_idx, int kv_idx) {
  return cfg::SCALE_FIRST ? qk * p.scale_log2 : qk;
}
__device__ __forceinline__ auto exponent_scale(const Params& p) {
  return cfg::SCALE_FIRST ? decltype(p.scale_log2)(1) : p.scale_log2;
}
