// Tiles of 16-bit elements: how they lie in shared memory, how they come from and go to global memory, and how warps
// read them as operands of mma.m16n8k16.
//
// A tile is [rows][COLS] in shared memory, COLS a multiple of 16, without padding. Its 16-byte chunks are swizzled
// within a row so that the eight rows of an 8 x 8 matrix, read or written together, fall into eight different groups of
// four banks, whatever COLS is. Rows 8 apart share a swizzle: fragments at multiples of 16 rows differ by a constant.
#pragma once
#include "dtypes.cuh"

constexpr int CHUNK_BYTES = 16, CHUNK_ELEMENTS = 8, BLOCK = 16;  // a 16-byte access; the side of an mma operand block

template <int COLS> struct Swizzle {
  static_assert(COLS % BLOCK == 0, "tiles are padded to whole mma blocks");
  static constexpr int CHUNKS = COLS / CHUNK_ELEMENTS;
  // Chunks are permuted inside groups of SPAN, the largest power of two up to 8 that divides the row.
  static constexpr int SPAN = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;
  static constexpr int ROW_BYTES = COLS * 2;
  static __device__ __forceinline__ int key(int row) { return (row * SPAN / 8) % SPAN; }
  // Byte offset of element (row, col) in the tile.
  static __device__ __forceinline__ u32 offset(int row, int col) {
    const int chunk = (col / CHUNK_ELEMENTS) ^ key(row);
    return row * ROW_BYTES + chunk * CHUNK_BYTES + col % CHUNK_ELEMENTS * 2;
  }
};

// A tile's place in global memory. `rows` and `cols` are how many exist from `data` on; both may exceed the tile.
template <class Element> struct GmemTile {
  Element* data;  // row 0, column 0
  i64 row_stride, col_stride;
  int rows, cols;
};

// The threads of a copy: SPAN of them share a row (so it is read in whole 32-byte sectors or 128-byte lines), and a
// thread's chunks differ by constants in shared memory.
template <int ROWS, int COLS, int THREADS> struct CopyMap {
  static constexpr int SPAN = Swizzle<COLS>::SPAN, COL_STEPS = COLS / (SPAN * CHUNK_ELEMENTS);
  static constexpr int ROW_STEP = THREADS / SPAN, STEPS = (ROWS + ROW_STEP - 1) / ROW_STEP;
  static constexpr bool EXACT = ROWS % ROW_STEP == 0;
  static_assert(THREADS % SPAN == 0 && (ROW_STEP % 8 == 0 || ROW_STEP == 4), "the rows' swizzle keys combine by xor");
  // The address of a thread's chunk i * ROW_STEP rows down and j * SPAN chunks sideways from its first.
  static __device__ __forceinline__ u32 step(u32 first, int i, int j) {
    return (first ^ Swizzle<COLS>::key(i * ROW_STEP) * CHUNK_BYTES) + i * ROW_STEP * Swizzle<COLS>::ROW_BYTES +
           j * SPAN * CHUNK_BYTES;
  }
};

// gmem -> smem by THREADS threads, `thread` = 0 .. THREADS - 1. What does not exist becomes zero: rows at and past
// src.rows (looked at only if TAIL), columns at and past src.cols (only if RAGGED). WIDE: cp.async, to be committed and
// awaited by the caller; needs col_stride 1 and 16-byte alignment. Otherwise plain element-wise loads with any strides.
// Both become visible to other threads at the barrier that follows (cp_async_wait and) the call.
template <int ROWS, int COLS, bool WIDE, bool RAGGED, bool TAIL, int THREADS, class Element>
__device__ __forceinline__ void load_tile(Element* tile_smem, const GmemTile<const Element>& src, u32 thread) {
  using Map = CopyMap<ROWS, COLS, THREADS>;
  const int row0 = thread / Map::SPAN, col0 = thread % Map::SPAN * CHUNK_ELEMENTS;
  const u32 first = smem_u32(tile_smem) + Swizzle<COLS>::offset(row0, col0);
  const Element* gmem = src.data + row0 * src.row_stride + col0 * (WIDE ? 1 : src.col_stride);
#pragma unroll(WIDE ? Map::STEPS : 1)
  for (int i = 0; i < Map::STEPS; i++, gmem += Map::ROW_STEP * src.row_stride) {
    const int row = row0 + i * Map::ROW_STEP;
    if (!Map::EXACT && row >= ROWS) break;
    const bool row_ok = !TAIL || row < src.rows;
#pragma unroll(WIDE ? Map::COL_STEPS : 1)
    for (int j = 0; j < Map::COL_STEPS; j++) {
      const int col = col0 + j * Map::SPAN * CHUNK_ELEMENTS;
      const u32 dst = Map::step(first, i, j);
      if constexpr (WIDE) {
        cp_async<CHUNK_BYTES>(dst, gmem + (col - col0), row_ok && (!RAGGED || col < src.cols));
      } else {
#pragma unroll 2  // more loads in flight would take registers that hold accumulators
        for (int pair = 0; pair < CHUNK_ELEMENTS / 2; pair++) {
          u32 bits[2] = {};
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const int e = col + pair * 2 + i;
            if (row_ok && (!RAGGED || e < src.cols)) bits[i] = gmem[(e - col0) * src.col_stride].bits;
          }
          st_shared(dst + pair * 4, bits[0] | bits[1] << 16);
        }
      }
    }
  }
}

