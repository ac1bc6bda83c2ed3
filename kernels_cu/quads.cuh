// Rows of arrays in global memory as accumulators need them: they are read 16 bytes at a time, and afterwards lane t of a
// quad has columns 8 j + 2 t and the next of its quad's row. Loads are for the caller to start early.
#pragma once
#include "tile_sm90.cuh"

// ROWS rows of COLUMNS 16-bit elements as TMA leaves them in shared memory: boxes as wide as a swizzle and the columns
// allow, whose 16-byte units it permutes so that ldmatrix finds the same columns of eight rows in different banks.
template <class Element, int ROWS, int COLUMNS> struct PairTile {
  static constexpr int BOX_COLUMNS = COLUMNS % 64 == 0 ? 64 : COLUMNS % 32 == 0 ? 32 : 16, BOXES = COLUMNS / BOX_COLUMNS;
  static constexpr int ROW_BYTES = BOX_COLUMNS * sizeof(Element), UNITS = ROW_BYTES / UNIT_BYTES;
  alignas(1024) Element boxes[BOXES][ROWS][BOX_COLUMNS];

  // Whence a lane reads that gives ldmatrix `row`, bytes from the tile's first on.
  static __device__ __forceinline__ u32 place(int row, int lane) {
    return row * ROW_BYTES + (lane / 16 ^ row * ROW_BYTES / 128 % UNITS) * UNIT_BYTES;
  }
  // Of 16 rows, the lane's pairs of columns 16 i + 8 * (k / 2) on in pairs[k], of its row k % 2.
  static __device__ __forceinline__ void read(u32 (&pairs)[4], u32 address, int i) {
    constexpr int READS = UNITS / 2;  // of a box
    ldmatrix_x4(pairs, (address ^ i % READS * 2 * UNIT_BYTES) + i / READS * sizeof(boxes[0]));
  }
  // Whence a lane reads that gives ldmatrix_trans `row`, for 16 columns from `column` on of 16 rows. Afterwards it has, of
  // column lane / 4 + 8 * (i % 2), rows 8 * (i / 2) + 2 * (lane % 4) and the next in register i.
  static __device__ __forceinline__ u32 place_transposed(int row, int column, int lane) {
    const int unit = column % BOX_COLUMNS * (int)sizeof(Element) / UNIT_BYTES + lane / 8 % 2;
    return column / BOX_COLUMNS * sizeof(boxes[0]) + row * ROW_BYTES + (unit ^ row * ROW_BYTES / 128 % UNITS) * UNIT_BYTES;
  }
};

// Sixteen bytes that are 0 or 1, to bits: a product moves those of four, apart from each other, to its last four.
__device__ __forceinline__ u32 bits_of(const u32 (&x)[4]) {
  auto eight = [](u32 first, u32 second) { return (first * 0x01020408u + second * 0x10204080u) >> 24; };
  return eight(x[0], x[1]) | eight(x[2], x[3]) << 8;
}

// COLUMNS bytes that are 0 or 1, in bits. Of a row that begins at a multiple of 16 bytes and has a multiple of 16
// columns.
template <int COLUMNS> struct QuadBits {
  static constexpr int UNIT_COLUMNS = 16, UNITS = COLUMNS / UNIT_COLUMNS, LOADS = (UNITS + 3) / 4;
  static_assert(LOADS <= 2, "the bits of a lane's columns are a word");
  u32 x[LOADS][4];

  // A lane reads every fourth unit of 16 bytes. Columns from `columns` on do not exist, and become zeros.
  __device__ __forceinline__ void load(const void* row, int columns, int lane) {
#pragma unroll
    for (int k = 0; k < LOADS; k++) {
      const int unit = 4 * k + lane % 4;
#pragma unroll
      for (u32& word : x[k]) word = 0;
      if (unit * UNIT_COLUMNS < min(columns, COLUMNS)) {
        ld_global_v4(x[k], static_cast<const unsigned char*>(row) + unit * UNIT_BYTES);
      }
    }
  }
  // Those of the lane's columns, each at its place().
  __device__ __forceinline__ u32 bits(int lane) const {
    u32 own = 0, found = 0;
#pragma unroll
    for (int k = 0; k < LOADS; k++) own |= bits_of(x[k]) << 16 * k;
#pragma unroll
    for (int t = 0; t < 4; t++) found |= (__shfl_sync(~0u, own, (lane & ~3) | t) >> lane % 4 * 2 & 0x03030303) << 2 * t;
    return found;
  }
  // Of the first (e = 0) or second of the lane's two columns of the j-th eight.
  static __device__ __forceinline__ constexpr int place(int j, int e) {
    return j / 8 * 16 + j % 2 * 8 + j % 8 / 2 * 2 + e;
  }
  // The same of bits of all columns, 32 a word.
  static __device__ __forceinline__ u32 of_words(const u32 (&words)[4], int lane) {
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 own = words[i] >> lane % 4 * 2;
      found |= ((own & 0x0303) | (own >> 14 & 0x0c0c)) << i / 2 * 16 + i % 2 * 4;
    }
    return found;
  }
};

// The same of accumulators that are transposed, of a warp's 16 keys and ROWS queries: a lane holds, of keys lane / 4 +
// 8 * (i % 2), queries 16 s + 8 * (i / 2) + 2 * (lane % 4) + e. Rows of the warp's keys lie `stride` elements apart from
// `row` on; `rows` of them exist, and `keys` of the keys: what does not becomes zero.
template <int ROWS> struct TransposedPairs {  // of 16-bit elements
  u32 x[ROWS / 16][4];

  template <class Value>
  __device__ __forceinline__ void load(const Value* row, i64 stride, int rows, int keys, int lane) {
    const int first = lane / 4;
    row += first * stride;
#pragma unroll
    for (int s = 0; s < ROWS / 16; s++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const bool exists = 16 * s + i / 2 * 8 + first < rows && i % 2 * 8 < keys;
        x[s][i] = exists ? reinterpret_cast<const u32*>(row)[i % 2 * 4 + lane % 4] : 0;
        if (i % 2) row += 8 * stride;
      }
    }
  }
  __device__ __forceinline__ void arrange() {
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) x[i / 4][i % 4] = movmatrix_trans(x[i / 4][i % 4]);
  }
};
template <int ROWS> struct TransposedBits {  // of bytes that are 0 or 1
  static_assert(ROWS == 64, "the bits of a lane's elements are a word");
  u32 x[2][4];  // of queries lane and lane + 32, the warp's keys

  template <class Value>
  __device__ __forceinline__ void load(const Value* row, i64 stride, int rows, int keys, int lane) {
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const int at = lane + WARP * k;
#pragma unroll
      for (u32& word : x[k]) word = 0;
      if (at < rows && keys > 0) ld_global_v4(x[k], row + at * stride);
    }
  }
  __device__ __forceinline__ u32 bits(int lane) const {
    const u32 own = bits_of(x[0]) | bits_of(x[1]) << 16;
    u32 found = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const u32 of_query = __shfl_sync(~0u, own, j / 2 * 8 + j % 2 + lane % 4 * 2);
      found |= (of_query >> lane / 4 & 0x01010101) << j;
    }
    return found;
  }
  static __device__ __forceinline__ constexpr int place(int s, int i, int e) {
    return s / 2 * 16 + i % 2 * 8 + s % 2 * 4 + i / 2 * 2 + e;
  }
};
