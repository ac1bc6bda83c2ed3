// y[i] = sum over tiles of x[tile][-i]: tiles of one 16-byte chunk a thread come by cp.async through two buffers, and
// each thread reads what another one copied. Each macro plants one bug.
#include "dtypes.cuh"

constexpr int THREADS = 128, TILES = 6, STAGES = 2, FLOATS = 4;
struct Smem { float x[STAGES][THREADS][FLOATS]; };

struct Params {
  const float* x;  // (TILES, THREADS, FLOATS)
  float* y;        // (THREADS, FLOATS)
};

extern "C" __global__ void __launch_bounds__(THREADS) copies(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int thread = threadIdx.x, partner = THREADS - 1 - thread;
  float sum[FLOATS] = {};

  auto load = [&](int tile) {
    int to = thread;
    const float* from = p.x + (tile * THREADS + thread) * FLOATS;
#ifdef SHARED_OVERRUN
    if (tile == TILES - 1) to++;
#endif
#ifdef READS_PAST_END
    if (tile == TILES - 1) from += FLOATS;
#endif
#ifdef MISALIGNED_COPY
    from++;
#endif
    cp_async<16>(smem_u32(smem.x[tile % STAGES][to]), from, true);
    cp_async_commit();
  };

  load(0);
  for (int tile = 0; tile < TILES; tile++) {
    if (tile + 1 < TILES) load(tile + 1);
    else cp_async_commit();
#ifdef BARRIER_BEFORE_WAIT
    __syncthreads();
#endif
#ifdef WEAK_WAIT
    cp_async_wait<2>();
#elif !defined(NO_WAIT)
    cp_async_wait<1>();
#endif
#if !defined(NO_BARRIER) && !defined(BARRIER_BEFORE_WAIT)
    __syncthreads();
#endif
    for (int i = 0; i < FLOATS; i++) sum[i] += smem.x[tile % STAGES][partner][i];
#ifndef BUFFER_REUSED_EARLY
    __syncthreads();
#endif
  }

  float* y = p.y + thread * FLOATS;
#ifdef WRITES_PAST_END
  y += FLOATS;
#endif
#ifdef WRITES_BEFORE_START
  y -= FLOATS;
#endif
#ifdef WRITES_INPUT
  y = const_cast<float*>(p.x);
#endif
#ifdef MISALIGNED_VECTOR
  *reinterpret_cast<float4*>(y + 1) = make_float4(sum[0], sum[1], sum[2], sum[3]);
#else
  for (int i = 0; i < FLOATS; i++) y[i] = sum[i];
#endif
}
