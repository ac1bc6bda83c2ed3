// Everything a kernel knows about score modifications: what scores become of products, what is dropped of
// probabilities, and the gradients of both. See mask.cuh.
#pragma once
#include "mask.cuh"

// Whether gradient() takes the products q.k. If not, it makes do with p, of which float32 and float64 would lose too much
// where softcap is flat.
constexpr bool KEEPS_SCORES = cfg::SCORE_MOD || (cfg::SOFTCAP && sizeof(cfg::Element) > 2);

// Whether gradient() adds to sums that a launch before has begun.
constexpr bool ADDS_TO_SUMS = cfg::DBIAS || cfg::SCATTERS;

// What the softmax of a row starts from, in units of log2.
__device__ __forceinline__ Real row_start(const Params& p, const Head& at) {
  if (!cfg::SINKS || (VARLEN && p.no_sequence)) return Real(NEG_INF);
  return p.sinks[at.head * p.sinks_stride] * Real(LOG2_E);
}

// Whether probabilities are dropped; a negative one then stands for one that was.
constexpr bool DROPS = cfg::DROPOUT;
// What the sum of the probabilities that were kept, times values, is multiplied with.
__device__ __forceinline__ Real kept_scale(const Params& p) { return DROPS ? p.dropout_scale : Real(1); }
__device__ __forceinline__ Real kept(Real marked) { return DROPS ? max(marked, Real(0)) : marked; }
// The same of a pair of 16-bit elements.
__device__ __forceinline__ u32 kept(u32 marked) { return DROPS ? marked & ~((marked >> 15 & 0x00010001) * 0xffff) : marked; }

// Four random words for a counter of four (Philox4x32-10, Salmon et al. 2011).
struct Words { u32 x[4]; };
__device__ __forceinline__ Words philox(u32 c0, u32 c1, u32 c2, u32 c3, u64 key) {
  u32 k0 = (u32)key, k1 = (u32)(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const u64 a = (u64)c0 * 0xd2511f53u, b = (u64)c2 * 0xcd9e8d57u;
    c0 = (u32)(b >> 32) ^ c1 ^ k0, c1 = (u32)b;
    c2 = (u32)(a >> 32) ^ c3 ^ k1, c3 = (u32)a;
    k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
  }
  return {c0, c1, c2, c3};
}

// One of the scores' natural units in those that a Scorer makes: log2, for exponentials; natural for the user's functions.
constexpr Real UNIT = cfg::SCORE_MOD ? 1 : LOG2_E;

// How large products are beside softcap: so small, as they mostly are, that a series does, which is shorter where they are
// TINY; or of any size.
enum class Size { ANY, SMALL, TINY };
// Where scores are those of softcap alone, the sum of their 2^score tells whether products were TINY enough: that series
// rises everywhere, so none is larger than the sum allows; those that are far below zero count for nothing beside it.
constexpr bool MAY_BE_TINY =
  cfg::SOFTCAP && !(cfg::SCORE_MOD || cfg::ALIBI || cfg::BIAS) && sizeof(cfg::Element) == 2;
// Whether that is worth a try, and whether those were whose sum's log2 is `level` (softcap.py derives the bounds).
__device__ __forceinline__ bool may_be_tiny(const Params& p) {
  if constexpr (MAY_BE_TINY) return p.softcap_levels[0] < p.softcap_levels[1];
  return false;
}
__device__ __forceinline__ bool were_tiny(const Params& p, float level) {
  if constexpr (MAY_BE_TINY) return p.softcap_levels[0] <= level && level <= p.softcap_levels[1];
  return true;
}

// What is known of elements before their scores are made. SIZE: of their products. ONE_SIDED: on which side of the
// diagonal they lie. GIVEN: what is to be added.
template <Size SIZE_, bool ONE_SIDED_ = false, bool GIVEN_ = false> struct Known {
  static constexpr Size SIZE = SIZE_;
  static constexpr bool ONE_SIDED = ONE_SIDED_, GIVEN = GIVEN_;
  Real addend = 0;
  template <bool SIDE> __device__ __forceinline__ Known<SIZE, SIDE, ADDENDS_AHEAD> with(Real addend) const {
    return {addend};
  }
};

