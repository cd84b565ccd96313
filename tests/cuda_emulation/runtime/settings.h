// What the caller chooses: the device that is pretended, and the order in which things happen.
#pragma once
#include <cstddef>

namespace emulation {

enum class Arrivals { late, at_once, last_first };

struct Settings {
  int major = 9, minor = 0;              // compute capability
  int sm_count = 132;
  size_t shared_memory = 227 << 10;      // bytes of shared memory that a block may ask for
  bool descending = false;               // blocks and threads from the last to the first
  Arrivals arrivals = Arrivals::late;    // when asynchronous work is done
  bool races = true;                     // whether accesses to shared memory are checked for an order
  int left_out = -1;                     // number of the step that kernels are to leave out, see mutations.py
  bool reached = false;                  // whether a thread came to it
  bool counting = false;                 // whether accesses to memory are counted, see accesses.h
  long long matmuls = 0;                // that warps (mma.sync) and warpgroups (wgmma) have begun
};

extern Settings settings;

}  // namespace emulation

// Sets compute capability (90 for sm_90a), number of SMs and bytes of shared memory per block.
extern "C" void emu_set_device(int capability, int sm_count, size_t shared_memory);
// Sets the thread order (0 ascending, 1 descending), the arrivals (0 late, 1 at once, 2 last first), race checks.
extern "C" void emu_set_order(int descending, int arrivals, int races);
// Leaves out a step from now on (-1: none); whether the one before it was reached.
extern "C" int emu_leave_out(int step);
// How many matmuls there were since the last time this was asked for.
extern "C" long long emu_take_matmuls();
// Counts accesses from now on, or no longer.
extern "C" void emu_set_counting(int on);
// Those of the launches since the last time this was asked for, in the lines that accesses.py reads.
extern "C" const char* emu_take_accesses();
// Why the last call of the driver or runtime that failed did so; "" since the start or the last time this was asked
// for.
extern "C" const char* emu_take_failure();
