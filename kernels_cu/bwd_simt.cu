// Attention backward in true float32 or float64, on any GPU: ordinary FMAs on register blocks (simt.cuh).
//
//   s = score(q k^T)    p = exp(s - lse)    dp = do v^T    ds = p * (dp - delta)       recomputed tile by tile
//   dq = scale ds k     dk = scale ds^T q   dv = p^T do
//
// Two launches of this file share the work. With PHASE_DQ a CTA owns TILE_M query rows and walks the key tiles that
// they see; without, it owns TILE_N keys and walks the query tiles that see them, of every query head of its group. So
// each gradient is summed by one thread in a fixed order: no atomics, no workspace, the same bits every time. The price
// is that s and dp are computed twice: 7 products in place of 5.
//
// In both, `a` are the tensors of extent head_dim and `b` those of head_dim_v; `own` rows stay in shared memory and
// `other` rows stream through it, in slices of columns for s and dp and in slices of rows for the gradients.
//
//                own a, own b    other a, other b    weights [own][other]     gradients [own][...] in registers
//   PHASE_DQ     q, do           k, v                p, then ds               dq += ds k
//   otherwise    k, v            q, do               p^T, then ds^T           dv += p^T do,  dk += ds^T q
//
//   the visit of a tile:  s = own a * other a | p | dv += p^T do | dp = own b * other b | ds | dq or dk += ds * other a
#include "score.cuh"
#include "simt.cuh"
#include "softmax.cuh"

using simt::Element;

constexpr int OWN = cfg::PHASE_DQ ? cfg::TILE_M : cfg::TILE_N, OTHER = cfg::PHASE_DQ ? cfg::TILE_N : cfg::TILE_M;
constexpr bool WIDE_OWN_A = cfg::PHASE_DQ ? cfg::WIDE_Q : cfg::WIDE_K;
constexpr bool WIDE_OTHER_A = cfg::PHASE_DQ ? cfg::WIDE_K : cfg::WIDE_Q;
constexpr bool WIDE_OWN_B = cfg::PHASE_DQ ? cfg::WIDE_DOUT : cfg::WIDE_V;
constexpr bool WIDE_OTHER_B = cfg::PHASE_DQ ? cfg::WIDE_V : cfg::WIDE_DOUT;

constexpr int A_STRIDE = simt::padded(cfg::TILE_D), B_STRIDE = simt::padded(cfg::TILE_DV);
constexpr int W_STRIDE = simt::padded_weights(OTHER), SLICE_STRIDE = simt::padded(cfg::SLICE_D);
constexpr int A_SLICES = (cfg::TILE_D + cfg::SLICE_D - 1) / cfg::SLICE_D;
constexpr int B_SLICES = (cfg::TILE_DV + cfg::SLICE_D - 1) / cfg::SLICE_D, ROW_SLICES = OTHER / cfg::SLICE_N;
constexpr int DV_SLICES = cfg::PHASE_DQ ? 0 : ROW_SLICES;
constexpr int SLICES = A_SLICES + DV_SLICES + B_SLICES + ROW_SLICES;  // of one visit
constexpr int SLOT = simt::larger(OTHER * SLICE_STRIDE, cfg::SLICE_N * simt::larger(cfg::TILE_D, cfg::TILE_DV));
static_assert(ROW_SLICES * cfg::SLICE_N == OTHER && cfg::SLICE_N % simt::VEC == 0, "whole slices of rows");

struct Smem {
  alignas(16) Element a[OWN][A_STRIDE];
  Element b[OWN][B_STRIDE];
  Element weights[OWN][W_STRIDE];
  Element slots[cfg::STAGES][SLOT];
};
static_assert(sizeof(Smem) == cfg::SMEM_BYTES, "tiles.py and struct Smem disagree");

// A thread's block of s and dp, of dq or dk, and of dv. lse and delta belong to queries: to its rows, or its columns.
constexpr int ROWS = OWN / simt::THREAD_ROWS, COLS = OTHER / simt::THREAD_COLS;
constexpr int COLS_A = cfg::TILE_D / simt::THREAD_COLS, COLS_B = cfg::TILE_DV / simt::THREAD_COLS;
constexpr int QUERIES = cfg::PHASE_DQ ? ROWS : COLS;

