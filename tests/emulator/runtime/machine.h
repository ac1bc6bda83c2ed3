// The emulated GPU: its threads, warps and CTAs, and the services that the runtime's files offer one another.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../device/emu.h"
#include "fiber.h"

namespace emu {

constexpr unsigned WARP_SIZE = 32, WARPGROUP_WARPS = 4, NAMED_BARRIERS = 16, ALL_LANES = ~0u;
constexpr unsigned char POISON = 0xff;  // all ones: NaN in every floating-point type, -1 in every integer type

// A place in the kernel's text: a Site, or a return address where the compiler's hooks report a plain access.
class Where {
 public:
  Where() = default;
  Where(Site site) : bits(__builtin_bit_cast(uintptr_t, site)) {}
  static Where address(void* pc) { Where where; where.bits = reinterpret_cast<uintptr_t>(pc) << 1 | 1; return where; }
  bool operator==(const Where&) const;
  std::string text() const;

 private:
  uintptr_t bits = 0;
};

// ---- chance ---------------------------------------------------------------------------------------------------------
class Random {
 public:
  explicit Random(uint64_t seed = 0) : state(seed * 0x9e3779b97f4a7c15ull + 0x853c49e6748fea9bull) { next(); next(); }
  uint32_t next() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const uint32_t x = uint32_t(((state >> 18) ^ state) >> 27), r = uint32_t(state >> 59);
    return x >> r | x << (-r & 31);
  }
  uint32_t below(uint32_t n) { return uint32_t(uint64_t(next()) * n >> 32); }
  bool one_in(uint32_t n) { return below(n) == 0; }

 private:
  uint64_t state;
};

enum class Timing { LATE, EARLY, MIXED };

// What a seed decides.
struct Policy {
  Timing copies, bulk, wgmma;     // when cp.async, TMA and wgmma do their work
  uint32_t bulk_delay;            // mean number of picks until a load lands, where timing is mixed
  uint32_t redraw;                // picks between new random priorities of the warps
  enum { RANDOM, ASCENDING, DESCENDING } lanes;
  uint32_t preempt;               // mean number of plain accesses between forced changes of thread; 0: never
  bool align_right;               // buffers end at their guard page rather than begin at it
  static Policy of(uint64_t seed, Random& random);
};

// ---- happens-before (race.cpp) --------------------------------------------------------------------------------------
// A component for every thread and every asynchronous agent of a CTA: the latest of its steps known to have happened.
using Clock = std::vector<uint32_t>;
constexpr uint32_t UNFINISHED = ~0u;  // the step of an access that nobody may depend on yet

// ---- threads --------------------------------------------------------------------------------------------------------
struct Cta;
struct Warp;

struct CopyAsync { unsigned smem; const char* gmem; unsigned bytes, source_bytes; bool landed; Where where; };
struct BulkStore {
  unsigned smem, bytes;
  TensorMap map;                    // magic 0: a linear add of floats to gmem
  char* gmem;
  int coordinates[TENSOR_RANK];
  std::vector<unsigned char> data;  // once read
  bool read, written, awaited;      // awaited: the issuer knows that it has been read
  Where where;
};

struct Wait {
  enum Kind { NOTHING, COLLECTIVE, BARRIER, MBARRIER, WARPGROUP, POLL } kind = NOTHING;
  const void* object = nullptr;
  unsigned detail = 0;
  Where where;
};

struct Thread {
  Fiber fiber;
  Place place;
  Cta* cta = nullptr;
  Warp* warp = nullptr;
  unsigned index = 0, lane = 0;
  enum { READY, WAITING, DONE } state = DONE;
  Wait wait;
  bool awaited = false;  // the launches before this one
  bool polled = false;  // has only polled since it last waited for anything else
  void* stack = nullptr;

  std::deque<std::vector<CopyAsync>> copies;  // groups, the open one last
  std::deque<std::vector<BulkStore>> stores;

  Clock clock;
  std::vector<uint32_t> proxy_fences;  // the steps of its fence.proxy.async

  std::string name() const;
};

// Lanes of a warp that meet at an instruction.
struct Collective {
  const char* name;
  uint64_t variant;  // what else the lanes must agree on
  unsigned mask, arrived = 0;
  Where where;
  void* slots[WARP_SIZE] = {};
};

struct Warpgroup;
struct Warp {
  Cta* cta = nullptr;
  unsigned index = 0, ready = 0, alive = 0;
  Thread* threads[WARP_SIZE] = {};
  std::vector<std::unique_ptr<Collective>> collectives;
  std::unique_ptr<Collective> barrier;  // lanes gathering before a named barrier
  int predicates[WARP_SIZE] = {};
  int registers = 0;  // by setmaxnreg; 0: as launched
};

struct NamedBarrier {
  unsigned expected = 0, arrived = 0;
  bool everybody = false;       // __syncthreads: as many threads as there are
  std::vector<unsigned> warps;  // that arrived
  std::vector<Thread*> waiting;
  Clock clock;
  int all = 1, any = 0, count = 0, result[3] = {};
};

struct Mbarrier {
  unsigned expected, pending, phase, index;
  int64_t bytes;              // that this phase still waits for
  uint64_t pattern;           // what its memory holds
  bool fenced;                // since initialisation, so that TMA may use it
  unsigned initialiser;       // a thread, and its step then
  uint32_t initialised, first_step;
  std::vector<Thread*> waiting;
  Clock arriving, complete;   // what those who arrived know, and of the phases completed
  uint32_t step() const { return first_step + phase; }  // of its agent in the clocks, for this phase's bytes
};

