// After the backward's delta: the gradient of each head's sink, a score without a value in the softmax of every row.
//   p_sink = exp(sink - lse)    ds_sink = p_sink * (0 - delta)    dsinks[head] = sum of ds_sink over batches and queries
// A CTA for each head; its sum has one order, so it has the same bits every time.
#include "dtypes.cuh"
#include "softmax.cuh"

using Real = Dtype<cfg::Element>::Real;

constexpr int WARP = 32, WARPS = cfg::NUM_THREADS / WARP;

__device__ __forceinline__ Real warp_sum(Real x) {
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

extern "C" __global__ void __launch_bounds__(cfg::NUM_THREADS, cfg::MIN_CTAS) bwd_sinks(const __grid_constant__ Params p) {
  __shared__ Real sums[WARPS];
  const int head = blockIdx.x, lane = threadIdx.x % WARP;
  const Real sink = p.sinks[head * p.sinks_stride] * Real(LOG2_E);
  Real sum = 0;
  for (int batch = 0; batch < p.batch; batch++) {
    const Real* lse = p.lse + batch * p.lse_stride[0] + head * p.lse_stride[1];
    const Real* delta = p.delta + ((i64)batch * p.num_heads_q + head) * p.seqlen_q;
    for (i64 row = threadIdx.x; row < p.seqlen_q; row += cfg::NUM_THREADS) {
      const Real prob = exp2_real(sink - lse_origin(lse[row * p.lse_stride[2]]));
      if (prob != 0) sum -= prob * delta[row];  // else perhaps no sequence's
    }
  }
  sum = warp_sum(sum);
  if (lane == 0) sums[threadIdx.x / WARP] = sum;
  __syncthreads();
  if (threadIdx.x < WARP) {
    sum = warp_sum(lane < WARPS ? sums[lane] : Real(0));
    if (lane == 0) p.dsinks[head] = sum;
  }
}
