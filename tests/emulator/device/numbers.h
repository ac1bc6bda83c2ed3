// 16-bit floating-point numbers, converted as the GPU's instructions do.
#pragma once
#include "emu.h"

namespace emu {

inline float bits_to_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
inline unsigned float_to_bits(float x) { return __builtin_bit_cast(unsigned, x); }

inline float f16_to_float(unsigned short bits) {
  const unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  if (exponent == 31) return bits_to_float(sign | 0x7f800000 | fraction << 13);
  if (exponent) return bits_to_float(sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = float(fraction) * 0x1p-24f;  // zero or subnormal
  return sign ? -magnitude : magnitude;
}

// Both round to nearest even; NaN becomes the canonical 0x7fff.
inline unsigned float_to_bf16(float x) {
  const unsigned bits = float_to_bits(x);
  if (x != x) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline unsigned float_to_f16(float x) {
  if (x != x) return 0x7fff;
  const unsigned sign = float_to_bits(x) >> 16 & 0x8000;
  const float magnitude = __builtin_fabsf(x);
  if (magnitude >= 65520.f) return sign | 0x7c00;  // halfway between the largest finite number and the next: infinity
  if (magnitude < 0x1p-14f) {                      // subnormal: adding 0.5 leaves steps of 2^-24, the last bit's weight
    return sign | (float_to_bits(magnitude + 0.5f) - float_to_bits(0.5f));
  }
  const unsigned bits = float_to_bits(magnitude) - (112u << 23);
  return sign | (bits + 0xfff + (bits >> 13 & 1)) >> 13;
}

template <Operand TYPE> float to_float(unsigned short bits) {
  if constexpr (TYPE == Operand::BF16) return bits_to_float(unsigned(bits) << 16);
  return f16_to_float(bits);
}

}  // namespace emu
