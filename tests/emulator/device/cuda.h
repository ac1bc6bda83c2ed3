// The CUDA vocabulary that kernels use, for a C++ compiler. Included in front of every emulated program. Only what
// NVRTC offers without any header belongs here; instructions have their emulated headers, ptx.cuh and ptx_sm90.cuh.
#pragma once
#include "emu.h"

// ---- declarations ---------------------------------------------------------------------------------------------------
#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define threadIdx (emu::place->thread)
#define blockIdx (emu::place->block)
#define blockDim (emu::place->block_dim)
#define gridDim (emu::place->grid_dim)
constexpr int warpSize = 32;
using size_t = decltype(sizeof(0));

#define EMU_VECTOR(type, name)                                                                                        \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; };                                                            \
  struct name##3 { type x, y, z; };                                                                                   \
  struct alignas(4 * sizeof(type) > 16 ? 16 : 4 * sizeof(type)) name##4 { type x, y, z, w; };                         \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                                    \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                                         \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
EMU_VECTOR(unsigned char, uchar)
EMU_VECTOR(unsigned short, ushort)
EMU_VECTOR(int, int)
EMU_VECTOR(unsigned, uint)
EMU_VECTOR(long long, longlong)
EMU_VECTOR(unsigned long long, ulonglong)
EMU_VECTOR(float, float)
EMU_VECTOR(double, double)
#undef EMU_VECTOR

