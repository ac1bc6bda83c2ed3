// Hopper's own instructions, one function each; the comment names the instruction's page in the PTX ISA manual (9.0).
// Everything here needs compute capability 9.0, and wgmma and setmaxnreg the architecture-specific target sm_90a.
//
// Vocabulary. A tile that TMA or wgmma touches lies in shared memory in chunks 64 elements (128 bytes) wide, row after
// row, the 16-byte units of row r permuted by XOR with r % 8: the 128-byte swizzle. Each chunk starts at a multiple of
// 1024 bytes. A wider tile is several chunks, one after the other. wgmma reads such a chunk either way round:
// "K-major" when a row's 128 bytes run along the product's summed dimension, "MN-major" when along the other one.
#pragma once
#include "dtypes.cuh"
#include "ptx.cuh"

// A CUtensorMap, made by the host, passed by value as a __grid_constant__ parameter.
struct alignas(64) TensorMap { u64 opaque[16]; };

// ---- mbarriers ------------------------------------------------------------------------------------------------------
// A phase completes when its expected arrivals and bytes are all in. Waits name the parity of the phase they wait for:
// a fresh barrier is in phase 0, and waiting on it for parity 1 returns at once.

// mbarrier.init
__device__ __forceinline__ void mbarrier_init(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(smem_u32(barrier)), "r"(arrivals) : "memory");
}
// fence.mbarrier_init: after the last mbarrier_init, before the CTA barrier that publishes them, so TMA sees them too.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// mbarrier.arrive
__device__ __forceinline__ void mbarrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(smem_u32(barrier)) : "memory");
}
// mbarrier.arrive.expect_tx: one arrival that also adds `bytes` to what this phase waits for.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(smem_u32(barrier)), "r"(bytes) : "memory");
}
// mbarrier.try_wait: true once the phase is complete; may sleep a while before it says false.
__device__ __forceinline__ bool mbarrier_try_wait(u64* barrier, u32 parity) {
  u32 complete;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(complete) : "r"(smem_u32(barrier)), "r"(parity) : "memory");
  return complete;
}
__device__ __forceinline__ void mbarrier_wait(u64* barrier, u32 parity) {
  while (!mbarrier_try_wait(barrier, parity)) {}
}

// ---- asynchronous copies (TMA) --------------------------------------------------------------------------------------
// fence.proxy.async: this thread's ordinary accesses to shared memory come before later TMA and wgmma accesses to it.
// Writers fence, then synchronise with the thread that starts the asynchronous access.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// prefetch.tensormap
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory");
}
// cp.async.bulk.tensor: one box at element coordinates (x0, x1, x2, x3), innermost first, gmem to smem. Elements
// outside the tensor arrive as zeros. Its bytes, those zeros included, count towards `barrier`.
__device__ __forceinline__ void tma_load_4d(void* smem, const TensorMap* map, u64* barrier,
                                            int x0, int x1, int x2, int x3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %4, %5, %6}], [%2];"
               :: "r"(smem_u32(smem)), "l"(map), "r"(smem_u32(barrier)), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
               : "memory");
}
// cp.async.bulk.tensor: smem to gmem; elements outside the tensor are not written. Joins the thread's open bulk group.
__device__ __forceinline__ void tma_store_4d(const TensorMap* map, const void* smem, int x0, int x1, int x2, int x3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               :: "l"(map), "r"(smem_u32(smem)), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}
// cp.async.bulk: `bytes` contiguous bytes, gmem to smem; addresses and size are multiples of 16.
__device__ __forceinline__ void bulk_load(void* smem, const void* gmem, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(smem_u32(smem)), "l"(gmem), "r"(bytes), "r"(smem_u32(barrier)) : "memory");
}
// cp.reduce.async.bulk: adds `bytes` of floats in smem to gmem. Joins the thread's open bulk group.
__device__ __forceinline__ void bulk_reduce_add(float* gmem, const float* smem, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :: "l"(gmem), "r"(smem_u32(smem)), "r"(bytes) : "memory");
}
// cp.async.bulk.commit_group: closes the thread's open bulk group.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// cp.async.bulk.wait_group: until at most PENDING of the thread's groups are unfinished; `_read`: have not yet read all
// of their shared memory.
template <int PENDING> __device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" :: "n"(PENDING) : "memory");
}
template <int PENDING> __device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(PENDING) : "memory");
}

// red: four neighbouring floats in global memory, 16-byte aligned, each added to atomically.
__device__ __forceinline__ void red_add_v4(float* gmem, float x0, float x1, float x2, float x3) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               :: "l"(gmem), "f"(x0), "f"(x1), "f"(x2), "f"(x3) : "memory");
}

