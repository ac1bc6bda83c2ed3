// cp.async: a copy may land at any time from its issue to the wait of the thread that issued it. Until then its
// destination is poison.
#include <cstring>

#include "machine.h"

namespace emu {
namespace {

void land(CopyAsync& copy) {
  if (copy.landed) return;
  copy.landed = true;
  char* target = shared_pointer(copy.smem, copy.bytes, copy.bytes, Access::WRITE, copy.where);
  memcpy(target, copy.gmem, copy.source_bytes);
  memset(target + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
}

void finish(Thread& thread, std::vector<CopyAsync>& group) {
  for (CopyAsync& copy : group) {
    land(copy);
    race::finish_write(thread, shared_offset(copy.smem), copy.bytes);
  }
  group.clear();
}

}  // namespace

void copy_async(unsigned smem, const void* gmem, unsigned bytes, unsigned source_bytes, Site site) {
  Thread& self = *machine.current;
  if (source_bytes) check_global(gmem, source_bytes, bytes, Access::READ, site);
  char* target = shared_pointer(smem, bytes, bytes, Access::WRITE, site);
  race::begin_write(self, shared_offset(smem), bytes, site);
  CopyAsync copy = {smem, static_cast<const char*>(gmem), bytes, source_bytes, false, site};
  if (mixed(machine.policy.copies)) {
    land(copy);
  } else {
    memset(target, POISON, bytes);
  }
  self.copies.back().push_back(copy);
  pause(site);
}

void copy_async_commit(Site) { machine.current->copies.emplace_back(); }

void copy_async_wait(int pending, Site site) {
  Thread& self = *machine.current;
  while (int(self.copies.size()) - 1 > pending) {
    finish(self, self.copies.front());
    self.copies.pop_front();
  }
  pause(site);
}

void finish_copies(Thread& thread) {
  for (auto& group : thread.copies) finish(thread, group);
}

// ---- global memory between threads ----------------------------------------------------------------------------------

void atomic_point(const void* pointer, unsigned bytes, bool write, bool polling, Site site) {
  if (bytes) check_plain(static_cast<const char*>(pointer), bytes, write ? Access::ATOMIC : Access::READ, site);
  if (polling) return poll(site);
  pause(site);
}

void pause(Site) {
  constexpr uint32_t CHANCE = 4;  // calls between changes of thread, on average
  if (machine.random.one_in(CHANCE)) yield();
}

void trap(const char* what, Site site) {
  blame("trap", site, "reaches %s", what);
}

}  // namespace emu
