// mbarriers: phases that complete when all arrivals and all bytes of bulk copies are in.
#include <unordered_map>

#include "asynchronous.h"
#include "failure.h"
#include "memory.h"

namespace emulation {
namespace {

constexpr long MAX_BYTES = (1 << 20) - 1;

struct Mbarrier {
  int count = 0, pending = 0;          // arrivals of a phase; those still missing
  long bytes = 0;                      // of bulk copies, still missing
  uint64_t phase = 0;
  Clock clock, completed;              // what arrivals tell; what they told when the last phase completed
  int initialized_by = 0;              // thread, and how many fences it had executed then
  uint32_t fences = 0;
};

std::unordered_map<uint32_t, Mbarrier> mbarriers;

Mbarrier& at(uint32_t address) {
  auto it = mbarriers.find(address);
  if (it == mbarriers.end()) fail("mbarrier at 0x%x was not initialized", address);
  return it->second;
}

void need_alive(uint32_t address, const char* what) {
  if (!block.alive[block_of(address)]) fail("%s at 0x%x, which is in the shared memory of a block that has ended", what, address);
}

// For the running thread: after the initialization, that is. remote: whether it may be that of another block.
Mbarrier& use(uint32_t address, bool remote = false) {
  if (!remote && block_of(address) != current->rank)
    fail("mbarrier at 0x%x: it is that of another block of the cluster", address);
  need_alive(address, "an mbarrier");
  Mbarrier& barrier = at(address);
  order_access(address, 8, false);
  return barrier;
}

void advance(uint32_t address, Mbarrier& barrier) {
  if (barrier.pending < 0) fail("mbarrier at 0x%x: more arrivals than its count of %d in one phase", address, barrier.count);
  if (barrier.bytes > MAX_BYTES || barrier.bytes < -MAX_BYTES) fail("mbarrier at 0x%x: expects too many bytes", address);
  if (barrier.pending || barrier.bytes) return;
  barrier.pending = barrier.count;
  barrier.phase++;
  barrier.completed = barrier.clock;
  progress++;
}

}  // namespace

void reset_mbarriers() { mbarriers.clear(); }

std::string describe_mbarrier(uint32_t address) {
  Mbarrier& barrier = at(address);
  char text[160];
  snprintf(text, sizeof text, "mbarrier at 0x%x (phase %lu: %d of %d arrivals and %ld bytes missing)", address,
           (unsigned long)barrier.phase, barrier.pending, barrier.count, barrier.bytes);
  return text;
}

void complete_bytes(uint32_t address, uint32_t bytes, const Clock& clock) {
  need_alive(address, "a bulk copy tells an mbarrier");
  Mbarrier& barrier = at(address);
  barrier.clock.join(clock);
  barrier.bytes -= bytes;
  advance(address, barrier);
}

void check_mbarrier_for_bulk(uint32_t address) {
  Mbarrier& barrier = use(address, true);
  if (threads[barrier.initialized_by].init_fences <= barrier.fences)
    fail("mbarrier at 0x%x: a bulk copy uses it, but there was no fence.mbarrier_init or fence.proxy.async after its "
         "initialization", address);
}

void arrive_for_copies(uint32_t address, const Clock& clock, int extra) {
  Mbarrier& barrier = at(address);
  barrier.clock.join(clock);
  barrier.pending -= 1 - extra;
  advance(address, barrier);
}

}  // namespace emulation

using namespace emulation;

void emu_mbarrier_init(uint32_t address, uint32_t count) {
  shared(address, 8, 8, "mbarrier.init");
  if (!count || count >= 1 << 20) fail("mbarrier at 0x%x: a count of %u", address, count);
  order_access(address, 8, true);
  Mbarrier barrier;
  barrier.count = barrier.pending = count;
  barrier.initialized_by = current->number;
  barrier.fences = current->init_fences;
  mbarriers[address] = barrier;
}

void emu_mbarrier_invalidate(uint32_t address) {
  at(address);
  order_access(address, 8, true);
  mbarriers.erase(address);
}

uint64_t emu_mbarrier_arrive(uint32_t address, uint32_t count, uint32_t expect_bytes, int remote) {
  Mbarrier& barrier = use(address, remote);
  uint64_t state = barrier.phase;
  publish(barrier.clock);
  progress++;
  barrier.bytes += expect_bytes;
  barrier.pending -= count;
  advance(address, barrier);
  return state;
}

void emu_mbarrier_expect(uint32_t address, uint32_t bytes) {
  Mbarrier& barrier = use(address);
  barrier.bytes += bytes;
  progress++;
}

// Phases are counted from 0: `state` is the number of the one to wait for. Lets other threads run if it is not complete.
bool emu_mbarrier_test_state(uint32_t address, uint64_t state) {
  use(address);
  auto complete = [&] { return at(address).phase > state; };
  if (!complete()) {
    current->waits = Waits::mbarrier;
    current->waits_for = address;
    yield();
    current->waits = Waits::nothing;
    if (!complete()) return false;
  }
  observe(at(address).completed);
  progress++;
  return true;
}

bool emu_mbarrier_test(uint32_t address, uint32_t parity) {
  Mbarrier& barrier = use(address);
  if ((barrier.phase & 1) == (parity & 1)) return emu_mbarrier_test_state(address, barrier.phase);
  observe(barrier.completed);            // the phase under way has the other parity: the one before it is complete
  progress++;
  return true;
}

void emu_fence_mbarrier_init() { current->init_fences++; }

void emu_fence_proxy_async() {
  current->init_fences++;
  current->proxy_fences++;
}
