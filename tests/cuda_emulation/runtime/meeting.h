// Where threads meet: lanes of a warp, warpgroups, named barriers.
#pragma once
#include <string>
#include <unordered_map>

#include "failure.h"
#include "fibers.h"
#include "ordering.h"

namespace emulation {

// A group of threads that execute one operation together: the last one does it for all.
struct Meeting {
  const void* operation = nullptr;
  const char* name = "";
  int arrived = 0;
  unsigned generation = 0;
  void* arguments[WARPGROUP] = {};
};

void reset_meetings();
Meeting& warp_meeting(uint32_t mask);
Meeting& warpgroup_meeting();
std::string describe_barrier(int id);
// The running thread returns from the kernel.
void leave_block();

// Member `index` of `members` joins with an argument; `work` gets all of them once. `key` tells operations apart.
template <class F>
void meet(Meeting& meeting, Waits waits, int members, int index, const void* key, const char* name, void* argument,
          F work) {
  if (meeting.arrived == 0) {
    meeting.operation = key;
    meeting.name = name;
  } else if (meeting.operation != key) {
    fail("divergence: %s, while other threads of the same %s are in %s", name,
         waits == Waits::warp ? "warp" : "warpgroup", meeting.name);
  }
  meeting.arguments[index] = argument;
  unsigned generation = meeting.generation;
  progress++;
  if (++meeting.arrived == members) {
    work(meeting.arguments);
    meeting.arrived = 0;
    meeting.generation++;
  } else {
    wait_until(waits, 0, name, [&] { return meeting.generation != generation; });
  }
}

// All 32 lanes of the running warp, as instructions with .sync.aligned demand.
void need_whole_warp(const char* name);
template <class F>
void meet_warp(const void* key, const char* name, void* argument, F work) {
  need_whole_warp(name);
  meet(warp_meeting(0xFFFFFFFF), Waits::warp, WARP, current->lane(), key, name, argument, work);
}

// All four warps of the running warpgroup.
template <class F>
void meet_warpgroup(const void* key, const char* name, void* argument, F work) {
  if (current->number / WARPGROUP * WARPGROUP + WARPGROUP > block.threads) fail("%s in an incomplete warpgroup", name);
  meet(warpgroup_meeting(), Waits::warpgroup, WARPGROUP, current->number % WARPGROUP, key, name, argument, work);
}

}  // namespace emulation
