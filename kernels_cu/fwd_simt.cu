// Attention forward in true float32 or float64, on any GPU: ordinary FMAs on register blocks (simt.cuh).
//
//   out = softmax(s) v,  s = score(q k^T),  lse = log(sum(exp(s)))       per head; scores live in one tile at a time
//
// One CTA computes TILE_M query rows of one head and walks the key tiles that they see from right to left, so that the
// masked tiles come first. Queries stay in shared memory; keys and values stream through it in slices:
//
//                         d →                         n →                         head_dim_v →
//            q  [TILE_M][TILE_D]        p  [TILE_M][TILE_N]          o  [TILE_M][TILE_DV] in registers
//            k  [TILE_N][SLICE_D] ...   v  [SLICE_N][TILE_DV] ...
//
//   step      | k slice 0 | k slice 1 | v slice 0 | v slice 1 | k slice 0 of the next tile ...
//   copy      |  k1       |  v0       |  v1       |  k0'      |
//   compute   |  s += qk  |  s += qk, |  o += pv  |  o += pv  |
//             |           |  softmax  |           |           |
//
// There is one CTA barrier a step, which hands over a slice and what was written of p. Two CTAs share a multiprocessor
// where registers and shared memory allow, so that one computes while the other is in its softmax.
#include "score.cuh"
#include "simt.cuh"
#include "softmax.cuh"

using simt::Element;

constexpr int Q_STRIDE = simt::padded(cfg::TILE_D), P_STRIDE = simt::padded_weights(cfg::TILE_N);
constexpr int K_STRIDE = simt::padded(cfg::SLICE_D);
constexpr int K_SLICES = (cfg::TILE_D + cfg::SLICE_D - 1) / cfg::SLICE_D, V_SLICES = cfg::TILE_N / cfg::SLICE_N;
constexpr int SLICES = K_SLICES + V_SLICES;  // of one key tile
constexpr int SLOT = simt::larger(cfg::TILE_N * K_STRIDE, cfg::SLICE_N * cfg::TILE_DV);
static_assert(V_SLICES * cfg::SLICE_N == cfg::TILE_N && cfg::SLICE_N % simt::VEC == 0, "whole slices of v");

struct Smem {
  alignas(16) Element q[cfg::TILE_M][Q_STRIDE];
  Element p[cfg::TILE_M][P_STRIDE];
  Element slots[cfg::STAGES][SLOT];
};
static_assert(sizeof(Smem) == cfg::SMEM_BYTES, "tiles.py and struct Smem disagree");

// A thread's block of s and of o.
constexpr int ROWS = cfg::TILE_M / simt::THREAD_ROWS;
constexpr int COLS = cfg::TILE_N / simt::THREAD_COLS, COLS_V = cfg::TILE_DV / simt::THREAD_COLS;

// Whether p v of a tile is summed by itself before it is added to o: the error of a sum over all keys, term by term,
// grows with their number. It takes as many registers as o, but those of s are free by then.
constexpr bool SUM_BY_TILE = ROWS * COLS_V * sizeof(Element) <= 64 * sizeof(float);

extern "C" __global__ void __launch_bounds__(cfg::NUM_THREADS, cfg::MIN_CTAS)
fwd_simt(const __grid_constant__ Params params) {
  extern __shared__ __align__(16) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);

  // The tiles of a head are neighbours in the grid, so its k and v stay in L2; the longest causal rows go first.
  Own<VARLEN> own(params);
  const Params& p = own.p;
  SequenceTile tile;
  if constexpr (VARLEN) {
    if (!find_tile<BY_QUERIES, cfg::TILE_M>(own, params, blockIdx.x, p.num_heads_q, tile)) return;
  } else {
    tile = {int(blockIdx.x / p.num_m_blocks / p.num_heads_q), int(blockIdx.x / p.num_m_blocks % p.num_heads_q),
            int(blockIdx.x % p.num_m_blocks), p.num_m_blocks};
  }
  const int batch = tile.batch, head = tile.head, m_block = tile.blocks - 1 - tile.block;
  const int m0 = m_block * cfg::TILE_M, thread_row = simt::thread_row(), thread_col = simt::thread_col();

  const int head_kv = head / p.qheads_per_kv;
  const auto q = simt::matrix(p.q, p.q_stride, q_begin(p, batch, p.q_stride), head, p.seqlen_q, p.head_dim);
  const auto k = simt::matrix(p.k, p.k_stride, k_begin(p, batch, p.k_stride), head_kv, p.seqlen_k, p.head_dim);
  const auto v = simt::matrix(p.v, p.v_stride, k_begin(p, batch, p.v_stride), head_kv, p.seqlen_k, p.head_dim_v);
  const KeyWalk walk(p, {batch, head}, m0);

  const auto q_idx = [&](int i) { return m0 + thread_row + i * simt::THREAD_ROWS; };
  const auto kv_offset = [&](int j) { return thread_col + j * simt::THREAD_COLS; };

  const auto load_slice = [&](int step, Element* slot) {
    const int n0 = walk.tile(walk.end - 1 - step / SLICES) * cfg::TILE_N, slice = step % SLICES;
    if (slice < K_SLICES) {
      simt::load_tile<cfg::WIDE_K, cfg::TILE_N, cfg::SLICE_D, K_STRIDE>(slot, k, n0, slice * cfg::SLICE_D);
    } else {
      const int row = n0 + (slice - K_SLICES) * cfg::SLICE_N;
      simt::load_tile<cfg::WIDE_V, cfg::SLICE_N, cfg::TILE_DV, cfg::TILE_DV>(slot, v, row, 0);
    }
  };
  simt::Stream<SLOT, decltype(load_slice)> slices{smem.slots, load_slice, (walk.end - walk.begin) * SLICES};

  Element s_rmem[ROWS][COLS], o_rmem[ROWS][COLS_V] = {};
  Element row_max[ROWS], row_sum[ROWS];  // in units of log2, of the whole row; of p, in this thread's columns
  Element rescale[ROWS];                 // what sums so far are worth against the new maximum
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    row_max[i] = row_start(p, {batch, head});
    row_sum[i] = row_max[i] == Element(HIDDEN) || thread_col != 0 ? 0 : 1;
  }

  // s = q k^T
  const auto scores = [&]() {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
      for (int j = 0; j < COLS; j++) s_rmem[i][j] = 0;
    }
