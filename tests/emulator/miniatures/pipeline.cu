// c = a b on Hopper's units: a (64, K), b (K, 64), c (64, 64). A producer warp brings slices of 64 along K by TMA
// through a ring of two stages; a warpgroup multiplies with wgmma and stores c by TMA. Each macro plants one bug.
#include "ptx_sm90.cuh"

constexpr int SIZE = 64, STAGES = 2, WARPGROUP = 128, TILE_BYTES = SIZE * SIZE * 2;
struct Params {
  TensorMap a, b, c;
  int slices;
};
struct Smem {
  alignas(1024) cfg::Element a[STAGES][SIZE * SIZE];  // swizzled rows of 128 bytes
  alignas(1024) cfg::Element b[STAGES][SIZE * SIZE];
  alignas(1024) cfg::Element c[SIZE * SIZE];
  alignas(8) u64 full[STAGES], empty[STAGES];
};
enum Barrier { C_WRITTEN = 1, A_READ };

__device__ __forceinline__ void produce(const Params& p, Smem& smem) {
  for (int slice = 0; slice < p.slices; slice++) {
    const int stage = slice % STAGES, phase = slice / STAGES % 2;
#ifndef NO_EMPTY_WAIT
    mbarrier_wait(&smem.empty[stage], phase ^ 1);
#endif
    u32 bytes = 2 * TILE_BYTES;
#ifdef EXPECTS_TOO_MUCH
    bytes += 16;
#endif
#ifdef EXPECTS_TOO_LITTLE
    bytes -= 16;
#endif
    mbarrier_arrive_expect_tx(&smem.full[stage], bytes);
    tma_load_4d(smem.a[stage], &p.a, &smem.full[stage], slice * SIZE, 0, 0, 0);
    tma_load_4d(smem.b[stage], &p.b, &smem.full[stage], 0, slice * SIZE, 0, 0);
  }
}

// Fragments of a slice of a, as an operand in registers.
__device__ __forceinline__ void read_a(u32 (&a)[4][4], const cfg::Element* tile, int thread) {
  const char* bytes = reinterpret_cast<const char*>(tile);
  for (int i = 0; i < 16; i++) {
    const int row = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8;
    const int column = i / 4 * 16 + thread % 4 * 2 + i % 4 / 2 * 8;
    a[i / 4][i % 4] = *reinterpret_cast<const u32*>(bytes + row * 128 + (column * 2 ^ (row % 8 * 16)));
  }
}

__device__ __forceinline__ void consume(const Params& p, Smem& smem, int thread) {
  float c[SIZE / 2];
  u32 a[4][4];
  for (int slice = 0; slice < p.slices; slice++) {
    const int stage = slice % STAGES, phase = slice / STAGES % 2;
#ifndef NO_FULL_WAIT
    mbarrier_wait(&smem.full[stage], phase);
#endif
    const u32 a_smem = smem_address(smem.a[stage]), b_smem = smem_address(smem.b[stage]);
    if (cfg::A_IN_REGISTERS) {
      read_a(a, smem.a[stage], thread);
#ifndef RELEASES_UNREAD
      named_barrier_sync(A_READ, WARPGROUP);  // only then may one thread release the stage for all
#endif
    }
    wgmma_hold(c);
#ifndef NO_WGMMA_FENCE
    wgmma_fence();
#endif
    for (int k = 0; k < SIZE / 16; k++) {
      const u64 b = descriptor_mn_major(b_smem + k * 2048, 0);
      if (cfg::A_IN_REGISTERS) {
        if (slice + k == 0) wgmma_rs<cfg::Element, SIZE, true, false>(c, a[k], b);
        else wgmma_rs<cfg::Element, SIZE, true, true>(c, a[k], b);
      } else {
        if (slice + k == 0) wgmma_ss<cfg::Element, SIZE, false, true, false>(c, descriptor_k_major(a_smem + k * 32), b);
        else wgmma_ss<cfg::Element, SIZE, false, true, true>(c, descriptor_k_major(a_smem + k * 32), b);
      }
    }
    wgmma_commit();
#ifdef CHANGES_A
    a[2][0]++;
#endif
#ifdef CHANGES_C
    c[5] = 0;
#endif
#ifdef RELEASES_EARLY
    if (thread == 0) mbarrier_arrive(&smem.empty[stage]);
#endif
#ifdef WEAK_WGMMA_WAIT
    wgmma_wait<1>();
#elif !defined(NO_WGMMA_WAIT)
    wgmma_wait<0>();
#endif
    wgmma_hold(c);
#ifdef ALL_RELEASE
    mbarrier_arrive(&smem.empty[stage]);
#elif !defined(RELEASES_EARLY)
    if (thread == 0) mbarrier_arrive(&smem.empty[stage]);
#endif
  }
  const int row = thread / 32 * 16 + thread % 32 / 4;
  for (int i = 0; i < SIZE / 4; i++) {
    const int r = row + i % 2 * 8, byte = (i / 2 * 8 + thread % 4 * 2) * 2;
    const u32 to = (r * 128 + (byte ^ (r % 8 * 16))) / sizeof(cfg::Element);
    *reinterpret_cast<u32*>(smem.c + to) = pack2<cfg::Element>(c[i * 2], c[i * 2 + 1]);
  }
#ifdef FENCE_AFTER_BARRIER
  named_barrier_sync(C_WRITTEN, WARPGROUP);
  fence_proxy_async_shared();
#else
#ifndef NO_PROXY_FENCE
  fence_proxy_async_shared();
#endif
#ifndef NO_STORE_BARRIER
  named_barrier_sync(C_WRITTEN, WARPGROUP);
#endif
#endif
  if (thread == 0) {
    tma_store_4d(&p.c, smem.c, 0, 0, 0, 0);
    bulk_commit();
#ifdef OVERWRITES_STORE
    smem.c[0] = cfg::Element{0};
#endif
#ifndef NO_STORE_WAIT
    bulk_wait_read<0>();
#endif
  }
}

extern "C" __global__ void __launch_bounds__(2 * WARPGROUP) pipeline(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; stage++) {
      mbarrier_init(&smem.full[stage], 1);
      mbarrier_init(&smem.empty[stage], 1);
    }
#ifndef NO_INIT_FENCE
    mbarrier_init_fence();
#endif
  }
#ifndef NO_INIT_BARRIER
  __syncthreads();
#endif
  if (threadIdx.x < WARPGROUP) {
    setmaxnreg_dec<24>();
    if (threadIdx.x == 0) produce(p, smem);
  } else {
    setmaxnreg_inc<240>();
    consume(p, smem, threadIdx.x - WARPGROUP);
  }
}