// Whether a tile's part of a gradient is summed by itself before it is added: the error of a sum over all rows, term by
// term, grows with their number. It takes registers, of which dk and dv together leave enough up to head_dim 96.
constexpr int GRADIENT_COLS = cfg::PHASE_DQ ? COLS_A : COLS_A + COLS_B;
constexpr bool SUM_BY_TILE =
    ROWS * (GRADIENT_COLS + simt::larger(COLS_A, COLS_B)) * sizeof(Element) <= 160 * sizeof(float);

extern "C" __global__ void __launch_bounds__(cfg::NUM_THREADS, cfg::MIN_CTAS)
bwd_simt(const __grid_constant__ Params params) {
  extern __shared__ __align__(16) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);

  // The tiles of a head are neighbours in the grid, so what streams stays in L2; the longest causal walks go first.
  Own<VARLEN> own(params);
  const Params& p = own.p;
  const int num_heads = cfg::PHASE_DQ ? p.num_heads_q : p.num_heads_kv;
  SequenceTile tile;
  if constexpr (VARLEN) {
    if (!find_tile<cfg::PHASE_DQ ? BY_QUERIES : BY_KEYS, OWN>(own, params, blockIdx.x, num_heads, tile)) return;
  } else {
    const int num_blocks = cfg::PHASE_DQ ? p.num_m_blocks : p.num_n_blocks;
    tile = {int(blockIdx.x / num_blocks / num_heads), int(blockIdx.x / num_blocks % num_heads),
            int(blockIdx.x % num_blocks), num_blocks};
  }
  const int block = cfg::PHASE_DQ ? tile.blocks - 1 - tile.block : tile.block;
  const int own_head = tile.head, batch = tile.batch;
  const int own0 = block * OWN, thread_row = simt::thread_row(), thread_col = simt::thread_col();

  const auto q = [&](int head) {
    return simt::matrix(p.q, p.q_stride, q_begin(p, batch, p.q_stride), head, p.seqlen_q, p.head_dim);
  };
  const auto k = [&](int head) {
    return simt::matrix(p.k, p.k_stride, k_begin(p, batch, p.k_stride), head, p.seqlen_k, p.head_dim);
  };
  const auto v = [&](int head) {
    return simt::matrix(p.v, p.v_stride, k_begin(p, batch, p.v_stride), head, p.seqlen_k, p.head_dim_v);
  };
  const auto dout = [&](int head) {
    return simt::matrix(p.dout, p.dout_stride, q_begin(p, batch, p.dout_stride), head, p.seqlen_q, p.head_dim_v);
  };

  // What is visited: tiles of one kv head, or of each query head of the group.
  struct Visit { int head, block; bool masked; };
  auto visits = [&] {
    if constexpr (cfg::PHASE_DQ) {
      struct Keys {
        KeyWalk walk;
        int head, position;
        __device__ __forceinline__ int count() const { return walk.end - walk.begin; }
        __device__ __forceinline__ Visit visit() const { return {head, walk.tile(position), walk.hides(position)}; }
        __device__ __forceinline__ void advance() { position++; }
      };
      const KeyWalk walk(p, {batch, own_head}, own0);
      return Keys{walk, own_head / p.qheads_per_kv, walk.begin};
    } else {
      struct Queries {
        const Params& p;
        QueryWalk walk;
        QueryVisit at;
        __device__ __forceinline__ int count() const { return walk.visits; }
        __device__ __forceinline__ Visit visit() const { return {walk.head(at).head, at.tile, walk.hides(at)}; }
        __device__ __forceinline__ void advance() { walk.advance(p, at); }
      };
      const QueryWalk walk(p, batch, own_head, own0);
      return Queries{p, walk, walk.start(p)};
    }
  }();
  const int num_visits = visits.count();

  const auto load_slice = [&](int step, Element* slot) {
    if (step > 0 && step % SLICES == 0) visits.advance();
    const Visit visit = visits.visit();
    const auto a = cfg::PHASE_DQ ? k(visit.head) : q(visit.head), b = cfg::PHASE_DQ ? v(visit.head) : dout(visit.head);
    const int row0 = visit.block * OTHER, slice = step % SLICES;
    constexpr int DV = A_SLICES, DP = DV + DV_SLICES, DA = DP + B_SLICES;  // where each product's slices begin
    if (slice < DV) {
      simt::load_tile<WIDE_OTHER_A, OTHER, cfg::SLICE_D, SLICE_STRIDE>(slot, a, row0, slice * cfg::SLICE_D);
    } else if (slice < DP) {
      const int row = row0 + (slice - DV) * cfg::SLICE_N;
      simt::load_tile<WIDE_OTHER_B, cfg::SLICE_N, cfg::TILE_DV, cfg::TILE_DV>(slot, b, row, 0);
    } else if (slice < DA) {
      simt::load_tile<WIDE_OTHER_B, OTHER, cfg::SLICE_D, SLICE_STRIDE>(slot, b, row0, (slice - DP) * cfg::SLICE_D);
    } else {
      const int row = row0 + (slice - DA) * cfg::SLICE_N;
      simt::load_tile<WIDE_OTHER_A, cfg::SLICE_N, cfg::TILE_D, cfg::TILE_D>(slot, a, row, 0);
    }
  };
  simt::Stream<SLOT, decltype(load_slice)> slices{smem.slots, load_slice, num_visits * SLICES};

  Element s_rmem[ROWS][COLS], marked[ROWS][COLS];                 // s, then dp; p, of which weights has what is kept
  Element qk[ROWS][COLS];                                          // if KEEPS_SCORES
  Element da_rmem[ROWS][COLS_A] = {}, dv_rmem[ROWS][COLS_B] = {};  // dq or dk; dv
  Element origin[QUERIES], delta[QUERIES];                         // lse in units of log2; rowsum(do * o) - dlse
  int other0, head;                                                // first row of the tile that is visited; query head
  bool masked;

  const auto own_row = [&](int i) { return thread_row + i * simt::THREAD_ROWS; };
  const auto other_row = [&](int j) { return thread_col + j * simt::THREAD_COLS; };
  const auto q_idx = [&](int own, int other) { return cfg::PHASE_DQ ? own0 + own : other0 + other; };
  const auto kv_idx = [&](int own, int other) { return cfg::PHASE_DQ ? other0 + other : own0 + own; };
  // Of the thread's first element, and how far the others lie from it.
  const auto scorer = [&]() {
    return Scorer(p, {batch, head}, q_idx(own_row(0), other_row(0)), kv_idx(own_row(0), other_row(0)));
  };
  const auto q_offset = [&](int i, int j) { return cfg::PHASE_DQ ? i * simt::THREAD_ROWS : j * simt::THREAD_COLS; };
  const auto kv_offset = [&](int i, int j) { return cfg::PHASE_DQ ? j * simt::THREAD_COLS : i * simt::THREAD_ROWS; };
  const auto hidden = [&](int own, int other) {
    return masked && !visible(p, q_idx(own, other), kv_idx(own, other), {batch, head});
  };

  const auto load_statistics = [&]() {
#pragma unroll
    for (int x = 0; x < QUERIES; x++) {
      const int query = q_idx(own_row(x), other_row(x));
      const bool exists = query < p.seqlen_q;
      const i64 place = rows_begin(p, batch, head, p.lse_stride) + query * p.lse_stride[2];
      origin[x] = lse_origin(exists ? p.lse[place] : HIDDEN);
      delta[x] = exists ? p.delta[rows_begin(p, flat_head(p, batch, head)) + query] : 0;
    }
  };

  // s_rmem = own other^T over `depth` columns, which stream in slices
  const auto product_of_columns = [&](const Element* own, auto stride, int num_slices, int depth) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
      for (int j = 0; j < COLS; j++) s_rmem[i][j] = 0;
    }