// ALIBI: the slope of a head, in a Scorer's units. It lies in memory, so who can holds it from the first element on.
__device__ __forceinline__ Real slope_of(const Params& p, const Head& at) {
  if constexpr (!cfg::ALIBI) return 0;
  return p.alibi_slopes[at.batch * p.alibi_slopes_stride[0] + at.head * p.alibi_slopes_stride[1]] * UNIT;
}

// Makes scores of products q.k, in its units, and gradients of products of gradients of scores. A positive scale
// alone commutes with the maximum, so it is folded into the exponent's fused multiply-add (exponent_scale); everything
// else is applied here first. Made for one element, others are told by how far they lie from it: constants, so that
// what depends on positions costs little.
struct Scorer {
  const Params& p;
  Real slope, distance;   // ALIBI: of the head, in its units, negative behind the diagonal if ONE_SIDED; from that
  const cfg::Bias* bias;  // BIAS: of the element
  Real* dbias;            // DBIAS: the same
  Head at;
  int q_idx, kv_idx;
  mutable RunningSums<Real, cfg::SCATTERS> sums;

  __device__ __forceinline__ Scorer(const Params& p, const Head& at, int q_idx, int kv_idx)
    : Scorer(p, at, q_idx, kv_idx, slope_of(p, at)) {}
  __device__ __forceinline__ Scorer(const Params& p, const Head& at, int q_idx, int kv_idx, Real slope) : p(p) {
    if constexpr (cfg::ALIBI) this->slope = slope, distance = q_idx + p.seqlen_k - p.seqlen_q - kv_idx;
    if constexpr (cfg::BIAS) bias = p.bias + place(p.bias_stride, at, q_idx, kv_idx);
    if constexpr (cfg::DBIAS) dbias = p.dbias + place(p.dbias_stride, at, q_idx, kv_idx);
    if constexpr (cfg::BIAS || cfg::SCORE_MOD || DROPS) this->at = at, this->q_idx = q_idx, this->kv_idx = kv_idx;
  }

  // A number, and what is added to the product's own score.
  template <class Told = Known<Size::ANY>>
  __device__ __forceinline__ Real with_addend(Real sum, int q_offset, int kv_offset, Told known = {}) const {
    if (cfg::ALIBI) {
      const Real apart = q_offset - kv_offset;
      if (Told::ONE_SIDED || cfg::CAUSAL) sum = fma_real(-slope, apart, fma_real(-slope, distance, sum));
      else sum = fma_real(-slope, abs_real(distance + apart), sum);
    }
    if (Told::GIVEN) {
      sum = fma_real(known.addend, UNIT, sum);
    } else if (cfg::BIAS && q_idx + q_offset < p.seqlen_q && kv_idx + kv_offset < p.seqlen_k) {
      const i64 key_stride = cfg::UNIT_BIAS ? 1 : p.bias_stride[3];
      sum = fma_real(Real(to_real(bias[q_offset * p.bias_stride[2] + kv_offset * key_stride])), UNIT, sum);
    }
    return sum;
  }
  template <class Told = Known<Size::ANY>>
  __device__ __forceinline__ Real score(Real qk, int q_offset, int kv_offset, Told known = {}) const {
    return modified(unmodified(qk, q_offset, kv_offset, known), q_offset, kv_offset);
  }
  // It in two steps. What queries that do not exist score is left alone: it must not become NaN.
  __device__ __forceinline__ Real modified(Real s, int q_offset, int kv_offset) const {
    if constexpr (cfg::SCORE_MOD) {
      const int query = q_idx + q_offset, key = kv_idx + kv_offset;
      const Real made = mod::score_mod(p, s, at.batch, at.head, query, key);
      if (query < p.seqlen_q) s = made;
    }
    return s;
  }
  template <class Told = Known<Size::ANY>>
  __device__ __forceinline__ Real unmodified(Real qk, int q_offset, int kv_offset, Told known = {}) const {
    return cfg::SCALE_FIRST ? with_product(qk, with_addend(0, q_offset, kv_offset, known), known) : qk;
  }
  // The score in units of log2, less `origin`.
  template <class Told>
  __device__ __forceinline__ Real exponent(Real qk, Real scale, Real origin, int q_offset, int kv_offset,
                                           Told known) const {
    if constexpr (cfg::SCORE_MOD || !cfg::SCALE_FIRST) {
      return fma_real(score(qk, q_offset, kv_offset, known), scale, -origin);
    } else {
      return with_product(qk, with_addend(-origin, q_offset, kv_offset, known), known);
    }
  }

