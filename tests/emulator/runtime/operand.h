// A wgmma operand in shared memory, found through its descriptor (PTX manual, "Matrix descriptor format", "Strides").
#pragma once
#include <cstring>

#include "../device/numbers.h"
#include "machine.h"

namespace emu {

constexpr unsigned UNIT_BYTES = 16, UNIT = 8, OPERAND_K = 16;  // what a swizzle moves as a whole; its elements

// Address bits 4... are xored with bits 7..., as many as number the units of a row of `width` bytes.
inline unsigned swizzled(unsigned smem, unsigned width) {
  return width ? smem ^ (smem >> 7 & (width / UNIT_BYTES - 1)) << 4 : smem;
}

inline float to_float(Operand type, unsigned short bits) {
  return type == Operand::BF16 ? to_float<Operand::BF16>(bits) : to_float<Operand::F16>(bits);
}

// Calls visit(shared address, mn, k) for each 16-byte unit of an operand of `extent` rows (of a) or columns (of b) and
// 16 along the summed dimension; (mn, k) is its first element. With `mn_major` a unit runs along mn, else along k.
template <class Visit>
void for_each_unit(unsigned long long descriptor, bool mn_major, unsigned extent, Where where, Visit visit) {
  static constexpr unsigned WIDTHS[] = {0, 128, 64, 32};
  const unsigned width = WIDTHS[descriptor >> 62], start = unsigned(descriptor & 0x3fff) << 4;
  const unsigned leading = unsigned(descriptor >> 16 & 0x3fff) << 4, stride = unsigned(descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 49 & 7) blame("emulator", where, "gives a wgmma descriptor a base offset, which is not emulated");
  const auto check_row = [&](unsigned bytes) {
    if (!width || start % width + bytes <= width) return;
    blame("wgmma misuse", where, "gives wgmma an operand that crosses the end of its swizzled rows");
  };
  if (!mn_major) {
    check_row(OPERAND_K * 2);
    for (unsigned mn = 0; mn < extent; mn++) {
      for (unsigned k = 0; k < OPERAND_K; k += UNIT) {
        const unsigned offset = width ? mn / 8 * stride + mn % 8 * width + k * 2
                                      : mn / 8 * stride + k / UNIT * leading + mn % 8 * UNIT_BYTES;
        visit(swizzled(start + offset, width), mn, k);
      }
    }
    return;
  }
  const unsigned along = width / 2;  // elements of a swizzled row
  for (unsigned k = 0; k < OPERAND_K; k++) {
    for (unsigned mn = 0; mn < extent; mn += UNIT) {
      const unsigned offset = width ? mn / along * leading + k / 8 * stride + k % 8 * width + mn % along * 2
                                    : mn / UNIT * stride + k / 8 * leading + k % 8 * UNIT_BYTES;
      visit(swizzled(start + offset, width), mn, k);
    }
  }
}

// The operand as values[mn][k].
inline void read_operand(unsigned long long descriptor, bool mn_major, unsigned extent, Operand type, float* values,
                         Where where) {
  for_each_unit(descriptor, mn_major, extent, where, [&](unsigned smem, unsigned mn, unsigned k) {
    unsigned short bits[UNIT];
    memcpy(bits, shared_pointer(smem, UNIT_BYTES, UNIT_BYTES, Access::READ, where), UNIT_BYTES);
    for (unsigned i = 0; i < UNIT; i++) {
      const unsigned at = mn_major ? (mn + i) * OPERAND_K + k : mn * OPERAND_K + k + i;
      values[at] = to_float(type, bits[i]);
    }
  });
}

}  // namespace emu
