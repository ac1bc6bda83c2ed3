// What functions that a user wrote are made of, in programs that have such functions: graphs.py writes them below this.
#pragma once
#include "softmax.cuh"
#include "sums.cuh"

namespace mod {
using Real = Dtype<cfg::Element>::Real;

__device__ __forceinline__ bool read(unsigned char x) { return x != 0; }
__device__ __forceinline__ int read(int x) { return x; }
__device__ __forceinline__ i64 read(i64 x) { return x; }
template <class Element> __device__ __forceinline__ Real read(Element x) { return Real(to_real(x)); }

// An element of an array of as many dimensions as there are indices. Outside of the array is its edge.
template <bool> struct Counted { using Place = i64; };
template <> struct Counted<true> { using Place = int; };
using Place = Counted<cfg::NEAR_ARRAYS>::Place;  // of an element: whether 32 bits hold it is known
template <class Int> __device__ __forceinline__ Place along(Int index, int size, i64 stride) {
  return Place(max(min(index, Int(size - 1)), Int(0))) * Place(stride);
}
template <class Element, class... Index>
__device__ __forceinline__ auto load(const void* array, const i64 (&stride)[4], const int (&size)[4], Index... index) {
  Place place = 0;
  int d = 0;
  ((place += along(index, size[d], stride[d]), d++), ...);
  return read(static_cast<const Element*>(array)[place]);
}

// Adds to the element that load reads of the same indices, in a contiguous array, if that is wanted.
template <class... Index>
__device__ __forceinline__ void scatter(RunningSum<Real>& sum, Real* array, const int (&size)[4], Real x, Index... index) {
  if (!array) return;
  i64 place = 0;
  int d = 0;
  ((place = place * size[d] + along(index, size[d], 1), d++), ...);
  sum.add(array + place, x);
}

// Rounded down, as in Python; 0 where the divisor is.
template <class Int> __device__ __forceinline__ Int floor_divide(Int a, Int b) {
  if (b == 0) return 0;
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}
template <class Int> __device__ __forceinline__ Int remainder(Int a, Int b) {
  return b == 0 ? 0 : a - b * floor_divide(a, b);
}
__device__ __forceinline__ bool inverted(bool x) { return !x; }
template <class Int> __device__ __forceinline__ Int inverted(Int x) { return ~x; }

// Where elements have 16 bits, by the GPU's approximations, as softmax is.
constexpr bool APPROXIMATE = sizeof(cfg::Element) == 2;
__device__ __forceinline__ float divide(float a, float b) { return APPROXIMATE ? __fdividef(a, b) : a / b; }
__device__ __forceinline__ double divide(double a, double b) { return a / b; }
__device__ __forceinline__ float exp_of(float x) { return APPROXIMATE ? ex2(x * float(LOG2_E)) : expf(x); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }
__device__ __forceinline__ float log_of(float x) { return APPROXIMATE ? lg2(x) * LN2 : logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }
__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }  // tanh.approx is off by 2^-11
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }
__device__ __forceinline__ float sqrt_of(float x) { return sqrtf(x); }
__device__ __forceinline__ double sqrt_of(double x) { return sqrt(x); }
__device__ __forceinline__ float floor_of(float x) { return floorf(x); }
__device__ __forceinline__ double floor_of(double x) { return floor(x); }
// Not inlined: their way for large numbers is long.
__device__ __noinline__ float sin_of(float x) { return sinf(x); }
__device__ __noinline__ double sin_of(double x) { return sin(x); }
__device__ __noinline__ float cos_of(float x) { return cosf(x); }
__device__ __noinline__ double cos_of(double x) { return cos(x); }
}  // namespace mod
