// Which functions of the driver and the runtime were called, in order, and on which stream: what a step costs the host.
#pragma once

namespace emulation {

// The stream of calls that have none.
inline void* const NO_STREAM = (void*)-1;

void note_call(const char* name, void* stream = NO_STREAM);

}  // namespace emulation

// The calls since the last time this was asked for: lines of a name, and of the stream's address where there is one.
extern "C" const char* emu_take_calls();
