// Backward attention with mma.sync, for every GPU from Ampere on. With p = exp(s - lse) and delta = rowsum(do * o):
//   dv = pT do     dp = do vT     ds = p (dp - delta)     dq = scale ds k     dk = scale dsT q
//
// A CTA owns TILE_N keys of one kv head and walks, for every query head of its group, the query tiles that see them.
// dk and dv stay in registers throughout; dq is added to an fp32 array in global memory.
//
//              queries ->   tile (TILE_M)         scores are computed transposed, keys as the rows of the product:
//            +-----------+-----------+            the accumulators of pT and dsT are, as they lie, the A operands of
//   keys     |           | pT  |     |   TILE_N   dv and dk. A warp owns TILE_N / (half the warps) keys, all queries.
//            +-----------+-----------+
//
// Half of the warps (role 0) compute p and dv, the other half (role 1) ds, dk and dq, so that each holds one gradient
// and has a long way to go between barriers. Step i of the walk, i = -1 .. tiles, works on three tiles at once:
//
//   role 0   pT = 2^(k q[i+1]T scale - lse) ------>  dv += pT do[i+1]                           load    tile i+2
//   role 1   dq[i-1] += ds[i-1] k   dpT = v do[i]T   dsT = pT (dpT - delta)   dk += dsT q[i]    (all)
//            -------------------------------------------------------------------------------- barrier, next step
//
// The products of one step do not depend on each other, so one warp's tensor work covers the other's exponentials and
// atomics. Where a lane cannot hold the gradients of its warp's keys (head_dim > 128), COLUMN_SPLIT = 2 warps share
// their keys: each computes the scores of its own and accumulates both warps' gradients in every other 16 columns.
//
// Shared memory (struct Smem): k, v; rings of three query tiles (q, do, lse, delta: read, read, arriving) and of three
// pT, of which role 0 fills one, role 1 turns one into dsT in place and reads one for dq. dk, dv are staged over k, v.
#include "tile.cuh"
#include "mask.cuh"
#include "softmax.cuh"

using cfg::Element;
using cfg::TILE_M, cfg::TILE_N, cfg::TILE_D, cfg::TILE_DV, cfg::NUM_THREADS, cfg::RAGGED_D;

constexpr int RING = cfg::STAGES;                         // query tiles and pT in smem
constexpr int WARPS = NUM_THREADS / 32, ROLE_WARPS = WARPS / 2;
constexpr int WARP_KEYS = TILE_N / ROLE_WARPS;            // keys whose scores a warp computes
constexpr int SPLIT = cfg::COLUMN_SPLIT;                  // warps that share the gradients of their keys
constexpr int KEY_BLOCKS = WARP_KEYS / BLOCK, GRAD_BLOCKS = KEY_BLOCKS * SPLIT;
constexpr int Q_BLOCKS = TILE_M / BLOCK, D_BLOCKS = TILE_D / BLOCK, DV_BLOCKS = TILE_DV / BLOCK;
constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int KEPT_D = smaller(cfg::K_RMEM_BLOCKS, D_BLOCKS);     // column blocks of a warp's keys (role 0) or values
constexpr int KEPT_DV = smaller(cfg::V_RMEM_BLOCKS, DV_BLOCKS);   // (role 1) that stay in registers
constexpr int DQ_WARPS = cfg::DQ_WARPS;                   // the last of the warps: role 1, or all
constexpr int DQ_M_WARPS = cfg::DQ_M_WARPS, DQ_D_WARPS = DQ_WARPS / DQ_M_WARPS;
constexpr int DQ_M_BLOCKS = Q_BLOCKS / DQ_M_WARPS;
constexpr int AHEAD = 2;                                  // operand blocks on their way from smem to registers

enum Barrier { STEP = 1, DQ_TURN, DQ_ADDED, PAIR };       // PAIR + i: the warps that share keys, in either role

template <bool VALUE> struct Bool { static constexpr bool value = VALUE; };
struct alignas(8) Pair { float first, second; };          // of two neighbouring queries