// ---- registers and fragments ----------------------------------------------------------------------------------------
// setmaxnreg: every warp of a warpgroup gives registers back, or waits for them. In one branch of the role's if/else.
template <int REGISTERS> __device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}
// stmatrix: four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8 and holds
// elements 2 * (l % 4) and the next of row l / 4 of each matrix. `_trans`: of column l / 4.
__device__ __forceinline__ void stmatrix_x4(void* row, u32 x0, u32 x1, u32 x2, u32 x3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(smem_u32(row)), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(void* row, u32 x0, u32 x1, u32 x2, u32 x3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(smem_u32(row)), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}

// ---- wgmma: warpgroup matrix products -------------------------------------------------------------------------------
// d(64, N) = [d +] a(64, 16) * b(16, N) by the 128 threads of a warpgroup, asynchronously. Thread t holds of d, at
// [4 * j + 2 * r + e], row 16 * (t / 32) + t % 32 / 4 + 8 * r, column 8 * j + 2 * (t % 4) + e; an a in registers has
// the same layout over its 16 columns, two elements a register: [2 * j + r].
// Order: wgmma_fence, products, wgmma_commit, ..., wgmma_wait. Until the wait, the compiler must not move reads or
// writes of the registers across: pass accumulators and register operands to wgmma_hold before the fence and after the
// wait.

// wgmma.fence: registers and shared memory written before are visible to products started after.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// wgmma.commit_group
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// wgmma.wait_group: until at most PENDING committed groups are unfinished.
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}
// No instruction: pins the registers' values at this place.
template <int COUNT> __device__ __forceinline__ void wgmma_hold(float (&x)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(x[i]) :: "memory");
}
template <int COUNT> __device__ __forceinline__ void wgmma_hold(u32 (&x)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(x[i]) :: "memory");
}
template <int STEPS, int COUNT> __device__ __forceinline__ void wgmma_hold(u32 (&x)[STEPS][COUNT]) {
#pragma unroll
  for (int i = 0; i < STEPS; i++) wgmma_hold(x[i]);
}

// "Matrix descriptor format": where a wgmma operand lies, for chunks with the 128-byte swizzle. `address` is that of
// the operand's first row and k-step; the next 16 of the summed dimension start 32 bytes further along the row
// (K-major) or 16 rows further down (MN-major). Eight rows, the swizzle's period, take 1024 bytes.
// `zero` is 0. Where the assembler cannot know, it leaves the upper word where it is; else it moves the constant there anew
// for each instruction. Operands of one instruction want different ones.
enum : u32 { DESCRIPTOR_SWIZZLE_128B = u32(1) << 30, DESCRIPTOR_EIGHT_ROWS = 1024 >> 4 };
__device__ __forceinline__ u64 descriptor(u32 address, u32 chunk_units, u32 zero) {
  const u32 high = DESCRIPTOR_SWIZZLE_128B | DESCRIPTOR_EIGHT_ROWS | zero;
  return u64(high) << 32 | ((address & 0x3ffff) >> 4) | chunk_units << 16;
}
__device__ __forceinline__ u64 descriptor_k_major(u32 address, u32 zero = 0) { return descriptor(address, 1, zero); }
// chunk_bytes: from one chunk of 64 elements to the next, where the operand is wider than one.
__device__ __forceinline__ u64 descriptor_mn_major(u32 address, u32 chunk_bytes, u32 zero = 0) {
  return descriptor(address, chunk_bytes >> 4, zero);
}

// The same operand `bytes` further on: smem addresses never carry out of the lower word. Said in C++, the compiler adds
// both words.
__device__ __forceinline__ u64 descriptor_at(u64 descriptor, u32 bytes) {
  u64 moved;
  asm("{ .reg .b32 low, high; mov.b64 {low, high}, %1; add.u32 low, low, %2; mov.b64 %0, {low, high}; }"
      : "=l"(moved) : "l"(descriptor), "r"(bytes >> 4));
  return moved;
}

// The accumulator's registers, as instruction text and as operands, in steps of 8.
#define TEXT_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TEXT_16 TEXT_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TEXT_24 TEXT_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TEXT_32 TEXT_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define TEXT_40 TEXT_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TEXT_48 TEXT_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TEXT_56 TEXT_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define TEXT_64 TEXT_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define TEXT_72 TEXT_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define TEXT_80 TEXT_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define TEXT_88 TEXT_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define TEXT_96 TEXT_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define TEXT_104 TEXT_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define TEXT_112 TEXT_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define TEXT_120 TEXT_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define TEXT_128 TEXT_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define EIGHT(C, i) C(d[i]), C(d[i + 1]), C(d[i + 2]), C(d[i + 3]), C(d[i + 4]), C(d[i + 5]), C(d[i + 6]), C(d[i + 7])
#define REGS_8(C) EIGHT(C, 0)
#define REGS_16(C) REGS_8(C), EIGHT(C, 8)
#define REGS_24(C) REGS_16(C), EIGHT(C, 16)
#define REGS_32(C) REGS_24(C), EIGHT(C, 24)
#define REGS_40(C) REGS_32(C), EIGHT(C, 32)
#define REGS_48(C) REGS_40(C), EIGHT(C, 40)
#define REGS_56(C) REGS_48(C), EIGHT(C, 48)
#define REGS_64(C) REGS_56(C), EIGHT(C, 56)
#define REGS_72(C) REGS_64(C), EIGHT(C, 64)
#define REGS_80(C) REGS_72(C), EIGHT(C, 72)
#define REGS_88(C) REGS_80(C), EIGHT(C, 80)
#define REGS_96(C) REGS_88(C), EIGHT(C, 88)
#define REGS_104(C) REGS_96(C), EIGHT(C, 96)
#define REGS_112(C) REGS_104(C), EIGHT(C, 104)
#define REGS_120(C) REGS_112(C), EIGHT(C, 112)
#define REGS_128(C) REGS_120(C), EIGHT(C, 120)
#define READ_WRITE(x) "+f"(x)
#define WRITE(x) "=f"(x)

