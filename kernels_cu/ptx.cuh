// Every inline-assembly instruction of the generations up to sm_80 (and plain ones of later generations), one function
// each, named like the instruction. Section numbers are those of the PTX ISA manual, version 9.0. Types are raw here,
// since dtypes.cuh builds on this file. The CPU emulator replaces this header by one with the same signatures.
#pragma once

struct bf16;  // dtypes.cuh
struct fp16;

// ---- Conversions and special functions ------------------------------------------------------------------------------

// 9.7.9.22 cvt
__device__ __forceinline__ float cvt_f32_f16(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

// 9.7.9.22 cvt: two floats rounded to nearest even, `lo` in the lower half of the register.
__device__ __forceinline__ unsigned cvt_rn_bf16x2(float lo, float hi) {
  unsigned y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}
__device__ __forceinline__ unsigned cvt_rn_f16x2(float lo, float hi) {
  unsigned y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

// 9.7.3.22 ex2: 2^x to 2 ulp; 2^-inf = +0, NaN stays NaN, subnormal results become 0.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 9.7.3.21 lg2: log2(x), relative error 2^-22; log2(0) = -inf.
__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}


// 9.7.13.7 redux.sync: x of all lanes, or-ed. Of an x that all lanes share it is the same x, now known to be uniform:
// it and what is computed from it can live in registers that the warp shares (sm_80 and later; before, it is only x).
__device__ __forceinline__ unsigned redux_or(unsigned x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  unsigned y;
  asm("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
#else
  return x;
#endif
}

// No instruction at all: x, of unknown origin. What is derived from it is computed where it is used, instead of ahead
// of a loop, where it would take registers throughout.
__device__ __forceinline__ unsigned opaque(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

// ---- Shared memory --------------------------------------------------------------------------------------------------

// 9.7.9.20 cvta: the address that instructions on shared memory take. Linear in the pointer.
__device__ __forceinline__ unsigned smem_u32(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// 9.7.15.5.15 ldmatrix: four 8 x 8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8
// and receives, of each matrix i, the elements 2 * (l % 4) and + 1 of row l / 4 (trans: of column l / 4) in d[i].
__device__ __forceinline__ void ldmatrix_x4(unsigned (&d)[4], unsigned smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(smem) : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&d)[4], unsigned smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(smem) : "memory");
}
__device__ __forceinline__ void ldmatrix_x2(unsigned (&d)[2], unsigned smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(d[0]), "=r"(d[1]) : "r"(smem) : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(unsigned (&d)[2], unsigned smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(d[0]), "=r"(d[1]) : "r"(smem) : "memory");
}

// 9.7.9.8 ld, 9.7.9.11 st, on 4 and 16 aligned bytes of shared memory.
__device__ __forceinline__ void ld_shared_v4(unsigned (&d)[4], unsigned smem) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(smem) : "memory");
}
__device__ __forceinline__ void st_shared(unsigned smem, unsigned x) {
  asm volatile("st.shared.u32 [%0], %1;" :: "r"(smem), "r"(x) : "memory");
}
__device__ __forceinline__ void st_shared_v4(unsigned smem, const unsigned (&x)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
               :: "r"(smem), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

// ---- Global memory --------------------------------------------------------------------------------------------------

// 9.7.9.8 ld, 9.7.9.11 st, on 16 aligned bytes of global memory.
__device__ __forceinline__ void ld_global_v4(unsigned (&d)[4], const void* src) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "l"(src) : "memory");
}
__device__ __forceinline__ void st_global_v4(void* dst, const unsigned (&x)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :: "l"(dst), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

// 9.7.13.9 red: *dst += x without waiting for the result, if valid. v4 needs dst aligned to 16 bytes; before sm_90 it is
// four adds.
__device__ __forceinline__ void red_add(float* dst, float x, bool valid = true) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; @p red.global.add.f32 [%0], %1; }"
               :: "l"(dst), "f"(x), "r"((int)valid) : "memory");
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool VECTOR_RED = true;  // whether red_add_v4 is one instruction
__device__ __forceinline__ void red_add_v4(float* dst, const float (&x)[4], bool valid = true) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %5, 0; @p red.global.add.v4.f32 [%0], {%1, %2, %3, %4}; }"
               :: "l"(dst), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"((int)valid) : "memory");
}
#else
constexpr bool VECTOR_RED = false;
__device__ __forceinline__ void red_add_v4(float* dst, const float (&x)[4], bool valid = true) {
  for (int i = 0; i < 4; i++) red_add(dst + i, x[i], valid);
}
#endif

