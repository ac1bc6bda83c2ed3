#include "fiber.h"

namespace emu {

#if defined(__x86_64__)

// The System V calling convention lets a callee change everything but rbx, rbp, r12-r15 and the stack pointer, so these
// are all there is to a fiber.
asm(R"(
.text
.globl emu_fiber_swap
.hidden emu_fiber_swap
.type emu_fiber_swap, @function
emu_fiber_swap:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_fiber_swap, .-emu_fiber_swap
)");
extern "C" void emu_fiber_swap(void** save, void* load);

void fiber_prepare(Fiber& fiber, void* stack, size_t bytes, void (*entry)()) {
  void** top = reinterpret_cast<void**>(static_cast<char*>(stack) + bytes);
  constexpr int SAVED = 6;
  *--top = nullptr;  // where entry would return to; also puts the stack where a call would have left it
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < SAVED; i++) *--top = nullptr;
  fiber.stack_pointer = top;
}

void fiber_switch(Fiber& from, Fiber& to) { emu_fiber_swap(&from.stack_pointer, to.stack_pointer); }

#else

void fiber_prepare(Fiber& fiber, void* stack, size_t bytes, void (*entry)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = bytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
}

void fiber_switch(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

#endif

}  // namespace emu