struct Smem {
  Element k[TILE_N * TILE_D];               // later dk
  Element v[TILE_N * TILE_DV];              // later dv
  Element q[RING][TILE_M * TILE_D];
  Element dout[RING][TILE_M * TILE_DV];
  Element pt[RING][TILE_N * TILE_M];        // pT, then dsT
  Pair lse[RING][TILE_M / 2];               // in units of log2
  Pair delta[RING][TILE_M / 2];
};
static_assert(sizeof(Smem) == cfg::SMEM_BYTES, "tiles.py and Smem disagree");
static_assert(RING == 3, "tiles i - 1 (then i + 2), i and i + 1");
static_assert(2 * TILE_M <= NUM_THREADS, "a thread fetches one lse or delta");
static_assert(TILE_N % (ROLE_WARPS * BLOCK) == 0 && Q_BLOCKS % DQ_M_WARPS == 0, "whole blocks a warp");

// Columns are dealt out in blocks of 16: of `blocks`, warp w of `warps` takes w, w + warps, ..., at most so many.
constexpr int share(int blocks, int warps) { return (blocks + warps - 1) / warps; }
constexpr int DQ_COLS = share(D_BLOCKS, DQ_D_WARPS), DK_COLS = share(D_BLOCKS, SPLIT), DV_COLS = share(DV_BLOCKS, SPLIT);

using Scores = float[KEY_BLOCKS][Q_BLOCKS][2][4];   // [16 keys][16 queries][8 queries][accumulator]
using Operands = u32[KEY_BLOCKS][Q_BLOCKS][4];      // the same as A operands
template <int KEPT> using Kept = u32[KEPT + 1][KEY_BLOCKS][4];  // A operands; the extra one keeps the extent positive

// Runs UNITS times multiply(u), with load(u) AHEAD units earlier.
template <int UNITS, int DISTANCE, class Load, class Multiply>
__device__ __forceinline__ void pipelined(Load load, Multiply multiply) {
#pragma unroll
  for (int u = 0; u < smaller(DISTANCE, UNITS); u++) load(u);
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    if (u + DISTANCE < UNITS) load(u + DISTANCE);
    multiply(u);
  }
}

// s = a bT: this warp's keys of a (TILE_N, COLS) times all of b (TILE_M, COLS).
template <int COLS, int KEPT>
__device__ __forceinline__ void multiply_rows(Scores& s, const Kept<KEPT>& a_kept, u32 a_lane, u32 b_lane) {
  constexpr int DISTANCE = smaller(AHEAD, Q_BLOCKS);
  u32 a[2][KEY_BLOCKS][4], b[AHEAD + 1][4];
#pragma unroll
  for (int i = 0; i < KEY_BLOCKS * Q_BLOCKS * 8; i++) s[i / 8 / Q_BLOCKS][i / 8 % Q_BLOCKS][i / 4 % 2][i % 4] = 0;
  pipelined<COLS / BLOCK * Q_BLOCKS, DISTANCE>(
    [&](int u) {
      const int d = u / Q_BLOCKS, m = u % Q_BLOCKS;
      if (m == 0 && d >= KEPT) {
#pragma unroll
        for (int n = 0; n < KEY_BLOCKS; n++) ldmatrix_x4(a[d % 2][n], block_at<COLS>(a_lane, n * BLOCK, d * BLOCK));
      }
      ldmatrix_x4(b[u % (AHEAD + 1)], block_at<COLS>(b_lane, m * BLOCK, d * BLOCK));
    },
    [&](int u) {
      const int d = u / Q_BLOCKS, m = u % Q_BLOCKS;
      const u32(&block)[4] = b[u % (AHEAD + 1)];
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int n = 0; n < KEY_BLOCKS; n++) {
          const u32(&fresh)[4] = a[d % 2][n], (&rows)[4] = d < KEPT ? a_kept[d][n] : fresh;
          mma_m16n8k16<Element>(s[n][m][half], rows, block[half * 2], block[half * 2 + 1]);
        }
      }
    });
}