// ---- bits -----------------------------------------------------------------------------------------------------------
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline double __longlong_as_double(long long x) { return __builtin_bit_cast(double, x); }
inline long long __double_as_longlong(double x) { return __builtin_bit_cast(long long, x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline size_t __cvta_generic_to_shared(const void* p, EMU_SITE) { return emu::shared_address(p, site); }

// ---- arithmetic -----------------------------------------------------------------------------------------------------
extern "C" {
float exp2f(float) noexcept; float expf(float) noexcept; float log2f(float) noexcept; float logf(float) noexcept;
float log1pf(float) noexcept; float tanhf(float) noexcept; float powf(float, float) noexcept;
float fmodf(float, float) noexcept; float rintf(float) noexcept; float sinf(float) noexcept; float cosf(float) noexcept;
double exp2(double) noexcept; double exp(double) noexcept; double log2(double) noexcept; double log(double) noexcept;
double log1p(double) noexcept; double tanh(double) noexcept; double pow(double, double) noexcept;
double fmod(double, double) noexcept; double rint(double) noexcept; double sin(double) noexcept; double cos(double) noexcept;
}
#define EMU_REAL(type, suffix)                                                                                        \
  inline type fma##suffix(type a, type b, type c) { return __builtin_fma##suffix(a, b, c); }                          \
  inline type fmax##suffix(type a, type b) { return __builtin_fmax##suffix(a, b); }                                   \
  inline type fmin##suffix(type a, type b) { return __builtin_fmin##suffix(a, b); }                                   \
  inline type fabs##suffix(type a) { return __builtin_fabs##suffix(a); }                                              \
  inline type sqrt##suffix(type a) { return __builtin_sqrt##suffix(a); }                                              \
  inline type rsqrt##suffix(type a) { return 1 / __builtin_sqrt##suffix(a); }                                         \
  inline type floor##suffix(type a) { return __builtin_floor##suffix(a); }                                            \
  inline type ceil##suffix(type a) { return __builtin_ceil##suffix(a); }                                              \
  inline bool isinf(type a) { return __builtin_isinf(a); }                                                            \
  inline bool isnan(type a) { return __builtin_isnan(a); }                                                            \
  inline bool isfinite(type a) { return __builtin_isfinite(a); }                                                      \
  inline type min(type a, type b) { return __builtin_fmin##suffix(a, b); }                                            \
  inline type max(type a, type b) { return __builtin_fmax##suffix(a, b); }
EMU_REAL(float, f)
EMU_REAL(double, )
#undef EMU_REAL
inline float fmaf(float a, float b, double c) = delete;  // a double slipped into float arithmetic
inline double exp(float) = delete;
inline double exp2(float) = delete;
inline double log(float) = delete;
inline double log2(float) = delete;
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x > 0 ? fminf(x, 1) : 0; }
inline float __frcp_rn(float a) { return 1 / a; }

#define EMU_INTEGER(type)                                   \
  inline type min(type a, type b) { return a < b ? a : b; } \
  inline type max(type a, type b) { return a > b ? a : b; }
EMU_INTEGER(int)
EMU_INTEGER(unsigned)
EMU_INTEGER(long)
EMU_INTEGER(unsigned long)
EMU_INTEGER(long long)
EMU_INTEGER(unsigned long long)
#undef EMU_INTEGER
inline int abs(int a) { return a < 0 ? -a : a; }

// ---- threads that meet ----------------------------------------------------------------------------------------------
inline void __syncthreads(EMU_SITE) { emu::cta_barrier(0, 0, true, emu::Vote::OR, 0, site); }
inline int __syncthreads_or(int x, EMU_SITE) { return emu::cta_barrier(0, 0, true, emu::Vote::OR, x, site); }
inline int __syncthreads_and(int x, EMU_SITE) { return emu::cta_barrier(0, 0, true, emu::Vote::AND, x, site); }
inline int __syncthreads_count(int x, EMU_SITE) { return emu::cta_barrier(0, 0, true, emu::Vote::COUNT, x, site); }
inline void __syncwarp(unsigned mask = ~0u, EMU_SITE) { emu::warp_barrier(mask, site); }
inline unsigned __ballot_sync(unsigned mask, bool x, EMU_SITE) { return emu::ballot(mask, x, site); }
inline bool __any_sync(unsigned mask, bool x, EMU_SITE) { return emu::ballot(mask, x, site) != 0; }
inline bool __all_sync(unsigned mask, bool x, EMU_SITE) { return emu::ballot(mask, x, site) == mask; }

template <class T> T emu_shuffle(emu::Shuffle how, unsigned mask, T value, int operand, int width, emu::Site site) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");
  unsigned long long bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = emu::shuffle(how, mask, bits, operand, width, site);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}
#define EMU_SHUFFLE(name, how, type)                                                     \
  template <class T> T name(unsigned mask, T value, type operand, int width = 32, EMU_SITE) { \
    return emu_shuffle(emu::Shuffle::how, mask, value, int(operand), width, site);       \
  }
EMU_SHUFFLE(__shfl_sync, IDX, int)
EMU_SHUFFLE(__shfl_up_sync, UP, unsigned)
EMU_SHUFFLE(__shfl_down_sync, DOWN, unsigned)
EMU_SHUFFLE(__shfl_xor_sync, XOR, int)
#undef EMU_SHUFFLE

// ---- atomics and fences ---------------------------------------------------------------------------------------------
// Threads change places only at calls of the runtime, so the plain operation is atomic.
template <class T> EMU_ATOMIC T emu_atomic(T* p, emu::Site site, T (*change)(T, T), T operand) {
  emu::atomic_point(p, sizeof(T), true, false, site);
  const T old = *p;
  *p = change(old, operand);
  return old;
}
#define EMU_CHANGE(name, expression)                                          \
  template <class T> T name(T* p, decltype(T() + 0) x, EMU_SITE) {            \
    return emu_atomic<T>(p, site, [](T a, T b) { return T(expression); }, x); \
  }
EMU_CHANGE(atomicAdd, a + b)
EMU_CHANGE(atomicSub, a - b)
EMU_CHANGE(atomicMax, a > b ? a : b)
EMU_CHANGE(atomicMin, a < b ? a : b)
EMU_CHANGE(atomicExch, (void(a), b))
EMU_CHANGE(atomicOr, a | b)
#undef EMU_CHANGE
template <class T> EMU_ATOMIC T atomicCAS(T* p, T expected, T desired, EMU_SITE) {
  emu::atomic_point(p, sizeof(T), true, true, site);
  const T old = *p;
  if (old == expected) *p = desired;
  return old;
}
inline void __threadfence(EMU_SITE) { emu::pause(site); }
inline void __threadfence_block(EMU_SITE) { emu::pause(site); }
inline void __nanosleep(unsigned, EMU_SITE) { emu::atomic_point(nullptr, 0, false, true, site); }
template <class T> T __ldg(const T* p) { return *p; }
inline void __trap(EMU_SITE) { emu::trap("__trap", site); }
extern "C" int printf(const char*, ...);
#define assert(condition) ((condition) ? void() : emu::trap("assert(" #condition ")", emu::Site::current()))

// ---- the entry ------------------------------------------------------------------------------------------------------
// Calls a kernel with arguments that lie one after the other in `params`, each at a multiple of its alignment.
template <class... Arguments> struct EmuCall {
  EmuCall(void (*kernel)(Arguments...), Arguments... arguments) { kernel(arguments...); }
};
struct EmuArguments {
  const char* params;
  size_t end = 0;
  template <class T> const T& next() {
    const size_t start = (end + alignof(T) - 1) / alignof(T) * alignof(T);
    end = start + sizeof(T);
    return *reinterpret_cast<const T*>(params + start);
  }
};
template <class... Arguments> void emu_call(void (*kernel)(Arguments...), const void* params) {
  EmuArguments arguments = {static_cast<const char*>(params)};
  EmuCall<Arguments...>{kernel, arguments.next<Arguments>()...};
}
#define EMU_ENTRY(kernel) \
  extern "C" void emu_entry(const void* params) { emu_call(kernel, params); }
