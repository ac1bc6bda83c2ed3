// Who runs when. Threads change places only inside the runtime's functions. The next thread is a ready one of the warp
// with the highest priority; priorities are random and redrawn after a while, so that one seed lets warps run far ahead
// of one another and another seed keeps them close. Asynchronous work happens when nothing else can (late), at once
// (early), or at random.
#include <cstdarg>
#include <cstdio>
#include <sys/mman.h>

#include "machine.h"

namespace emu {

Machine machine;
const Place* place = nullptr;

namespace {

constexpr size_t STACK_BYTES = 256 << 10, STACK_GUARD = 16 << 10;
constexpr unsigned ENDLESS_POLLS = 2000;  // rounds in which nothing but polling happened

Fiber main_fiber;
std::vector<void*> stacks;       // reused by every CTA of every run
std::vector<Warp*> order;        // highest priority first
std::vector<Thread*> pollers;
std::vector<unsigned> remaining; // CTAs to start, last one first
uint32_t until_redraw;
unsigned idle_polls;
Cta* finished;
bool failed, on_main = true;
struct Failed {};                // thrown where no thread runs
std::string error_kind, error_text;

void* make_stack() {
  char* pages = static_cast<char*>(mmap(nullptr, STACK_GUARD + STACK_BYTES, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (pages == MAP_FAILED) fail("emulator", "no memory for the stack of a thread");
  mprotect(pages, STACK_GUARD, PROT_NONE);
  return pages + STACK_GUARD;
}

void thread_main() {
  machine.launch.entry(machine.launch.params);
  leave(*machine.current);
  machine.current->state = Thread::DONE;
  if (machine.current->cta->alive == 0) finished = machine.current->cta;
  block({});
  __builtin_unreachable();
}

void shuffle_order() {
  for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[machine.random.below(uint32_t(i))]);
  until_redraw = machine.policy.redraw;
}

unsigned pick_lane(unsigned ready) {
  if (machine.policy.lanes == Policy::ASCENDING) return __builtin_ctz(ready);
  if (machine.policy.lanes == Policy::DESCENDING) return 31 - __builtin_clz(ready);
  const unsigned turn = machine.random.below(WARP_SIZE);
  const unsigned turned = ready >> turn | ready << (-turn & 31);
  return (__builtin_ctz(turned) + turn) % WARP_SIZE;
}

[[noreturn]] void deadlock(const char* what) {
  std::map<std::pair<std::string, std::string>, unsigned> groups;  // (warp, what it waits for) -> lanes
  for (auto& cta : machine.ctas) {
    if (!cta) continue;
    for (Thread& thread : cta->threads) {
      if (thread.state == Thread::DONE) continue;
      const std::string warp = format("block %u warp %2u", cta->index, thread.warp->index);
      groups[{warp, describe_wait(thread.wait)}] |= 1u << thread.lane;
    }
  }
  std::string text;
  for (auto& [group, lanes] : groups) {
    text += "\n  " + group.first + " lanes " + lane_list(lanes) + ": " + group.second;
  }
  fail("deadlock", "%s:%s", what, text.c_str());
}

// The next thread to run, or null if a CTA has ended or there is none left.
Thread* pick() {
  if (finished) return nullptr;
  if (until_redraw-- == 0) shuffle_order();
  if (machine.policy.bulk == Timing::MIXED && machine.random.one_in(machine.policy.bulk_delay)) land_bulk_load();
  for (;;) {
    for (Warp* warp : order) {
      if (!warp->ready) continue;
      Thread* thread = warp->threads[pick_lane(warp->ready)];
      if (!thread->polled) idle_polls = 0;
      return thread;
    }
    if (land_bulk_load()) continue;
    if (!pollers.empty()) {
      if (idle_polls++ > ENDLESS_POLLS) deadlock("threads poll for something that nobody will do");
      for (Thread* thread : pollers) thread->polled = true;
      wake_all(pollers);
      continue;
    }
    if (order.empty()) return nullptr;
    deadlock("nobody can go on");
  }
}

void switch_to(Fiber& from, Thread* to) {
  machine.current = to;
  place = to ? &to->place : nullptr;
  without_switch = 0;
  on_main = !to;
  Fiber& fiber = to ? to->fiber : main_fiber;
  if (&from != &fiber) fiber_switch(from, fiber);
}

std::string formatted(const char* format, va_list arguments) {
  va_list again;
  va_copy(again, arguments);
  std::vector<char> text(vsnprintf(nullptr, 0, format, arguments) + 1);
  vsnprintf(text.data(), text.size(), format, again);
  return text.data();
}

[[noreturn]] void end_run(const char* kind, const std::string& text) {
  error_kind = kind;
  error_text = text;
  failed = true;
  if (on_main) throw Failed();
  Fiber abandoned;
  switch_to(abandoned, nullptr);
  __builtin_unreachable();
}

void start_cta(unsigned slot) {
  auto& cta = machine.ctas[slot];
  cta = std::make_unique<Cta>();
  const Launch& launch = machine.launch;
  cta->index = remaining.back();
  remaining.pop_back();
  cta->slot = slot;
  cta->alive = launch.block;
  cta->shared = shared_memory(slot, launch.smem_bytes);
  cta->warps.resize(launch.block / WARP_SIZE);
  cta->threads.resize(launch.block);
  for (unsigned i = 0; i < launch.block; i++) {
    Thread& thread = cta->threads[i];
    Warp& warp = cta->warps[i / WARP_SIZE];
    thread.cta = cta.get();
    thread.warp = &warp;
    thread.index = i;
    thread.lane = i % WARP_SIZE;
    thread.place = {{i}, {cta->index}, {launch.block, 1, 1}, {launch.grid, 1, 1}};
    thread.copies.emplace_back();
    thread.stores.emplace_back();
    thread.state = Thread::READY;
    const size_t stack = slot * launch.block + i;
    while (stacks.size() <= stack) stacks.push_back(make_stack());
    thread.stack = stacks[stack];
    fiber_prepare(thread.fiber, thread.stack, STACK_BYTES, thread_main);
    warp.cta = cta.get();
    warp.index = i / WARP_SIZE;
    warp.threads[thread.lane] = &thread;
    warp.ready = warp.alive = ALL_LANES;
  }
  for (Warp& warp : cta->warps) order.insert(order.begin() + machine.random.below(order.size() + 1), &warp);
  race::begin_cta(*cta);
}

void end_cta(unsigned slot) {
  Cta& cta = *machine.ctas[slot];
  check_warpgroups(cta);
  check_bulk_loads(cta);
  std::erase_if(order, [&](Warp* warp) { return warp->cta == &cta; });
  machine.ctas[slot].reset();
}

void run_grid() {
  const Launch& launch = machine.launch;
  machine.random = Random(launch.seed);
  machine.policy = Policy::of(launch.seed, machine.random);
  machine.ctas.resize(std::min(launch.resident, launch.grid));
  race::begin_run(launch.block, launch.smem_bytes, unsigned(machine.ctas.size()));
  for (unsigned i = launch.grid; i-- > 0;) remaining.push_back(i);
  if (launch.shuffled) {
    for (size_t i = remaining.size(); i > 1; i--) {
      std::swap(remaining[i - 1], remaining[machine.random.below(uint32_t(i))]);
    }
  }
  for (unsigned slot = 0; slot < machine.ctas.size(); slot++) start_cta(slot);
  shuffle_order();
  while (Thread* thread = pick()) {
    switch_to(main_fiber, thread);
    if (failed) return;
    if (finished) {
      const unsigned slot = finished->slot;
      finished = nullptr;
      end_cta(slot);
      if (!remaining.empty()) start_cta(slot);
    }
  }
  check_canaries();
}

}  // namespace

// ---- what the other files use ---------------------------------------------------------------------------------------

Policy Policy::of(uint64_t seed, Random& random) {
  static constexpr Timing TIMINGS[][3] = {
      {Timing::LATE, Timing::LATE, Timing::LATE},    {Timing::EARLY, Timing::EARLY, Timing::EARLY},
      {Timing::LATE, Timing::LATE, Timing::EARLY},   {Timing::EARLY, Timing::EARLY, Timing::LATE},
      {Timing::MIXED, Timing::MIXED, Timing::MIXED}, {Timing::MIXED, Timing::MIXED, Timing::LATE},
      {Timing::LATE, Timing::LATE, Timing::MIXED},   {Timing::LATE, Timing::MIXED, Timing::EARLY},
  };
  static constexpr uint32_t REDRAWS[] = {0, 10, 100, 1000, ~0u}, PREEMPTS[] = {0, 30, 1000}, DELAYS[] = {30, 300, 3000};
  const auto& timing = TIMINGS[seed % std::size(TIMINGS)];
  Policy policy;
  policy.copies = timing[0], policy.bulk = timing[1], policy.wgmma = timing[2];
  policy.redraw = REDRAWS[random.below(std::size(REDRAWS))];
  policy.lanes = decltype(policy.lanes)(random.below(3));
  policy.preempt = PREEMPTS[random.below(std::size(PREEMPTS))];
  policy.bulk_delay = DELAYS[random.below(std::size(DELAYS))];
  policy.align_right = seed % 2 == 0;
  return policy;
}

bool mixed(Timing timing) {
  return timing == Timing::EARLY || (timing == Timing::MIXED && machine.random.one_in(2));
}

void block(Wait wait) {
  Thread* self = machine.current;
  if (wait.kind != Wait::POLL) self->polled = false;
  if (self->state != Thread::DONE) self->state = Thread::WAITING;
  self->wait = wait;
  self->warp->ready &= ~(1u << self->lane);
  switch_to(self->fiber, pick());
}

void wake(Thread* thread) {
  thread->state = Thread::READY;
  thread->wait = {};
  thread->warp->ready |= 1u << thread->lane;
}

void wake_all(std::vector<Thread*>& threads) {
  for (Thread* thread : threads) wake(thread);
  threads.clear();
}

void yield() { switch_to(machine.current->fiber, pick()); }

void poll(Where where) {
  pollers.push_back(machine.current);
  block({Wait::POLL, nullptr, 0, where});
}

std::string lane_list(unsigned mask) {
  std::string text;
  for (unsigned lane = 0; lane < WARP_SIZE; lane++) {
    if (!(mask >> lane & 1)) continue;
    unsigned last = lane;
    while (last + 1 < WARP_SIZE && mask >> (last + 1) & 1) last++;
    text += (text.empty() ? "" : ",") + (last > lane ? format("%u-%u", lane, last) : format("%u", lane));
    lane = last;
  }
  return text;
}

void fail(const char* kind, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  end_run(kind, formatted(format, arguments));
}

void blame(const char* kind, Where where, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  end_run(kind, machine.current->name() + " " + formatted(format, arguments) + " " + where.text());
}

std::string format(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  return formatted(format, arguments);
}


}  // namespace emu

// ---- what Python calls ----------------------------------------------------------------------------------------------

extern "C" {

// Runs a grid. Returns 0, or 1 if it failed: then emu_error_kind and emu_error_text say how.
int emu_run(void (*entry)(const void*), const void* params, unsigned grid, unsigned block, unsigned smem_bytes,
            unsigned smem_alignment, uint64_t seed, unsigned resident, int shuffled, int check_races, int overlaps) {
  using namespace emu;
  machine = Machine();
  machine.launch = {entry, params, grid, block, smem_bytes, smem_alignment, resident, bool(shuffled), bool(check_races),
                    bool(overlaps), seed};
  order.clear(), pollers.clear(), remaining.clear();
  forget_bulk_loads();
  finished = nullptr, failed = false, idle_polls = 0;
  watch_faults(true);
  try {
    run_grid();
  } catch (const Failed&) {
  }
  watch_faults(false);
  machine.current = nullptr;
  machine.ctas.clear();
  release_shared();
  return failed;
}

const char* emu_error_kind() { return emu::error_kind.c_str(); }
const char* emu_error_text() { return emu::error_text.c_str(); }
}
