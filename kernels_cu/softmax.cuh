// Online softmax: the state of the rows that a lane holds parts of, and everything about -inf.
//
// Probabilities are taken against a reference, p = 2^(s * scale - reference), that is some maximum of the row's scores
// seen so far, not the latest one ("stale maximum"). It is raised only when a score exceeds it by more than
// MAX_EXPONENT, so exponentials need not wait for the row's maximum, nor the output for a rescaling, and almost no step
// exchanges anything between lanes. The result is exact: sums and output share one reference, and p <= 2^MAX_EXPONENT
// has the same relative precision as p <= 1.
//
// A row's elements lie in the four lanes of a quad, as in an accumulator of mma.m16n8k16; `sum` is the lane's own part.
// The reference starts at the true -inf: scores may be arbitrarily negative, and a row may have no visible key at all.
#pragma once
#include "dtypes.cuh"

constexpr float LN2 = 0.693147180559945309f;
constexpr double LOG2_E = 1.442695040888963407360;
constexpr float MAX_EXPONENT = 8;  // 2^8 a probability: far from float16's 65504 even after a thousand such steps
constexpr float NEG_INF = __builtin_bit_cast(float, 0xff800000u);
constexpr float HIDDEN = NEG_INF;  // the score of a key that the row does not see

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

template <int ROWS> struct RowSoftmax {
  float reference[ROWS];  // in units of log2, -inf while the row has seen nothing
  float sum[ROWS];        // of p, this lane's columns

  // Before the first step, from a score that has no key (-inf: there is none). `speaker`: in one lane of the quad.
  __device__ __forceinline__ void begin(int r, float start, bool speaker) {
    reference[r] = start, sum[r] = start == NEG_INF || !speaker ? 0 : 1;
  }

  // Whether a score (the largest of this lane's) is too large for the reference. The first visible one always is; a
  // hidden or NaN score never is.
  __device__ __forceinline__ bool outgrown(int r, float lane_max, float scale) const {
    return fmaf(lane_max, scale, -reference[r]) > MAX_EXPONENT;
  }

  // Raises the reference to the maximum of the row, or just above (called by whole quads), and returns what everything
  // accumulated for the row must be multiplied with: a power of two, so that nothing is rounded again.
  __device__ __forceinline__ float raise(int r, float lane_max, float scale) {
    const float old = reference[r], top = quad_max(lane_max) * scale;
    if (old == NEG_INF) {
      reference[r] = top;  // nothing accumulated yet
      return 1;
    }
    if (top > old) reference[r] = old + ceilf(top - old);
    const float factor = ex2(old - reference[r]);
    sum[r] *= factor;
    return factor;
  }

  // The probability of score s, added to the sum. Where keys may be hidden a row may still have seen none: its p are 0.
  template <bool MAY_HIDE> __device__ __forceinline__ float probability(int r, float s, float scale) {
    const float origin = MAY_HIDE && reference[r] == NEG_INF ? 0.f : reference[r];
    const float p = ex2(fmaf(s, scale, -origin));
    sum[r] += p;
    return p;
  }

  // After the last step: the row's sum over the quad, 1 / sum (0 for a row that saw nothing) and log(sum exp(s)).
  __device__ __forceinline__ void finish(int r, float& inverse, float& lse) {
    sum[r] = quad_sum(sum[r]);
    inverse = sum[r] == 0 ? 0.f : 1.f / sum[r];
    lse = (reference[r] + lg2(sum[r])) * LN2;
  }
};

// ---- The pieces alone, in float or double, for kernels that lay rows out otherwise ----------------------------------

