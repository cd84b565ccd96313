#include "aliasing.h"

#include <sys/mman.h>

#include <map>

#include "failure.h"

namespace emulation {
namespace {

// Windows through which a byte was accessed in this launch, 0 for none.
struct Cell {
  uint8_t writer, first, second, unused;
};

struct Parameter {
  const char* name;
  size_t offset, begin, bytes;               // of the pointer, and of the allocation that it points into
};

Cell* cells;                                 // of every byte of the arena; pages that nobody touched take no memory
std::vector<Parameter> in_window;            // the first is window 1
std::vector<void*> values, pointers;

[[noreturn]] void report(int window, int other, size_t offset, bool write, const char* done) {
  auto &own = in_window[window - 1], &its = in_window[other - 1];
  fail("aliasing: %s through the __restrict__ parameter %s (byte %zu of an allocation of %zu) of byte %zu, which was %s "
       "through %s (byte %zu)",
       write ? "write" : "read", own.name, own.offset - own.begin, own.bytes, offset - own.begin, done, its.name,
       its.offset - its.begin);
}

}  // namespace

void** with_windows(const emu_kernel& kernel, void** parameters) {
  std::map<size_t, std::vector<int>> sharing;                      // by allocation
  for (int i = 0; i < kernel.parameters; i++) {
    if (!kernel.restricted[i]) continue;
    uint64_t address = *(uint64_t*)parameters[i];
    if (!address || !in_arena(address)) continue;
    auto [begin, bytes] = allocation_around(offset_of(address));
    if (bytes) sharing[begin].push_back(i);
  }
  in_window.clear();
  values.assign(kernel.parameters, nullptr);
  pointers.assign(parameters, parameters + kernel.parameters);
  for (auto& [begin, members] : sharing) {
    if (members.size() < 2) continue;
    size_t bytes = allocation_around(begin).second;
    if (!cells)
      cells = (Cell*)mmap(nullptr, CAPACITY * sizeof(Cell), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (cells == MAP_FAILED) fail("no address space for the emulated device");
    // Allocations lie at least a page of cells apart.
    size_t page = 4096 / sizeof(Cell), first = begin / page * page;
    madvise(cells + first, (begin + bytes - first) * sizeof(Cell), MADV_DONTNEED);
    for (int i : members) {
      if (in_window.size() + 1 == WINDOWS) break;    // the others go unchecked
      char* address = *(char**)parameters[i];
      in_window.push_back({kernel.restricted[i], offset_of((uint64_t)address), begin, bytes});
      values[i] = address + in_window.size() * CAPACITY;
      pointers[i] = &values[i];
    }
  }
  open_windows(in_window.size());
  return pointers.data();
}

void note_through_window(uint64_t address, size_t bytes, bool write) {
  int window = window_of(address);
  size_t begin = offset_of(address);
  for (size_t at = begin; at < begin + bytes; at++) {
    Cell& cell = cells[at];
    if (cell.writer && cell.writer != window) report(window, cell.writer, at, write, "written");
    if (write && cell.first && cell.first != window) report(window, cell.first, at, write, "read");
    if (write && cell.second && cell.second != window) report(window, cell.second, at, write, "read");
    if (write) cell.writer = window;
    if (!cell.first) cell.first = window;
    else if (cell.first != window && !cell.second) cell.second = window;
  }
}

}  // namespace emulation
