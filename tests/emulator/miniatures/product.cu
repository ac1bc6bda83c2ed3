// c = a bT and, with TRANSPOSED, c = aT b, by one warp: a (16, 16), b (16, 16), through ldmatrix and mma.
#include "tile.cuh"

struct Smem { cfg::Element a[BLOCK * BLOCK], b[BLOCK * BLOCK]; };
struct Params {
  const cfg::Element *a, *b;
  float* c;
};

extern "C" __global__ void __launch_bounds__(32) product(const Params p) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int lane = threadIdx.x;
  for (int i = lane; i < BLOCK * BLOCK; i += 32) {
    const u32 to = Swizzle<BLOCK>::offset(i / BLOCK, i % BLOCK) / sizeof(cfg::Element);
    smem.a[to] = p.a[i];
    smem.b[to] = p.b[i];
  }
  __syncwarp();
  u32 a[4], b[4];
#ifdef TRANSPOSED
  ldmatrix_x4_trans(a, lane_address<BLOCK, COLS_FIRST>(smem.a, 0, lane));
  ldmatrix_x4_trans(b, lane_address<BLOCK, ROWS_FIRST>(smem.b, 0, lane));
#else
  ldmatrix_x4(a, lane_address<BLOCK, ROWS_FIRST>(smem.a, 0, lane));
  ldmatrix_x4(b, lane_address<BLOCK, COLS_FIRST>(smem.b, 0, lane));
#endif
  for (int half = 0; half < 2; half++) {
    float c[4] = {};
    mma_m16n8k16<cfg::Element>(c, a, b[half * 2], b[half * 2 + 1]);
    for (int i = 0; i < 4; i++) p.c[(lane / 4 + i / 2 * 8) * BLOCK + half * 8 + lane % 4 * 2 + i % 2] = c[i];
  }
}
