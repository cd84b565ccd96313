// Bulk copies (cp.async.bulk, the tensor memory accelerator): boxes of tensors and plain bytes, to and from shared memory.
#include <algorithm>
#include <cstring>
#include <deque>
#include <vector>

#include "aliasing.h"
#include "asynchronous.h"
#include "failure.h"
#include "memory.h"
#include "settings.h"
#include "tensor_map.h"

namespace emulation {
namespace {

// A bulk copy out of shared memory.
struct Store {
  std::function<void()> work;
  Operation operation;
};

// Of one thread.
struct Groups {
  std::vector<Store> open;
  std::deque<std::vector<Store>> committed;
};

std::vector<Groups> groups;

// Calls row(element of the tensor or null, address in shared memory, bytes) for 16 bytes (or an element) at a time.
template <class F>
void for_each_chunk(const TensorMap& map, const int* coordinates, uint32_t smem, F chunk) {
  int index[MAX_RANK] = {};
  int step = std::max(1, 16 / map.element_bytes);
  for (uint32_t offset = 0; offset < map.box_bytes(); offset += step * map.element_bytes) {
    char* element = map.base;
    bool inside = true;
    for (int i = 1; i < map.rank; i++) {
      int64_t at = (int64_t)coordinates[i] + index[i];
      inside = inside && at >= 0 && at <= map.last[i];
      element += at * (int64_t)map.stride[i];
    }
    uint32_t to = swizzled(smem + offset, map.swizzle);
    for (int e = 0; e < step; e++) {
      int64_t at = (int64_t)coordinates[0] + index[0] + e;
      bool here = inside && at >= 0 && at <= map.last[0];
      chunk(here ? element + at * map.element_bytes : nullptr, shared(to + e * map.element_bytes), map.element_bytes);
    }
    index[0] += step;
    for (int i = 0; i + 1 < map.rank && index[i] >= map.box[i]; i++) {
      index[i] = 0;
      index[i + 1]++;
    }
  }
}

void load(const TensorMap& map, const int* coordinates, uint32_t destination) {
  for_each_chunk(map, coordinates, destination, [](char* element, char* to, int bytes) {
    if (!element) return (void)memset(to, 0, bytes);
    if (!accessible((uint64_t)element, bytes)) check(element, bytes, "bulk tensor load: read");
    memcpy(to, element, bytes);
  });
}

void store(const TensorMap& map, const int* coordinates, uint32_t source) {
  for_each_chunk(map, coordinates, source, [](char* element, char* from, int bytes) {
    if (!element) return;
    if (!accessible((uint64_t)element, bytes)) check(element, bytes, "bulk tensor store: write");
    memcpy(element, from, bytes);
  });
}

void check_box(const TensorMap& map, int rank, uint32_t address, const char* what) {
  if (map.rank != rank) fail("%s of %d dimensions with a map of %d", what, rank, map.rank);
  // the pattern of a swizzle repeats after 8 times its width: the box must begin where the pattern does
  shared(address, map.box_bytes(), map.swizzle ? size_t(128) << map.swizzle : 128, what);
}

void add_store(const Operation& operation, std::function<void()> work) {
  if (settings.arrivals == Arrivals::at_once) {
    work();
    work = [] {};
  }
  groups[current->number].open.push_back({std::move(work), operation});
}

void check_pieces(const void* global, uint32_t bytes, bool write, const char* what) {
  if (bytes % 16 || !bytes) fail("%s of %u bytes, which is no multiple of 16", what, bytes);
  if ((uint64_t)global % 16) fail("%s: the address of device memory is not aligned to 16 bytes", what);
  check(global, bytes, what);
  note_aliases((uint64_t)global, bytes, write);
}

}  // namespace

void reset_bulk() { groups.assign(block.threads, Groups()); }

void end_bulk() {
  for (size_t i = 0; i < groups.size(); i++)
    if (!groups[i].open.empty() || !groups[i].committed.empty())
      fail("the block ended while bulk stores of thread %zu were reading its shared memory", i);
}

}  // namespace emulation

