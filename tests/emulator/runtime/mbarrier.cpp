// mbarriers: barriers in shared memory that count arrivals, of threads and of bytes that TMA brings.
#include <cstring>

#include "machine.h"

namespace emu {
namespace {

constexpr unsigned MBARRIER_BYTES = 8;

void check_balance(const Mbarrier& barrier, Where where) {
  if (barrier.pending || barrier.bytes >= 0) return;
  fail("barrier misuse", "%lld bytes more than expected arrive at mbarrier %u by a TMA load %s",
       (long long)-barrier.bytes, barrier.index, where.text().c_str());
}

// Opens the barrier if nothing more is due in its phase.
void settle(Mbarrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  if (!barrier.arriving.empty()) barrier.arriving[race::mbarrier_agent(barrier)] = barrier.step();
  barrier.complete = barrier.arriving;
  barrier.phase++;
  barrier.pending = barrier.expected;
  wake_all(barrier.waiting);
}

}  // namespace

Mbarrier& mbarrier_at(unsigned address, const char* does, Where where) {
  Thread& self = *machine.current;
  const auto found = self.cta->mbarriers.find(address);
  if (found == self.cta->mbarriers.end()) {
    blame("barrier misuse", where, "%s an mbarrier that was never initialised", does);
  }
  Mbarrier& barrier = found->second;
  const char* memory = shared_pointer(address, MBARRIER_BYTES, MBARRIER_BYTES, Access::READ, where);
  if (memcmp(memory, &barrier.pattern, MBARRIER_BYTES)) {
    blame("barrier misuse", where, "%s an mbarrier whose memory was overwritten", does);
  }
  if (!race::knows(self, barrier.initialiser, barrier.initialised)) {
    blame("race", where, "%s an mbarrier, but no barrier orders that after its initialisation by thread %u", does,
          barrier.initialiser);
  }
  return barrier;
}

void complete_bytes(Mbarrier& barrier, unsigned bytes, Where where) {
  barrier.bytes -= bytes;
  check_balance(barrier, where);
  settle(barrier);
}

void mbarrier_init(unsigned address, unsigned arrivals, Site site) {
  Thread& self = *machine.current;
  char* memory = access_shared(address, MBARRIER_BYTES, MBARRIER_BYTES, Access::WRITE, site);
  auto& barriers = self.cta->mbarriers;
  if (arrivals == 0 || barriers.count(address)) {
    blame("barrier misuse", site, "initialises an mbarrier %s", arrivals ? "a second time" : "for 0 arrivals");
  }
  Mbarrier barrier = {};
  barrier.expected = barrier.pending = arrivals;
  barrier.index = unsigned(barriers.size());
  barrier.first_step = race::next_step(*self.cta, race::mbarrier_agent(barrier));
  barrier.pattern = 0xba221e5500000000u | address;
  memcpy(memory, &barrier.pattern, MBARRIER_BYTES);
  barrier.initialiser = self.index;
  barrier.initialised = self.clock.empty() ? 0 : self.clock[self.index];
  barriers.emplace(address, barrier);
}

void mbarrier_init_fence(Site) {
  Thread& self = *machine.current;
  for (auto& [address, barrier] : self.cta->mbarriers) barrier.fenced |= barrier.initialiser == self.index;
}

void mbarrier_arrive(unsigned address, unsigned bytes, Site site) {
  Thread& self = *machine.current;
  Mbarrier& barrier = mbarrier_at(address, "arrives at", site);
  race::release(self, barrier.arriving);
  barrier.bytes += bytes;
  if (barrier.pending == 0) {  // all arrivals are in, bytes are not
    blame("barrier misuse", site, "arrives at an mbarrier that has all of its %u arrivals", barrier.expected);
  }
  barrier.pending--;
  check_balance(barrier, site);
  settle(barrier);
  pause(site);
}

void mbarrier_wait(unsigned address, unsigned parity, Site site) {
  Thread& self = *machine.current;
  Mbarrier& barrier = mbarrier_at(address, "waits on", site);
  while (barrier.phase % 2 == parity) {  // the phase of that parity is not complete yet
    barrier.waiting.push_back(&self);
    block({Wait::MBARRIER, &barrier, parity, site});
  }
  race::acquire(self, barrier.complete);
  pause(site);
}

bool mbarrier_try_wait(unsigned address, unsigned parity, Site site) {
  mbarrier_wait(address, parity, site);
  return true;
}

std::string describe_mbarrier(const void* object, unsigned parity) {
  const auto& barrier = *static_cast<const Mbarrier*>(object);
  return format("wait on mbarrier %u for parity %u, in phase %u, which lacks %u of %u arrivals and %lld bytes "
                "(%u loads in flight)", barrier.index, parity, barrier.phase, barrier.pending, barrier.expected,
                (long long)barrier.bytes, loads_in_flight(barrier));
}

void fence_proxy_async(Site) { race::fence_proxy(*machine.current); }

}  // namespace emu
