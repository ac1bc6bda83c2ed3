// Matrix products in ordinary registers, for float32 and float64 on any GPU: shared memory -> register blocks -> FMA.
//
// A CTA is a grid of THREAD_ROWS x THREAD_COLS threads, and every product it makes is cut among them the same way: a
// thread owns a block of results whose rows lie THREAD_ROWS apart and whose columns lie THREAD_COLS (groups) apart.
// With 8 x 8 results a thread loads 16 vectors of 16 bytes for every 256 FMAs (float32).
//
//   product_nt   acc[i][j] += sum_d a[row i][d] * b[column j][d]    both operands row by row, vectors along d
//   product_nn   acc[i][c] += sum_n w[row i][n] * b[n][column c]    w in vectors along n, b in vectors along columns
//
// A row of threads lies within one warp, so row maxima and sums are a few shuffles:
//
//   lanes of a warp, THREAD_COLS = 16:  lane = column * 2 + row            (2 x 16 threads)
//                    THREAD_COLS = 8:   lane = row / 2 * 16 + column * 2 + row % 2   (4 x 8 threads)
//
// so in every operand load lanes share addresses with a neighbour (lane ^ 1 or lane ^ 2), which lets quarter-warps of a
// 16-byte load be served together. Rows are padded to an odd number of 16-byte units: neighbouring rows fall into
// different banks.
#pragma once
#include "dtypes.cuh"

namespace simt {

using Element = cfg::Element;
constexpr int VEC = 16 / sizeof(Element);  // elements of a 16-byte access
constexpr int WARP = 32;
constexpr int THREAD_COLS = cfg::THREAD_COLS, THREAD_ROWS = cfg::NUM_THREADS / THREAD_COLS;
static_assert(THREAD_COLS == 8 || THREAD_COLS == 16, "a warp is 4 x 8 or 2 x 16 threads");

__device__ __forceinline__ int thread_col() { return threadIdx.x / 2 % THREAD_COLS; }
__device__ __forceinline__ int thread_row() {
  const int row_in_warp = threadIdx.x % 2 + threadIdx.x % WARP / (2 * THREAD_COLS) * 2;
  return threadIdx.x / WARP * (WARP / THREAD_COLS) + row_in_warp;
}

// Row strides in shared memory: operands (see above), and weights, whose rows are shifted by a row of threads.
constexpr int padded(int cols) { return (cols / VEC | 1) * VEC; }
constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int common_divisor(int a, int b) { return b ? common_divisor(b, a % b) : a; }
constexpr int padded_weights(int cols) { return cols + THREAD_COLS * 4 / (int)sizeof(Element); }

// A number that a generic lambda takes as a template argument.
template <int N> struct Constant { static constexpr int value = N; };

template <int N> struct alignas(N * sizeof(Element)) Vector { Element x[N]; };

template <int N> __device__ __forceinline__ Vector<N> load(const Element* source) {
  return *reinterpret_cast<const Vector<N>*>(source);
}

// The widest vector that `cols` columns of a thread are a multiple of.
constexpr int vector_width(int cols) {
  int width = VEC;
  while (cols % width) width /= 2;
  return width;
}

// ---- Global memory --------------------------------------------------------------------------------------------------

// One head of one batch, or sequence, whose rows begin at `begin`: (rows, cols) = (seqlen, head_dim).
template <class T> struct Matrix {
  T* data;
  i64 row_stride, col_stride;
  int rows, cols;
};

template <class T>
__device__ __forceinline__ Matrix<T> matrix(T* data, const i64 (&stride)[4], i64 begin, int head, int rows, int cols) {
  return {data + begin + head * stride[2], stride[1], stride[3], rows, cols};
}

// Start copying ROWS x COLS elements from (row0, col0) on to tile[ROWS][STRIDE]; zeros where the matrix has ended.
// SPAN threads share a row, and each keeps its columns from row to row: a copy costs little besides the copy itself.
template <bool WIDE, int ROWS, int COLS, int STRIDE>
__device__ __forceinline__ void load_tile(Element* tile, const Matrix<const Element>& source, int row0, int col0) {
  constexpr int WIDTH = WIDE ? VEC : 1;
  constexpr int SPAN = common_divisor(COLS / WIDTH, cfg::NUM_THREADS), ROW_STEP = cfg::NUM_THREADS / SPAN;
  const int row = threadIdx.x / SPAN, col = threadIdx.x % SPAN * WIDTH;
  const int rows = source.rows - row0 - row, cols = source.cols - col0 - col;  // those that exist from here on
  const i64 col_stride = WIDE ? 1 : source.col_stride;
  const Element* from = source.data + (row0 + row) * source.row_stride + (col0 + col) * col_stride;
  const unsigned to = smem_u32(tile + row * STRIDE + col);
#pragma unroll
  for (int r = 0; r < ROWS; r += ROW_STEP) {
    if (ROWS % ROW_STEP != 0 && row + r >= ROWS) break;
#pragma unroll
    for (int c = 0; c < COLS; c += SPAN * WIDTH) {
      const unsigned offset = (r * STRIDE + c) * sizeof(Element);
      cp_async<WIDTH * sizeof(Element)>(to + offset, from + c * col_stride, r < rows && c < cols);
    }
    from += ROW_STEP * source.row_stride;
  }
}

// Write a thread's block of results, times factor(i) in row i, to the rows from row0 on.
template <bool WIDE, int ROWS, int COLS, class Factor>
__device__ __forceinline__ void store_block(const Matrix<Element>& target, const Element (&acc)[ROWS][COLS],
                                            Factor factor, int row0) {
  constexpr int WIDTH = vector_width(COLS);
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    const int row = thread_row() + i * THREAD_ROWS;
    if (row >= target.rows - row0) continue;
    Element* to = target.data + (row0 + row) * target.row_stride;
#pragma unroll
    for (int c = 0; c < COLS; c += WIDTH) {
      const int col = (c / WIDTH * THREAD_COLS + thread_col()) * WIDTH;
      Vector<WIDTH> out;
#pragma unroll
      for (int e = 0; e < WIDTH; e++) out.x[e] = acc[i][c + e] * factor(i);
      if (WIDE && WIDTH == VEC) {
        if (col < target.cols) *reinterpret_cast<Vector<WIDTH>*>(to + col) = out;
      } else {
#pragma unroll
        for (int e = 0; e < WIDTH; e++) {
          if (col + e < target.cols) to[(col + e) * target.col_stride] = out.x[e];
        }
      }
    }
  }
}