  // A probability, made negative if it is dropped: by 16 random bits. Eight elements share the bits of one counter, as
  // features.py has it: they lie in one lane of an accumulator.
  __device__ __forceinline__ Real marked(Real prob, int q_offset, int kv_offset) const {
    if constexpr (!DROPS) return prob;
    // Offsets in accumulators leave these bits of what they are added to alone, so the compiler sees what is shared.
    constexpr bool APART = sizeof(cfg::Element) == 2;
    const int query = q_idx + q_offset, key = kv_idx + kv_offset;
    const Words words = philox(APART ? (q_idx & ~8) + (q_offset & ~8) : query & ~8,
                               APART ? (kv_idx & ~9) + (kv_offset & ~9) : key & ~9, at.head, at.batch, p.seed);
    const u32 word = query & 8 ? (key & 8 ? words.x[3] : words.x[2]) : (key & 8 ? words.x[1] : words.x[0]);
    const int bits = key & 1 ? word >> 16 : word & 0xffff;
    return bits >= p.dropout_threshold ? prob : -prob;
  }

  // Of a pair of 16-bit probabilities, of two neighbouring keys, what is kept.
  __device__ __forceinline__ u32 kept(u32 pair, int q_offset, int kv_offset) const {
    if constexpr (!DROPS) return pair;
    const Real one = 1;
    return (marked(one, q_offset, kv_offset) > 0 ? pair & 0xffff : 0) |
           (marked(one, q_offset, kv_offset + 1) > 0 ? pair & 0xffff0000 : 0);
  }

  // ds of the product from p = 2^(score - origin), marked, dp and delta. The slope of softcap follows from p too: whoever
  // computes ds need not have the product, but for KEEPS_SCORES. It is 0 where p is, or is not a number.
  template <class Told = Known<Size::ANY>>
  __device__ __forceinline__ Real gradient(Real prob, Real dp, Real delta, Real origin, int q_offset, int kv_offset,
                                           Real qk = 0, Told known = {}) const {
    if constexpr (DROPS) {
      dp = prob > 0 ? dp * kept_scale(p) : Real(0);
      prob = abs_real(prob);
    }
    Real ds = prob * (dp - delta);
    scatter(prob, ds, qk, q_offset, kv_offset);
    if constexpr (cfg::SCORE_MOD) ds *= prob != 0 ? slope_of_mod(qk, q_offset, kv_offset) : Real(1);
    add_to_dbias(prob, ds, q_offset, kv_offset);
    if (!cfg::SOFTCAP) return ds;
    Real t;
    if constexpr (KEEPS_SCORES) {
      t = tanh_real(qk * p.softcap_in);
    } else {
      const Real around = with_addend(-origin, q_offset, kv_offset, known);
      t = fma_real(Real(lg2(prob)), p.softcap_out_inverse, -around * p.softcap_out_inverse);
    }
    return ds * saturate(fma_real(-t, t, 1));
  }

  // The same in two steps, for KEEPS_SCORES where the product is at hand before dp: what of ds is known by then, p times
  // the slope of the score, and the rest. Sums need a slope of 1, and nothing else that depends on the score.
  __device__ __forceinline__ Real weight(Real prob, Real qk, int q_offset, int kv_offset) const {
    Real slope = 1;
    if constexpr (cfg::SCORE_MOD) slope = slope_of_mod(qk, q_offset, kv_offset);
    if constexpr (cfg::SOFTCAP) {
      const Real t = tanh_real(qk * p.softcap_in);
      slope *= 1 - t * t;
    }
    return prob != 0 ? prob * slope : prob;
  }
  __device__ __forceinline__ Real weighed(Real weight, Real dp, Real delta, int q_offset, int kv_offset) const {
    if constexpr (DROPS) dp = marked(1, q_offset, kv_offset) > 0 ? dp * kept_scale(p) : Real(0);
    const Real ds = weight * (dp - delta);
    scatter(weight, ds, 0, q_offset, kv_offset);
    add_to_dbias(weight, ds, q_offset, kv_offset);
    return ds;
  }

