// Lists the blocks that are not empty: for each block of queries those of keys, for each block of keys those of queries.
// A list is their number, then in rising order 2 * block + (it is full). A warp for each list.
#include "dtypes.cuh"

constexpr int WARP = 32, FULL = 2;  // lanes; a kind of block_kinds.cu

extern "C" __global__ void __launch_bounds__(cfg::NUM_THREADS, cfg::MIN_CTAS)
block_lists(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % WARP, lists = p.num_m_blocks + p.num_n_blocks;
  const i64 index = blockIdx.x * (i64)(cfg::NUM_THREADS / WARP) + threadIdx.x / WARP;
  const i64 head = index / lists, place = index % lists;  // of all batches
  if (head >= (i64)p.batch * p.num_heads_q) return;
  const bool of_queries = place < p.num_m_blocks;
  const i64 block = of_queries ? place : place - p.num_m_blocks;
  const int length = of_queries ? p.num_n_blocks : p.num_m_blocks;
  const i64 step = of_queries ? 1 : p.num_n_blocks;
  const unsigned char* kinds = p.kinds + head * p.num_m_blocks * p.num_n_blocks + block * (of_queries ? p.num_n_blocks : 1);
  int* list = of_queries ? p.key_blocks + (head * p.num_m_blocks + block) * (1 + length)
                         : p.query_blocks + (head * p.num_n_blocks + block) * (1 + length);
  int count = 0;
  for (int first = 0; first < length; first += WARP) {
    const int i = first + lane, kind = i < length ? kinds[i * step] : 0;
    const u32 listed = __ballot_sync(~0u, kind != 0);
    if (kind != 0) list[1 + count + __popc(listed & ((1u << lane) - 1))] = 2 * i + (kind == FULL);
    count += __popc(listed);
  }
  if (lane == 0) list[0] = count;
}
