// Global and shared memory. All of it lies in one reserved stretch of addresses, each buffer between pages that fault,
// and whatever belongs to no buffer is filled with poison: reads there give NaN, writes there are noticed afterwards.
// Instructions and, through the compiler's hooks (hooks.cpp), plain accesses are checked exactly.
#include <cstring>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include "machine.h"

namespace emu {
namespace {

constexpr size_t ARENA_BYTES = size_t(16) << 30, GUARD_BYTES = 1 << 20;
constexpr unsigned STATIC_WINDOW = 1 << 20;  // shared addresses of static declarations begin here,
constexpr unsigned DYNAMIC_ALIGNMENT = 1024; // and of dynamic shared memory at this, aligned no better than declared
unsigned misalignment() { return machine.launch.smem_alignment % DYNAMIC_ALIGNMENT; }
unsigned dynamic_window() { return DYNAMIC_ALIGNMENT + misalignment(); }

struct Buffer {
  std::string name;
  char* data;
  size_t bytes;
  char* pages;
  size_t page_bytes;
  bool writable;
  bool shared_by_launches = false;  // written by one, read by another
};

char* arena = nullptr;
size_t arena_used = 0;
std::vector<Buffer> buffers;
Buffer* last_found = nullptr;

struct SharedSlot { Buffer dynamic, fixed; };
std::vector<SharedSlot> slots;

Buffer reserve(const char* name, size_t bytes, size_t alignment, size_t remainder, bool right) {
  if (!arena) {
    void* pages = mmap(nullptr, ARENA_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) fail("emulator", "cannot reserve %zu GiB of addresses", ARENA_BYTES >> 30);
    arena = static_cast<char*>(pages);
  }
  const size_t page = size_t(sysconf(_SC_PAGESIZE)), whole = (bytes + alignment + page - 1) / page * page;
  if (arena_used + whole + 2 * GUARD_BYTES > ARENA_BYTES) fail("emulator", "out of emulated memory");
  Buffer buffer{name, nullptr, bytes, arena + arena_used + GUARD_BYTES, whole, true};
  arena_used += (whole + 2 * GUARD_BYTES + GUARD_BYTES - 1) / GUARD_BYTES * GUARD_BYTES;
  const size_t room = right ? whole - bytes : alignment;
  const size_t start = reinterpret_cast<size_t>(buffer.pages);
  size_t address = (start + room) / alignment * alignment + remainder;
  if (address > start + room) address -= alignment;
  if (address < start) address += alignment;
  buffer.data = reinterpret_cast<char*>(address);
  mprotect(buffer.pages, whole, PROT_READ | PROT_WRITE);
  memset(buffer.pages, POISON, whole);
  return buffer;
}

// The buffer whose pages or guard hold the address.
Buffer* nearest(const char* pointer) {
  const auto holds = [&](const Buffer& b) {
    return pointer >= b.pages - GUARD_BYTES && pointer < b.pages + b.page_bytes + GUARD_BYTES;
  };
  if (last_found && holds(*last_found)) return last_found;
  for (Buffer& buffer : buffers) {
    if (holds(buffer)) return last_found = &buffer;
  }
  for (SharedSlot& slot : slots) {
    if (holds(slot.dynamic)) return &slot.dynamic;
    if (holds(slot.fixed)) return &slot.fixed;
  }
  return nullptr;
}

std::string place_in(const Buffer* buffer, const char* pointer) {
  if (!buffer) return "outside every buffer";
  const long long offset = pointer - buffer->data, size = (long long)buffer->bytes;
  const char* name = buffer->name.c_str();
  if (offset < 0) return format("%lld bytes before the start of %s (%lld bytes)", -offset, name, size);
  if (offset >= size) return format("%lld bytes past the end of %s (%lld bytes)", offset - size, name, size);
  return format("at byte %lld of %s (%lld bytes)", offset, name, size);
}

const char* verb(Access access) { return access == Access::READ ? "reads" : "writes"; }

[[noreturn]] void out_of_bounds(const char* pointer, unsigned bytes, Access access, Where where) {
  blame("out of bounds", where, "%s %u bytes %s", verb(access), bytes, place_in(nearest(pointer), pointer).c_str());
}

[[noreturn]] void misaligned(const char* pointer, unsigned bytes, unsigned alignment, Access access, Where where) {
  blame("misaligned", where, "%s %u bytes %s, whose address is not a multiple of %u", verb(access), bytes,
        place_in(nearest(pointer), pointer).c_str(), alignment);
}

}  // namespace

bool in_arena(const void* pointer) {
  return size_t(static_cast<const char*>(pointer) - arena) < (arena ? ARENA_BYTES : 0);
}

bool is_constant(const void* pointer) {
  const char* address = static_cast<const char*>(pointer);
  const Buffer* buffer = nearest(address);
  return buffer && !buffer->writable && size_t(address - buffer->data) < buffer->bytes;
}

std::string describe(const void* pointer) {
  const char* address = static_cast<const char*>(pointer);
  return place_in(nearest(address), address);
}

// ---- checks ---------------------------------------------------------------------------------------------------------

void check_global(const void* pointer, unsigned bytes, unsigned alignment, Access access, Where where) {
  const char* start = static_cast<const char*>(pointer);
  const Buffer* buffer = in_arena(start) ? nearest(start) : nullptr;
  if (!buffer || start < buffer->data || start + bytes > buffer->data + buffer->bytes) {
    out_of_bounds(start, bytes, access, where);
  }
  if (reinterpret_cast<uintptr_t>(start) % alignment) misaligned(start, bytes, alignment, access, where);
  if (access != Access::READ && !buffer->writable) {
    blame("write to constant", where, "writes %u bytes %s", bytes, place_in(buffer, start).c_str());
  }
  if (machine.launch.overlaps && buffer->shared_by_launches && !machine.current->awaited) {
    blame("race", where, "%s, before it has waited for the launches before this one", place_in(buffer, start).c_str());
  }
}

void await_launches() { machine.current->awaited = true; }

unsigned shared_offset(unsigned smem) {
  return smem >= STATIC_WINDOW ? smem - STATIC_WINDOW : STATIC_SHARED + smem - dynamic_window();
}

char* shared_pointer(unsigned smem, unsigned bytes, unsigned alignment, Access access, Where where) {
  const SharedSlot& slot = slots[machine.current->cta->slot];
  const bool fixed = smem >= STATIC_WINDOW;
  const unsigned offset = smem - (fixed ? STATIC_WINDOW : dynamic_window());
  const unsigned size = fixed ? machine.current->cta->static_bytes : machine.launch.smem_bytes;
  char* pointer = (fixed ? slot.fixed : slot.dynamic).data + int(offset);
  if (offset > size || bytes > size - offset) out_of_bounds(pointer, bytes, access, where);
  if (smem % alignment) misaligned(pointer, bytes, alignment, access, where);
  return pointer;
}

char* access_shared(unsigned smem, unsigned bytes, unsigned alignment, Access access, Where where) {
  char* pointer = shared_pointer(smem, bytes, alignment, access, where);
  race::access(*machine.current, shared_offset(smem), bytes, access, where);
  return pointer;
}

// A plain access, reported by the compiler's hook.
void check_plain(const char* pointer, unsigned bytes, Access access, Where where) {
  if (!in_arena(pointer) || !machine.current) return;
  const SharedSlot& slot = slots[machine.current->cta->slot];
  for (const Buffer* shared : {&slot.dynamic, &slot.fixed}) {
    if (size_t(pointer - shared->pages) >= shared->page_bytes) continue;
    const long long offset = pointer - shared->data;
    if (offset < 0 || offset + bytes > (long long)shared->bytes) out_of_bounds(pointer, bytes, access, where);
    const unsigned window = shared == &slot.fixed ? STATIC_WINDOW : dynamic_window();
    race::access(*machine.current, shared_offset(window + unsigned(offset)), bytes, access, where);
    return;
  }
  check_global(pointer, bytes, 1, access, where);
}

unsigned shared_address(const void* pointer, Site site) {
  const SharedSlot& slot = slots[machine.current->cta->slot];
  const char* address = static_cast<const char*>(pointer);
  for (const Buffer* shared : {&slot.dynamic, &slot.fixed}) {
    if (address < shared->pages - GUARD_BYTES || address >= shared->pages + shared->page_bytes + GUARD_BYTES) continue;
    return unsigned(address - shared->data) + (shared == &slot.fixed ? STATIC_WINDOW : dynamic_window());
  }
  blame("misuse", site, "takes the shared address of a pointer that is not to its shared memory");
}

// ---- shared memory --------------------------------------------------------------------------------------------------

char* shared_memory(unsigned slot, unsigned bytes) {
  while (slots.size() <= slot) {
    const bool right = machine.policy.align_right;
    slots.push_back({reserve("dynamic shared memory", bytes, DYNAMIC_ALIGNMENT, misalignment(), right),
                     reserve("static shared memory", STATIC_SHARED, 16, 0, true)});
  }
  for (const Buffer* shared : {&slots[slot].dynamic, &slots[slot].fixed}) {
    memset(shared->pages, POISON, shared->page_bytes);
  }
  return slots[slot].dynamic.data;
}

void* dynamic_shared() { return machine.current->cta->shared; }

void* static_shared(int declaration, unsigned bytes, unsigned alignment) {
  Cta& cta = *machine.current->cta;
  const auto [entry, added] = cta.static_offsets.try_emplace(declaration, 0);
  if (added) {
    entry->second = (cta.static_bytes + alignment - 1) / alignment * alignment;
    cta.static_bytes = entry->second + bytes;
    if (cta.static_bytes > STATIC_SHARED) fail("emulator", "more than %u bytes of static shared memory", STATIC_SHARED);
  }
  return slots[cta.slot].fixed.data + entry->second;
}

void release_shared() { slots.clear(); }

void check_canaries() {
  const auto check = [](const Buffer& buffer) {
    for (const char* p = buffer.pages; p < buffer.pages + buffer.page_bytes; p++) {
      if (p == buffer.data) p += buffer.bytes;
      if (p < buffer.pages + buffer.page_bytes && static_cast<unsigned char>(*p) != POISON) {
        fail("out of bounds", "something wrote %s", place_in(&buffer, p).c_str());
      }
    }
  };
  for (const Buffer& buffer : buffers) check(buffer);
  for (const SharedSlot& slot : slots) check(slot.dynamic);
}

// ---- plain instructions ---------------------------------------------------------------------------------------------

void load_shared(void* registers, unsigned smem, unsigned bytes, Site site) {
  memcpy(registers, access_shared(smem, bytes, bytes, Access::READ, site), bytes);
}
void store_shared(unsigned smem, const void* registers, unsigned bytes, Site site) {
  memcpy(access_shared(smem, bytes, bytes, Access::WRITE, site), registers, bytes);
}
void load_global(void* registers, const void* gmem, unsigned bytes, Site site) {
  check_global(gmem, bytes, bytes, Access::READ, site);
  memcpy(registers, gmem, bytes);
}
void store_global(void* gmem, const void* registers, unsigned bytes, Site site) {
  check_global(gmem, bytes, bytes, Access::WRITE, site);
  memcpy(gmem, registers, bytes);
}

void add_global(float* gmem, const float* registers, unsigned count, Site site) {
  check_global(gmem, 4 * count, 4 * count, Access::WRITE, site);
  pause(site);
  for (unsigned i = 0; i < count; i++) gmem[i] += registers[i];
}

// ---- places ---------------------------------------------------------------------------------------------------------

std::string Thread::name() const {
  return format("thread %u (warp %u lane %u) of block %u", index, warp->index, lane, cta->index);
}

bool Where::operator==(const Where& other) const {
  if (bits == other.bits) return true;
  if (!bits || !other.bits || (bits & 1) || (other.bits & 1)) return false;
  const Site a = __builtin_bit_cast(Site, bits), b = __builtin_bit_cast(Site, other.bits);
  return a.line() == b.line() && !strcmp(a.file_name(), b.file_name());
}

std::string Where::text() const {
  if (!bits) return "at an unknown place";
  if (bits & 1) {  // emulator.py looks the line up
    void* address = reinterpret_cast<void*>(bits >> 1);
    Dl_info info;
    if (!dladdr(address, &info)) return "at an unknown place";
    return format("at {%#zx}", size_t(static_cast<char*>(address) - static_cast<char*>(info.dli_fbase)) - 1);
  }
  const Site site = __builtin_bit_cast(Site, bits);
  return format("at %s:%u", site.file_name(), site.line());
}

}  // namespace emu