// Whether what this thread brought by load_tile (and awaited, no barrier is needed) holds inf or NaN.
template <int ROWS, int COLS, int THREADS, class Element>
__device__ __forceinline__ bool loaded_nonfinite(const Element* tile_smem, u32 thread) {
  using Map = CopyMap<ROWS, COLS, THREADS>;
  const int row0 = thread / Map::SPAN, col0 = thread % Map::SPAN * CHUNK_ELEMENTS;
  const u32 first = smem_u32(tile_smem) + Swizzle<COLS>::offset(row0, col0);
  u32 found = 0;
#pragma unroll 1
  for (int i = 0; i < Map::STEPS && (Map::EXACT || row0 + i * Map::ROW_STEP < ROWS); i++) {
#pragma unroll
    for (int j = 0; j < Map::COL_STEPS; j++) {
      u32 chunk[CHUNK_ELEMENTS / 2];
      ld_shared_v4(chunk, Map::step(first, i, j));
#pragma unroll
      for (int e = 0; e < CHUNK_ELEMENTS / 2; e++) found |= nonfinite<Element>(chunk[e]);
    }
  }
  return found != 0;
}

// smem -> gmem by THREADS threads: rows below dst.rows and columns below dst.cols.
template <int ROWS, int COLS, bool WIDE, bool RAGGED, int THREADS, class Element>
__device__ __forceinline__ void store_tile(const GmemTile<Element>& dst, const Element* tile_smem, u32 thread) {
  using Map = CopyMap<ROWS, COLS, THREADS>;
  const int row0 = thread / Map::SPAN, col0 = thread % Map::SPAN * CHUNK_ELEMENTS;
  const u32 first = smem_u32(tile_smem) + Swizzle<COLS>::offset(row0, col0);
  Element* gmem = dst.data + row0 * dst.row_stride + col0 * (WIDE ? 1 : dst.col_stride);
#pragma unroll
  for (int i = 0; i < Map::STEPS; i++, gmem += Map::ROW_STEP * dst.row_stride) {
    const int row = row0 + i * Map::ROW_STEP;
    if ((!Map::EXACT && row >= ROWS) || row >= dst.rows) break;
#pragma unroll
    for (int j = 0; j < Map::COL_STEPS; j++) {
      const int col = col0 + j * Map::SPAN * CHUNK_ELEMENTS;
      if (RAGGED && col >= dst.cols) continue;
      u32 chunk[CHUNK_ELEMENTS / 2];
      ld_shared_v4(chunk, Map::step(first, i, j));
      if constexpr (WIDE) {
        st_global_v4(gmem + (col - col0), chunk);
      } else {
#pragma unroll
        for (int e = 0; e < CHUNK_ELEMENTS; e++) {
          if (RAGGED && col + e >= dst.cols) continue;
          gmem[(col - col0 + e) * dst.col_stride] = Element{(unsigned short)(chunk[e / 2] >> (e % 2 * 16))};
        }
      }
    }
  }
}

// ---- Operands of mma.m16n8k16 ---------------------------------------------------------------------------------------
// One ldmatrix.x4 reads a 16 x 16 block as four 8 x 8 matrices, in one of two orders:
//
//   ROWS_FIRST  0 2      COLS_FIRST  0 1      operand     tile in smem   order        ldmatrix
//               1 3                  2 3      A (m, k)    [m][k]         ROWS_FIRST   x4
//                                             A (m, k)    [k][m]         COLS_FIRST   x4_trans
//   B is returned for two n8 blocks:          B (k, n)    [n][k]         COLS_FIRST   x4
//   b0, b1 of columns 0-7, then of 8-15.      B (k, n)    [k][n]         ROWS_FIRST   x4_trans
enum MatrixOrder { ROWS_FIRST, COLS_FIRST };

// The address this lane gives for the block at (row, 0), row a multiple of 8. Computed once, then moved by block_at.
template <int COLS, MatrixOrder ORDER, class Element>
__device__ __forceinline__ u32 lane_address(const Element* tile_smem, int row, u32 lane) {
  const int second = lane / 8 % 2 * 8, third = lane / 16 * 8;
  const int block_row = lane % 8 + (ORDER == ROWS_FIRST ? second : third);
  return smem_u32(tile_smem) + Swizzle<COLS>::offset(row + block_row, ORDER == ROWS_FIRST ? third : second);
}

// The same for the block `rows` further down (a multiple of 8) and `cols` to the right (a multiple of 16). The tile
// begins at a multiple of 128 bytes. With constant arguments this is at most one xor and a constant offset.
template <int COLS> __device__ __forceinline__ u32 block_at(u32 lane_address, int rows, int cols) {
  constexpr int SPAN_BYTES = Swizzle<COLS>::SPAN * CHUNK_BYTES;
  const int bytes = cols * 2;
  return (lane_address ^ (bytes % SPAN_BYTES)) + (bytes / SPAN_BYTES * SPAN_BYTES + rows * Swizzle<COLS>::ROW_BYTES);
}

// An accumulator of mma.m16n8k16 as 16-bit elements into a tile: its top left element goes to (row, col).
template <int COLS, class Element>
__device__ __forceinline__ void store_accumulator(Element* tile_smem, int row, int col, const float (&d)[4], u32 lane) {
  const u32 tile = smem_u32(tile_smem);
  row += lane / 4, col += lane % 4 * 2;
  st_shared(tile + Swizzle<COLS>::offset(row, col), pack2<Element>(d[0], d[1]));
  st_shared(tile + Swizzle<COLS>::offset(row + 8, col), pack2<Element>(d[2], d[3]));
}

// Two neighbouring accumulators (columns 0-7 and 8-15) as the A operand of the next mma.
template <class Element>
__device__ __forceinline__ void accumulators_to_a(u32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = pack2<Element>(left[0], left[1]);
  a[1] = pack2<Element>(left[2], left[3]);
  a[2] = pack2<Element>(right[0], right[1]);
  a[3] = pack2<Element>(right[2], right[3]);
}
