// One fiber per CUDA thread of the block, or the cluster of blocks, that runs: a thread runs until it has to wait for
// another one. Threads of a cluster are numbered on from block to block, so that warps and warpgroups are too.
#pragma once
#include <cstdint>
#include <vector>

#include "../include/interface.h"

namespace emulation {

constexpr int WARP = 32;
constexpr int WARPGROUP = 128;
constexpr int MAX_THREADS = 1024;

// What a thread waits for; the text of a deadlock report.
enum class Waits { nothing, barrier, mbarrier, warp, warpgroup, cluster };

struct Thread {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  emu_dim index{}, block_index{};
  int number = 0;
  int rank = 0;                     // of its block in the cluster
  bool done = false;
  Waits waits = Waits::nothing;
  uint32_t waits_for = 0;           // number of the named barrier, or address of the mbarrier
  const char* operation = "";       // name of the collective operation
  uint32_t proxy_fences = 0;        // fence.proxy.async executed so far
  uint32_t copies_seen = 0;         // commit groups of its cp.async that it has waited for
  uint32_t init_fences = 0;         // those and fence.mbarrier_init
  bool at_cluster = false;          // arrived at the barrier of the cluster, and did not wait for it yet
  unsigned cluster_phase = 0;       // of that barrier, then

  int warp() const { return number / WARP; }
  int lane() const { return number % WARP; }
};

constexpr int MAX_CLUSTER = 8;

// The cluster of blocks that runs, mostly one of one.
struct Block {
  emu_dim grid{}, size{}, index{};   // index: of the first block
  int cluster = 1;                   // blocks, along x
  int each = 0, threads = 0;         // threads of a block, and of all
  int alive[MAX_CLUSTER] = {};       // threads of each block that have not returned
  int running = 0;                   // of all blocks
};

extern Block block;
extern std::vector<Thread> threads;
extern Thread* current;               // null outside of kernels
extern unsigned long progress;        // grows with everything that may let another thread go on

constexpr size_t STACK = 256 << 10;
// The stacks of all threads lie in one allocation.
bool on_a_stack(uint64_t address);

// Lets the other threads run.
void yield();

// Waits until ready() is true; `waits`, `what` and `operation` are for the report of a deadlock.
template <class F>
void wait_until(Waits waits, uint32_t what, const char* operation, F ready) {
  if (ready()) return;
  current->waits = waits;
  current->waits_for = what;
  current->operation = operation;
  while (!ready()) yield();
  current->waits = Waits::nothing;
}

// Runs all threads of one cluster; false and the message of failure() if it failed.
bool run_block(void (*entry)(void**), void** parameters);

const char* failure();
void set_failure(const char* text);

}  // namespace emulation
