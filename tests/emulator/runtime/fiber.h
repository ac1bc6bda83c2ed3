// A fiber: a stack of its own and a place to continue from. Threads of the emulated GPU are fibers of one host thread.
#pragma once
#include <cstddef>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emu {

struct Fiber {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
};

// `entry` starts on the stack at the first switch to the fiber and must never return.
void fiber_prepare(Fiber& fiber, void* stack, size_t bytes, void (*entry)());
void fiber_switch(Fiber& from, Fiber& to);

}  // namespace emu
