// __restrict__: a kernel promises that what it reads or writes through one such parameter, it does not write through
// another one. Compilers use that (loads by the read-only path, loads before stores), so that a broken promise is a fault
// even where threads come in the right order here.
//
// Parameters that point into one allocation may keep the promise, so addresses are what counts: such a parameter gets a
// window of its own, an address at which device memory lies too, and an access tells by its window which one it came
// through. Tensor maps are not such parameters.
#pragma once
#include <vector>

#include "memory.h"

namespace emulation {

// A launch begins: the parameters to call the kernel with, which live until the next launch.
void** with_windows(const emu_kernel& kernel, void** parameters);
// Of bytes in the arena by the running thread; fails if the promise is broken.
void note_through_window(uint64_t address, size_t bytes, bool write);
inline void note_aliases(uint64_t address, size_t bytes, bool write) {
  if (window_of(address)) note_through_window(address, bytes, write);
}

}  // namespace emulation
