// Sums in global memory to which many elements of many threads add, in any order.
#pragma once
#include "dtypes.cuh"

// What a thread adds, one element after the other: as long as all goes to one place it is summed up here.
template <class Real> struct RunningSum {
  Real* place = nullptr;
  Real sum = 0;

  __device__ __forceinline__ void add(Real* to, Real x) {
    if (to != place) {
      if (place) atomicAdd(place, sum);
      place = to, sum = 0;
    }
    sum += x;
  }
  // The rest, which all lanes of a warp add together: at once, if to one place.
  __device__ __forceinline__ void finish() {
    Real* first = reinterpret_cast<Real*>(__shfl_sync(~0u, reinterpret_cast<u64>(place), 0));
    bool adds = place;
    if (__all_sync(~0u, place == first)) {
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
      adds &= threadIdx.x % 32 == 0;
    }
    if (adds) atomicAdd(place, sum);
  }
};

// Several, finished where they go out of scope.
template <class Real, int COUNT> struct RunningSums {
  RunningSum<Real> of[COUNT];
  RunningSums() = default;
  RunningSums(const RunningSums&) = delete;
  __device__ __forceinline__ ~RunningSums() {
#pragma unroll
    for (RunningSum<Real>& sum : of) sum.finish();
  }
};
template <class Real> struct RunningSums<Real, 0> {
  static constexpr RunningSum<Real>* of = nullptr;
};