// The first KEPT column blocks of this warp's rows of a tile.
template <int COLS, int KEPT> __device__ __forceinline__ void keep(Kept<KEPT>& kept, u32 a_lane) {
#pragma unroll
  for (int i = 0; i < KEPT * KEY_BLOCKS; i++) {
    ldmatrix_x4(kept[i / KEY_BLOCKS][i % KEY_BLOCKS], block_at<COLS>(a_lane, i % KEY_BLOCKS * BLOCK, i / KEY_BLOCKS * BLOCK));
  }
}

// gradient += a b: a (keys, TILE_M) is this warp's own operands and those at other_lane (SPLIT = 2), b (TILE_M, COLS).
template <int COLS, int COL_BLOCKS>
__device__ __forceinline__ void accumulate(float (&gradient)[GRAD_BLOCKS][COL_BLOCKS][2][4], const Operands& own,
                                           u32 other_lane, u32 b_lane, int part) {
  constexpr int DISTANCE = smaller(AHEAD, COL_BLOCKS), BLOCKS = COLS / BLOCK;
  u32 other[2][KEY_BLOCKS][4], b[AHEAD + 1][4];
  auto exists = [&](int c) { return (c + 1) * SPLIT <= BLOCKS || c * SPLIT + part < BLOCKS; };
  pipelined<Q_BLOCKS * COL_BLOCKS, DISTANCE>(
    [&](int u) {
      const int m = u / COL_BLOCKS, c = u % COL_BLOCKS;
      if (c == 0 && SPLIT > 1) {
#pragma unroll
        for (int n = 0; n < KEY_BLOCKS; n++) ldmatrix_x4(other[m % 2][n], block_at<TILE_M>(other_lane, n * BLOCK, m * BLOCK));
      }
      if (exists(c)) ldmatrix_x4_trans(b[u % (AHEAD + 1)], block_at<COLS>(b_lane, m * BLOCK, c * SPLIT * BLOCK));
    },
    [&](int u) {
      const int m = u / COL_BLOCKS, c = u % COL_BLOCKS;
      const u32(&block)[4] = b[u % (AHEAD + 1)];
      if (!exists(c)) return;
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int n = 0; n < GRAD_BLOCKS; n++) {
          const u32(&theirs)[4] = other[m % 2][n % KEY_BLOCKS], (&a)[4] = n < KEY_BLOCKS ? own[n % KEY_BLOCKS][m] : theirs;
          mma_m16n8k16<Element>(gradient[n][c][half], a, block[half * 2], block[half * 2 + 1]);
        }
      }
    });
}

// ds k for this warp's share of the query tile: ds from dsT (TILE_N, TILE_M), k (TILE_N, TILE_D).
using QueryGradient = float[DQ_M_BLOCKS][DQ_COLS][2][4];
__device__ __forceinline__ void multiply_ds_k(QueryGradient& dq, u32 dst_lane, u32 k_lane, int part) {
  constexpr int DISTANCE = smaller(AHEAD, DQ_COLS);
  u32 a[2][DQ_M_BLOCKS][4], b[AHEAD + 1][4];
  auto exists = [&](int c) { return (c + 1) * DQ_D_WARPS <= D_BLOCKS || c * DQ_D_WARPS + part < D_BLOCKS; };
#pragma unroll
  for (int i = 0; i < DQ_M_BLOCKS * DQ_COLS * 8; i++) dq[i / 8 / DQ_COLS][i / 8 % DQ_COLS][i / 4 % 2][i % 4] = 0;
  pipelined<TILE_N / BLOCK * DQ_COLS, DISTANCE>(
    [&](int u) {
      const int n = u / DQ_COLS, c = u % DQ_COLS;
      if (c == 0) {
#pragma unroll
        for (int m = 0; m < DQ_M_BLOCKS; m++) ldmatrix_x4_trans(a[n % 2][m], block_at<TILE_M>(dst_lane, n * BLOCK, m * BLOCK));
      }
      if (exists(c)) ldmatrix_x4_trans(b[u % (AHEAD + 1)], block_at<TILE_D>(k_lane, n * BLOCK, c * DQ_D_WARPS * BLOCK));
    },
    [&](int u) {
      const int n = u / DQ_COLS, c = u % DQ_COLS;
      const u32(&block)[4] = b[u % (AHEAD + 1)];
      if (!exists(c)) return;
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int m = 0; m < DQ_M_BLOCKS; m++) {
          mma_m16n8k16<Element>(dq[m][c][half], a[n % 2][m], block[half * 2], block[half * 2 + 1]);
        }
      }
    });
}

