#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "failure.h"
#include "fibers.h"

namespace emulation {

char* arena = nullptr;
size_t arena_bytes = 0;

namespace {

constexpr size_t GRANULE = 8;                 // bytes per entry of the map
constexpr size_t GAP = 4096;                  // unusable bytes between allocations

uint8_t* usable;                              // per granule: how many of its first bytes may be accessed
std::map<size_t, size_t> allocations, holes;  // offset -> bytes
size_t top;                                   // device memory beyond was never used

struct Placed {
  const char* name;
  size_t offset, bytes;
};
std::vector<Placed> placed;                   // shared arrays; the first is the dynamic one
size_t used_window;
int blocks = 1;                               // whose shared memory is laid out

void open_arena() {
  if (arena) return;
  auto map = [](size_t bytes, int access, int how, void* at = nullptr) {
    void* p = mmap(at, bytes, access, how | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) fail("no address space for the emulated device");
    return p;
  };
  usable = (uint8_t*)map(CAPACITY / GRANULE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
  arena = (char*)map(CAPACITY * WINDOWS, PROT_NONE, MAP_PRIVATE);
  map(CAPACITY, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, arena);    // shared, for other windows to show the same
  arena_bytes = CAPACITY * WINDOWS;
  top = SHARED_WINDOW + GAP;
}

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

// Only whole granules begin an allocation, so that a count of leading bytes describes each.
void mark(size_t offset, size_t bytes, bool allowed) {
  memset(usable + offset / GRANULE, allowed ? GRANULE : 0, bytes / GRANULE);
  if (bytes % GRANULE) usable[(offset + bytes) / GRANULE] = allowed ? bytes % GRANULE : 0;
}

}  // namespace

void* allocate(size_t bytes) {
  open_arena();
  size_t room = round_up(std::max<size_t>(bytes, 1), 512) + GAP, offset = 0;
  for (auto& [at, size] : holes)
    if (size == room) {
      offset = at;
      holes.erase(at);
      break;
    }
  if (!offset) {
    if (top + room > CAPACITY) return nullptr;
    offset = top;
    top += room;
  }
  allocations[offset] = bytes;
  memset(arena + offset, POISON, bytes);
  mark(offset, bytes, true);
  return arena + offset;
}

bool release(void* pointer) {
  auto it = allocations.find((char*)pointer - arena);
  if (it == allocations.end()) return false;
  auto [offset, bytes] = *it;
  mark(offset, bytes, false);
  size_t first = round_up(offset, 4096), last = (offset + bytes) / 4096 * 4096;
  if (last > first) madvise(arena + first, last - first, MADV_REMOVE);
  holes[offset] = round_up(std::max<size_t>(bytes, 1), 512) + GAP;
  allocations.erase(it);
  return true;
}

size_t bytes_free() {
  open_arena();
  return CAPACITY - top;
}

std::pair<size_t, size_t> allocation_around(size_t offset) {
  auto next = allocations.upper_bound(offset);
  if (next == allocations.begin()) return {offset, 0};
  auto [begin, bytes] = *std::prev(next);
  return {begin, offset < begin + bytes ? bytes : 0};
}

void open_windows(int last) {
  static int open = 1;
  for (; open <= last; open++)                 // an old size of 0 maps the same pages once more
    if (mremap(arena, 0, CAPACITY, MREMAP_MAYMOVE | MREMAP_FIXED, arena + open * CAPACITY) == MAP_FAILED)
      fail("no address space for the emulated device");
}

bool accessible(uint64_t address, size_t bytes) {
  if (!in_arena(address)) return false;
  size_t at = offset_of(address), end = at + bytes;
  if (end > CAPACITY) return false;
  for (size_t granule = at / GRANULE; granule * GRANULE < end; granule++)
    if (usable[granule] < std::min(end - granule * GRANULE, GRANULE)) return false;
  return true;
}

namespace {

// The nearest allocation below the address, and how far after its end the address lies.
[[noreturn]] void report(uint64_t address, size_t bytes, const char* what) {
  if (!in_arena(address)) fail("%s of %zu bytes at %p, which is not device memory", what, bytes, (void*)address);
  size_t at = offset_of(address);
  if (at < SHARED_WINDOW) {
    at %= BLOCK_WINDOW;
    const Placed* below = nullptr;
    for (auto& array : placed)
      if (array.offset <= at && (!below || array.offset > below->offset)) below = &array;
    if (!below) fail("%s of %zu bytes before the beginning of shared memory", what, bytes);
    fail("%s of %zu bytes at byte %zu of the shared array %s, which has %zu bytes", what, bytes, at - below->offset,
         below->name, below->bytes);
  }
  auto hole = holes.upper_bound(at);
  if (hole != holes.begin() && at < std::prev(hole)->first + std::prev(hole)->second - GAP)
    fail("%s of %zu bytes in device memory that was freed", what, bytes);
  auto next = allocations.upper_bound(at);
  if (next == allocations.begin()) fail("%s of %zu bytes before the first allocation", what, bytes);
  auto [offset, size] = *std::prev(next);
  if (next != allocations.end() && next->first - at < at - offset - std::min(size, at - offset))
    fail("%s of %zu bytes, %zu bytes before an allocation of %zu bytes", what, bytes, next->first - at, next->second);
  fail("%s of %zu bytes at byte %zu of an allocation of %zu bytes", what, bytes, at - offset, size);
}

}  // namespace

void check(uint64_t address, size_t bytes, const char* what) {
  if (!accessible(address, bytes)) report(address, bytes, what);
}

char* shared(uint32_t address, size_t bytes, size_t alignment, const char* what) {
  if (address >= SHARED_WINDOW) fail("%s: 0x%x is no address of shared memory", what, address);
  if (current && block_of(address) != current->rank)
    fail("%s: address 0x%x lies in the shared memory of another block of the cluster", what, address);
  if (address % alignment) fail("%s: address 0x%x of shared memory is not aligned to %zu bytes", what, address, alignment);
  check(shared(address), bytes, what);
  return shared(address);
}

// Each array ends as close as its alignment permits to a gap. Alignment is what was asked for and no more, so that a
// kernel that needs a better one (the 1024 bytes of a 128-byte swizzle) fails here before it fails by chance elsewhere.
void lay_out_shared(const emu_kernel& kernel, size_t dynamic_bytes, int cluster) {
  open_arena();
  for (auto& array : placed)
    for (int rank = 0; rank < blocks; rank++) mark(in_block(array.offset, rank), array.bytes, false);
  placed.clear();
  blocks = cluster;
  size_t offset = 0;
  auto place = [&](const char* name, size_t bytes, size_t alignment) {
    offset = round_up(offset, 2 * alignment) + alignment;
    placed.push_back({name, offset, bytes});
    if (offset + bytes > BLOCK_WINDOW) fail("no room for the shared memory of a block");
    for (int rank = 0; rank < blocks; rank++) mark(in_block(offset, rank), bytes, true);
    offset += round_up(bytes, 16) + 16;
  };
  place("(dynamic)", dynamic_bytes, std::max<size_t>(kernel.dynamic_alignment, 16));
  for (int i = 0; i < kernel.arrays; i++)
    place(kernel.shared[i].name, kernel.shared[i].bytes, std::max<size_t>(kernel.shared[i].alignment, 16));
  used_window = offset;
}

void poison_shared() {
  for (int rank = 0; rank < blocks; rank++) memset(arena + rank * BLOCK_WINDOW, POISON, used_window);
}
size_t shared_end() { return (blocks - 1) * BLOCK_WINDOW + used_window; }

}  // namespace emulation

using namespace emulation;

void* emu_dynamic_shared() { return arena + in_block(placed[0].offset, current->rank); }
void* emu_static_shared(int number) { return arena + in_block(placed[number + 1].offset, current->rank); }
uint32_t emu_map_shared(uint32_t address, uint32_t rank) {
  if (rank >= (uint32_t)blocks) fail("mapa: block %u of a cluster of %d", rank, blocks);
  return in_block(shared(address, 1, 1, "mapa") - arena, rank);
}
uint32_t emu_shared_address(const void* generic) {
  if (!in_shared((uint64_t)generic)) fail("%p is no generic address of shared memory", generic);
  return (const char*)generic - arena;
}
void* emu_shared_pointer(uint32_t address) { return shared(address); }
