// What the compiler calls of its own accord. Kernels are compiled with -fsanitize=thread,alignment,bounds but linked
// with these functions in place of the sanitizers' libraries: every plain memory access, every misaligned pointer and
// every index past an array arrives here.
#include "machine.h"

namespace emu {
namespace {

uint32_t until_preemption = 0;

void plain(void* pointer, unsigned bytes, Access access, void* pc) {
  if (!in_arena(pointer)) return;
  check_plain(static_cast<char*>(pointer), bytes, access, Where::address(pc));
  if (machine.policy.preempt && until_preemption-- == 0) {
    until_preemption = machine.random.below(2 * machine.policy.preempt);
    yield();
  }
}

// The layout of what the compiler passes to the handlers of -fsanitize=alignment,bounds.
struct Location { const char* file; uint32_t line, column; };
struct TypeMismatch { Location location; const void* type; unsigned char log_alignment, kind; };
struct OutOfBounds { Location location; const void *array_type, *index_type; };

}  // namespace
}  // namespace emu

#define HERE __builtin_extract_return_addr(__builtin_return_address(0))
#define HOOKS(n)                                                                                             \
  void __tsan_read##n(void* p) { emu::plain(p, n, emu::Access::READ, HERE); }                                \
  void __tsan_write##n(void* p) { emu::plain(p, n, emu::Access::WRITE, HERE); }                              \
  void __tsan_unaligned_read##n(void* p) { emu::plain(p, n, emu::Access::READ, HERE); }                      \
  void __tsan_unaligned_write##n(void* p) { emu::plain(p, n, emu::Access::WRITE, HERE); }

extern "C" {
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void* p, size_t bytes) { emu::plain(p, unsigned(bytes), emu::Access::READ, HERE); }
void __tsan_write_range(void* p, size_t bytes) { emu::plain(p, unsigned(bytes), emu::Access::WRITE, HERE); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

void __ubsan_handle_type_mismatch_v1_abort(emu::TypeMismatch* what, uintptr_t pointer) {
  if (!emu::machine.current) return;
  emu::fail("misaligned", "%s uses address %#zx (%s) as a type aligned to %u, at %s:%u",
            emu::machine.current->name().c_str(), size_t(pointer),
            emu::describe(reinterpret_cast<void*>(pointer)).c_str(), 1u << what->log_alignment, what->location.file,
            what->location.line);
}
void __ubsan_handle_out_of_bounds_abort(emu::OutOfBounds* what, uintptr_t index) {
  if (!emu::machine.current) return;
  emu::fail("out of bounds", "%s takes element %ld of an array that has fewer, at %s:%u",
            emu::machine.current->name().c_str(), long(index), what->location.file, what->location.line);
}
}
