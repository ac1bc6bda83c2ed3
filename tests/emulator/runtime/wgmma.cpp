// wgmma: products that the four warps of a warpgroup start together and that go on by themselves. A product reads its
// operands, in shared memory or registers, at any time from its issue to the wait for its group. From its issue to the
// wait of each warp, that warp's accumulators are poison.
#include <algorithm>
#include <cstring>

#include "machine.h"
#include "operand.h"

namespace emu {
namespace {

constexpr unsigned ROWS = 64, WARP_ROWS = 16, STEP = 16, MAX_N = 256, A_REGISTERS = 4;
constexpr unsigned ALL_WARPS = (1 << WARPGROUP_WARPS) - 1;
constexpr unsigned REGISTER_FILE = 65536;

// Accumulators in use by consecutive products.
struct Chain {
  int n;
  std::vector<float> values;                               // [ROWS][n]
  float* registers[WARPGROUP_WARPS][WARP_SIZE] = {};       // of the warps that have joined
  unsigned joined = 0, left = 0;                           // warps
  unsigned pending[WARPGROUP_WARPS] = {};                  // products a warp has not waited for
  Chain(int n) : n(n), values(ROWS * n) {}
};

struct Product {
  Wgmma what;
  Where where;
  Chain* chain = nullptr;
  unsigned issued = 0, waited = 0;                         // warps
  const unsigned* a[WARPGROUP_WARPS][WARP_SIZE] = {};      // registers, and what they held at issue
  unsigned a_then[WARPGROUP_WARPS][WARP_SIZE][A_REGISTERS];
};

}  // namespace

struct Warpgroup {
  unsigned index;
  uint32_t first_step;
  std::vector<std::unique_ptr<Product>> products;          // by number; null once done and waited for by all
  std::vector<std::unique_ptr<Chain>> chains;
  unsigned done = 0;                                       // products whose results are known
  unsigned issued[WARPGROUP_WARPS] = {}, waited[WARPGROUP_WARPS] = {}, fences[WARPGROUP_WARPS] = {};
  std::vector<unsigned> groups[WARPGROUP_WARPS];           // products before each commit
  std::map<const float*, unsigned> fences_then[WARPGROUP_WARPS];  // when accumulators were last delivered
  std::vector<Thread*> waiting;                            // for all warps to have issued
  unsigned by_all() const { return *std::min_element(issued, issued + WARPGROUP_WARPS); }
};

Cta::Cta() = default;
Cta::~Cta() = default;

namespace {

Warpgroup& warpgroup_of(Warp& warp, Where where) {
  Cta& cta = *warp.cta;
  const unsigned index = warp.index / WARPGROUP_WARPS;
  if ((index + 1) * WARPGROUP_WARPS > cta.warps.size()) {
    blame("misuse", where, "is in no whole warpgroup");
  }
  while (cta.warpgroups.size() <= index) {
    auto group = std::make_unique<Warpgroup>();
    group->index = unsigned(cta.warpgroups.size());
    group->first_step = race::next_step(cta, race::warpgroup_agent(group->index));
    cta.warpgroups.push_back(std::move(group));
  }
  return *cta.warpgroups[index];
}

// Which element of the warp's 16 x n accumulator register i of a lane is: row lane / 4 (+ 8), columns 2 * (lane % 4)...
unsigned row_of(unsigned lane, unsigned i) { return lane / 4 + i / 2 % 2 * 8; }
unsigned column_of(unsigned lane, unsigned i) { return i / 4 * 8 + lane % 4 * 2 + i % 2; }

void execute(Product& product) {
  static float a[ROWS][STEP], b[STEP][MAX_N], packed[MAX_N][STEP];
  const Wgmma& what = product.what;
  const int n = what.n;
  if (what.a_registers) {
    for (unsigned w = 0; w < WARPGROUP_WARPS; w++) {
      for (unsigned lane = 0; lane < WARP_SIZE; lane++) {
        if (memcmp(product.a[w][lane], product.a_then[w][lane], sizeof product.a_then[w][lane])) {
          blame("wgmma misuse", product.where, "finds that lane %u of its warpgroup's warp %u changed the registers "
                "of operand a of a product in flight, issued", lane, w);
        }
        for (unsigned i = 0; i < A_REGISTERS; i++) {
          for (unsigned e = 0; e < 2; e++) {
            a[w * WARP_ROWS + lane / 4 + i % 2 * 8][i / 2 * 8 + lane % 4 * 2 + e] =
                to_float(what.type, uint16_t(product.a_then[w][lane][i] >> (16 * e)));
          }
        }
      }
    }
  } else {
    read_operand(what.a_descriptor, what.mn_major_a, ROWS, what.type, &a[0][0], product.where);
  }
  read_operand(what.b_descriptor, what.mn_major_b, unsigned(n), what.type, &packed[0][0], product.where);
  for (int j = 0; j < n; j++) {
    for (unsigned k = 0; k < STEP; k++) b[k][j] = packed[j][k];
  }
  float* d = product.chain->values.data();
  if (!what.accumulate) std::fill_n(d, ROWS * n, 0.f);
  for (unsigned m = 0; m < ROWS; m++, d += n) {
    for (unsigned k = 0; k < STEP; k++) {
      const float x = a[m][k];
      for (int j = 0; j < n; j++) d[j] += x * b[k][j];
    }
  }
}

void execute_until(Warpgroup& group, unsigned end) {
  for (; group.done < end; group.done++) execute(*group.products[group.done]);
}

// Gives a warp its results of the products before `end`.
void deliver(Warpgroup& group, unsigned w, unsigned end) {
  for (unsigned number = group.waited[w]; number < end; number++) {
    Chain& chain = *group.products[number]->chain;
    if (--chain.pending[w]) continue;
    group.fences_then[w][chain.registers[w][0]] = group.fences[w];
    for (unsigned lane = 0; lane < WARP_SIZE; lane++) {
      for (int i = 0; i < chain.n / 2; i++) {
        float& value = chain.registers[w][lane][i];
        if (__builtin_bit_cast(unsigned, value) != ~0u) {
          blame("wgmma misuse", group.products[number]->where, "finds that lane %u of its warp wrote to an accumulator "
                "of a product in flight, issued", lane);
        }
        value = chain.values[(w * WARP_ROWS + row_of(lane, i)) * chain.n + column_of(lane, i)];
      }
    }
    chain.joined &= ~(1u << w);
    chain.left |= 1u << w;
  }
  for (unsigned number = group.waited[w]; number < end; number++) {
    Product& product = *group.products[number];
    product.waited |= 1u << w;
    if (product.waited == ALL_WARPS) group.products[number].reset();
  }
  std::erase_if(group.chains, [](auto& chain) { return chain->left == ALL_WARPS && !chain->joined; });
  group.waited[w] = std::max(group.waited[w], end);
}

bool same_product(const Wgmma& x, const Wgmma& y) {
  return x.type == y.type && x.n == y.n && x.mn_major_a == y.mn_major_a && x.mn_major_b == y.mn_major_b &&
         x.accumulate == y.accumulate && x.a_descriptor == y.a_descriptor && x.b_descriptor == y.b_descriptor &&
         !x.a_registers == !y.a_registers;
}

// The chain that a warp's accumulators belong to; a new one takes their values in.
void join_chain(Warpgroup& group, Product& product, unsigned w, float* const (&registers)[WARP_SIZE]) {
  Chain* chain = nullptr;
  for (auto& other : group.chains) {
    if (other->joined >> w & 1 && other->registers[w][0] == registers[0]) chain = other.get();
  }
  const bool fresh = !chain;
  if (fresh) {
    if (group.fences[w] <= group.fences_then[w][registers[0]]) {
      blame("wgmma misuse", product.where, "starts a product without wgmma_fence since the accumulators' last use");
    }
    if (!product.chain) {
      group.chains.push_back(std::make_unique<Chain>(product.what.n));
      product.chain = group.chains.back().get();
    }
    chain = product.chain;
    chain->joined |= 1u << w;
    for (unsigned lane = 0; lane < WARP_SIZE; lane++) {
      chain->registers[w][lane] = registers[lane];
      for (int i = 0; i < chain->n / 2; i++) {
        chain->values[(w * WARP_ROWS + row_of(lane, i)) * chain->n + column_of(lane, i)] = registers[lane][i];
      }
      memset(registers[lane], POISON, chain->n / 2 * sizeof(float));
    }
  }
  if (!product.chain) product.chain = chain;
  if (product.chain != chain || chain->n != product.what.n) {
    blame("wgmma misuse", product.where, "starts a product on accumulators that one in flight uses differently");
  }
  chain->pending[w]++;
}

void issue(Warp& warp, Collective& meeting) {
  Warpgroup& group = warpgroup_of(warp, meeting.where);
  const unsigned w = warp.index % WARPGROUP_WARPS, number = group.issued[w];
  const Wgmma& what = *static_cast<Wgmma*>(meeting.slots[0]);
  if (number == group.products.size()) {
    group.products.push_back(std::make_unique<Product>());
    group.products.back()->what = what;
    group.products.back()->where = meeting.where;
  }
  Product& product = *group.products[number];
  float* registers[WARP_SIZE];
  for (unsigned lane = 0; lane < WARP_SIZE; lane++) {
    const Wgmma& of_lane = *static_cast<Wgmma*>(meeting.slots[lane]);
    if (!same_product(product.what, of_lane)) {
      blame("divergence", meeting.where, "starts another product than the other warps of its warpgroup %s",
            product.where.text().c_str());
    }
    registers[lane] = of_lane.d;
    if (!what.a_registers) continue;
    product.a[w][lane] = of_lane.a_registers;
    memcpy(product.a_then[w][lane], of_lane.a_registers, sizeof product.a_then[w][lane]);
  }
  join_chain(group, product, w, registers);
  const auto reads = [&](unsigned long long descriptor, bool mn_major, unsigned extent) {
    for_each_unit(descriptor, mn_major, extent, meeting.where, [&](unsigned smem, unsigned, unsigned) {
      race::agent_reads(*warp.threads[0], race::warpgroup_agent(group.index), group.first_step + number,
                        shared_offset(smem), UNIT_BYTES, meeting.where);
    });
  };
  if (!what.a_registers) reads(what.a_descriptor, what.mn_major_a, ROWS);
  reads(what.b_descriptor, what.mn_major_b, unsigned(what.n));
  product.issued |= 1u << w;
  group.issued[w]++;
  if (product.issued != ALL_WARPS) return;
  wake_all(group.waiting);
  if (mixed(machine.policy.wgmma)) execute_until(group, number + 1);
}

}  // namespace

void wgmma(const Wgmma& product, Site site) {
  Wgmma slot = product;
  collective("wgmma", 0, ALL_LANES, &slot, site, issue);
}

void wgmma_fence(Site site) {
  collective("wgmma_fence", 0, ALL_LANES, nullptr, site, [](Warp& warp, Collective& meeting) {
    warpgroup_of(warp, meeting.where).fences[warp.index % WARPGROUP_WARPS]++;
  });
}

void wgmma_commit(Site site) {
  collective("wgmma_commit", 0, ALL_LANES, nullptr, site, [](Warp& warp, Collective& meeting) {
    Warpgroup& group = warpgroup_of(warp, meeting.where);
    const unsigned w = warp.index % WARPGROUP_WARPS;
    group.groups[w].push_back(group.issued[w]);
    for (auto& other : group.groups) {
      if (other.size() < group.groups[w].size() || other[group.groups[w].size() - 1] == group.issued[w]) continue;
      blame("divergence", meeting.where, "commits other products than the other warps of its warpgroup");
    }
  });
}

void wgmma_wait(int pending, Site site) {
  collective("wgmma_wait", unsigned(pending), ALL_LANES, nullptr, site, [](Warp&, Collective&) {});
  Thread& self = *machine.current;
  Warpgroup& group = warpgroup_of(*self.warp, site);
  const unsigned w = self.warp->index % WARPGROUP_WARPS;
  const int finished = int(group.groups[w].size()) - pending;
  const unsigned end = finished > 0 ? group.groups[w][finished - 1] : 0;
  while (group.by_all() < end) {
    group.waiting.push_back(&self);
    block({Wait::WARPGROUP, nullptr, 0, site});
  }
  execute_until(group, end);
  deliver(group, w, end);
  if (end) race::knows_agent(self, race::warpgroup_agent(group.index), group.first_step + end - 1);
}

// Every warp waits before its results are used, and warps of a warpgroup do the same.
void finish_products(Thread& thread) {
  const unsigned index = thread.warp->index / WARPGROUP_WARPS, w = thread.warp->index % WARPGROUP_WARPS;
  if (index >= thread.cta->warpgroups.size()) return;
  const Warpgroup& group = *thread.cta->warpgroups[index];
  if (group.waited[w] == group.issued[w]) return;
  blame("wgmma misuse", group.products[group.waited[w]]->where, "ends with a product in flight, issued");
}

void check_warpgroups(const Cta& cta) {
  for (auto& group : cta.warpgroups) {
    if (std::count(group->issued, group->issued + WARPGROUP_WARPS, group->issued[0]) == WARPGROUP_WARPS) continue;
    fail("divergence", "the warps of warpgroup %u start %u, %u, %u and %u products", group->index, group->issued[0],
         group->issued[1], group->issued[2], group->issued[3]);
  }
  unsigned registers = 0;
  for (const Warp& warp : cta.warps) {
    if (!warp.registers) return;
    registers += unsigned(warp.registers) * WARP_SIZE;
  }
  if (registers > REGISTER_FILE) {
    fail("deadlock", "setmaxnreg asks for %u registers in all; there are %u", registers, REGISTER_FILE);
  }
}

void set_max_registers(int registers, bool increase, Site site) {
  constexpr int LEAST = 24, MOST = 256, GRANULARITY = 8;
  if (registers < LEAST || registers > MOST || registers % GRANULARITY) {
    blame("misuse", site, "gives setmaxnreg %d: it takes a multiple of %d from %d to %d", registers, GRANULARITY, LEAST,
          MOST);
  }
  const unsigned variant = unsigned(registers) << 1 | increase;
  collective("setmaxnreg", variant, ALL_LANES, nullptr, site, [](Warp& warp, Collective& meeting) {
    warp.registers = int(meeting.variant >> 1);
  });
}

}  // namespace emu
