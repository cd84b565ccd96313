#include "meeting.h"

#include <map>

namespace emulation {
namespace {

constexpr int BARRIERS = 16;

struct Barrier {
  int expected = 0;                    // threads of this phase; 0 if nobody arrived
  int arrived = 0;
  int votes = 0, counted = 0;          // of __syncthreads_or and its like, in this and in the last phase
  unsigned generation = 0;
  Clock clock, completed;
};

Barrier barriers[MAX_CLUSTER][BARRIERS];      // of each block
Barrier of_cluster;                            // which counts threads that have not returned
std::map<std::pair<int, uint32_t>, Meeting> warp_meetings;      // by warp and mask
std::map<int, Meeting> warpgroup_meetings;

void complete(Barrier& barrier) {
  barrier.completed = barrier.clock;
  barrier.counted = barrier.votes;
  barrier.expected = barrier.arrived = barrier.votes = 0;
  barrier.generation++;
  progress++;
}

uint32_t lanes_alive() {
  uint32_t mask = 0;
  int first = current->warp() * WARP;
  for (int i = 0; i < WARP && first + i < block.threads; i++)
    if (!threads[first + i].done) mask |= 1u << i;
  return mask;
}

// Bit i is set for lanes that join with the running one; fails if one of them cannot.
void check_mask(uint32_t mask, const char* name) {
  if (!(mask >> current->lane() & 1)) fail("%s with mask 0x%08x by lane %d, which is not in it", name, mask, current->lane());
  int first = current->warp() * WARP;
  for (int i = 0; i < WARP; i++)
    if ((mask >> i & 1) && first + i < block.threads && threads[first + i].done)
      fail("%s with mask 0x%08x, but lane %d has returned", name, mask, i);
}

// Lanes of the mask that exist.
uint32_t members(uint32_t mask) {
  int lanes = std::min(WARP, block.threads - current->warp() * WARP);
  return lanes == WARP ? mask : mask & ((1u << lanes) - 1);
}

template <class F>
void meet_lanes(uint32_t mask, const void* key, const char* name, void* argument, F work) {
  check_mask(mask, name);
  mask = members(mask);
  meet(warp_meeting(mask), Waits::warp, __builtin_popcount(mask), current->lane(), key, name, argument, work);
}

}  // namespace

void reset_meetings() {
  for (auto& own : barriers)
    for (auto& barrier : own) barrier = Barrier();
  of_cluster = Barrier();
  warp_meetings.clear();
  warpgroup_meetings.clear();
}

Meeting& warp_meeting(uint32_t mask) { return warp_meetings[{current->warp(), mask}]; }
Meeting& warpgroup_meeting() { return warpgroup_meetings[current->number / WARPGROUP]; }

void need_whole_warp(const char* name) {
  if (block.threads - current->warp() * WARP < WARP) fail("%s in a warp of fewer than 32 threads", name);
  check_mask(0xFFFFFFFF, name);
}

std::string describe_barrier(int id) {
  Barrier& barrier = barriers[0][id];
  return "barrier " + std::to_string(id) + " (" + std::to_string(barrier.arrived) + " of " +
         std::to_string(barrier.expected) + " threads arrived)";
}

// A barrier of the whole block counts the threads that have not returned.
void leave_block() {
  Barrier& barrier = barriers[current->rank][0];
  if (barrier.expected == block.alive[current->rank] && barrier.arrived) {
    barrier.expected--;
    if (barrier.arrived == barrier.expected) complete(barrier);
  }
  if (current->at_cluster) fail("a thread arrived at barrier.cluster and returned without waiting for it");
  if (of_cluster.arrived && of_cluster.arrived == block.running - 1) complete(of_cluster);
}

}  // namespace emulation

using namespace emulation;

void emu_barrier(int id, int count, int arrive_only) {
  if (id < 0 || id >= BARRIERS) fail("barrier %d: there are barriers 0 to 15", id);
  if (count % WARP && count) fail("barrier %d for %d threads, which is no multiple of 32", id, count);
  if (!count) count = block.alive[current->rank];
  Barrier& barrier = barriers[current->rank][id];
  if (!barrier.expected) barrier.expected = count;
  if (barrier.expected != count)
    fail("divergence: barrier %d for %d threads, while others are at it for %d", id, count, barrier.expected);
  publish(barrier.clock);
  progress++;
  unsigned generation = barrier.generation;
  if (++barrier.arrived == barrier.expected) complete(barrier);
  if (arrive_only) return;
  wait_until(Waits::barrier, id, "bar.sync", [&] { return barrier.generation != generation; });
  observe(barrier.completed);
}

int emu_barrier_count(int predicate) {
  Barrier& own = barriers[current->rank][0];
  own.votes += predicate != 0;
  emu_barrier(0, 0, 0);
  return own.counted;
}

void emu_cluster_arrive(int relaxed) {
  if (current->at_cluster) fail("barrier.cluster.arrive twice, without a wait between");
  current->at_cluster = true;
  current->cluster_phase = of_cluster.generation;
  if (!relaxed) publish(of_cluster.clock);
  progress++;
  if (++of_cluster.arrived == block.running) complete(of_cluster);
}

void emu_cluster_wait() {
  if (!current->at_cluster) fail("barrier.cluster.wait without an arrive before it");
  wait_until(Waits::cluster, 0, "barrier.cluster", [] { return of_cluster.generation != current->cluster_phase; });
  current->at_cluster = false;
  observe(of_cluster.completed);
}

void emu_syncwarp(uint32_t mask) {
  static const char key = 0;
  share_copies();
  meet_lanes(mask, &key, "__syncwarp", nullptr, [](void**) {});
}

// Which lanes would be together on hardware is not known: those that have not returned.
uint32_t emu_active_mask() { return lanes_alive(); }

uint64_t emu_shuffle(uint32_t mask, uint64_t value, int source) {
  static const char key = 0;
  struct Lane {
    uint64_t value;
    int source;
    uint64_t result;
  } own{value, source, value};
  uint32_t present = members(mask);
  meet_lanes(mask, &key, "shfl.sync", &own, [present](void** lanes) {
    for (int i = 0; i < WARP; i++) {
      if (!(present >> i & 1)) continue;
      Lane& lane = *(Lane*)lanes[i];
      if (lane.source >= 0 && (present >> lane.source & 1)) lane.result = ((Lane*)lanes[lane.source])->value;
    }
  });
  return own.result;
}

uint32_t emu_ballot(uint32_t mask, int predicate) {
  static const char key = 0;
  struct Lane {
    int predicate;
    uint32_t result;
  } own{predicate, 0};
  uint32_t present = members(mask);
  meet_lanes(mask, &key, "vote.sync", &own, [present](void** lanes) {
    uint32_t votes = 0;
    for (int i = 0; i < WARP; i++)
      if ((present >> i & 1) && ((Lane*)lanes[i])->predicate) votes |= 1u << i;
    for (int i = 0; i < WARP; i++)
      if (present >> i & 1) ((Lane*)lanes[i])->result = votes;
  });
  return own.result;
}
