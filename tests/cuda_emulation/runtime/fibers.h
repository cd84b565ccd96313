// One fiber per CUDA thread of the block that runs: a thread runs until it has to wait for another one.
#pragma once
#include <cstdint>
#include <vector>

#include "../include/interface.h"

namespace emulation {

constexpr int WARP = 32;
constexpr int WARPGROUP = 128;
constexpr int MAX_THREADS = 1024;

// What a thread waits for; the text of a deadlock report.
enum class Waits { nothing, barrier, mbarrier, warp, warpgroup };

struct Thread {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  emu_dim index{};
  int number = 0;
  bool done = false;
  Waits waits = Waits::nothing;
  uint32_t waits_for = 0;           // number of the named barrier, or address of the mbarrier
  const char* operation = "";       // name of the collective operation
  uint32_t proxy_fences = 0;        // fence.proxy.async executed so far
  uint32_t copies_seen = 0;         // commit groups of its cp.async that it has waited for
  uint32_t init_fences = 0;         // those and fence.mbarrier_init

  int warp() const { return number / WARP; }
  int lane() const { return number % WARP; }
};

// The block that runs.
struct Block {
  emu_dim grid{}, size{}, index{};
  int threads = 0;
  int alive = 0;       // threads that have not returned
};

extern Block block;
extern std::vector<Thread> threads;
extern Thread* current;               // null outside of kernels
extern unsigned long progress;        // grows with everything that may let another thread go on

constexpr size_t STACK = 256 << 10;
// The stacks of all threads lie in one piece of memory.
bool on_a_stack(uint64_t address);

// Lets the other threads run.
void yield();

// Waits until ready() holds; `waits`, `what` and `operation` are for the report of a deadlock.
template <class F>
void wait_until(Waits waits, uint32_t what, const char* operation, F ready) {
  if (ready()) return;
  current->waits = waits;
  current->waits_for = what;
  current->operation = operation;
  while (!ready()) yield();
  current->waits = Waits::nothing;
}

// Runs all threads of one block; false and the message of failure() if it failed.
bool run_block(void (*entry)(void**), void** parameters);

const char* failure();
void set_failure(const char* text);

}  // namespace emulation
