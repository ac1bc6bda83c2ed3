// Element types and their conversions. A 16-bit type is only its bits here: arithmetic happens in float, and the two
// are joined by one conversion instruction (ptx.cuh), so no toolkit header is needed.
#pragma once
#include "ptx.cuh"

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };

__device__ __forceinline__ float to_real(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
__device__ __forceinline__ float to_real(fp16 x) { return cvt_f32_f16(x.bits); }
__device__ __forceinline__ float to_real(float x) { return x; }
__device__ __forceinline__ double to_real(double x) { return x; }

// Two neighbouring elements as one 32-bit register, `lo` at the lower address, rounded to nearest even.
template <class Element> __device__ __forceinline__ u32 pack2(float lo, float hi);
template <> __device__ __forceinline__ u32 pack2<bf16>(float lo, float hi) { return cvt_rn_bf16x2(lo, hi); }
template <> __device__ __forceinline__ u32 pack2<fp16>(float lo, float hi) { return cvt_rn_f16x2(lo, hi); }

// Nonzero if one of a pair of elements is inf or NaN: its exponent is all ones, so adding 1 to that carries out.
template <class Element> __device__ __forceinline__ u32 nonfinite(u32 pair);
template <> __device__ __forceinline__ u32 nonfinite<bf16>(u32 pair) {
  return ((pair & 0x7fff7fff) + 0x00800080) & 0x80008000;
}
template <> __device__ __forceinline__ u32 nonfinite<fp16>(u32 pair) {
  return ((pair & 0x7fff7fff) + 0x04000400) & 0x80008000;
}

template <class Element> struct Dtype {
  using Real = float;  // what it is computed in
  static __device__ __forceinline__ Element from_real(float x) {
    return Element{(unsigned short)(pack2<Element>(x, 0.f) & 0xffff)};
  }
};
template <> struct Dtype<float> {
  using Real = float;
  static __device__ __forceinline__ float from_real(float x) { return x; }
};
template <> struct Dtype<double> {
  using Real = double;
  static __device__ __forceinline__ double from_real(double x) { return x; }
};
