// Around the backward, which adds up into `sum` the gradient of an array whose elements take part in many scores: zeroes
// the sum before (ZERO), and makes it `out` after, unless it lies there already. Element by element, bound by memory.
#include "dtypes.cuh"

constexpr int PER_THREAD = cfg::TILE_M / cfg::NUM_THREADS;

extern "C" __global__ void __launch_bounds__(cfg::NUM_THREADS, cfg::MIN_CTAS) bwd_sums(const __grid_constant__ Params p) {
  const i64 first = blockIdx.x * (i64)cfg::TILE_M + threadIdx.x;
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    const i64 at = first + i * cfg::NUM_THREADS;
    if (at >= p.count) break;
    if constexpr (cfg::ZERO) p.sum[at] = 0;
    else p.out[at] = Dtype<cfg::Output>::from_real(p.sum[at]);
  }
}
