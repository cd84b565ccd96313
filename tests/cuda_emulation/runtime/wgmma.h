// wgmma reads and writes registers while its thread goes on: which ones may not be touched.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emulation {

// Fails if the running thread touches a register of a wgmma in flight. Registers are its stack here.
void check_registers(uint64_t address, size_t bytes, bool write);

}  // namespace emulation
