// Unordered accesses to shared memory, found whatever order the threads happened to take: every two bytes remember who
// wrote and read them last, and clocks that travel along barriers tell whether that is known to have happened before.
//
// Lanes of a warp are threads like any others: between them only __syncwarp orders. One thing is let pass: what a lane
// has read may be overwritten by whoever is ordered after a later instruction of its whole warp (mma, ldmatrix, wgmma, a
// shuffle), which no lane passes before the others have come to it. So clocks count those of every warp, too.
#include <algorithm>

#include "machine.h"

namespace emu::race {
namespace {

constexpr unsigned GRANULE = 2, MBARRIERS = 64;

// The last write to a granule.
struct Write {
  uint32_t step = 0;  // 0: none
  uint16_t member = 0;
  bool generic = true;  // by a thread rather than the asynchronous proxy
  bool atomic = false;
  uint64_t readers = 0;  // the columns that have read it since
};
struct Read {
  uint32_t step;
  uint16_t member;
  uint32_t meetings;  // of the lane's warp until then
};

// The shared memory of a slot. Most accesses are reads, of granules next to each other: they touch two of the arrays.
struct History {
  std::vector<Write> writes;  // [granule]
  std::vector<Where> places;  // [granule]: of the last write
  std::vector<Read> reads;    // [column][granule]: the last by each warp, by each warpgroup's wgmma, by bulk stores
  Clock highest;              // the last step of each member of a clock
};
std::vector<History> histories;
unsigned thread_count, warps, warpgroups;
size_t granules_of_each;  // in every history

bool off() { return !machine.launch.check_races; }
History& history(const Cta& cta) { return histories[cta.slot]; }
unsigned warp_column(const Thread& thread) { return thread.warp->index; }
unsigned meetings_of(unsigned warp) { return thread_count + warpgroups + MBARRIERS + warp; }  // a member of the clocks
unsigned bulk_column() { return warps + warpgroups; }

std::string member_name(unsigned member) {
  if (member < thread_count) return format("thread %u (warp %u)", member, member / WARP_SIZE);
  if (member < thread_count + warpgroups) return format("wgmma of warpgroup %u", member - thread_count);
  return "TMA";
}

std::string byte_name(unsigned granule) {
  const unsigned offset = granule * GRANULE;
  if (offset < STATIC_SHARED) return format("byte %u of static shared memory", offset);
  return format("byte %u of shared memory", offset - STATIC_SHARED);
}

[[noreturn]] void report(unsigned granule, const char* does, const char* did, unsigned member,
                         Where where, const Where* earlier) {
  const std::string place = earlier ? " " + earlier->text() : "";
  fail("race", "%s %s %s %s, but no barrier orders that after %s %s it%s", machine.current->name().c_str(), does,
       byte_name(granule).c_str(), where.text().c_str(), member_name(member).c_str(), did, place.c_str());
}

struct Granules {
  unsigned first, last;
  Granules(unsigned offset, unsigned bytes) : first(offset / GRANULE), last((offset + bytes - 1) / GRANULE) {}
};

Read& read_by(History& h, unsigned column, unsigned granule) { return h.reads[column * granules_of_each + granule]; }

void set_read(History& h, unsigned column, unsigned granule, const Read& read) {
  h.writes[granule].readers |= uint64_t(1) << column;
  read_by(h, column, granule) = read;
}

void check_last_write(const Thread& thread, const History& h, unsigned granule, const char* does, Where where,
                      bool atomic = false) {
  const Write& write = h.writes[granule];
  if (!write.step || (write.atomic && atomic) || knows(thread, write.member, write.step)) return;
  const char* did = write.step == UNFINISHED ? "began to copy (and has not waited for)" : "wrote";
  report(granule, does, did, write.member, where, &h.places[granule]);
}

void check_last_reads(const Thread& thread, History& h, unsigned granule, const char* does, Where where) {
  for (uint64_t readers = h.writes[granule].readers; readers; readers &= readers - 1) {
    const unsigned column = unsigned(__builtin_ctzll(readers));
    const Read& read = read_by(h, column, granule);
    if (knows(thread, read.member, read.step)) continue;
    if (column < warps && thread.clock[meetings_of(column)] > read.meetings) continue;
    report(granule, does, read.step == UNFINISHED ? "still reads" : "read", read.member, where, nullptr);
  }
}

// The asynchronous proxy sees what threads wrote only past a fence by the writer, known to whoever starts the access.
void check_proxy_fence(const Thread& issuer, const History& h, unsigned granule, const char* does, Where where) {
  const Write& write = h.writes[granule];
  if (!write.step || !write.generic) return;
  const auto& fences = issuer.cta->threads[write.member].proxy_fences;
  const auto fence = std::upper_bound(fences.begin(), fences.end(), write.step);
  if (fence != fences.end() && knows(issuer, write.member, *fence)) return;
  const std::string written = member_name(write.member) + " wrote " + h.places[granule].text();
  fail("missing proxy fence", "%s %s %s %s, which %s without fence.proxy.async before the barrier between them",
       issuer.name().c_str(), does, byte_name(granule).c_str(), where.text().c_str(), written.c_str());
}

void write(Thread& thread, unsigned offset, unsigned bytes, uint32_t step, Where where, bool atomic = false) {
  History& h = history(*thread.cta);
  const Granules granules(offset, bytes);
  for (unsigned g = granules.first; g <= granules.last; g++) {
    check_last_write(thread, h, g, "writes", where, atomic);
    check_last_reads(thread, h, g, "writes", where);
    h.writes[g] = {step, uint16_t(thread.index), true, atomic};
    h.places[g] = where;
  }
}

}  // namespace

bool knows(const Thread& thread, unsigned member, uint32_t step) {
  return off() || (step != UNFINISHED && step <= thread.clock[member]);
}

void begin_run(unsigned threads_per_cta, unsigned shared_bytes, unsigned slots) {
  thread_count = threads_per_cta;
  warps = thread_count / WARP_SIZE;
  warpgroups = (warps + WARPGROUP_WARPS - 1) / WARPGROUP_WARPS;
  const unsigned columns = bulk_column() + 1;
  if (columns > 64) fail("emulator", "more than 64 kinds of readers");
  histories.clear();
  histories.resize(slots);
  granules_of_each = off() ? 0 : (STATIC_SHARED + shared_bytes + GRANULE - 1) / GRANULE;
  for (History& h : histories) {
    h.writes.resize(granules_of_each);
    h.places.resize(granules_of_each);
    h.reads.resize(granules_of_each * columns);
    h.highest.assign(meetings_of(warps), 0);
  }
}

void begin_cta(Cta& cta) {
  if (off()) return;
  Clock& highest = history(cta).highest;
  for (unsigned i = 0; i < thread_count; i++) highest[i] += 2;  // a fence after all before, and a step after that
  for (Thread& thread : cta.threads) {  // it knows all that went on before, and of its siblings nothing
    thread.clock = highest;
    for (unsigned i = 0; i < thread_count; i++) thread.clock[i] -= i != thread.index;
    thread.proxy_fences.assign(1, highest[thread.index] - 1);
  }
}

void meet(Warp& warp) {
  if (off()) return;
  const uint32_t meetings = ++history(*warp.cta).highest[meetings_of(warp.index)];
  for (Thread* thread : warp.threads) thread->clock[meetings_of(warp.index)] = meetings;
}

void release(Thread& thread, Clock& into) {
  if (off()) return;
  if (into.empty()) into.assign(thread.clock.size(), 0);
  for (size_t i = 0; i < into.size(); i++) into[i] = std::max(into[i], thread.clock[i]);
  history(*thread.cta).highest[thread.index] = ++thread.clock[thread.index];
}

void acquire(Thread& thread, const Clock& from) {
  if (off() || from.empty()) return;
  for (size_t i = 0; i < from.size(); i++) thread.clock[i] = std::max(thread.clock[i], from[i]);
}

void knows_agent(Thread& thread, unsigned agent, uint32_t step) {
  if (!off()) thread.clock[agent] = std::max(thread.clock[agent], step);
}

void access(Thread& thread, unsigned offset, unsigned bytes, Access access, Where where) {
  if (off()) return;
  const uint32_t step = thread.clock[thread.index];
  if (access != Access::READ) return write(thread, offset, bytes, step, where, access == Access::ATOMIC);
  History& h = history(*thread.cta);
  const Granules granules(offset, bytes);
  const Read read = {step, uint16_t(thread.index), thread.clock[meetings_of(warp_column(thread))]};
  for (unsigned g = granules.first; g <= granules.last; g++) {
    check_last_write(thread, h, g, "reads", where);
    set_read(h, warp_column(thread), g, read);
  }
}

void begin_write(Thread& thread, unsigned offset, unsigned bytes, Where where) {
  if (!off()) write(thread, offset, bytes, UNFINISHED, where);
}

void finish_write(Thread& thread, unsigned offset, unsigned bytes) {
  if (off()) return;
  const Granules granules(offset, bytes);
  for (unsigned g = granules.first; g <= granules.last; g++) {
    Write& write = history(*thread.cta).writes[g];
    if (write.member == thread.index && write.step == UNFINISHED) write.step = thread.clock[thread.index];
  }
}

void fence_proxy(Thread& thread) {
  if (off()) return;
  Clock nobody;
  release(thread, nobody);
  thread.proxy_fences.push_back(thread.clock[thread.index]);
}

unsigned warpgroup_agent(unsigned warpgroup) { return thread_count + warpgroup; }

unsigned mbarrier_agent(const Mbarrier& barrier) {
  if (barrier.index >= MBARRIERS) fail("emulator", "more than %u mbarriers", MBARRIERS);
  return thread_count + warpgroups + barrier.index;
}

uint32_t next_step(const Cta& cta, unsigned agent) { return off() ? 1 : history(cta).highest[agent] + 1; }

void agent_writes(Thread& issuer, unsigned agent, uint32_t step, unsigned offset, unsigned bytes, Where where) {
  if (off()) return;
  History& h = history(*issuer.cta);
  h.highest[agent] = std::max(h.highest[agent], step);
  const Granules granules(offset, bytes);
  for (unsigned g = granules.first; g <= granules.last; g++) {
    check_last_write(issuer, h, g, "starts TMA writes to", where);
    check_proxy_fence(issuer, h, g, "starts TMA writes to", where);
    check_last_reads(issuer, h, g, "starts TMA writes to", where);
    h.writes[g] = {step, uint16_t(agent), false, false};
    h.places[g] = where;
  }
}

void agent_reads(Thread& issuer, unsigned agent, uint32_t step, unsigned offset, unsigned bytes, Where where) {
  if (off()) return;
  History& h = history(*issuer.cta);
  if (step != UNFINISHED) h.highest[agent] = std::max(h.highest[agent], step);
  const unsigned column = agent < thread_count ? bulk_column() : warps + agent - thread_count;
  const Granules granules(offset, bytes);
  for (unsigned g = granules.first; g <= granules.last; g++) {
    check_last_write(issuer, h, g, "starts asynchronous reads of", where);
    check_proxy_fence(issuer, h, g, "starts asynchronous reads of", where);
    set_read(h, column, g, {step, uint16_t(agent), 0});
  }
}

void begin_bulk_read(Thread& issuer, unsigned offset, unsigned bytes, Where where) {
  agent_reads(issuer, issuer.index, UNFINISHED, offset, bytes, where);
}

void finish_bulk_read(Thread& issuer, unsigned offset, unsigned bytes) {
  if (off()) return;
  const Granules granules(offset, bytes);
  for (unsigned g = granules.first; g <= granules.last; g++) {
    Read& read = read_by(history(*issuer.cta), bulk_column(), g);
    if (read.member == issuer.index && read.step == UNFINISHED) read.step = issuer.clock[issuer.index];
  }
}

}  // namespace emu::race
