// ldmatrix, stmatrix and mma.sync: a warp's fragments, laid out over its lanes as the PTX manual says.
#include <cstring>

#include "machine.h"
#include "../device/numbers.h"

namespace emu {
namespace {

constexpr unsigned MATRIX_ROWS = 8, ROW_BYTES = 16;

struct MatrixSlot { unsigned* registers; char* row; };

uint16_t half_of(unsigned packed, unsigned which) { return uint16_t(packed >> (16 * which)); }

// Lanes 8i to 8i + 7 name the rows of matrix i. Lane l holds, of each, elements 2 * (l % 4) and the next of row l / 4.
template <int COUNT, bool TRANSPOSED, bool STORE> void move_matrices(Warp&, Collective& meeting) {
  for (unsigned lane = 0; lane < WARP_SIZE; lane++) {
    MatrixSlot& slot = *static_cast<MatrixSlot*>(meeting.slots[lane]);
    for (unsigned i = 0; i < COUNT; i++) {
      for (unsigned e = 0; e < 2; e++) {
        const unsigned near = lane / 4, along = lane % 4 * 2 + e;
        const unsigned row = TRANSPOSED ? along : near, column = TRANSPOSED ? near : along;
        char* element = static_cast<MatrixSlot*>(meeting.slots[i * MATRIX_ROWS + row])->row + 2 * column;
        uint16_t bits;
        if (STORE) {
          bits = half_of(slot.registers[i], e);
          memcpy(element, &bits, 2);
        } else {
          memcpy(&bits, element, 2);
          slot.registers[i] = e ? slot.registers[i] | unsigned(bits) << 16 : bits;
        }
      }
    }
  }
}

using Act = void (*)(Warp&, Collective&);

void matrices(const char* name, unsigned* registers, int count, unsigned smem, Access access, Act act, Site site) {
  MatrixSlot slot = {registers, nullptr};
  if (machine.current->lane < unsigned(count) * MATRIX_ROWS) {  // the other lanes' addresses are not used
    slot.row = access_shared(smem, ROW_BYTES, ROW_BYTES, access, site);
  }
  collective(name, unsigned(count), ALL_LANES, &slot, site, act);
}

struct MmaSlot { float* d; const unsigned *a, *b; };

template <Operand TYPE> void multiply(Warp&, Collective& meeting) {
  constexpr unsigned M = 16, N = 8, K = 16;
  float a[M][K], b[K][N], d[M][N];
  const auto slot = [&](unsigned lane) -> MmaSlot& { return *static_cast<MmaSlot*>(meeting.slots[lane]); };
  for (unsigned lane = 0; lane < WARP_SIZE; lane++) {
    const unsigned g = lane / 4, t = lane % 4;
    for (unsigned e = 0; e < 2; e++) {
      for (unsigned i = 0; i < 4; i++) {
        a[g + i % 2 * 8][2 * t + e + i / 2 * 8] = to_float<TYPE>(half_of(slot(lane).a[i], e));
      }
      for (unsigned i = 0; i < 2; i++) b[2 * t + e + 8 * i][g] = to_float<TYPE>(half_of(slot(lane).b[i], e));
      for (unsigned i = 0; i < 2; i++) d[g + 8 * i][2 * t + e] = slot(lane).d[2 * i + e];
    }
  }
  for (unsigned m = 0; m < M; m++) {
    for (unsigned k = 0; k < K; k++) {
      for (unsigned n = 0; n < N; n++) d[m][n] += a[m][k] * b[k][n];
    }
  }
  for (unsigned lane = 0; lane < WARP_SIZE; lane++) {
    const unsigned g = lane / 4, t = lane % 4;
    for (unsigned i = 0; i < 4; i++) slot(lane).d[i] = d[g + i / 2 * 8][2 * t + i % 2];
  }
}

}  // namespace

void load_matrices(unsigned* registers, int count, unsigned row_smem, bool transposed, Site site) {
  const Act acts[] = {move_matrices<2, false, false>, move_matrices<2, true, false>,
                      move_matrices<4, false, false>, move_matrices<4, true, false>};
  matrices("ldmatrix", registers, count, row_smem, Access::READ, acts[(count / 4) * 2 + transposed], site);
}

void store_matrices(unsigned row_smem, const unsigned* registers, int count, bool transposed, Site site) {
  const Act acts[] = {move_matrices<2, false, true>, move_matrices<2, true, true>,
                      move_matrices<4, false, true>, move_matrices<4, true, true>};
  matrices("stmatrix", const_cast<unsigned*>(registers), count, row_smem, Access::WRITE,
           acts[(count / 4) * 2 + transposed], site);
}

void mma_m16n8k16(Operand type, float* d, const unsigned* a, const unsigned* b, Site site) {
  MmaSlot slot = {d, a, b};
  collective("mma", unsigned(type), ALL_LANES, &slot, site,
             type == Operand::BF16 ? multiply<Operand::BF16> : multiply<Operand::F16>);
}

}  // namespace emu