// ---- what Python calls ----------------------------------------------------------------------------------------------

extern "C" {

// A buffer of poison whose address is `remainder` modulo `alignment`; null if there is no room.
void* emu_allocate(const char* name, size_t bytes, size_t alignment, size_t remainder, int right) {
  try {
    emu::buffers.push_back(emu::reserve(name, bytes, alignment, remainder, right != 0));
  } catch (...) {
    return nullptr;
  }
  emu::last_found = nullptr;
  return emu::buffers.back().data;
}

// From now on the kernel may only read the buffer.
void emu_make_constant(void* data) {
  for (emu::Buffer& buffer : emu::buffers) {
    if (buffer.data != data) continue;
    buffer.writable = false;
    mprotect(buffer.pages, buffer.page_bytes, PROT_READ);
  }
}

// Launches hand each other something in the buffer: one that overlaps those before it must wait for them first.
void emu_share_by_launches(void* data) {
  for (emu::Buffer& buffer : emu::buffers) buffer.shared_by_launches |= buffer.data == data;
}

void emu_free_all() {
  if (emu::arena_used) {
    mmap(emu::arena, emu::arena_used, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  }
  emu::arena_used = 0;
  emu::buffers.clear();
  emu::slots.clear();
  emu::last_found = nullptr;
}
}