// ---- Streamed operands ----------------------------------------------------------------------------------------------

// Slices of the streamed operands pass through STAGES slots of shared memory in a fixed order; `load(step, slot)`
// starts copying the slice of a step. While one is computed on, the next ones are in flight.
template <int SLOT, class Load> struct Stream {
  Element (&slots)[cfg::STAGES][SLOT];
  const Load& load;
  int num_steps;
  int step = 0;

  __device__ __forceinline__ void start() {
    for (int ahead = 0; ahead < cfg::STAGES - 1; ahead++) fetch(ahead);
  }

  // The next slice. Waits for it, and for everybody to be done with the one before, whose slot is filled anew.
  __device__ __forceinline__ const Element* next() {
    cp_async_wait<cfg::STAGES - 2>();
    __syncthreads();
    fetch(step + cfg::STAGES - 1);
    return slots[step++ % cfg::STAGES];
  }

  __device__ __forceinline__ void fetch(int which) {
    if (which < num_steps) load(which, slots[which % cfg::STAGES]);
    cp_async_commit();
  }
};

// Whether all COUNT elements at `slice` are finite. Every thread of the CTA must ask.
template <int COUNT> __device__ __forceinline__ bool all_finite(const Element* slice) {
  Element zero = 0;
  for (int x = threadIdx.x * VEC; x < COUNT; x += cfg::NUM_THREADS * VEC) {
    const Vector<VEC> values = load<VEC>(slice + x);
#pragma unroll
    for (int e = 0; e < VEC; e++) zero += values.x[e] * 0;
  }
  return !__syncthreads_or(zero != 0);  // inf * 0 and NaN * 0 are NaN
}

