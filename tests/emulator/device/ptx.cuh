// Stands in for kernels_cu/ptx.cuh: the same functions with the emulator's bodies.
#pragma once
#include "numbers.h"

struct bf16;
struct fp16;

inline float cvt_f32_f16(unsigned short x) { return emu::f16_to_float(x); }
inline unsigned cvt_rn_bf16x2(float lo, float hi) { return emu::float_to_bf16(lo) | emu::float_to_bf16(hi) << 16; }
inline unsigned cvt_rn_f16x2(float lo, float hi) { return emu::float_to_f16(lo) | emu::float_to_f16(hi) << 16; }

inline float emu_flush(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.f, x) : x; }
inline float ex2(float x) { return emu_flush(exp2f(emu_flush(x))); }
inline float lg2(float x) { return emu_flush(log2f(emu_flush(x))); }

inline float tanh_approx(float x) { return tanhf(x); }

inline unsigned opaque(unsigned x) { return x; }
inline unsigned redux_or(unsigned x) {
  for (int distance = 16; distance; distance /= 2) x |= __shfl_xor_sync(~0u, x, distance);
  return x;
}

inline unsigned movmatrix_trans(unsigned x) {
  const unsigned row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2, half = row % 2 * 16;
  const unsigned first = __shfl_sync(~0u, x, column * 4 + row / 2), second = __shfl_sync(~0u, x, (column + 1) * 4 + row / 2);
  return (first >> half & 0xffff) | (second >> half & 0xffff) << 16;
}

inline unsigned smem_u32(const void* p, EMU_SITE) { return emu::shared_address(p, site); }

inline void ldmatrix_x4(unsigned (&d)[4], unsigned smem, EMU_SITE) { emu::load_matrices(d, 4, smem, false, site); }
inline void ldmatrix_x4_trans(unsigned (&d)[4], unsigned smem, EMU_SITE) { emu::load_matrices(d, 4, smem, true, site); }
inline void ldmatrix_x2(unsigned (&d)[2], unsigned smem, EMU_SITE) { emu::load_matrices(d, 2, smem, false, site); }
inline void ldmatrix_x2_trans(unsigned (&d)[2], unsigned smem, EMU_SITE) { emu::load_matrices(d, 2, smem, true, site); }

inline void ld_shared_v4(unsigned (&d)[4], unsigned smem, EMU_SITE) { emu::load_shared(d, smem, 16, site); }
inline void st_shared(unsigned smem, unsigned x, EMU_SITE) { emu::store_shared(smem, &x, 4, site); }
inline void st_shared_v4(unsigned smem, const unsigned (&x)[4], EMU_SITE) { emu::store_shared(smem, x, 16, site); }

inline void ld_global_v4(unsigned (&d)[4], const void* src, EMU_SITE) { emu::load_global(d, src, 16, site); }
inline void st_global_v4(void* dst, const unsigned (&x)[4], EMU_SITE) { emu::store_global(dst, x, 16, site); }

constexpr bool VECTOR_RED = true;
inline void red_add(float* dst, float x, bool valid = true, EMU_SITE) {
  if (valid) emu::add_global(dst, &x, 1, site);
}
inline void red_add_v4(float* dst, const float (&x)[4], bool valid = true, EMU_SITE) {
  if (valid) emu::add_global(dst, x, 4, site);
}

inline void named_barrier_sync(int id, int threads, EMU_SITE) {
  emu::cta_barrier(id, threads, true, emu::Vote::OR, 0, site);
}
inline void named_barrier_arrive(int id, int threads, EMU_SITE) {
  emu::cta_barrier(id, threads, false, emu::Vote::OR, 0, site);
}

EMU_ATOMIC inline int ld_acquire(const int* flag, EMU_SITE) {
  emu::atomic_point(flag, 4, false, true, site);
  return *flag;
}
EMU_ATOMIC inline void red_release_add(int* flag, int x, EMU_SITE) {
  emu::atomic_point(flag, 4, true, false, site);
  *flag += x;
}

inline void let_next_launch_start() {}
inline void await_launches_before() { emu::await_launches(); }

template <int BYTES> inline void cp_async(unsigned smem_dst, const void* gmem_src, bool valid, EMU_SITE) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  emu::copy_async(smem_dst, gmem_src, BYTES, valid ? BYTES : 0, site);
}
inline void cp_async_commit(EMU_SITE) { emu::copy_async_commit(site); }
template <int N> inline void cp_async_wait(EMU_SITE) { emu::copy_async_wait(N, site); }

template <class Element> constexpr emu::Operand EMU_OPERAND = emu::Operand::F16;
template <> constexpr emu::Operand EMU_OPERAND<bf16> = emu::Operand::BF16;
template <class Element>
inline void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, EMU_SITE) {
  const unsigned b[2] = {b0, b1};
  emu::mma_m16n8k16(EMU_OPERAND<Element>, d, a, b, site);
}