using namespace emulation;

void emu_tma_load(uint32_t destination, const void* where, const int* coordinates, int rank, uint32_t mbarrier) {
  const TensorMap& map = tensor_map(where);
  check_box(map, rank, destination, "bulk tensor load");
  check_mbarrier_for_bulk(mbarrier);
  Operation operation = bulk_operation();
  order_operation(operation, Proxy::async, destination, map.box_bytes(), true, "write by a bulk tensor load");
  std::vector<int> at(coordinates, coordinates + rank);
  do_later([map, at, destination, mbarrier, operation] {
    load(map, at.data(), destination);
    complete_bytes(mbarrier, map.box_bytes(), operation.clock);
  });
}

// Each block of the mask gets the box at the same place, and its mbarrier at the same place hears of it.
void emu_tma_multicast(uint32_t destination, const void* where, const int* coordinates, int rank, uint32_t mbarrier,
                       uint32_t mask) {
  const TensorMap& map = tensor_map(where);
  check_box(map, rank, destination, "bulk tensor load");
  if (!mask || mask >> block.cluster) fail("bulk tensor load for the blocks 0x%x of a cluster of %d", mask, block.cluster);
  Operation operation = bulk_operation();
  std::vector<int> at(coordinates, coordinates + rank);
  for (int to = 0; to < block.cluster; to++) {
    if (!(mask >> to & 1)) continue;
    uint32_t there = in_block(destination, to), told = in_block(mbarrier, to);
    check_mbarrier_for_bulk(told);
    order_operation(operation, Proxy::async, there, map.box_bytes(), true, "write by a bulk tensor load");
    do_later([map, at, there, told, operation] {
      load(map, at.data(), there);
      complete_bytes(told, map.box_bytes(), operation.clock);
    });
  }
}

void emu_tma_store(const void* where, const int* coordinates, int rank, uint32_t source) {
  const TensorMap& map = tensor_map(where);
  check_box(map, rank, source, "bulk tensor store");
  Operation operation = bulk_operation();
  order_operation(operation, Proxy::async, source, map.box_bytes(), false, "read by a bulk tensor store");
  std::vector<int> at(coordinates, coordinates + rank);
  add_store(operation, [map, at, source] { store(map, at.data(), source); });
}

void emu_bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t mbarrier) {
  check_pieces(source, bytes, false, "bulk load");
  char* to = shared(destination, bytes, 16, "bulk load");
  check_mbarrier_for_bulk(mbarrier);
  Operation operation = bulk_operation();
  order_operation(operation, Proxy::async, destination, bytes, true, "write by a bulk load");
  do_later([=] {
    memcpy(to, source, bytes);
    complete_bytes(mbarrier, bytes, operation.clock);
  });
}

void emu_bulk_store(void* destination, uint32_t source, uint32_t bytes) {
  check_pieces(destination, bytes, true, "bulk store");
  const char* from = shared(source, bytes, 16, "bulk store");
  Operation operation = bulk_operation();
  order_operation(operation, Proxy::async, source, bytes, false, "read by a bulk store");
  add_store(operation, [=] { memcpy(destination, from, bytes); });
}

void emu_bulk_commit() {
  Groups& own = groups[current->number];
  own.committed.push_back(std::move(own.open));
  own.open.clear();
}

// With .read only the reads are known to be done; the writes to device memory are done here all the same, because only
// later launches and blocks could tell.
void emu_bulk_wait(int left, int) {
  Groups& own = groups[current->number];
  while ((int)own.committed.size() > left) {
    auto& group = own.committed.front();
    if (settings.arrivals == Arrivals::last_first) std::reverse(group.begin(), group.end());
    for (auto& store : group) {
      store.work();
      observe(store.operation.clock);
    }
    own.committed.pop_front();
  }
}
