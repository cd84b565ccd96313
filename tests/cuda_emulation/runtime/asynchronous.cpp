#include "asynchronous.h"

#include <deque>

#include "failure.h"
#include "settings.h"

namespace emulation {
namespace {
std::deque<std::function<void()>> kept;
}

void do_later(std::function<void()> work) {
  progress++;
  if (settings.arrivals == Arrivals::at_once) work();
  else kept.push_back(std::move(work));
}

bool run_asynchronous() {
  if (kept.empty()) return false;
  bool newest = settings.arrivals == Arrivals::last_first;
  auto work = std::move(newest ? kept.back() : kept.front());
  if (newest) kept.pop_back();
  else kept.pop_front();
  work();
  return true;
}

void reset_asynchronous() {
  kept.clear();
  reset_mbarriers();
  reset_cp_async();
  reset_bulk();
  reset_wgmma();
}

void end_asynchronous() {
  if (!kept.empty()) fail("the block ended while asynchronous copies into its shared memory were under way");
  end_bulk();
  end_wgmma();
}

}  // namespace emulation
