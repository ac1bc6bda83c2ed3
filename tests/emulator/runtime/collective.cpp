// Instructions at which threads meet: warp collectives, votes and shuffles, CTA-wide and named barriers.
#include <algorithm>

#include "machine.h"

namespace emu {
namespace {

[[noreturn]] void diverged(const Collective& other, const char* name, Where where) {
  blame("divergence", where, "finds lanes %s of its warp at %s %s when it comes to %s",
        lane_list(other.arrived).c_str(), other.name, other.where.text().c_str(), name);
}

void drop(Warp& warp, Collective* done) {
  std::erase_if(warp.collectives, [&](auto& collective) { return collective.get() == done; });
}

}  // namespace

void collective(const char* name, uint64_t variant, unsigned mask, void* slot, Where where,
                void (*act)(Warp&, Collective&)) {
  Thread& self = *machine.current;
  Warp& warp = *self.warp;
  const unsigned bit = 1u << self.lane;
  if (!(mask & bit)) {
    blame("divergence", where, "gives %s the mask %#x, which lacks its own lane", name, mask);
  }
  if (mask & ~warp.alive) {
    blame("divergence", where, "comes to %s for lanes %s, of which %s have ended", name, lane_list(mask).c_str(),
          lane_list(mask & ~warp.alive).c_str());
  }
  if (warp.barrier) diverged(*warp.barrier, name, where);
  Collective* meeting = nullptr;
  for (auto& other : warp.collectives) {
    if (!(other->mask & mask)) continue;
    const bool same = other->mask == mask && other->name == name && other->variant == variant && other->where == where;
    if (!same) diverged(*other, name, where);
    meeting = other.get();
  }
  if (!meeting) {
    warp.collectives.push_back(std::make_unique<Collective>(Collective{name, variant, mask, 0, where, {}}));
    meeting = warp.collectives.back().get();
  }
  meeting->slots[self.lane] = slot;
  meeting->arrived |= bit;
  if (meeting->arrived != mask) return block({Wait::COLLECTIVE, meeting, 0, where});
  act(warp, *meeting);
  if (mask == warp.alive) race::meet(warp);
  drop(warp, meeting);
  for (unsigned lane = 0; lane < WARP_SIZE; lane++) {
    if (mask >> lane & 1 && lane != self.lane) wake(warp.threads[lane]);
  }
  yield();
}

// ---- warp-wide ------------------------------------------------------------------------------------------------------

void warp_barrier(unsigned mask, Site site) {
  collective("__syncwarp", 0, mask, nullptr, site, [](Warp& warp, Collective& meeting) {
    Clock all;
    for (unsigned lane = 0; lane < WARP_SIZE; lane++) {
      if (meeting.mask >> lane & 1) race::release(*warp.threads[lane], all);
    }
    for (unsigned lane = 0; lane < WARP_SIZE; lane++) {
      if (meeting.mask >> lane & 1) race::acquire(*warp.threads[lane], all);
    }
  });
}

unsigned ballot(unsigned mask, bool predicate, Site site) {
  unsigned value = predicate;
  collective("a vote", 0, mask, &value, site, [](Warp&, Collective& meeting) {
    unsigned result = 0;
    for (unsigned lane = 0; lane < WARP_SIZE; lane++) {
      if (meeting.mask >> lane & 1) result |= *static_cast<unsigned*>(meeting.slots[lane]) << lane;
    }
    for (unsigned lane = 0; lane < WARP_SIZE; lane++) {
      if (meeting.mask >> lane & 1) *static_cast<unsigned*>(meeting.slots[lane]) = result;
    }
  });
  return value;
}

unsigned long long shuffle(Shuffle how, unsigned mask, unsigned long long bits, int operand, int width, Site site) {
  struct Slot { unsigned long long bits, result; int source; } slot = {bits, 0, 0};
  const int lane = int(machine.current->lane), first = lane / width * width;
  int source = lane;
  if (how == Shuffle::IDX) source = first + operand % width;
  if (how == Shuffle::UP) source = lane - operand < first ? lane : lane - operand;
  if (how == Shuffle::DOWN) source = lane + operand >= first + width ? lane : lane + operand;
  if (how == Shuffle::XOR) source = (lane ^ operand) >= first + width ? lane : lane ^ operand;
  if (!(mask >> source & 1)) {
    blame("divergence", site, "shuffles from lane %d, which is not in the mask %#x", source, mask);
  }
  slot.source = source;
  collective("a shuffle", unsigned(how), mask, &slot, site, [](Warp&, Collective& meeting) {
    for (unsigned lane = 0; lane < WARP_SIZE; lane++) {
      if (!(meeting.mask >> lane & 1)) continue;
      Slot& slot = *static_cast<Slot*>(meeting.slots[lane]);
      slot.result = static_cast<Slot*>(meeting.slots[slot.source])->bits;
    }
  });
  return slot.result;
}

// ---- CTA-wide -------------------------------------------------------------------------------------------------------

namespace {

struct Arrival { int id; unsigned threads; bool wait; };

// Threads that a barrier needs: all of the CTA's but whole warps that have ended, unless a number is given.
unsigned expected_threads(const Cta& cta, unsigned threads) {
  if (threads) return threads;
  for (const Warp& warp : cta.warps) threads += warp.alive ? WARP_SIZE : 0;
  return threads;
}

void open(NamedBarrier& barrier) {
  barrier.result[int(Vote::AND)] = barrier.all;
  barrier.result[int(Vote::OR)] = barrier.any;
  barrier.result[int(Vote::COUNT)] = barrier.count;
  for (Thread* thread : barrier.waiting) race::acquire(*thread, barrier.clock);
  barrier.clock.clear();
  barrier.warps.clear();
  barrier.expected = barrier.arrived = 0;
  barrier.all = 1, barrier.any = 0, barrier.count = 0;
  wake_all(barrier.waiting);
}

// All live lanes of a warp have come: the barrier counts the whole warp.
void warp_arrives(Warp& warp, const Arrival& arrival, Where where) {
  Cta& cta = *warp.cta;
  NamedBarrier& barrier = cta.barriers[arrival.id];
  const unsigned expected = expected_threads(cta, arrival.threads);
  if (barrier.arrived == 0) barrier.expected = expected, barrier.everybody = arrival.threads == 0;
  if (barrier.expected != expected) {
    blame("barrier misuse", where, "and its warp come to barrier %d for %u threads, but others came to it for %u",
          arrival.id, expected, barrier.expected);
  }
  if (std::find(barrier.warps.begin(), barrier.warps.end(), warp.index) != barrier.warps.end()) {
    blame("barrier misuse", where, "and its warp arrive at barrier %d again before it has opened", arrival.id);
  }
  barrier.warps.push_back(warp.index);
  barrier.arrived += WARP_SIZE;
  for (unsigned lane = 0; lane < WARP_SIZE; lane++) {
    Thread& thread = *warp.threads[lane];
    if (!(warp.alive >> lane & 1)) continue;
    race::release(thread, barrier.clock);
    barrier.all &= warp.predicates[lane] != 0;
    barrier.any |= warp.predicates[lane] != 0;
    barrier.count += warp.predicates[lane] != 0;
    if (arrival.wait) barrier.waiting.push_back(&thread);
  }
  if (barrier.arrived > barrier.expected) {
    blame("barrier misuse", where, "and its warp are too many for barrier %d of %u threads", arrival.id,
          barrier.expected);
  }
  if (barrier.arrived == barrier.expected) open(barrier);
}

void gathered(Warp& warp) {
  const std::unique_ptr<Collective> gathering = std::move(warp.barrier);
  const Arrival arrival = *static_cast<Arrival*>(gathering->slots[__builtin_ctz(gathering->arrived)]);
  race::meet(warp);
  if (!arrival.wait) {
    for (unsigned lane = 0; lane < WARP_SIZE; lane++) {
      if (gathering->arrived >> lane & 1 && warp.threads[lane]->state == Thread::WAITING) wake(warp.threads[lane]);
    }
  }
  warp_arrives(warp, arrival, gathering->where);
}

}  // namespace

int cta_barrier(int id, int threads, bool wait, Vote vote, int predicate, Site site) {
  Thread& self = *machine.current;
  Warp& warp = *self.warp;
  Cta& cta = *self.cta;
  const char* name = threads == 0 ? "__syncthreads" : wait ? "bar.sync" : "bar.arrive";
  if (id < 0 || id >= int(NAMED_BARRIERS) || threads < 0 || threads % WARP_SIZE || threads > int(cta.threads.size())) {
    blame("barrier misuse", site, "comes to barrier %d for %d threads: ids go to %u, threads come in whole warps", id,
          threads, NAMED_BARRIERS - 1);
  }
  for (auto& other : warp.collectives) diverged(*other, name, site);
  Arrival arrival = {id, unsigned(threads), wait};
  const uint64_t variant = uint64_t(threads) << 32 | unsigned(id) << 1 | wait;
  if (!warp.barrier) {
    warp.barrier = std::make_unique<Collective>(Collective{name, variant, 0, 0, site, {}});
  }
  Collective& gathering = *warp.barrier;
  if (gathering.variant != variant || !(gathering.where == Where(site))) diverged(gathering, name, site);
  gathering.arrived |= 1u << self.lane;
  gathering.slots[self.lane] = &arrival;
  warp.predicates[self.lane] = predicate;
  if (gathering.arrived == warp.alive) {
    self.state = Thread::WAITING;
    gathered(warp);
    if (self.state == Thread::READY) {  // it opened, or this warp only arrives
      yield();
      return cta.barriers[id].result[int(vote)];
    }
  }
  block({Wait::BARRIER, &cta.barriers[id], unsigned(id), site});
  return cta.barriers[id].result[int(vote)];
}

void leave(Thread& thread) {
  Warp& warp = *thread.warp;
  Cta& cta = *thread.cta;
  finish_copies(thread);
  finish_stores(thread);
  finish_products(thread);
  warp.alive &= ~(1u << thread.lane);
  cta.alive--;
  for (auto& meeting : warp.collectives) {
    if (!(meeting->mask >> thread.lane & 1)) continue;
    blame("divergence", meeting->where, "ends while lanes %s of its warp wait for it at %s",
          lane_list(meeting->arrived).c_str(), meeting->name);
  }
  if (warp.barrier && warp.alive && warp.barrier->arrived == warp.alive) gathered(warp);
  if (warp.alive) return;
  NamedBarrier& barrier = cta.barriers[0];  // __syncthreads no longer waits for a warp that has ended
  if (barrier.arrived == 0 || !barrier.everybody) return;
  barrier.expected -= WARP_SIZE;
  if (barrier.arrived == barrier.expected) open(barrier);
}

std::string describe_wait(const Wait& wait) {
  const std::string at = " " + wait.where.text();
  switch (wait.kind) {
    case Wait::NOTHING: return "could run";
    case Wait::POLL: return "polls global memory" + at;
    case Wait::WARPGROUP: return "waits for the other warps of its warpgroup" + at;
    case Wait::MBARRIER: return describe_mbarrier(wait.object, wait.detail) + at;
    case Wait::COLLECTIVE: {
      const auto& meeting = *static_cast<const Collective*>(wait.object);
      return format("wait at %s for lanes %s", meeting.name, lane_list(meeting.mask & ~meeting.arrived).c_str()) + at;
    }
    case Wait::BARRIER: {
      const auto& barrier = *static_cast<const NamedBarrier*>(wait.object);
      std::string warps;
      for (unsigned warp : barrier.warps) warps += format(" %u", warp);
      return format("wait at barrier %u for %u threads, of which %u came (warps%s)", wait.detail, barrier.expected,
                    barrier.arrived, warps.empty() ? " none" : warps.c_str()) + at;
    }
  }
  return "";
}

}  // namespace emu
