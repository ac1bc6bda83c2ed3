// Stands in for kernels_cu/ptx_sm90.cuh: the same functions with the emulator's bodies.
#pragma once
#include "dtypes.cuh"

// Holds an emu::TensorMap.
struct alignas(64) TensorMap { u64 opaque[16]; };
static_assert(sizeof(emu::TensorMap) <= sizeof(TensorMap));

inline u32 smem_address(const void* pointer, EMU_SITE) { return emu::shared_address(pointer, site); }

// ---- mbarriers ------------------------------------------------------------------------------------------------------
inline void mbarrier_init(u64* barrier, u32 arrivals, EMU_SITE) {
  emu::mbarrier_init(smem_address(barrier, site), arrivals, site);
}
inline void mbarrier_init_fence(EMU_SITE) { emu::mbarrier_init_fence(site); }
inline void mbarrier_arrive(u64* barrier, EMU_SITE) { emu::mbarrier_arrive(smem_address(barrier, site), 0, site); }
inline void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes, EMU_SITE) {
  emu::mbarrier_arrive(smem_address(barrier, site), bytes, site);
}
inline bool mbarrier_try_wait(u64* barrier, u32 parity, EMU_SITE) {
  return emu::mbarrier_try_wait(smem_address(barrier, site), parity, site);
}
inline void mbarrier_wait(u64* barrier, u32 parity, EMU_SITE) {
  emu::mbarrier_wait(smem_address(barrier, site), parity, site);
}

// ---- asynchronous copies (TMA) --------------------------------------------------------------------------------------
inline void fence_proxy_async_shared(EMU_SITE) { emu::fence_proxy_async(site); }
inline void prefetch_tensor_map(const TensorMap*) {}
inline void tma_load_4d(void* smem, const TensorMap* map, u64* barrier, int x0, int x1, int x2, int x3, EMU_SITE) {
  const int coordinates[] = {x0, x1, x2, x3};
  emu::tensor_load(smem_address(smem, site), map, smem_address(barrier, site), coordinates, site);
}
inline void tma_store_4d(const TensorMap* map, const void* smem, int x0, int x1, int x2, int x3, EMU_SITE) {
  const int coordinates[] = {x0, x1, x2, x3};
  emu::tensor_store(map, smem_address(smem, site), coordinates, site);
}
inline void bulk_load(void* smem, const void* gmem, u32 bytes, u64* barrier, EMU_SITE) {
  emu::bulk_load(smem_address(smem, site), gmem, bytes, smem_address(barrier, site), site);
}
inline void bulk_reduce_add(float* gmem, const float* smem, u32 bytes, EMU_SITE) {
  emu::bulk_reduce_add(gmem, smem_address(smem, site), bytes, site);
}
inline void bulk_commit(EMU_SITE) { emu::bulk_commit(site); }
template <int PENDING> inline void bulk_wait(EMU_SITE) { emu::bulk_wait(PENDING, false, site); }
template <int PENDING> inline void bulk_wait_read(EMU_SITE) { emu::bulk_wait(PENDING, true, site); }

inline void red_add_v4(float* gmem, float x0, float x1, float x2, float x3, EMU_SITE) {
  const float x[] = {x0, x1, x2, x3};
  emu::add_global(gmem, x, 4, site);
}

// ---- registers and fragments ----------------------------------------------------------------------------------------
template <int REGISTERS> inline void setmaxnreg_dec(EMU_SITE) { emu::set_max_registers(REGISTERS, false, site); }
template <int REGISTERS> inline void setmaxnreg_inc(EMU_SITE) { emu::set_max_registers(REGISTERS, true, site); }
inline void stmatrix_x4(void* row, u32 x0, u32 x1, u32 x2, u32 x3, EMU_SITE) {
  const u32 x[] = {x0, x1, x2, x3};
  emu::store_matrices(smem_address(row, site), x, 4, false, site);
}
inline void stmatrix_x4_trans(void* row, u32 x0, u32 x1, u32 x2, u32 x3, EMU_SITE) {
  const u32 x[] = {x0, x1, x2, x3};
  emu::store_matrices(smem_address(row, site), x, 4, true, site);
}

// ---- wgmma ----------------------------------------------------------------------------------------------------------
inline void wgmma_fence(EMU_SITE) { emu::wgmma_fence(site); }
inline void wgmma_commit(EMU_SITE) { emu::wgmma_commit(site); }
template <int PENDING> inline void wgmma_wait(EMU_SITE) { emu::wgmma_wait(PENDING, site); }
template <int COUNT> inline void wgmma_hold(float (&)[COUNT]) {}
template <int COUNT> inline void wgmma_hold(u32 (&)[COUNT]) {}
template <int STEPS, int COUNT> inline void wgmma_hold(u32 (&)[STEPS][COUNT]) {}

constexpr u32 DESCRIPTOR_SWIZZLE_128B = u32(1) << 30, DESCRIPTOR_EIGHT_ROWS = 1024 >> 4;
inline u64 descriptor(u32 address, u32 chunk_units, u32 zero) {
  const u32 high = DESCRIPTOR_SWIZZLE_128B | DESCRIPTOR_EIGHT_ROWS | zero;
  return u64(high) << 32 | ((address & 0x3ffff) >> 4) | chunk_units << 16;
}
inline u64 descriptor_k_major(u32 address, u32 zero = 0) { return descriptor(address, 1, zero); }
inline u64 descriptor_mn_major(u32 address, u32 chunk_bytes, u32 zero = 0) {
  return descriptor(address, chunk_bytes >> 4, zero);
}
inline u64 descriptor_at(u64 descriptor, u32 bytes) {
  return (descriptor >> 32) << 32 | u32(u32(descriptor) + (bytes >> 4));
}

template <class Element> constexpr bool IS_BF16 = false;
template <> constexpr bool IS_BF16<bf16> = true;

template <class Element, int N, bool MN_MAJOR_A, bool MN_MAJOR_B, bool ACCUMULATE>
inline void wgmma_ss(float (&d)[N / 2], u64 a, u64 b, EMU_SITE) {
  emu::wgmma({EMU_OPERAND<Element>, N, MN_MAJOR_A, MN_MAJOR_B, ACCUMULATE, a, b, nullptr, d}, site);
}
template <class Element, int N, bool MN_MAJOR_B, bool ACCUMULATE>
inline void wgmma_rs(float (&d)[N / 2], const u32 (&a)[4], u64 b, EMU_SITE) {
  emu::wgmma({EMU_OPERAND<Element>, N, false, MN_MAJOR_B, ACCUMULATE, 0, b, a, d}, site);
}
