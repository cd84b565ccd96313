#include "ordering.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "failure.h"
#include "memory.h"
#include "settings.h"

namespace emulation {
namespace {

constexpr size_t CELL = 2;                 // bytes: elements of one byte are not checked

constexpr uint8_t NOBODY = 255;

// The last write and two reads by different agents of two bytes of shared memory.
struct Cell {
  uint32_t write = 0, read[2] = {0, 0};    // clocks
  uint32_t fences = 0;                     // proxy fences that the writing thread had executed
  uint16_t thread = 0;                     // that wrote
  uint8_t writer = NOBODY, reader[2] = {NOBODY, NOBODY};
  bool generic = true;                     // written by ordinary stores or cp.async
};

std::vector<Cell> cells;
std::array<Clock, WARPS> warps;
uint32_t bulk_clocks[BULK_CLOCKS];
int next_bulk;

const char* name(int agent) {
  static char text[2][48];
  static int turn;
  char* buffer = text[turn ^= 1];
  if (agent < WARPS) snprintf(buffer, 48, "warp %d", agent);
  else if (agent < WGMMA_AT) snprintf(buffer, 48, "cp.async of warp %d", agent - COPIES_AT);
  else if (agent < BULK_AT) snprintf(buffer, 48, "wgmma of warpgroup %d", (agent - WGMMA_AT) / 4);
  else snprintf(buffer, 48, "a bulk copy");
  return buffer;
}

// Whether the past includes what an agent read.
bool has_seen_read(const Clock& seen, int agent, uint32_t clock) {
  if (agent < WGMMA_AT || agent >= BULK_AT) return seen.at[agent] >= clock;
  for (int warp = 0; warp < WARPGROUP / WARP; warp++)
    if (seen.at[agent + warp] < clock) return false;
  return true;
}

// Whether the past includes a write; a thread has seen the copies that it waited for itself.
bool has_seen(const Clock& seen, const Cell& cell) {
  if (seen.at[cell.writer] >= cell.write) return true;
  return current && cell.writer == COPIES_AT + current->warp() && cell.thread == current->number &&
         current->copies_seen >= cell.write;
}

// `seen` is the past of the agent that accesses now.
void access(const Clock& seen, int agent, bool generic, uint32_t address, size_t bytes, bool write, const char* what) {
  if (!settings.races || bytes < CELL) return;
  size_t last = (address + bytes - 1) / CELL;
  if (last >= cells.size()) return;
  uint32_t now = seen.at[agent];
  for (size_t i = address / CELL; i <= last; i++) {
    Cell& cell = cells[i];
    if (cell.writer != NOBODY) {
      if (!has_seen(seen, cell))
        fail("race: %s of shared memory at 0x%zx without an order after the write by %s", what, i * CELL,
             name(cell.writer));
      if (!generic && !write && cell.generic && threads[cell.thread].proxy_fences <= cell.fences)
        fail("%s of shared memory at 0x%zx, which thread %d wrote without a fence.proxy.async after it", what, i * CELL,
             cell.thread);
    }
    if (write) {
      for (int r = 0; r < 2; r++)
        if (cell.reader[r] != NOBODY && !has_seen_read(seen, cell.reader[r], cell.read[r]))
          fail("race: %s of shared memory at 0x%zx without an order after the read by %s", what, i * CELL,
               name(cell.reader[r]));
      cell.writer = agent;
      cell.write = now;
      cell.generic = generic;
      cell.thread = current ? current->number : 0;
      cell.fences = current ? current->proxy_fences : 0;
      cell.reader[0] = cell.reader[1] = NOBODY;
    } else {
      if (cell.reader[0] != agent) {
        cell.reader[1] = cell.reader[0];
        cell.read[1] = cell.read[0];
        cell.reader[0] = agent;
      }
      cell.read[0] = now;
    }
  }
}

}  // namespace

void reset_ordering() {
  cells.assign(settings.races ? (shared_end() + CELL - 1) / CELL : 0, Cell());
  warps.fill(Clock());
  for (int w = 0; w < WARPS; w++) warps[w].at[w] = 1;
  memset(bulk_clocks, 0, sizeof bulk_clocks);
  next_bulk = 0;
}

Clock& clock_of(int warp) { return warps[warp]; }
Clock& clock_of_warp() { return warps[current->warp()]; }

void share_copies() {
  uint32_t& seen = clock_of_warp().at[COPIES_AT + current->warp()];
  seen = std::max(seen, current->copies_seen);
}

void publish(Clock& to) {
  share_copies();
  Clock& own = clock_of_warp();
  to.join(own);
  own.at[current->warp()]++;
}

void observe(const Clock& from) { clock_of_warp().join(from); }

Operation operation(int agent, uint32_t clock, const Clock& past) {
  Operation result{agent, past};
  result.clock.at[agent] = clock;
  return result;
}

Operation bulk_operation() {
  share_copies();
  next_bulk = (next_bulk + 1) % BULK_CLOCKS;
  return operation(BULK_AT + next_bulk, ++bulk_clocks[next_bulk], clock_of_warp());
}

void order_access(uint32_t address, size_t bytes, bool write) {
  access(clock_of_warp(), current->warp(), true, address, bytes, write, write ? "write" : "read");
}

void order_operation(const Operation& operation, Proxy proxy, uint32_t address, size_t bytes, bool write,
                     const char* what) {
  access(operation.clock, operation.agent, proxy == Proxy::generic, address, bytes, write, what);
}

}  // namespace emulation
