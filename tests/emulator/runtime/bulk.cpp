// The copies between global and shared memory that TMA makes on its own. A load may land at any time from its
// issue until a thread can go no further without it; a store may read shared memory as late as its issuer's wait for
// reading, and write as late as the wait for writing.
#include <algorithm>
#include <cstring>
#include <utility>

#include "machine.h"
#include "operand.h"

namespace emu {
namespace {

constexpr unsigned SMEM_ALIGNMENT = 128, BULK_ALIGNMENT = 16, MAP_ALIGNMENT = 64;

struct BulkLoad {
  unsigned smem, bytes, barrier;
  TensorMap map;  // magic 0: linear
  const char* gmem;
  int coordinates[TENSOR_RANK];
  unsigned thread;
  Cta* cta;
  Where where;
};
std::vector<BulkLoad> loads;  // in flight

// ---- boxes ----------------------------------------------------------------------------------------------------------

const TensorMap& checked_map(const void* pointer, unsigned smem, Where where) {
  const auto& map = *static_cast<const TensorMap*>(pointer);
  if (reinterpret_cast<uintptr_t>(pointer) % MAP_ALIGNMENT) {
    blame("misaligned", where, "uses a tensor map that is not aligned to %u bytes", MAP_ALIGNMENT);
  }
  if (map.magic != TensorMap::MAGIC) blame("misuse", where, "uses a tensor map that the host has not filled");
  if (smem % SMEM_ALIGNMENT) {
    blame("misaligned", where, "gives TMA shared memory that is not aligned to %u bytes", SMEM_ALIGNMENT);
  }
  return map;
}

unsigned box_bytes(const TensorMap& map) {
  unsigned bytes = map.element_bytes;
  for (unsigned extent : map.box) bytes *= extent;
  return bytes;
}

// Calls visit(shared address, global address or null outside the tensor) for each element of a box.
template <class Visit> void for_each_element(const TensorMap& map, const int* coordinates, unsigned smem, Visit visit) {
  const unsigned rows = map.box[1] * map.box[2] * map.box[3];
  for (unsigned row = 0; row < rows; row++) {
    const unsigned offsets[] = {0, row % map.box[1], row / map.box[1] % map.box[2], row / map.box[1] / map.box[2]};
    char* start = reinterpret_cast<char*>(map.base);
    for (int dim = 1; dim < TENSOR_RANK && start; dim++) {
      const long long x = (long long)coordinates[dim] + offsets[dim];
      start = x < 0 || x >= map.extent[dim] ? nullptr : start + x * (long long)map.stride_bytes[dim];
    }
    for (unsigned i = 0; i < map.box[0]; i++) {
      const long long x = (long long)coordinates[0] + i;
      const bool inside = start && x >= 0 && x < map.extent[0];
      visit(swizzled(smem + (row * map.box[0] + i) * map.element_bytes, map.swizzle_bytes),
            inside ? start + x * map.element_bytes : nullptr);
    }
  }
}

void check_multiple(unsigned bytes, Where where) {
  if (bytes % BULK_ALIGNMENT == 0) return;
  blame("misaligned", where, "makes a bulk copy of %u bytes, not a multiple of %u", bytes, BULK_ALIGNMENT);
}

// ---- loads ----------------------------------------------------------------------------------------------------------

void land(BulkLoad load) {
  // Shared memory is addressed through the current thread's CTA.
  Thread* const self = std::exchange(machine.current, &load.cta->threads[load.thread]);
  if (!load.map.magic) {
    memcpy(shared_pointer(load.smem, load.bytes, 1, Access::WRITE, load.where), load.gmem, load.bytes);
  } else {
    for_each_element(load.map, load.coordinates, load.smem, [&](unsigned smem, const char* element) {
      char* target = shared_pointer(smem, load.map.element_bytes, 1, Access::WRITE, load.where);
      if (element) memcpy(target, element, load.map.element_bytes);
      else memset(target, 0, load.map.element_bytes);
    });
  }
  complete_bytes(load.cta->mbarriers.at(load.barrier), load.bytes, load.where);
  machine.current = self;
}

void start(BulkLoad load) {
  Thread& self = *machine.current;
  Mbarrier& barrier = mbarrier_at(load.barrier, "gives TMA", load.where);
  if (!barrier.fenced) {
    blame("missing proxy fence", load.where, "gives TMA an mbarrier that was initialised without mbarrier_init_fence");
  }
  char* target = shared_pointer(load.smem, load.bytes, BULK_ALIGNMENT, Access::WRITE, load.where);
  race::agent_writes(self, race::mbarrier_agent(barrier), barrier.step(), shared_offset(load.smem),
                     load.bytes, load.where);
  load.thread = self.index;
  load.cta = self.cta;
  memset(target, POISON, load.bytes);
  if (mixed(machine.policy.bulk)) land(load);
  else loads.push_back(load);
  pause({});
}

// ---- stores ---------------------------------------------------------------------------------------------------------

// Takes what shared memory holds now.
void read(BulkStore& store) {
  if (store.read) return;
  const char* source = shared_pointer(store.smem, store.bytes, BULK_ALIGNMENT, Access::READ, store.where);
  store.data.assign(source, source + store.bytes);
  store.read = true;
}

void write(BulkStore& store) {
  read(store);
  if (store.written) return;
  store.written = true;
  if (!store.map.magic) {
    for (unsigned at = 0; at < store.bytes; at += sizeof(float)) {
      float sum, x;
      memcpy(&sum, store.gmem + at, sizeof sum);
      memcpy(&x, &store.data[at], sizeof x);
      sum += x;
      memcpy(store.gmem + at, &sum, sizeof sum);
    }
    return;
  }
  for_each_element(store.map, store.coordinates, store.smem, [&](unsigned smem, char* element) {
    if (!element) return;
    check_global(element, store.map.element_bytes, store.map.element_bytes, Access::WRITE, store.where);
    memcpy(element, &store.data[smem - store.smem], store.map.element_bytes);
  });
}

void issue(BulkStore store) {
  Thread& self = *machine.current;
  shared_pointer(store.smem, store.bytes, BULK_ALIGNMENT, Access::READ, store.where);
  race::begin_bulk_read(self, shared_offset(store.smem), store.bytes, store.where);
  if (mixed(machine.policy.bulk)) read(store);
  if (store.read && mixed(machine.policy.bulk)) write(store);
  self.stores.back().push_back(std::move(store));
  pause({});
}

}  // namespace

void tensor_load(unsigned smem, const void* map, unsigned barrier, const int* coordinates, Site site) {
  BulkLoad load = {smem, 0, barrier, checked_map(map, smem, site), nullptr, {}, 0, nullptr, site};
  load.bytes = box_bytes(load.map);
  std::copy_n(coordinates, TENSOR_RANK, load.coordinates);
  start(load);
}

void bulk_load(unsigned smem, const void* gmem, unsigned bytes, unsigned barrier, Site site) {
  check_global(gmem, bytes, BULK_ALIGNMENT, Access::READ, site);
  check_multiple(bytes, site);
  start({smem, bytes, barrier, {}, static_cast<const char*>(gmem), {}, 0, nullptr, site});
}

unsigned loads_in_flight(const Mbarrier& barrier) {
  return unsigned(std::count_if(loads.begin(), loads.end(), [&](const BulkLoad& load) {
    const auto found = load.cta->mbarriers.find(load.barrier);
    return found != load.cta->mbarriers.end() && &found->second == &barrier;
  }));
}

bool land_bulk_load() {
  if (loads.empty()) return false;
  std::swap(loads[machine.random.below(uint32_t(loads.size()))], loads.back());
  const BulkLoad load = loads.back();
  loads.pop_back();
  land(load);
  return true;
}

void forget_bulk_loads() { loads.clear(); }

void check_bulk_loads(const Cta& cta) {
  for (const BulkLoad& load : loads) {
    if (load.cta != &cta) continue;
    fail("misuse", "block %u ends while a TMA load into its shared memory is in flight, issued by thread %u %s",
         cta.index, load.thread, load.where.text().c_str());
  }
}

// ---- stores ---------------------------------------------------------------------------------------------------------

void tensor_store(const void* map, unsigned smem, const int* coordinates, Site site) {
  BulkStore store = {smem, 0, checked_map(map, smem, site), nullptr, {}, {}, false, false, false, site};
  store.bytes = box_bytes(store.map);
  std::copy_n(coordinates, TENSOR_RANK, store.coordinates);
  issue(std::move(store));
}

void bulk_reduce_add(float* gmem, unsigned smem, unsigned bytes, Site site) {
  check_global(gmem, bytes, BULK_ALIGNMENT, Access::WRITE, site);
  check_multiple(bytes, site);
  issue({smem, bytes, {}, reinterpret_cast<char*>(gmem), {}, {}, false, false, false, site});
}

void bulk_commit(Site) { machine.current->stores.emplace_back(); }

void bulk_wait(int pending, bool read_only, Site site) {
  Thread& self = *machine.current;
  const int finished = int(self.stores.size()) - 1 - pending;  // the open group does not count
  for (int i = 0; i < finished; i++) {
    for (BulkStore& store : self.stores[i]) {
      read_only ? read(store) : write(store);
      store.awaited = true;
      race::finish_bulk_read(self, shared_offset(store.smem), store.bytes);
    }
  }
  if (!read_only && finished > 0) self.stores.erase(self.stores.begin(), self.stores.begin() + finished);
  pause(site);
}

// What a thread's stores have not written yet when it ends, they write then; but shared memory may be gone.
void finish_stores(Thread& thread) {
  for (auto& group : thread.stores) {
    for (BulkStore& store : group) {
      if (!store.awaited) {
        blame("misuse", store.where, "ends without having waited until its bulk store has read shared memory, issued");
      }
      write(store);
    }
  }
}

}  // namespace emu
