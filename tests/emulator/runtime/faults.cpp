// Faults of a kernel's thread become errors of the run: accesses outside every buffer, and endless loops.
#include <csignal>
#include <pthread.h>
#include <sys/time.h>
#include <ucontext.h>

#include "machine.h"

namespace emu {

volatile int without_switch = 0;  // timer ticks since threads last changed

namespace {

struct sigaction before_segv, before_bus, before_timer;
stack_t stack_before;
char signal_stack[64 << 10];
pthread_t runner;  // the host's thread that runs the grid

void on_fault(int signal, siginfo_t* info, void* context) {
  if (!machine.current || !pthread_equal(pthread_self(), runner)) {  // as if the emulator were not there
    sigaction(signal, signal == SIGSEGV ? &before_segv : &before_bus, nullptr);
    return;
  }
  const char* verb = "reads";
  Where where;
#if defined(__x86_64__)
  const auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  if (registers[REG_ERR] & 2) verb = "writes";
  where = Where::address(reinterpret_cast<void*>(registers[REG_RIP] + 1));
#else
  (void)context;
#endif
  constexpr long BELOW_STACK = 64 << 10;
  char* address = static_cast<char*>(info->si_addr);
  const long below = static_cast<char*>(machine.current->stack) - address;
  if (below > 0 && below < BELOW_STACK) blame("emulator", where, "overflows its stack");
  if (!in_arena(address)) blame("out of bounds", where, "%s address %p, which is no emulated memory,", verb, address);
  const char* kind = is_constant(address) ? "write to constant" : "out of bounds";
  blame(kind, where, "%s %s", verb, describe(address).c_str());
}

void on_timer(int) {
  if (!pthread_equal(pthread_self(), runner)) {
    pthread_kill(runner, SIGVTALRM);
    return;
  }
  without_switch = without_switch + 1;
  if (without_switch > 1 && machine.current) {
    fail("endless loop", "%s has run for seconds without waiting", machine.current->name().c_str());
  }
}

}  // namespace

void watch_faults(bool on) {
  constexpr int SECONDS = 5;  // of CPU time, twice of which no thread may run without waiting
  itimerval timer = {};
  if (on) {
    runner = pthread_self();
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
