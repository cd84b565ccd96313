// Which accesses to shared memory are ordered: happens-before with vector clocks, as race detectors do it.
//
// An agent is a warp, or an asynchronous operation in flight (copies, wgmma), which has a clock of its own from its
// issue on. Barriers, mbarriers and waits pass clocks on. Two accesses to the same two bytes of which one is a write
// are a race unless the later agent has seen the clock of the earlier access; the order in which fibers happen to run
// plays no part. Lanes of one warp count as ordered, except that what a lane copied by cp.async and waited for is seen by
// the others only when it has met them. (Flanagan and Freund, FastTrack, PLDI 2009.)
//
// The asynchronous proxy is here too: what a thread wrote by ordinary stores, wgmma and bulk copies may read only after
// that thread executed fence.proxy.async.
#pragma once
#include <array>
#include <cstdint>

#include "fibers.h"

namespace emulation {

// Agents: warps; then the cp.async copies of each warp, whose clock is the number of the commit group; then the wgmmas,
// likewise, with a clock for each warp, as each waits for its share alone: what a warpgroup reads has been read when all
// four have waited, and goes by the name of the first; then bulk copies, each with the next of a few clocks.
constexpr int WARPS = MAX_THREADS / WARP;
constexpr int COPIES_AT = WARPS;
constexpr int WGMMA_AT = COPIES_AT + WARPS;
constexpr int BULK_AT = WGMMA_AT + WARPS;
constexpr int BULK_CLOCKS = 64;
constexpr int AGENTS = BULK_AT + BULK_CLOCKS;

struct Clock {
  std::array<uint32_t, AGENTS> at{};

  void join(const Clock& other) {
    for (int i = 0; i < AGENTS; i++) at[i] = at[i] > other.at[i] ? at[i] : other.at[i];
  }
  void meet(const Clock& other) {
    for (int i = 0; i < AGENTS; i++) at[i] = at[i] < other.at[i] ? at[i] : other.at[i];
  }
};

// An asynchronous operation: who it is, and what it has seen (its issuer's past and itself).
struct Operation {
  int agent = -1;
  Clock clock;
};

enum class Proxy { generic, async };

void reset_ordering();

Clock& clock_of(int warp);
Clock& clock_of_warp();                    // of the running thread
// The other lanes of the warp may see the copies that the running thread waited for.
void share_copies();
// The running warp tells `to` all it did; what it does from now on is later.
void publish(Clock& to);
// The running warp has seen what `from` tells.
void observe(const Clock& from);

// An operation of the agent that comes after all that `past` has seen.
Operation operation(int agent, uint32_t clock, const Clock& past);
// A bulk copy that the running thread issues.
Operation bulk_operation();

// Records and checks an access of the running thread, or of an operation.
void order_access(uint32_t address, size_t bytes, bool write);
void order_operation(const Operation& operation, Proxy proxy, uint32_t address, size_t bytes, bool write,
                     const char* what);

}  // namespace emulation