#pragma unroll 1
    for (int slice = 0; slice < num_slices; slice++) {
      const int d0 = slice * cfg::SLICE_D;
      const Element* other = slices.next() + thread_col * SLICE_STRIDE;
      simt::product_nt<stride.value, SLICE_STRIDE>(s_rmem, own + thread_row * stride.value + d0, other,
                                                   min(cfg::SLICE_D, depth - d0));
    }
  };

  // sum += weights other, whose rows stream in slices
  const auto accumulate = [&](auto& sum, auto width) {
#pragma unroll 1
    for (int slice = 0; slice < ROW_SLICES; slice++) {
      const int n0 = slice * cfg::SLICE_N;
      const Element* weights = &smem.weights[thread_row][n0];
      const Element* rows = slices.next();
      if (masked && !simt::all_finite<cfg::SLICE_N * width.value>(rows)) {
        simt::product_nn_seen<W_STRIDE, width.value, cfg::SLICE_N>(sum, weights, rows, [&](int i, int n) {
          return !hidden(own_row(i), n0 + n);
        });
      } else {
        simt::product_nn<W_STRIDE, width.value, cfg::SLICE_N>(sum, weights, rows);
      }
    }
  };

  // gradient += weights other
  const auto product_of_rows = [&](auto& gradient, auto width) {
    if constexpr (SUM_BY_TILE) {
      constexpr int COLUMNS = width.value / simt::THREAD_COLS;
      Element sum_rmem[ROWS][COLUMNS] = {};
      accumulate(sum_rmem, width);
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) gradient[i][c] += sum_rmem[i][c];
      }
    } else {
      accumulate(gradient, width);
    }
  };

  // p = exp(s - lse)
  const auto probabilities = [&]() {
    const Element scale = exponent_scale(p);
    const Scorer scores = scorer();
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
      for (int j = 0; j < COLS; j++) {
        const int own = own_row(i), other = other_row(j);
        qk[i][j] = s_rmem[i][j];
        const Element s = scores.score(qk[i][j], q_offset(i, j), kv_offset(i, j));
        const Element prob = exp2_real(s * scale - origin[cfg::PHASE_DQ ? i : j]);
        marked[i][j] = scores.marked(hidden(own, other) ? 0 : prob, q_offset(i, j), kv_offset(i, j));
        smem.weights[own][other] = kept(marked[i][j]);
      }
    }
  };

  // ds = p * (dp - delta)
  const auto score_gradients = [&]() {
    const Scorer scores = scorer();
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
      for (int j = 0; j < COLS; j++) {
        Element& weight = smem.weights[own_row(i)][other_row(j)];
        const int query = cfg::PHASE_DQ ? i : j;
        const Element prob = DROPS ? marked[i][j] : weight;
        const Element ds = scores.gradient(prob, s_rmem[i][j], delta[query], origin[query], q_offset(i, j),
                                           kv_offset(i, j), KEEPS_SCORES ? qk[i][j] : 0);
        weight = hidden(own_row(i), other_row(j)) ? 0 : ds;
      }
    }
  };

  {
    const auto a = cfg::PHASE_DQ ? q(own_head) : k(own_head), b = cfg::PHASE_DQ ? dout(own_head) : v(own_head);
    simt::load_tile<WIDE_OWN_A, OWN, cfg::TILE_D, A_STRIDE>(smem.a[0], a, own0, 0);
    simt::load_tile<WIDE_OWN_B, OWN, cfg::TILE_DV, B_STRIDE>(smem.b[0], b, own0, 0);
  }
  slices.start();
  if (cfg::PHASE_DQ) head = own_head, load_statistics();

