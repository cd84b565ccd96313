// cp.async: copies of 4, 8 or 16 bytes per thread, complete when the thread waits for their commit group.
#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "accesses.h"
#include "aliasing.h"
#include "asynchronous.h"
#include "failure.h"
#include "memory.h"
#include "settings.h"

namespace emulation {
namespace {

struct Copy {
  char* destination;
  const char* source;
  int bytes, source_bytes;

  void run() const {
    memcpy(destination, source, source_bytes);
    memset(destination + source_bytes, 0, bytes - source_bytes);
  }
};

// Of one thread.
struct Groups {
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> committed;
  uint32_t number = 1;                  // of the open group
};

std::vector<Groups> groups;

int agent() { return COPIES_AT + current->warp(); }

void run(std::vector<Copy>& group) {
  if (settings.arrivals == Arrivals::last_first) std::reverse(group.begin(), group.end());
  for (auto& copy : group) copy.run();
  group.clear();
}

}  // namespace

void reset_cp_async() { groups.assign(block.threads, Groups()); }

}  // namespace emulation

using namespace emulation;

void emu_cp_async(uint32_t destination, const void* source, int bytes, int source_bytes) {
  if (source_bytes < 0 || source_bytes > bytes) fail("cp.async of %d bytes from %d bytes", bytes, source_bytes);
  if ((uint64_t)source % bytes) fail("cp.async: the source is not aligned to %d bytes", bytes);
  char* to = shared(destination, bytes, bytes, "cp.async");
  count_access(__builtin_return_address(0), (uint64_t)to, bytes, true);
  if (source_bytes) {
    check(source, source_bytes, "cp.async: read");
    note_aliases((uint64_t)source, source_bytes, false);
    count_access(__builtin_return_address(0), (uint64_t)source, source_bytes, false);
  }
  Groups& own = groups[current->number];
  order_operation(operation(agent(), own.number, clock_of_warp()), Proxy::generic, destination, bytes, true,
                  "write by cp.async");
  Copy copy{to, (const char*)source, bytes, source_bytes};
  if (settings.arrivals == Arrivals::at_once) copy.run();
  else own.open.push_back(copy);
}

void emu_cp_async_commit() {
  Groups& own = groups[current->number];
  own.committed.push_back(std::move(own.open));
  own.open.clear();
  own.number++;
}

void emu_cp_async_wait(int left) {
  Groups& own = groups[current->number];
  if (left < 0) {
    emu_cp_async_commit();
    left = 0;
  }
  while ((int)own.committed.size() > left) {
    run(own.committed.front());
    own.committed.pop_front();
  }
  if (own.number > (uint32_t)left) current->copies_seen = std::max(current->copies_seen, own.number - 1 - left);
}

// The mbarrier is told when the copies issued so far are done; without .noinc it waits for one arrival more.
void emu_cp_async_arrive(uint32_t mbarrier, int no_increment) {
  Groups* own = &groups[current->number];
  Clock clock = clock_of_warp();
  clock.at[agent()] = own->number;
  publish(clock);
  if (!no_increment) arrive_for_copies(mbarrier, Clock(), 2);
  auto copies = std::make_shared<std::vector<Copy>>();
  for (auto& group : own->committed) {
    copies->insert(copies->end(), group.begin(), group.end());
    group.clear();
  }
  copies->insert(copies->end(), own->open.begin(), own->open.end());
  own->open.clear();
  do_later([=] {
    run(*copies);
    arrive_for_copies(mbarrier, clock, 0);
  });
}
