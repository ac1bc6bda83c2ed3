// Which blocks of TILE_M queries x TILE_N keys a mask function leaves empty, hides in part, or leaves full. A CTA for each
// block looks at its elements until it has found one that is seen and one that is hidden.
#include "dtypes.cuh"

using cfg::TILE_M, cfg::TILE_N, cfg::NUM_THREADS;

constexpr int LOOKS = 8;  // of a thread, between votes
enum Kind { EMPTY, PARTIAL, FULL };

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS) block_kinds(const __grid_constant__ Params p) {
  const int n_block = blockIdx.x % p.num_n_blocks, line = blockIdx.x / p.num_n_blocks;
  const int m_block = line % p.num_m_blocks, head = line / p.num_m_blocks % p.num_heads_q;
  const int batch = line / p.num_m_blocks / p.num_heads_q, m0 = m_block * TILE_M, n0 = n_block * TILE_N;
  const int rows = min(TILE_M, p.seqlen_q - m0), columns = min(TILE_N, p.seqlen_k - n0);
  bool seen = false, hidden = false;
  for (int first = threadIdx.x; first - (int)threadIdx.x < rows * TILE_N && !(seen && hidden);
       first += LOOKS * NUM_THREADS) {
#pragma unroll 1
    for (int i = first; i < first + LOOKS * NUM_THREADS; i += NUM_THREADS) {
      const int row = i / TILE_N, column = i % TILE_N;
      if (row >= rows || column >= columns) continue;
      (mod::mask_mod(p, batch, head, m0 + row, n0 + column) ? seen : hidden) = true;
    }
    seen = __syncthreads_or(seen);
    hidden = __syncthreads_or(hidden);
  }
  if (threadIdx.x == 0) p.kinds[blockIdx.x] = !seen ? EMPTY : hidden ? PARTIAL : FULL;
}
