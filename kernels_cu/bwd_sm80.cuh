// The products of the tensor-core backward as warps compute them, and how dq, dk and dv leave their accumulators.
#pragma once
#include "tile.cuh"

using cfg::Element;
using cfg::TILE_M, cfg::TILE_N, cfg::TILE_D, cfg::TILE_DV, cfg::NUM_THREADS, cfg::RAGGED_D;

constexpr int WARPS = NUM_THREADS / 32, ROLE_WARPS = WARPS / 2;
constexpr int WARP_KEYS = TILE_N / ROLE_WARPS;            // keys whose scores a warp computes
constexpr int SPLIT = cfg::COLUMN_SPLIT;                  // warps that share the gradients of their keys
constexpr int KEY_BLOCKS = WARP_KEYS / BLOCK, GRAD_BLOCKS = KEY_BLOCKS * SPLIT;
constexpr int Q_BLOCKS = TILE_M / BLOCK, D_BLOCKS = TILE_D / BLOCK, DV_BLOCKS = TILE_DV / BLOCK;
constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int KEPT_D = smaller(cfg::K_RMEM_BLOCKS, D_BLOCKS);     // column blocks of a warp's keys (role 0) or values
constexpr int KEPT_DV = smaller(cfg::V_RMEM_BLOCKS, DV_BLOCKS);   // (role 1) that stay in registers
constexpr int DQ_M_WARPS = cfg::DQ_M_WARPS, DQ_D_WARPS = WARPS / DQ_M_WARPS;  // that divide rows, columns of dq
constexpr int DQ_M_BLOCKS = Q_BLOCKS / DQ_M_WARPS;
constexpr int AHEAD = 2;                                  // operand blocks on their way from smem to registers
constexpr int FENCE = cfg::DETERMINISTIC ? 2 : 4;         // every so many blocks loads may not be moved further ahead

static_assert(TILE_N % (ROLE_WARPS * BLOCK) == 0 && Q_BLOCKS % DQ_M_WARPS == 0, "whole blocks a warp");

// Columns are dealt out in blocks of 16: of `blocks`, warp w of `warps` takes w, w + warps, ..., at most so many.
constexpr int share(int blocks, int warps) { return (blocks + warps - 1) / warps; }
constexpr int DQ_COLS = share(D_BLOCKS, DQ_D_WARPS);
constexpr int DK_COLS = share(D_BLOCKS, SPLIT), DV_COLS = share(DV_BLOCKS, SPLIT);
// The lane's address for the first block of columns of warp w, rows being the summed dimension.
template <int COLS> __device__ __forceinline__ u32 first_block(const Element* tile_smem, int w, int lane) {
  return block_at<COLS>(lane_address<COLS, ROWS_FIRST>(tile_smem, 0, lane), 0, w * BLOCK);
}

using Scores = float[KEY_BLOCKS][Q_BLOCKS][2][4];   // [16 keys][16 queries][8 queries][accumulator]
using Operands = u32[KEY_BLOCKS][Q_BLOCKS][4];      // the same as A operands
template <int KEPT> using Kept = u32[KEPT + 1][KEY_BLOCKS][4];  // A operands; the extra one keeps the extent positive

// Runs UNITS times multiply(u), with load(u) DISTANCE units earlier. The assembler would move loads far ahead, until
// registers are spilled; it does not move them across __syncwarp, which costs next to nothing here.
template <int UNITS, int DISTANCE, class Load, class Multiply>
__device__ __forceinline__ void pipelined(Load load, Multiply multiply) {
#pragma unroll
  for (int u = 0; u < smaller(DISTANCE, UNITS); u++) load(u);
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    if (u + DISTANCE < UNITS) load(u + DISTANCE);
    multiply(u);
    if (u % FENCE == FENCE - 1 && u + 1 < UNITS) __syncwarp();
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
    const int d = i / KEY_BLOCKS, n = i % KEY_BLOCKS;
    ldmatrix_x4(kept[d][n], block_at<COLS>(a_lane, n * BLOCK, d * BLOCK));
  }
}

// gradient += a b: a (keys, TILE_M) is this warp's own operands and those at other_lane (SPLIT = 2), b (TILE_M, COLS).
// change() is made of what lies there.
template <int COLS, int COL_BLOCKS, class Change>
__device__ __forceinline__ void accumulate(float (&gradient)[GRAD_BLOCKS][COL_BLOCKS][2][4], const Operands& own,
                                           u32 other_lane, u32 b_lane, int part, Change change) {
  constexpr int DISTANCE = smaller(AHEAD, COL_BLOCKS), BLOCKS = COLS / BLOCK;
  u32 other[2][KEY_BLOCKS][4], b[AHEAD + 1][4];
  auto exists = [&](int c) { return (c + 1) * SPLIT <= BLOCKS || c * SPLIT + part < BLOCKS; };
  pipelined<Q_BLOCKS * COL_BLOCKS, DISTANCE>(
    [&](int u) {
      const int m = u / COL_BLOCKS, c = u % COL_BLOCKS;
      if (c == 0 && SPLIT > 1) {
#pragma unroll
        for (int n = 0; n < KEY_BLOCKS; n++) {
          ldmatrix_x4(other[m % 2][n], block_at<TILE_M>(other_lane, n * BLOCK, m * BLOCK));
#pragma unroll
          for (u32& pair : other[m % 2][n]) pair = change(pair);
        }
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
          const u32(&theirs)[4] = other[m % 2][n % KEY_BLOCKS];
          const u32(&a)[4] = n < KEY_BLOCKS ? own[n % KEY_BLOCKS][m] : theirs;
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
        for (int m = 0; m < DQ_M_BLOCKS; m++) {
          ldmatrix_x4_trans(a[n % 2][m], block_at<TILE_M>(dst_lane, n * BLOCK, m * BLOCK));
        }
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
__device__ __forceinline__ void add_rows(float* dst, int row_stride, int rows, int cols, const QueryGradient& dq,
                                         int lane) {
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
__device__ __forceinline__ void stage_gradient(Element* tile_smem,
                                               const float (&gradient)[GRAD_BLOCKS][COL_BLOCKS][2][4], float factor,
                                               int key0, int other_key0, int part, int lane) {
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
