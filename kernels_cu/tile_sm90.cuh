// What the Hopper kernels share besides instructions: rings of buffers, accumulators on their way to global memory, and
// scores of a single warp.
#pragma once
#include "ptx_sm90.cuh"

// A tile in shared memory is [chunks][rows][CHUNK]: see ptx_sm90.cuh.
constexpr int WARP = 32, WARPGROUP = 128, CHUNK = 64, CHUNK_ROW_BYTES = 128, UNIT_BYTES = 16;

// A value that all lanes of a warp share, so that the compiler knows: it then takes a uniform register.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// A position that goes round a ring of COUNT buffers, and the parity of the mbarrier phase that it is in.
template <int COUNT> struct Ring {
  int index = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance() {
    if (++index == COUNT) index = 0, parity ^= 1;
  }
};
// The same in one number, for a ring that is seldom asked where registers are few.
template <int COUNT> struct PackedRing {
  u32 place = 0;  // in two rounds, one of each parity

  __device__ __forceinline__ int index() const { return place % COUNT; }
  __device__ __forceinline__ u32 parity() const { return place / COUNT; }
  __device__ __forceinline__ void advance() { place = (place + 1) % (2 * COUNT); }
};

// Transposes the 4 x 4 matrix whose row t lane t of each quad holds: afterwards x[i] is what lane i had in x[t].
__device__ __forceinline__ void transpose_quad(u32 (&x)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool high = lane & bit;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i & bit) continue;
      const u32 got = __shfl_xor_sync(~0u, high ? x[i] : x[i + bit], bit);
      x[i] = high ? got : x[i];
      x[i + bit] = high ? x[i + bit] : got;
    }
  }
}

struct alignas(8) Pair { float first, second; };

// A warp's 16 rows of an accumulator (64, COLUMNS), each times its factor, straight from registers to global memory:
// columns below `columns` of the lane's rows row_gmem(0) and row_gmem(1), unless that is null. Rounded to 16-bit
// elements, 16 bytes a lane and 64 a row at a time; or as floats, 8 bytes a lane and 32 a row.
template <int COLUMNS, class Output, class RowGmem>
__device__ __forceinline__ void store_rows(RowGmem row_gmem, int columns, const float (&acc_rmem)[COLUMNS / 2],
                                           const float (&factor)[2], int lane) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    Output* const gmem = row_gmem(r);
    auto value = [&](int j, int e) { return acc_rmem[4 * j + 2 * r + e] * factor[r]; };
    if constexpr (sizeof(Output) == sizeof(float)) {
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; j++) {
        const int column = j * 8 + lane % 4 * 2;
        if (gmem && column < columns) *reinterpret_cast<Pair*>(gmem + column) = {value(j, 0), value(j, 1)};
      }
    } else {
#pragma unroll
      for (int j0 = 0; j0 < COLUMNS / 8; j0 += 4) {
        u32 x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int j = j0 + i < COLUMNS / 8 ? j0 + i : j0;  // past the last column: stored by no lane
          x[i] = pack2<Output>(value(j, 0), value(j, 1));
        }
        transpose_quad(x, lane);
        const int column = (j0 + lane % 4) * 8;
        if (gmem && column < columns) st_global_v4(gmem + column, x);
      }
    }
  }
}
// The same for rows at equal distances: those below `rows`, from the warp's first on.
template <int COLUMNS, class Element>
__device__ __forceinline__ void store_accumulator(Element* gmem, i64 row_stride, int rows, int columns,
                                                  const float (&acc_rmem)[COLUMNS / 2], const float (&factor)[2],
                                                  int lane) {
  auto row_gmem = [&](int r) {
    const int row = lane / 4 + 8 * r;
    return row < rows ? gmem + row * row_stride : nullptr;
  };
  store_rows<COLUMNS, Element>(row_gmem, columns, acc_rmem, factor, lane);
}

// The 16-byte unit `unit` of row `row` in a tile of `rows` rows.
__device__ __forceinline__ u32 unit_address(u32 tile, int rows, int row, int unit) {
  constexpr int UNITS = CHUNK_ROW_BYTES / UNIT_BYTES;
  return tile + (unit / UNITS * rows + row) * CHUNK_ROW_BYTES + (unit % UNITS ^ row % UNITS) * UNIT_BYTES;
}

// A warp's 16 rows of an accumulator (64, COLUMNS), each times its factor, rounded, to a tile in shared memory, from
// `row` on.
template <int COLUMNS, class Element, int CHUNKS, int ROWS>
__device__ __forceinline__ void accumulator_to_smem(Element (&tile)[CHUNKS][ROWS][CHUNK], int row,
                                                    const float (&acc_rmem)[COLUMNS / 2], const float (&factor)[2],
                                                    int lane) {
  auto* const bytes = reinterpret_cast<unsigned char*>(tile);
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j += 2) {
    u32 x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int at = 4 * (j + i / 2) + 2 * (i % 2);
      x[i] = pack2<Element>(acc_rmem[at] * factor[i % 2], acc_rmem[at + 1] * factor[i % 2]);
    }
    stmatrix_x4(bytes + unit_address(0, ROWS, row + lane % 16, j + lane / 16), x[0], x[1], x[2], x[3]);
  }
}

// s(16, N) = a(16, 16 * STEPS) * b(N, 16 * STEPS)T by one warp alone, with mma.sync, in the layout of its part of a
// wgmma accumulator. `a` is a tile of A_ROWS rows, of which the warp takes 16 from `a_row` on. Slow and small: for what
// happens rarely.
template <class Element, int A_ROWS, int N, int STEPS>
__device__ __forceinline__ void warp_products(float (&s_rmem)[N / 2], u32 a, int a_row, u32 b, int lane) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) s_rmem[i] = 0;
  const int second = lane / 8 % 2, third = lane / 16;  // lane l gives row l % 8 of matrix l / 8 = 2 * third + second
#pragma unroll 1
  for (int step = 0; step < STEPS; step++) {
    u32 a_rmem[4];
    ldmatrix_x4(a_rmem, unit_address(a, A_ROWS, a_row + second * 8 + lane % 8, 2 * step + third));
#pragma unroll
    for (int n = 0; n < N; n += 16) {
      u32 b_rmem[4];
      ldmatrix_x4(b_rmem, unit_address(b, N, n + third * 8 + lane % 8, 2 * step + second));
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float* s = s_rmem + (n / 8 + half) * 4;
        float d[4] = {s[0], s[1], s[2], s[3]};
        mma_m16n8k16<Element>(d, a_rmem, b_rmem[2 * half], b_rmem[2 * half + 1]);
#pragma unroll
        for (int i = 0; i < 4; i++) s[i] = d[i];
      }
    }
  }
}