// ---- Products -------------------------------------------------------------------------------------------------------

// `a` [][A_STRIDE] and `b` [][B_STRIDE] start at the thread's own first row and column.
template <int A_STRIDE, int B_STRIDE, int ROWS, int COLS>
__device__ __forceinline__ void product_nt(Element (&acc)[ROWS][COLS], const Element* a, const Element* b, int depth) {
#pragma unroll 1
  for (int left = depth; left > 0; left -= VEC, a += VEC, b += VEC) {
    Vector<VEC> a_rmem[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) a_rmem[i] = load<VEC>(a + i * THREAD_ROWS * A_STRIDE);
#pragma unroll
    for (int j = 0; j < COLS; j++) {
      const Vector<VEC> b_rmem = load<VEC>(b + j * THREAD_COLS * B_STRIDE);
#pragma unroll
      for (int e = 0; e < VEC; e++) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) acc[i][j] += a_rmem[i].x[e] * b_rmem.x[e];
      }
    }
  }
}

// `w` [][W_STRIDE] starts at the thread's own first row, `b` [DEPTH][B_COLS] at its first row.
template <int W_STRIDE, int B_COLS, int DEPTH, int ROWS, int COLS>
__device__ __forceinline__ void product_nn(Element (&acc)[ROWS][COLS], const Element* w, const Element* b) {
  constexpr int WIDTH = vector_width(COLS);
  b += thread_col() * WIDTH;
#pragma unroll 1
  for (int left = DEPTH; left > 0; left -= VEC, w += VEC, b += VEC * B_COLS) {
    Vector<VEC> w_rmem[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) w_rmem[i] = load<VEC>(w + i * THREAD_ROWS * W_STRIDE);
#pragma unroll
    for (int e = 0; e < VEC; e++) {
#pragma unroll
      for (int c = 0; c < COLS; c += WIDTH) {
        const Vector<WIDTH> b_rmem = load<WIDTH>(b + e * B_COLS + c * THREAD_COLS);
#pragma unroll
        for (int f = 0; f < WIDTH; f++) {
#pragma unroll
          for (int i = 0; i < ROWS; i++) acc[i][c + f] += w_rmem[i].x[e] * b_rmem.x[f];
        }
      }
    }
  }
}

// The same where b holds inf or NaN in rows that not every row of w sees (their weight is 0, and 0 * NaN is NaN):
// row n of b has no influence on the thread's row i unless sees(i, n). Rare, and made to take few registers.
template <int W_STRIDE, int B_COLS, int DEPTH, int ROWS, int COLS, class Sees>
__device__ __forceinline__ void product_nn_seen(Element (&acc)[ROWS][COLS], const Element* w, const Element* b,
                                                Sees sees) {
  constexpr int WIDTH = vector_width(COLS);
  b += thread_col() * WIDTH;
#pragma unroll 1
  for (int n = 0; n < DEPTH; n++) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      if (!sees(i, n)) continue;
      const Element weight = w[i * THREAD_ROWS * W_STRIDE + n];
#pragma unroll
      for (int c = 0; c < COLS; c++) {
        acc[i][c] += weight * b[n * B_COLS + c / WIDTH * WIDTH * THREAD_COLS + c % WIDTH];
      }
    }
  }
}

// ---- Reductions along a row of threads ------------------------------------------------------------------------------

template <class Combine> __device__ __forceinline__ Element reduce_row(Element x, Combine combine) {
#pragma unroll
  for (int lane = 2; lane <= THREAD_COLS; lane *= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, lane));
  return x;
}
__device__ __forceinline__ Element row_max(Element x) {
  return reduce_row(x, [](Element a, Element b) { return max(a, b); });
}
__device__ __forceinline__ Element row_sum(Element x) {
  return reduce_row(x, [](Element a, Element b) { return a + b; });
}

}  // namespace simt
