// What a kernel's text may call in the emulator: declarations only, so that it compiles fast. `cuda.h` and the
// emulator's `ptx.cuh` and `ptx_sm90.cuh` are thin layers over these. Every call carries the place it was made from,
// for reports and to tell whether the lanes of a warp met at the same instruction.
#pragma once
#include <source_location>

namespace emu {

using Site = std::source_location;
#define EMU_SITE emu::Site site = emu::Site::current()

struct Index { unsigned x = 0, y = 0, z = 0; };
// The running thread's place in the grid.
struct Place { Index thread, block, block_dim, grid_dim; };
extern const Place* place;

// ---- shared memory --------------------------------------------------------------------------------------------------
void* dynamic_shared();
void* static_shared(int declaration, unsigned bytes, unsigned alignment);
unsigned shared_address(const void* pointer, Site site);  // cvta: the 32-bit shared address of a generic pointer

// ---- barriers, votes and shuffles -----------------------------------------------------------------------------------
enum class Vote { AND, OR, COUNT };
enum class Shuffle { IDX, UP, DOWN, XOR };
int cta_barrier(int id, int threads, bool wait, Vote vote, int predicate, Site site);  // threads 0: the whole CTA
void warp_barrier(unsigned mask, Site site);
unsigned ballot(unsigned mask, bool predicate, Site site);
unsigned long long shuffle(Shuffle how, unsigned mask, unsigned long long bits, int operand, int width, Site site);

// ---- memory ---------------------------------------------------------------------------------------------------------
// Shared memory is named by 32-bit shared addresses throughout. Each function checks bounds and alignment.
void load_shared(void* registers, unsigned smem, unsigned bytes, Site site);
void store_shared(unsigned smem, const void* registers, unsigned bytes, Site site);
void load_global(void* registers, const void* gmem, unsigned bytes, Site site);
void store_global(void* gmem, const void* registers, unsigned bytes, Site site);
void add_global(float* gmem, const float* registers, unsigned count, Site site);  // red.add
// Comes before an atomic access: another thread may get in between. `polling`: the kernel may be waiting there for a
// value that another thread writes.
#define EMU_ATOMIC __attribute__((no_sanitize("thread")))  // its accesses have been checked
void atomic_point(const void* pointer, unsigned bytes, bool write, bool polling, Site site);
void await_launches();  // griddepcontrol.wait
void pause(Site site);  // a place where another thread may run
[[noreturn]] void trap(const char* what, Site site);

// ---- cp.async -------------------------------------------------------------------------------------------------------
// Copies source_bytes and fills up to bytes with zeros.
void copy_async(unsigned smem, const void* gmem, unsigned bytes, unsigned source_bytes, Site site);
void copy_async_commit(Site site);
void copy_async_wait(int pending, Site site);  // at most `pending` groups may remain in flight

// ---- matrix products and fragments by one warp ----------------------------------------------------------------------
enum class Operand { BF16, F16 };
void load_matrices(unsigned* registers, int count, unsigned row_smem, bool transposed, Site site);
void store_matrices(unsigned row_smem, const unsigned* registers, int count, bool transposed, Site site);
void mma_m16n8k16(Operand type, float* d, const unsigned* a, const unsigned* b, Site site);  // d += a * b

// ---- mbarriers and bulk copies --------------------------------------------------------------------------------------
void mbarrier_init(unsigned barrier, unsigned arrivals, Site site);
void mbarrier_init_fence(Site site);
void mbarrier_arrive(unsigned barrier, unsigned transaction_bytes, Site site);
void mbarrier_wait(unsigned barrier, unsigned parity, Site site);
bool mbarrier_try_wait(unsigned barrier, unsigned parity, Site site);
void fence_proxy_async(Site site);

constexpr int TENSOR_RANK = 4;
// Lies in the 128 opaque bytes of a kernel's TensorMap, written by emulator.py.
struct TensorMap {
  unsigned long long magic, base;
  unsigned long long stride_bytes[TENSOR_RANK];  // [0] is the element's size
  unsigned extent[TENSOR_RANK];                  // elements, innermost first
  unsigned box[TENSOR_RANK];
  unsigned element_bytes, swizzle_bytes;         // swizzle_bytes 0: none
  static constexpr unsigned long long MAGIC = 0x70616d726f736e65ull;
};
void tensor_load(unsigned smem, const void* map, unsigned barrier, const int* coordinates, Site site);
void tensor_store(const void* map, unsigned smem, const int* coordinates, Site site);
void bulk_load(unsigned smem, const void* gmem, unsigned bytes, unsigned barrier, Site site);
void bulk_reduce_add(float* gmem, unsigned smem, unsigned bytes, Site site);
void bulk_commit(Site site);
void bulk_wait(int pending, bool read_only, Site site);

// ---- matrix products by a warpgroup ---------------------------------------------------------------------------------
struct Wgmma {
  Operand type;
  int n;
  bool mn_major_a, mn_major_b, accumulate;
  unsigned long long a_descriptor, b_descriptor;
  const unsigned* a_registers;  // null: a lies in shared memory
  float* d;
};
void wgmma(const Wgmma& product, Site site);
void wgmma_fence(Site site);
void wgmma_commit(Site site);
void wgmma_wait(int pending, Site site);
void wgmma_hold(const void* registers, unsigned bytes, Site site);
void set_max_registers(int registers, bool increase, Site site);

}  // namespace emu