#pragma unroll 1
    for (int slice = 0; slice < K_SLICES; slice++) {
      const int d0 = slice * cfg::SLICE_D;
      simt::product_nt<Q_STRIDE, K_STRIDE>(s_rmem, &smem.q[thread_row][d0], slices.next() + thread_col * K_STRIDE,
                                           min(cfg::SLICE_D, cfg::TILE_D - d0));
    }
  };

  // p = exp(s - max), to shared memory
  const auto softmax = [&](int n0, bool masked) {
    const Element scale = exponent_scale(p);
    const Scorer scorer(p, {batch, head}, q_idx(0), n0 + kv_offset(0));
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
      for (int j = 0; j < COLS; j++) {
        s_rmem[i][j] = scorer.score(s_rmem[i][j], i * simt::THREAD_ROWS, j * simt::THREAD_COLS);
      }
    }
    if (masked) {
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
#pragma unroll
        for (int j = 0; j < COLS; j++) {
          if (!visible(p, q_idx(i), n0 + kv_offset(j), {batch, head})) s_rmem[i][j] = HIDDEN;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      Element tile_max = s_rmem[i][0];
#pragma unroll
      for (int j = 1; j < COLS; j++) tile_max = max(tile_max, s_rmem[i][j]);
      const Element old_max = row_max[i];
      row_max[i] = max(old_max, simt::row_max(tile_max) * scale);
      const Element origin = exponent_origin(row_max[i]);
      rescale[i] = exp2_real(old_max - origin);
      row_sum[i] *= rescale[i];
#pragma unroll
      for (int j = 0; j < COLS; j++) {
        const Element prob = exp2_real(s_rmem[i][j] * scale - origin);
        row_sum[i] += prob;
        const Element marked = scorer.marked(prob, i * simt::THREAD_ROWS, j * simt::THREAD_COLS);
        smem.p[thread_row + i * simt::THREAD_ROWS][kv_offset(j)] = kept(marked);
      }
    }
  };

  // sum += p v
  const auto accumulate = [&](Element(&sum)[ROWS][COLS_V], int n0, bool masked) {
#pragma unroll 1
    for (int slice = 0; slice < V_SLICES; slice++) {
      const Element* weights = &smem.p[thread_row][slice * cfg::SLICE_N];
      const Element* rows = slices.next();
      if (masked && !simt::all_finite<cfg::SLICE_N * cfg::TILE_DV>(rows)) {
        simt::product_nn_seen<P_STRIDE, cfg::TILE_DV, cfg::SLICE_N>(sum, weights, rows, [&](int i, int n) {
          return visible(p, q_idx(i), n0 + slice * cfg::SLICE_N + n, {batch, head});
        });
      } else {
        simt::product_nn<P_STRIDE, cfg::TILE_DV, cfg::SLICE_N>(sum, weights, rows);
      }
    }
  };

  // o = o * rescale + addend
  const auto rescale_and_add = [&](const Element(&addend)[ROWS][COLS_V]) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
      for (int c = 0; c < COLS_V; c++) o_rmem[i][c] = o_rmem[i][c] * rescale[i] + addend[i][c];
    }
  };

  simt::load_tile<cfg::WIDE_Q, cfg::TILE_M, cfg::TILE_D, Q_STRIDE>(smem.q[0], q, m0, 0);
  slices.start();

#pragma unroll 1
  for (int position = walk.end - 1; position >= walk.begin; position--) {
    const int n0 = walk.tile(position) * cfg::TILE_N;
    const bool masked = walk.hides(position);
    scores();
    softmax(n0, masked);
    Element pv_rmem[ROWS][COLS_V] = {};
    if (SUM_BY_TILE) accumulate(pv_rmem, n0, masked);
    rescale_and_add(pv_rmem);
    if (!SUM_BY_TILE) accumulate(o_rmem, n0, masked);
  }

  // Also of a row that saw nothing: o = 0, lse = -inf.
  Element inverse[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    const Element sum = simt::row_sum(row_sum[i]);
    inverse[i] = inverse_sum(sum) * kept_scale(p);
    if (p.lse && thread_col == 0 && q_idx(i) < p.seqlen_q) {
      p.lse[rows_begin(p, flat_head(p, batch, head)) + q_idx(i)] = log_sum_exp(row_max[i], sum);
    }
  }
  const auto o = simt::matrix(p.o, p.o_stride, q_begin(p, batch, p.o_stride), head, p.seqlen_q, p.head_dim_v);
  simt::store_block<cfg::WIDE_O>(o, o_rmem, [&](int i) { return inverse[i]; }, m0);
}
