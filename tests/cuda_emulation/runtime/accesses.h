// What the accesses of warps to memory take of a GPU, where settings.counting asks for it: wavefronts of shared memory, of
// 32 banks of 4 bytes, and sectors of 32 bytes of device memory, each with the fewest that would do.
//
// Threads run one by one, so the n-th execution of an instruction by each lane of a warp in a block counts as one access of
// the warp. That is what hardware does where lanes that skip an instruction skip its last executions, or all.
#pragma once
#include <cstdint>
#include <string>

#include "settings.h"

namespace emulation {

// Of a power of two of bytes, up to 16, by the running thread; `site` is an address in the instruction's code.
void record_access(const void* site, uint64_t address, size_t bytes, bool write);
inline void count_access(const void* site, uint64_t address, size_t bytes, bool write) {
  if (settings.counting) record_access(site, address, bytes, write);
}
// A block begins, and has ended.
void reset_accesses();
void end_accesses();
// A launch has ended of a kernel in the library that was made from a file.
void report_accesses(const std::string& kernel, const char* file);

}  // namespace emulation