 private:
  // A number and the product's own score.
  template <class Told> __device__ __forceinline__ Real with_product(Real qk, Real sum, Told) const {
    constexpr Real UNITS = UNIT / Real(LOG2_E);
    if constexpr (!cfg::SOFTCAP) {
      return fma_real(p.scale_log2 * UNITS, qk, sum);
    } else if constexpr (Told::SIZE == Size::TINY) {
      const Real(&series)[3] = p.softcap_short_series, square = qk * qk;
      return fma_real(fma_real(fma_real(series[2], square, series[1]), square, series[0]), qk, sum);
    } else if constexpr (Told::SIZE == Size::SMALL) {
      const Real(&series)[4] = p.softcap_series, square = qk * qk;
      Real factor = fma_real(series[3], square, series[2]);
      factor = fma_real(fma_real(factor, square, series[1]), square, series[0]);
      return fma_real(factor, qk * UNITS, sum);
    } else {
      return fma_real(p.softcap_out * UNITS, tanh_score(qk * p.softcap_in), sum);
    }
  }
  static __device__ __forceinline__ i64 place(const i64 (&stride)[4], const Head& at, int q_idx, int kv_idx) {
    return at.batch * stride[0] + at.head * stride[1] + q_idx * stride[2] + kv_idx * stride[3];
  }
  __device__ __forceinline__ Real slope_of_mod(Real qk, int q_offset, int kv_offset) const {
    const int query = q_idx + q_offset, key = kv_idx + kv_offset;
    const Real score = unmodified(qk, q_offset, kv_offset);
    return mod::score_mod_slope(p, score, at.batch, at.head, query, key);
  }
  // What is hidden or does not exist has no weight.
  __device__ __forceinline__ void scatter(Real weight, Real ds, Real qk, int q_offset, int kv_offset) const {
    if constexpr (cfg::SCATTERS) {
      const int query = q_idx + q_offset, key = kv_idx + kv_offset;
      const Real score = unmodified(qk, q_offset, kv_offset);
      if (weight != 0) mod::score_mod_scatter(p, sums.of, score, ds, at.batch, at.head, query, key);
    }
  }
  __device__ __forceinline__ void add_to_dbias(Real weight, Real ds, int q_offset, int kv_offset) const {
    if constexpr (cfg::DBIAS) {
      const i64 key_stride = cfg::UNIT_DBIAS ? 1 : p.dbias_stride[3];
      if (weight != 0) atomicAdd(dbias + q_offset * p.dbias_stride[2] + kv_offset * key_stride, ds);
    }
  }
  // tanh.approx, off by 2^-11, would move a score of 30 by more than its products were rounded.
  static __device__ __forceinline__ Real tanh_score(Real x) {
    if constexpr (sizeof(cfg::Element) == 2) return tanh_rough(x);
    return tanh_real(x);
  }
};

// body(Known<SIZE>()), for all products s of the warp. The series leaves the units that exponentials need alone.
template <class Products, class Body>
__device__ __forceinline__ auto by_size(const Params& p, const Products& s, Body body) {
  if constexpr (cfg::SOFTCAP && sizeof(cfg::Element) == 2) {
    if (!__any_sync(~0u, largest(s) > p.softcap_small)) return body(Known<Size::SMALL>());
  }
  return body(Known<Size::ANY>());
}

// ADDENDS_AHEAD: a row of what is added, from its first key on, and how far rows lie apart.
__device__ __forceinline__ const cfg::Bias* addend_row(const Params& p, const Head& at, int q_idx) {
  return p.bias + at.batch * p.bias_stride[0] + at.head * p.bias_stride[1] + q_idx * p.bias_stride[2];
}
__device__ __forceinline__ i64 addend_row_stride(const Params& p) { return p.bias_stride[2]; }
// Or where TMA brings them: in a map that has one row for all that share it.
struct AddendPlace { int batch, head, query; };
__device__ __forceinline__ AddendPlace addend_place(const Params& p, const Head& at, int q_idx) {
  const i64(&stride)[4] = p.bias_stride;
  return {stride[0] ? at.batch : 0, stride[1] ? at.head : 0, stride[2] ? q_idx : 0};
}
template <class Params> __device__ __forceinline__ const auto* addend_map(const Params& params) { return &params.tma_bias; }

__device__ __forceinline__ auto exponent_scale(const Params& p) {
  return cfg::SCALE_FIRST ? Real(LOG2_E) / UNIT : p.scale_log2;
}
