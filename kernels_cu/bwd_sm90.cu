// Backward attention on Hopper with wgmma, TMA and warp specialisation. With p = exp(s - lse), delta = rowsum(do * o):
//   dv = pT do     dp = do vT     ds = p (dp - delta)     dq = scale ds k     dk = scale dsT q
//
// A CTA stays on its multiprocessor and draws tiles of TILE_N keys (Draw). For each it walks the query
// tiles that see them, of every query head of the group, with dk and dv in registers throughout; dq is added to floats
// in global memory, in the order of registers, which bwd_convert_sm90 turns into dq.
//
//   time ->
//   bwd_delta          | delta, zeros for dq |
//   bwd_sm90                |  barriers, k, v, q | walks  ...                |
//   bwd_convert_sm90                                                      |  | dq |
//
// Each launch may start while the one before it ends, and waits for that (await_launches_before) before it looks at
// what it has written. Where all keys are one tile (ALONE) dq is not summed, and the last launch is not needed.
//
// Every product belongs to one warpgroup, and the warpgroups go through the steps one behind the other, joined only by
// mbarriers: so while one waits or computes elements, the tensor cores work for the others. How warpgroups divide the
// work depends on what registers hold: bwd_sm90_small.cuh and bwd_sm90_large.cuh.
#include "bwd_sm90_large.cuh"
#include "bwd_sm90_small.cuh"

// A template, so that only the schedule that fits the constants is made.
template <bool LARGE_HEADS, class Own> __device__ __forceinline__ void run(Own& own, unsigned char* smem_raw) {
  auto with = [&](auto& smem) -> auto& {
    static_assert(sizeof(smem) == cfg::SMEM_BYTES, "tiles.py and Smem disagree");
    return smem;
  };
  if constexpr (LARGE_HEADS) {
    products_divided::run(own, with(*reinterpret_cast<products_divided::Smem*>(smem_raw)));
  } else {
    keys_divided::run(own, with(*reinterpret_cast<keys_divided::Smem*>(smem_raw)));
  }
}

extern "C" __global__ void __launch_bounds__(cfg::NUM_THREADS, cfg::MIN_CTAS)
bwd_sm90(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  Own<VARLEN> own(params);
  run<cfg::LARGE_HEADS>(own, smem_raw);
}
