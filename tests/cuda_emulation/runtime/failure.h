// How the emulator reports what a kernel did wrong: the launch ends and the driver call fails with the message.
#pragma once

namespace emulation {

// Ends the running launch (or the driver call) with a message in the manner of printf. Never returns into the kernel.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace emulation