struct Cta {
  unsigned index = 0, slot = 0, alive = 0;
  char* shared = nullptr;  // dynamic shared memory, then the static declarations
  std::vector<Warp> warps;
  std::vector<Thread> threads;
  NamedBarrier barriers[NAMED_BARRIERS];
  std::map<unsigned, Mbarrier> mbarriers;  // by shared address
  std::vector<std::unique_ptr<Warpgroup>> warpgroups;
  std::map<int, unsigned> static_offsets;
  unsigned static_bytes = 0;
  Cta();
  ~Cta();
};

// ---- services -------------------------------------------------------------------------------------------------------
struct Launch {
  void (*entry)(const void*) = nullptr;
  const void* params = nullptr;
  unsigned grid = 0, block = 0, smem_bytes = 0, smem_alignment = 16, resident = 1;
  bool shuffled = false, check_races = true, overlaps = false;
  uint64_t seed = 0;
};

struct Machine {
  Launch launch;
  Policy policy;
  Random random;
  Thread* current = nullptr;
  std::vector<std::unique_ptr<Cta>> ctas;
};
extern Machine machine;

// Both end the run with an error of a kind. Nothing on the fibers' stacks is unwound.
[[noreturn]] void fail(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));
// "<the running thread> <text>, <place>"
[[noreturn]] void blame(const char* kind, Where where, const char* format, ...) __attribute__((format(printf, 3, 4)));
std::string format(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string lane_list(unsigned mask);

// schedule.cpp
void block(Wait wait);                   // the running thread waits until somebody wakes it
void wake(Thread* thread);
void wake_all(std::vector<Thread*>& threads);
void yield();                            // the running thread stays ready; another may run
void poll(Where where);                  // lets everything else happen first
bool mixed(Timing timing);               // whether an operation issued now does its work at once

// memory.cpp
enum class Access { READ, WRITE, ATOMIC };
void check_global(const void* pointer, unsigned bytes, unsigned alignment, Access access, Where where);
// The host address of shared memory, its bounds and alignment checked...
char* shared_pointer(unsigned smem, unsigned bytes, unsigned alignment, Access access, Where where);
// ... and the access ordered against those of others.
char* access_shared(unsigned smem, unsigned bytes, unsigned alignment, Access access, Where where);
unsigned shared_offset(unsigned smem);               // where its history is kept
char* shared_memory(unsigned slot, unsigned bytes);  // a CTA's, filled with poison
constexpr unsigned STATIC_SHARED = 16 << 10;         // room for static declarations
bool in_arena(const void* pointer);
bool is_constant(const void* pointer);
std::string describe(const void* pointer);           // which buffer an address lies in or near
void check_plain(const char* pointer, unsigned bytes, Access access, Where where);  // a hook's report
void check_canaries();
void release_shared();

// faults.cpp
void watch_faults(bool on);
extern volatile int without_switch;

// collective.cpp
void leave(Thread& thread);              // a thread ends: whoever waited for it hears of it
std::string describe_wait(const Wait& wait);
// Once every lane of the mask has come to the instruction, `act` sees their slots.
void collective(const char* name, uint64_t variant, unsigned mask, void* slot, Where where,
                void (*act)(Warp&, Collective&));

// async.cpp
void finish_copies(Thread& thread);

// mbarrier.cpp, bulk.cpp
Mbarrier& mbarrier_at(unsigned address, const char* does, Where where);
void complete_bytes(Mbarrier& barrier, unsigned bytes, Where where);
std::string describe_mbarrier(const void* barrier, unsigned parity);
unsigned loads_in_flight(const Mbarrier& barrier);
bool land_bulk_load();                   // one of those in flight; false: none is
void check_bulk_loads(const Cta& cta);   // none may outlive its CTA
void forget_bulk_loads();
void finish_stores(Thread& thread);

// wgmma.cpp
void check_warpgroups(const Cta& cta);   // their warps must have done the same
void finish_products(Thread& thread);

// race.cpp. An access is ordered after another if a chain of barriers leads from it to the accessing thread. Accesses
// by the asynchronous proxy (TMA and wgmma) belong to agents, which are members of the clocks as threads are.
namespace race {
void begin_run(unsigned threads_per_cta, unsigned shared_bytes, unsigned slots);
void begin_cta(Cta& cta);
bool knows(const Thread& thread, unsigned member, uint32_t step);
void meet(Warp& warp);  // all its lanes have come to an instruction of the whole warp
void release(Thread& thread, Clock& into);
void acquire(Thread& thread, const Clock& from);
void knows_agent(Thread& thread, unsigned agent, uint32_t step);
void access(Thread& thread, unsigned offset, unsigned bytes, Access access, Where where);
void begin_write(Thread& thread, unsigned offset, unsigned bytes, Where where);  // of a cp.async
void finish_write(Thread& thread, unsigned offset, unsigned bytes);
void fence_proxy(Thread& thread);
unsigned mbarrier_agent(const Mbarrier& barrier);
unsigned warpgroup_agent(unsigned warpgroup);
uint32_t next_step(const Cta& cta, unsigned agent);                             // a step that no access has had yet
void agent_writes(Thread& issuer, unsigned agent, uint32_t step, unsigned offset, unsigned bytes, Where where);
void agent_reads(Thread& issuer, unsigned agent, uint32_t step, unsigned offset, unsigned bytes, Where where);
void begin_bulk_read(Thread& issuer, unsigned offset, unsigned bytes, Where where);  // for a bulk store
void finish_bulk_read(Thread& issuer, unsigned offset, unsigned bytes);
}  // namespace race

}  // namespace emu
