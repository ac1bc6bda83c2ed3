// y[0] = sum of x, by shuffles within warps and named barriers between them. Each macro plants one bug.
#include "dtypes.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32;
struct Smem { float lanes[THREADS], warps[WARPS]; };

struct Params {
  const float* x;  // (THREADS)
  float* y;        // (1)
  int* flag;       // (1), zero
};
enum Barrier { SUMS_READY = 1 };

extern "C" __global__ void __launch_bounds__(THREADS) meetings(const Params p) {
  extern __shared__ __align__(16) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;

  smem.lanes[thread] = p.x[thread];
#ifndef NO_SYNCWARP
  __syncwarp();
#endif
  float sum = smem.lanes[warp * 32 + 31 - lane];
#ifdef LANE_LEAVES
  if (lane == 7) return;
#endif
  for (int step = 16; step > 0; step /= 2) {
#ifdef DIVERGENT_SHUFFLE
    if (step == 4 && lane >= 16) continue;
#endif
    sum += __shfl_xor_sync(~0u, sum, step);
  }
#ifdef INDEX_PAST_ARRAY
  float copies[4] = {sum, sum, sum, sum};
  for (int i = 0; i <= lane % 4 + 1; i++) sum = copies[i];
#endif
  if (lane == 0) smem.warps[warp] = sum;
#ifdef BARRIER_IN_HALF_A_WARP
  if (lane < 16) __syncthreads();
#endif
#ifdef SKIPPED_BARRIER
  if (warp != 2)
#endif
    if (warp == 0) {
#ifdef WRONG_COUNT
      named_barrier_sync(SUMS_READY, THREADS / 2);
#elif defined(TOO_MANY)
      named_barrier_sync(SUMS_READY, 2 * THREADS);
#elif !defined(NO_BARRIER)
      named_barrier_sync(SUMS_READY, THREADS);
#endif
    } else {
      named_barrier_arrive(SUMS_READY, THREADS);
#ifdef ARRIVES_TWICE
      if (warp == 1) named_barrier_arrive(SUMS_READY, THREADS);
#endif
    }
#ifdef FLAG_NEVER_SET
  while (ld_acquire(p.flag) == 0) {}
#else
  if (thread == THREADS - 1) red_release_add(p.flag, 1);
  while (ld_acquire(p.flag) == 0) {}
#endif
  if (thread == 0) {
    float total = 0;
    for (int i = 0; i < WARPS; i++) total += smem.warps[i];
    p.y[0] = total;
  }
}