// Adding dq to fp32 global memory. With vector adds neighbouring lanes trade halves of each 16 x 16 block: an even lane
// then has four neighbouring columns of the left accumulator, an odd one of the right, in block[r] those of its row r,
// and each row of the block is added as 64 consecutive bytes.
constexpr bool TRADE = VECTOR_RED && !RAGGED_D;
__device__ __forceinline__ void trade_columns(float (&block)[2][4], int lane) {
  const bool odd = lane % 2;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float traded = __shfl_xor_sync(~0u, odd ? block[0][i] : block[1][i], 1);
    (odd ? block[0][i] : block[1][i]) = traded;
  }
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const float x = block[0][e + 2];
    block[0][e + 2] = block[1][e];
    block[1][e] = x;
  }
}
// dst: this warp's first row and column; rows, cols: how many exist from there on (rows are looked at only if TAIL).
template <bool TAIL>
__device__ __forceinline__ void add_rows(float* dst, int row_stride, int rows, int cols, const QueryGradient& dq, int lane) {
  const int row = lane / 4, t = lane % 4, lane_col = TRADE ? t % 2 * 8 + t / 2 * 4 : t * 2;
  constexpr bool WHOLE = !RAGGED_D && D_BLOCKS % DQ_D_WARPS == 0;  // all columns exist
  float* row_gmem = dst + row * row_stride + lane_col;
#pragma unroll
  for (int r = 0; r < DQ_M_BLOCKS * 2; r++, row_gmem += 8 * row_stride) {
    const bool row_ok = !TAIL || row + r * 8 < rows;
#pragma unroll
    for (int c = 0; c < DQ_COLS; c++) {
      const float(&block)[2][4] = dq[r / 2][c];
      const int col = c * DQ_D_WARPS * BLOCK;
      if constexpr (TRADE) {
        red_add_v4(row_gmem + col, block[r % 2], row_ok && (WHOLE || col < cols));
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int element = col + i / 2 * 8 + i % 2;
          red_add(row_gmem + element, block[i / 2][r % 2 * 2 + i % 2], row_ok && (WHOLE || lane_col + element < cols));
        }
      }
    }
  }
}

// gradient * factor as elements into a tile. key0: this warp's keys' first row, other_key0: that of those it shares.
template <int COLS, int COL_BLOCKS>
__device__ __forceinline__ void stage_gradient(Element* tile_smem, const float (&gradient)[GRAD_BLOCKS][COL_BLOCKS][2][4],
                                               float factor, int key0, int other_key0, int part, int lane) {
#pragma unroll
  for (int i = 0; i < GRAD_BLOCKS * COL_BLOCKS * 2; i++) {
    const int n = i / 2 / COL_BLOCKS, c = i / 2 % COL_BLOCKS, col = (c * SPLIT + part) * BLOCK;
    if (col >= COLS) continue;
    const float(&x)[4] = gradient[n][c][i % 2];
    const float scaled[4] = {x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor};
    const int row = (n < KEY_BLOCKS ? key0 : other_key0) + n % KEY_BLOCKS * BLOCK;
    store_accumulator<COLS>(tile_smem, row, col + i % 2 * 8, scaled, lane);
  }
}

// A query tile of the walk: of which query head of the group, which tile, in which slot of the rings.
struct QueryTile { int group_head, m_block, slot; };