// Calls SHAPE(N, accumulator registers, the operand numbers that follow them) for every N. DISPATCH keeps the one
// INSTRUCTION that the template arguments ask for.
#define EVERY_SHAPE(SHAPE)                                                              \
  SHAPE(16, 8, "%8", "%9", "%10", "%11", "%12", "%13", "%14")                           \
  SHAPE(32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")                        \
  SHAPE(48, 24, "%24", "%25", "%26", "%27", "%28", "%29", "%30")                        \
  SHAPE(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")                        \
  SHAPE(80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")                        \
  SHAPE(96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")                        \
  SHAPE(112, 56, "%56", "%57", "%58", "%59", "%60", "%61", "%62")                       \
  SHAPE(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")                       \
  SHAPE(144, 72, "%72", "%73", "%74", "%75", "%76", "%77", "%78")                       \
  SHAPE(160, 80, "%80", "%81", "%82", "%83", "%84", "%85", "%86")                       \
  SHAPE(176, 88, "%88", "%89", "%90", "%91", "%92", "%93", "%94")                       \
  SHAPE(192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102")                    \
  SHAPE(208, 104, "%104", "%105", "%106", "%107", "%108", "%109", "%110")               \
  SHAPE(224, 112, "%112", "%113", "%114", "%115", "%116", "%117", "%118")               \
  SHAPE(240, 120, "%120", "%121", "%122", "%123", "%124", "%125", "%126")               \
  SHAPE(256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
#define DISPATCH(n, regs, ...)                                                                            \
  if constexpr (N == n) {                                                                                 \
    if constexpr (IsBf16<Element>::value && ACCUMULATE) INSTRUCTION(n, regs, "bf16", READ_WRITE, __VA_ARGS__); \
    else if constexpr (IsBf16<Element>::value) INSTRUCTION(n, regs, "bf16", WRITE, __VA_ARGS__);          \
    else if constexpr (ACCUMULATE) INSTRUCTION(n, regs, "f16", READ_WRITE, __VA_ARGS__);                  \
    else INSTRUCTION(n, regs, "f16", WRITE, __VA_ARGS__);                                                 \
  }

template <class Element> struct IsBf16 { static constexpr bool value = false; };
template <> struct IsBf16<bf16> { static constexpr bool value = true; };

// wgmma.mma_async, both operands in shared memory. MN_MAJOR_A/B say which way round each lies. ACCUMULATE: d += a * b;
// otherwise d = a * b, and what d held is dead.
template <class Element, int N, bool MN_MAJOR_A, bool MN_MAJOR_B, bool ACCUMULATE>
__device__ __forceinline__ void wgmma_ss(float (&d)[N / 2], u64 a, u64 b) {
#define INSTRUCTION(n, regs, type, C, x0, x1, x2, x3, x4, ...)                                              \
  asm volatile("{ .reg .pred accumulate; setp.ne.b32 accumulate, " x2 ", 0;"                                \
               " wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type                             \
               " {" TEXT_##regs "}, " x0 ", " x1 ", accumulate, 1, 1, " x3 ", " x4 "; }"                    \
               : REGS_##regs(C) : "l"(a), "l"(b), "n"(ACCUMULATE), "n"(MN_MAJOR_A), "n"(MN_MAJOR_B))
  EVERY_SHAPE(DISPATCH)
#undef INSTRUCTION
}

// The same with a in registers.
template <class Element, int N, bool MN_MAJOR_B, bool ACCUMULATE>
__device__ __forceinline__ void wgmma_rs(float (&d)[N / 2], const u32 (&a)[4], u64 b) {
#define INSTRUCTION(n, regs, type, C, x0, x1, x2, x3, x4, x5, x6)                                           \
  asm volatile("{ .reg .pred accumulate; setp.ne.b32 accumulate, " x5 ", 0;"                                \
               " wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type                             \
               " {" TEXT_##regs "}, {" x0 ", " x1 ", " x2 ", " x3 "}, " x4 ", accumulate, 1, 1, " x6 "; }"  \
               : REGS_##regs(C)                                                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ACCUMULATE), "n"(MN_MAJOR_B))
  EVERY_SHAPE(DISPATCH)
#undef INSTRUCTION
}