#pragma unroll 1
  for (int x = 0; x < num_visits; x++) {
    static_assert(cfg::STAGES - 1 <= SLICES, "what is requested ahead at the start of a visit is its own");
    const Visit visit = visits.visit();
    other0 = visit.block * OTHER;
    masked = visit.masked;
    if (!cfg::PHASE_DQ) head = visit.head, load_statistics();
    product_of_columns(smem.a[0], simt::Constant<A_STRIDE>(), A_SLICES, cfg::TILE_D);
    probabilities();
    if (!cfg::PHASE_DQ) product_of_rows(dv_rmem, simt::Constant<cfg::TILE_DV>());
    product_of_columns(smem.b[0], simt::Constant<B_STRIDE>(), B_SLICES, cfg::TILE_DV);
    score_gradients();
    product_of_rows(da_rmem, simt::Constant<cfg::TILE_D>());
  }

  if (cfg::PHASE_DQ) {
    const auto dq = simt::matrix(p.dq, p.dq_stride, q_begin(p, batch, p.dq_stride), own_head, p.seqlen_q, p.head_dim);
    simt::store_block<cfg::WIDE_DQ>(dq, da_rmem, [&](int) { return p.softmax_scale; }, own0);
  } else {
    const auto dk = simt::matrix(p.dk, p.dk_stride, k_begin(p, batch, p.dk_stride), own_head, p.seqlen_k, p.head_dim);
    const auto dv = simt::matrix(p.dv, p.dv_stride, k_begin(p, batch, p.dv_stride), own_head, p.seqlen_k, p.head_dim_v);
    simt::store_block<cfg::WIDE_DK>(dk, da_rmem, [&](int) { return p.softmax_scale; }, own0);
    simt::store_block<cfg::WIDE_DV>(dv, dv_rmem, [&](int) { return kept_scale(p); }, own0);
  }
}
