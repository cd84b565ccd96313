#include "calls.h"

#include <cstdint>
#include <mutex>
#include <string>

namespace emulation {
namespace {

std::mutex mutex;
std::string calls;

}  // namespace

void note_call(const char* name, void* stream) {
  std::lock_guard<std::mutex> lock(mutex);
  calls += name;
  if (stream != NO_STREAM) calls += "\t" + std::to_string((uint64_t)stream);
  calls += "\n";
}

}  // namespace emulation

const char* emu_take_calls() {
  static std::string taken;
  std::lock_guard<std::mutex> lock(emulation::mutex);
  taken.swap(emulation::calls);
  emulation::calls.clear();
  return taken.c_str();
}