extern "C" __global__ void __launch_bounds__(cfg::NUM_THREADS, cfg::MIN_CTAS) bwd_sm80(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int thread = threadIdx.x, lane = thread % 32;
  const int warp = __shfl_sync(~0u, thread / 32, 0);  // the compiler then knows that it is the same in all lanes
  // Key tiles of a head follow each other: they share its queries in L2, those with most queries come first (causal),
  // and a CTA waits only for smaller blockIdx (DETERMINISTIC), which start before it.
  const int n_block = blockIdx.x % p.num_n_blocks, kv_head = blockIdx.x / p.num_n_blocks % p.num_heads_kv;
  const int batch = blockIdx.x / p.num_n_blocks / p.num_heads_kv;
  const int n0 = n_block * TILE_N, keys = p.seqlen_k - n0;
  const TileRange range = q_range(p, n0);
  const int tiles = (range.end - range.begin) * p.qheads_per_kv;

  const bool role1 = warp >= ROLE_WARPS;
  const int role_warp = warp % ROLE_WARPS, part = role_warp % SPLIT;
  const int key0 = role_warp * WARP_KEYS, other_key0 = (role_warp ^ (SPLIT - 1)) * WARP_KEYS;
  const int dq_warp = warp - (WARPS - DQ_WARPS), dq_part = dq_warp % DQ_D_WARPS;
  const int dq_row = dq_warp / DQ_D_WARPS * DQ_M_BLOCKS * BLOCK;

  // The thread, for what is derived from it on the spot rather than kept in registers all along.
  auto fresh_thread = [&] { return int(u32(opaque(threadIdx.x)) % NUM_THREADS); };
  auto fresh_lane = [&] { return fresh_thread() % 32; };

  // Where the next query tile to be requested lies.
  const int first_head = kv_head * p.qheads_per_kv, first_row = range.begin * TILE_M;
  struct { const Element *q, *dout; const float *lse, *delta; } source = {
    p.q + batch * p.q_stride[0] + first_head * p.q_stride[2] + first_row * p.q_stride[1],
    p.dout + batch * p.dout_stride[0] + first_head * p.dout_stride[2] + first_row * p.dout_stride[1],
    p.lse + batch * p.lse_stride[0] + first_head * p.lse_stride[1] + first_row * p.lse_stride[2],
    p.delta + ((i64)batch * p.num_heads_q + first_head) * p.seqlen_q + first_row};
  // Requests it. Its lse and delta are for the threads that requested them to finish (finish_rows).
  auto load_queries = [&](const QueryTile& tile) {
    const int thread = fresh_thread(), row = thread % TILE_M, rows = p.seqlen_q - tile.m_block * TILE_M;
    const GmemTile<const Element> q = {source.q, p.q_stride[1], p.q_stride[3], rows, p.head_dim};
    const GmemTile<const Element> dout = {source.dout, p.dout_stride[1], p.dout_stride[3], rows, p.head_dim_v};
    load_tile<TILE_M, TILE_D, cfg::WIDE_Q, RAGGED_D, true, NUM_THREADS>(smem.q[tile.slot], q, thread);
    load_tile<TILE_M, TILE_DV, cfg::WIDE_DOUT, RAGGED_D, true, NUM_THREADS>(smem.dout[tile.slot], dout, thread);
    if (thread < TILE_M) {
      cp_async<4>(smem_u32(smem.lse[tile.slot]) + row * 4, source.lse + row * p.lse_stride[2], row < rows);
    } else if (thread < 2 * TILE_M) {
      cp_async<4>(smem_u32(smem.delta[tile.slot]) + row * 4, source.delta + row, row < rows);
    }
    cp_async_commit();
    const bool last = tile.m_block + 1 == range.end;  // of its head
    const int step = last ? (range.begin - tile.m_block) * TILE_M : TILE_M, heads = last;
    source.q += heads * p.q_stride[2] + step * p.q_stride[1];
    source.dout += heads * p.dout_stride[2] + step * p.dout_stride[1];
    source.lse += heads * p.lse_stride[1] + step * p.lse_stride[2];
    source.delta += heads * (i64)p.seqlen_q + step;
  };
  // lse as origins of exponents; +inf, so that p = 0, for queries that do not exist.
  auto finish_rows = [&](const QueryTile& tile) {
    if (thread >= TILE_M) return;
    float& lse = reinterpret_cast<float*>(smem.lse[tile.slot])[thread];
    lse = tile.m_block * TILE_M + thread < p.seqlen_q ? lse_origin(lse) : -NEG_INF;
  };
  auto load_kv = [&] {
    const GmemTile<const Element> k = {p.k + batch * p.k_stride[0] + kv_head * p.k_stride[2] + n0 * p.k_stride[1],
                                       p.k_stride[1], p.k_stride[3], keys, p.head_dim};
    const GmemTile<const Element> v = {p.v + batch * p.v_stride[0] + kv_head * p.v_stride[2] + n0 * p.v_stride[1],
                                       p.v_stride[1], p.v_stride[3], keys, p.head_dim_v};
    load_tile<TILE_N, TILE_D, cfg::WIDE_K, RAGGED_D, true, NUM_THREADS>(smem.k, k, thread);
    load_tile<TILE_N, TILE_DV, cfg::WIDE_V, RAGGED_D, true, NUM_THREADS>(smem.v, v, thread);
  };

  // Calls step(i, tile i-1, tile i, tile i+1) for i = -1 .. tiles, behind one barrier each, with tile i+2 on its way.
  auto walk = [&](auto step) {
    QueryTile previous = {0, 0, 1}, current = {0, 0, 2}, next = {0, range.begin, 0};
    for (int i = -1; i <= tiles; i++) {
      cp_async_wait<0>();
      if (i + 1 < tiles) finish_rows(next);
      named_barrier_sync(STEP, NUM_THREADS);
      const bool last = next.m_block + 1 == range.end;
      const QueryTile after = {next.group_head + last, last ? range.begin : next.m_block + 1, previous.slot};
      if (i + 2 < tiles) load_queries(after);
      step(i, previous, current, next);
      previous = current, current = next, next = after;
    }
  };
  auto hides = [&](const QueryTile& tile) { return tile.m_block < range.full_begin || tile.m_block >= range.full_end; };
  // Of element e of accumulator (n, m, half) of pT or dsT: its pair of queries, its query within the tile, its key.
  auto pair = [&](int m, int half) { return (m * BLOCK + half * 8) / 2 + lane % 4; };
  auto query = [&](int m, int half, int e) { return pair(m, half) * 2 + e % 2; };
  auto key = [&](int n, int e) { return n0 + key0 + n * BLOCK + e / 2 * 8 + lane / 4; };
  auto hide = [&](const QueryTile& tile, Scores& x) {
#pragma unroll
    for (int i = 0; i < KEY_BLOCKS * 2; i++) {
      const int n = i / 2, row = i % 2 * 2;  // of the accumulators: elements row and row + 1 are of one key
      const VisibleQueries queries = visible_queries(p, key(n, row), tile.m_block * TILE_M + query(0, 0, 0));
#pragma unroll
      for (int j = 0; j < Q_BLOCKS * 4; j++) {
        const int m = j / 4, half = j / 2 % 2, e = j % 2;
        if (!queries.has(m * BLOCK + half * 8 + e)) x[n][m][half][row + e] = 0;
      }
    }
  };

  // dq[tile] += ds k. DETERMINISTIC: when the CTAs of all key tiles before this one have added theirs.
  auto add_dq = [&](const QueryTile& tile) {
    const int lane = fresh_lane();
    QueryGradient dq;
    multiply_ds_k(dq, block_at<TILE_M>(lane_address<TILE_M, COLS_FIRST>(smem.pt[tile.slot], 0, lane), 0, dq_row),
                  block_at<TILE_D>(lane_address<TILE_D, ROWS_FIRST>(smem.k, 0, lane), 0, dq_part * BLOCK), dq_part);
    const i64 head = (i64)batch * p.num_heads_q + first_head + tile.group_head;
    const int m0 = tile.m_block * TILE_M, row = m0 + dq_row, row_stride = RAGGED_D ? p.head_dim : TILE_D;
    float* dst = p.dq_accum + (head * p.seqlen_q + row) * row_stride + dq_part * BLOCK;
    int* turn = p.semaphore + head * p.num_m_blocks + tile.m_block;
    const bool speaker = thread == (WARPS - DQ_WARPS) * 32;
    if (cfg::DETERMINISTIC) {
      if (speaker) while (ld_acquire(turn) != n_block - kv_range(p, m0).begin) {}
      named_barrier_sync(DQ_TURN, DQ_WARPS * 32);
    }
#pragma unroll
    for (int i = 0; TRADE && i < DQ_M_BLOCKS * DQ_COLS; i++) trade_columns(dq[i / DQ_COLS][i % DQ_COLS], lane);
    const int rows = p.seqlen_q - row, cols = (RAGGED_D ? p.head_dim : TILE_D) - dq_part * BLOCK;
    if (m0 + TILE_M <= p.seqlen_q) add_rows<false>(dst, row_stride, rows, cols, dq, lane);
    else add_rows<true>(dst, row_stride, rows, cols, dq, lane);
    if (cfg::DETERMINISTIC) {
      named_barrier_sync(DQ_ADDED, DQ_WARPS * 32);
      if (speaker) red_release_add(turn, 1);
    }
  };

  // This warp's pT or dsT, A operands, into its place in smem.
  auto store_pt = [&](const QueryTile& tile, const Operands& pt) {
    const int lane = fresh_lane();
    const u32 first = smem_u32(smem.pt[tile.slot]) + Swizzle<TILE_M>::offset(key0 + lane / 4, lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < KEY_BLOCKS * Q_BLOCKS * 4; i++) {
      const int n = i / 4 % KEY_BLOCKS, m = i / 4 / KEY_BLOCKS;
      st_shared(block_at<TILE_M>(first, n * BLOCK + i % 2 * 8, m * BLOCK + i / 2 % 2 * 8), pt[n][m][i % 4]);
    }
  };
  auto share_pt = [&] { if (SPLIT > 1) named_barrier_sync(PAIR + warp / SPLIT, SPLIT * 32); };

  if (tiles > 0) {
    load_kv();
    load_queries({0, range.begin, 0});
    cp_async_wait<0>();
    named_barrier_sync(STEP, NUM_THREADS);
  }
  if (!role1) {
    float dv[GRAD_BLOCKS][DV_COLS][2][4] = {};
    Kept<KEPT_D> k_kept;
    keep<TILE_D, KEPT_D>(k_kept, lane_address<TILE_D, ROWS_FIRST>(smem.k, key0, lane));
    const float scale = exponent_scale(p);

    auto probabilities = [&](const QueryTile& tile, Operands& pt) {
      const int lane = fresh_lane();
      Scores s;
      multiply_rows<TILE_D, KEPT_D>(s, k_kept, lane_address<TILE_D, ROWS_FIRST>(smem.k, key0, lane),
                                    lane_address<TILE_D, COLS_FIRST>(smem.q[tile.slot], 0, lane));
#pragma unroll
      for (int m = 0; m < Q_BLOCKS; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const Pair lse = smem.lse[tile.slot][pair(m, half)];
#pragma unroll
          for (int i = 0; i < KEY_BLOCKS * 4; i++) {
            const int n = i / 4, e = i % 4;
            float& x = s[n][m][half][e];
            x = score(p, x, tile.m_block * TILE_M + query(m, half, e), key(n, e));
            x = ex2(fmaf(x, scale, -(e % 2 ? lse.second : lse.first)));
          }
        }
      }
      if (hides(tile)) hide(tile, s);
#pragma unroll
      for (int m = 0; m < Q_BLOCKS; m++) {
#pragma unroll
        for (int n = 0; n < KEY_BLOCKS; n++) accumulators_to_a<Element>(pt[n][m], s[n][m][0], s[n][m][1]);
      }
      store_pt(tile, pt);
      share_pt();
    };
    walk([&](int i, const QueryTile& previous, const QueryTile&, const QueryTile& next) {
      if (i + 1 < tiles) {
        Operands pt;
        probabilities(next, pt);
        const int lane = fresh_lane();
        accumulate<TILE_DV>(dv, pt, lane_address<TILE_M, ROWS_FIRST>(smem.pt[next.slot], other_key0, lane),
                            block_at<TILE_DV>(lane_address<TILE_DV, ROWS_FIRST>(smem.dout[next.slot], 0, lane), 0, part * BLOCK), part);
      }
      if (DQ_WARPS == WARPS && i > 0) add_dq(previous);
    });
    named_barrier_sync(STEP, NUM_THREADS);
    stage_gradient<TILE_DV>(smem.v, dv, 1.f, key0, other_key0, part, lane);
  } else {
    float dk[GRAD_BLOCKS][DK_COLS][2][4] = {};
    Kept<KEPT_DV> v_kept;
    keep<TILE_DV, KEPT_DV>(v_kept, lane_address<TILE_DV, ROWS_FIRST>(smem.v, key0, lane));

    auto score_gradients = [&](const QueryTile& tile, Operands& dst) {
      const int lane = fresh_lane();
      const u32 pt_lane = lane_address<TILE_M, ROWS_FIRST>(smem.pt[tile.slot], key0, lane);
      Scores dp;
      multiply_rows<TILE_DV, KEPT_DV>(dp, v_kept, lane_address<TILE_DV, ROWS_FIRST>(smem.v, key0, lane),
                                      lane_address<TILE_DV, COLS_FIRST>(smem.dout[tile.slot], 0, lane));
#pragma unroll
      for (int m = 0; m < Q_BLOCKS; m++) {
        u32 pt[KEY_BLOCKS][4];
#pragma unroll
        for (int n = 0; n < KEY_BLOCKS; n++) ldmatrix_x4(pt[n], block_at<TILE_M>(pt_lane, n * BLOCK, m * BLOCK));
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const Pair delta = smem.delta[tile.slot][pair(m, half)];
#pragma unroll
          for (int i = 0; i < KEY_BLOCKS * 4; i++) {
            const int n = i / 4, e = i % 4;
            float& x = dp[n][m][half][e];
            const float prob = to_real(Element{(unsigned short)(pt[n][half * 2 + e / 2] >> (e % 2 * 16))});
            x = prob * (x - (e % 2 ? delta.second : delta.first));
          }
        }
      }
      if (hides(tile)) hide(tile, dp);
      __syncwarp();  // all lanes have read pT, dsT takes its place
#pragma unroll
      for (int m = 0; m < Q_BLOCKS; m++) {
#pragma unroll
        for (int n = 0; n < KEY_BLOCKS; n++) accumulators_to_a<Element>(dst[n][m], dp[n][m][0], dp[n][m][1]);
      }
      store_pt(tile, dst);
      share_pt();
    };
    walk([&](int i, const QueryTile& previous, const QueryTile& current, const QueryTile&) {
      if (i > 0) add_dq(previous);
      if (i >= 0 && i < tiles) {
        Operands dst;
        score_gradients(current, dst);
        const int lane = fresh_lane();
        accumulate<TILE_D>(dk, dst, lane_address<TILE_M, ROWS_FIRST>(smem.pt[current.slot], other_key0, lane),
                           block_at<TILE_D>(lane_address<TILE_D, ROWS_FIRST>(smem.q[current.slot], 0, lane), 0, part * BLOCK), part);
      }
    });
    named_barrier_sync(STEP, NUM_THREADS);
    stage_gradient<TILE_D>(smem.k, dk, p.softmax_scale, key0, other_key0, part, lane);
  }
  named_barrier_sync(STEP, NUM_THREADS);
  const GmemTile<Element> dk = {p.dk + batch * p.dk_stride[0] + kv_head * p.dk_stride[2] + n0 * p.dk_stride[1],
                                p.dk_stride[1], p.dk_stride[3], keys, p.head_dim};
  const GmemTile<Element> dv = {p.dv + batch * p.dv_stride[0] + kv_head * p.dv_stride[2] + n0 * p.dv_stride[1],
                                p.dv_stride[1], p.dv_stride[3], keys, p.head_dim_v};
  store_tile<TILE_N, TILE_D, cfg::WIDE_DK, RAGGED_D, NUM_THREADS>(dk, smem.k, thread);
  store_tile<TILE_N, TILE_DV, cfg::WIDE_DV, RAGGED_D, NUM_THREADS>(dv, smem.v, thread);
}