__device__ __forceinline__ float exp2_real(float x) { return ex2(x); }
__device__ __forceinline__ double exp2_real(double x) { return exp2(x); }
__device__ __forceinline__ float tanh_real(float x) { return tanhf(x); }
__device__ __forceinline__ double tanh_real(double x) { return tanh(x); }
// By the GPU's approximations: off by 2^-22, not by a part of small values.
__device__ __forceinline__ float tanh_rough(float x) {
  return 1 - __fdividef(2.f, 1 + ex2(x * float(2 * LOG2_E)));
}
// The largest magnitude in an array of any dimensions. NaN is none.
__device__ __forceinline__ float largest(float x) { return fabsf(x); }
template <class Part, int COUNT> __device__ __forceinline__ float largest(const Part (&parts)[COUNT]) {
  float found[4] = {};  // so that they do not wait for each other
#pragma unroll
  for (int i = 0; i < COUNT; i++) found[i % 4] = fmaxf(found[i % 4], largest(parts[i]));
  return fmaxf(fmaxf(found[0], found[1]), fmaxf(found[2], found[3]));
}
__device__ __forceinline__ float fma_real(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double fma_real(double a, double b, double c) { return fma(a, b, c); }
__device__ __forceinline__ float abs_real(float x) { return fabsf(x); }
__device__ __forceinline__ double abs_real(double x) { return fabs(x); }
// In [0, 1]; 0 if it is not a number.
__device__ __forceinline__ float saturate(float x) { return __saturatef(x); }
__device__ __forceinline__ double saturate(double x) { return x > 0 ? min(x, 1.0) : 0; }
__device__ __forceinline__ float log_real(float x) { return logf(x); }
__device__ __forceinline__ double log_real(double x) { return log(x); }

// What exponents are taken against: the maximum, or 0 while the row has seen nothing, so that its p are 0.
template <class Real> __device__ __forceinline__ Real exponent_origin(Real row_max) {
  return row_max == Real(NEG_INF) ? Real(0) : row_max;
}
// 1 / sum, and 0 for a row that saw nothing.
template <class Real> __device__ __forceinline__ Real inverse_sum(Real sum) { return sum == 0 ? Real(0) : 1 / sum; }

// log(sum exp(s)) from the row's maximum in units of log2; -inf for a row that saw nothing.
template <class Real> __device__ __forceinline__ Real log_sum_exp(Real row_max, Real sum) {
  return row_max * Real(0.693147180559945309417) + log_real(sum);
}
// Backward: lse in units of log2, so that p = 2^(s * scale - origin); +inf for a row that saw nothing, so that p is 0.
template <class Real> __device__ __forceinline__ Real lse_origin(Real lse) {
  return lse == Real(NEG_INF) ? -Real(NEG_INF) : lse * Real(LOG2_E);
}

// ---- Whole accumulators of wgmma: s[4 * j + 2 * r + e] is of the lane's row r ---------------------------------------
// Here not even the maximum of new scores is looked for. They are exponentiated in place against the reference as it
// is, and the sums of the results, needed anyway, tell whether a score was too large for it: no p exceeds its lane's
// sum. What was overwritten must then be computed anew, so the limit is high enough that it hardly ever happens.
constexpr float LOWEST = -0x1p126f;      // finite, and below all scores that are
constexpr float MAX_LANE_SUM = 4096;  // also bounds p: 2^12, far from float16's 65504

struct TileSoftmax : RowSoftmax<2> {
  // Scores become probabilities, 2^exponent(score, its index, reference); `lane_sum` is what the lane's add up to, row
  // by row. Where they may be hidden and the row has seen none that is not, p is 0 of those that are; of others it is of
  // no use, and infinite if STALE.
  template <bool MAY_HIDE, bool STALE = false, int COUNT, class Exponent>
  __device__ __forceinline__ void exponentiate(float (&s)[COUNT], Exponent exponent, float (&lane_sum)[2]) const {
    float origin[2], part[2][2] = {};
#pragma unroll
    for (int r = 0; r < 2; r++) {
      origin[r] = !MAY_HIDE ? reference[r] : STALE ? fmaxf(reference[r], LOWEST) : exponent_origin(reference[r]);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const int r = i / 2 % 2;
      s[i] = ex2(exponent(s[i], i, origin[r]));
      part[r][i % 2] += s[i];
    }
#pragma unroll
    for (int r = 0; r < 2; r++) lane_sum[r] = part[r][0] + part[r][1];
  }

  // log2 of what a lane's probabilities add up to against a reference of 0.
  __device__ __forceinline__ float level(int r, float lane_sum) const { return reference[r] + lg2(lane_sum); }

  // Against the reference as it is. Returns, to the whole warp, whether some score was too large for it; then nothing
  // but s has changed. A row that has seen nothing yet outgrows -inf, and NaN counts as too large. So do sums of which
  // fits(lane_sum) is false.
  template <bool MAY_HIDE, int COUNT, class Exponent, class Fits>
  __device__ __forceinline__ bool take_stale(float (&s)[COUNT], Exponent exponent, Fits fits) {
    float lane_sum[2];
    exponentiate<MAY_HIDE, true>(s, exponent, lane_sum);
    const bool outgrown = __any_sync(~0u, !(lane_sum[0] <= MAX_LANE_SUM && lane_sum[1] <= MAX_LANE_SUM && fits(lane_sum)));
#pragma unroll
    for (int r = 0; r < 2; r++) sum[r] += outgrown ? 0 : lane_sum[r];
    return outgrown;
  }

  // Against the raised reference. The output so far must be multiplied with `factor`.
  template <bool MAY_HIDE, int COUNT>
  __device__ __forceinline__ void take_raised(float (&s)[COUNT], float scale, float (&factor)[2]) {
    float lane_max[2][2] = {{NEG_INF, NEG_INF}, {NEG_INF, NEG_INF}}, lane_sum[2];
#pragma unroll
    for (int i = 0; i < COUNT; i++) lane_max[i / 2 % 2][i % 2] = fmaxf(lane_max[i / 2 % 2][i % 2], s[i]);
#pragma unroll
    for (int r = 0; r < 2; r++) factor[r] = raise(r, fmaxf(lane_max[r][0], lane_max[r][1]), scale);
    exponentiate<MAY_HIDE>(s, scaled(scale), lane_sum);
#pragma unroll
    for (int r = 0; r < 2; r++) sum[r] += lane_sum[r];
  }

  // The same only if some score is too large for the reference as it is, which is what it returns to the whole warp.
  template <int COUNT> __device__ __forceinline__ bool take_checked(float (&s)[COUNT], float scale, float (&factor)[2]) {
    float lane_max[2] = {NEG_INF, NEG_INF}, lane_sum[2];
#pragma unroll
    for (int i = 0; i < COUNT; i++) lane_max[i / 2 % 2] = fmaxf(lane_max[i / 2 % 2], s[i]);
    const bool raised = __any_sync(~0u, outgrown(0, lane_max[0], scale) || outgrown(1, lane_max[1], scale));
    if (raised) {
#pragma unroll
      for (int r = 0; r < 2; r++) factor[r] = raise(r, lane_max[r], scale);
    }
    exponentiate<true>(s, scaled(scale), lane_sum);
#pragma unroll
    for (int r = 0; r < 2; r++) sum[r] += lane_sum[r];
    return raised;
  }

  static __device__ __forceinline__ auto scaled(float scale) {
    return [scale](float s, int, float origin) { return fmaf(s, scale, -origin); };
  }
};
