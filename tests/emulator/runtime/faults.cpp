// Faults of a kernel's thread become errors of the run: accesses outside every buffer, and endless loops.
#include <csignal>
#include <sys/time.h>
#include <ucontext.h>

#include "machine.h"

namespace emu {

volatile int without_switch = 0;  // timer ticks since threads last changed

namespace {

struct sigaction before_segv, before_bus, before_timer;
stack_t stack_before;
char signal_stack[64 << 10];

void on_fault(int signal, siginfo_t* info, void* context) {
  char* address = static_cast<char*>(info->si_addr);
  if (!machine.current) {  // not a kernel's: as if the emulator were not there
    sigaction(signal, signal == SIGSEGV ? &before_segv : &before_bus, nullptr);
    return;
  }
  Access access = Access::READ;
  Where where;
#if defined(__x86_64__)
  const auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  if (registers[REG_ERR] & 2) access = Access::WRITE;
  where = Where::address(reinterpret_cast<void*>(registers[REG_RIP] + 1));
#endif
  const Thread& thread = *machine.current;
  const std::string name = thread.name(), at = where.text();
  const char* verb = access == Access::READ ? "reads" : "writes";
  if (in_arena(address)) {
    fail(is_constant(address) ? "write to constant" : "out of bounds", "%s %s %s, %s", name.c_str(), verb,
         describe(address).c_str(), at.c_str());
  }
  const long below = static_cast<char*>(thread.stack) - address;
  if (below > 0 && below < (64 << 10)) fail("emulator", "%s overflows its stack, %s", name.c_str(), at.c_str());
  fail("out of bounds", "%s %s address %p, which is no emulated memory, %s", name.c_str(), verb, address, at.c_str());
}

void on_timer(int) {
  without_switch = without_switch + 1;
  if (without_switch > 1 && machine.current) {
    fail("endless loop", "%s has run for seconds without waiting", machine.current->name().c_str());
  }
}

}  // namespace

void watch_faults(bool on) {
  constexpr int SECONDS = 5;  // of CPU time, once or twice of which a thread may run without waiting
  itimerval timer = {};
  if (on) {
    stack_t stack = {};
    stack.ss_sp = signal_stack;
    stack.ss_size = sizeof signal_stack;
    sigaltstack(&stack, &stack_before);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &before_segv);
    sigaction(SIGBUS, &action, &before_bus);
    action = {};
    action.sa_handler = on_timer;
    action.sa_flags = SA_ONSTACK | SA_NODEFER | SA_RESTART;
    sigaction(SIGVTALRM, &action, &before_timer);
    without_switch = 0;
    timer.it_value.tv_sec = timer.it_interval.tv_sec = SECONDS;
    setitimer(ITIMER_VIRTUAL, &timer, nullptr);
  } else {
    setitimer(ITIMER_VIRTUAL, &timer, nullptr);
    sigaction(SIGSEGV, &before_segv, nullptr);
    sigaction(SIGBUS, &before_bus, nullptr);
    sigaction(SIGVTALRM, &before_timer, nullptr);
    sigaltstack(&stack_before, nullptr);
  }
}

}  // namespace emu
