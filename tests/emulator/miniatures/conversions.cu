// half = x rounded to a 16-bit type, back = half as float; by every conversion that there is.
#include "dtypes.cuh"

struct Params {
  const float* x;
  unsigned short* half;
  float* back;
};

extern "C" __global__ void __launch_bounds__(32) conversions(const Params p) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  const u32 pair = pack2<cfg::Element>(-p.x[i], p.x[i]);
  p.half[i] = (unsigned short)(pair >> 16);
  p.back[i] = to_real(cfg::Element{p.half[i]});
}
