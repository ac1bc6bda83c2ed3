#include "machine.h"
namespace emu {

void finish_stores(Thread&, bool) {}
bool land_bulk_load() { return false; }
void forget_bulk_loads() {}
std::string describe_mbarrier(const void*, unsigned) { return ""; }
void check_warpgroups(Cta&) {}
struct Warpgroup {};
Cta::Cta() = default; Cta::~Cta() = default;
}