// ---- Barriers and flags ---------------------------------------------------------------------------------------------

// 9.7.13.1 bar.sync, bar.arrive: barrier `id` (0 is __syncthreads, 15 the last) opens when `threads` threads (whole
// warps) have synced on it or arrived at it.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// 9.7.9.8 ld.acquire, 9.7.13.9 red.release: a flag in global memory. Who acquires a value sees everything that happened
// before it was released.
__device__ __forceinline__ int ld_acquire(const int* flag) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(flag) : "memory");
  return x;
}
__device__ __forceinline__ void red_release_add(int* flag, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" :: "l"(flag), "r"(x) : "memory");
}

// 9.7.13.13 griddepcontrol: the next launch may start when all CTAs of this one have said so, if it is one that
// overlaps; such a one then waits for the end of all launches before it, and sees what they wrote. Before sm_90 nothing
// overlaps.
__device__ __forceinline__ void let_next_launch_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void await_launches_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// 9.7.15.5.17 movmatrix: transposes an 8 x 8 matrix of 16-bit elements, of which lane 4 i + j of the warp holds row i,
// columns 2 j and the next.
__device__ __forceinline__ unsigned movmatrix_trans(unsigned x) {
  unsigned y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// ---- sm_80: asynchronous copies -------------------------------------------------------------------------------------

// 9.7.9.25.3.1 cp.async: BYTES (4, 8 or 16, both sides aligned to it) from global to shared memory, or zeros where not
// valid (src is then not read). 16-byte copies bypass L1.
template <int BYTES> __device__ __forceinline__ void cp_async(unsigned smem_dst, const void* gmem_src, bool valid) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  // Through registers, and complete on return.
  unsigned x[BYTES / 4] = {};
  for (int i = 0; valid && i < BYTES / 4; i++) x[i] = static_cast<const unsigned*>(gmem_src)[i];
  for (int i = 0; i < BYTES / 4; i++) st_shared(smem_dst + 4 * i, x[i]);
#else
  const int bytes = valid ? BYTES : 0;
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(smem_dst), "l"(gmem_src), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :: "r"(smem_dst), "l"(gmem_src), "n"(BYTES), "r"(bytes) : "memory");
  }
#endif
}

// 9.7.9.25.3.2 cp.async.commit_group: this thread's copies since the last commit become one group.
__device__ __forceinline__ void cp_async_commit() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// 9.7.9.25.3.3 cp.async.wait_group: until at most the N latest groups of this thread are pending.
template <int N> __device__ __forceinline__ void cp_async_wait() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
#endif
}

// ---- sm_80: tensor cores --------------------------------------------------------------------------------------------

// 9.7.15.5.14 mma.m16n8k16: d (16 x 8) += a (16 x 16) * b (16 x 8). With g = lane / 4 and t = lane % 4, a lane holds
//   a[0] (g, 2t..), a[1] (g + 8, 2t..), a[2] (g, 2t + 8..), a[3] (g + 8, 2t + 8..)   two neighbouring columns each
//   b0 (2t.., g), b1 (2t + 8.., g)                                                   two neighbouring rows each
//   d[0..1] (g, 2t..), d[2..3] (g + 8, 2t..)
template <class Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
template <>
__device__ __forceinline__ void mma_m16n8k16<bf16>(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<fp16>(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
