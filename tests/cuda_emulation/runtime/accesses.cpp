#include "accesses.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "fibers.h"
#include "memory.h"

namespace emulation {
namespace {

constexpr int BANKS = 32, WORD = 4, SECTOR = 32;

// By some lanes of a warp.
struct Request {
  uint32_t lanes = 0;
  std::array<uint64_t, WARP> address;
};

// An instruction, which one in generic addresses counts as two of, and how it accesses memory.
using Instruction = std::tuple<const void*, bool, size_t, bool>;   // site, in shared memory, bytes of a lane, write

// Of a warp and an instruction: requests that not all lanes have joined yet.
struct Open {
  uint32_t dropped = 0;                       // requests that were complete
  std::array<uint32_t, WARP> executions{};
  std::deque<Request> requests;
};

struct Count {
  long long requests = 0, least = 0, taken = 0;
};

std::map<std::pair<int, Instruction>, Open> open;       // of the block that runs
std::map<Instruction, Count> counts;                     // of the launch so far
std::string report;

// Words of one bank take a wavefront each. Accesses of 8 and 16 bytes go by halves and quarters of a warp.
void count_wavefronts(const Request& request, size_t bytes, Count& count) {
  int together = bytes <= WORD ? WARP : std::max<int>(1, WARP * WORD / bytes);
  for (int first = 0; first < WARP; first += together) {
    std::array<std::vector<uint64_t>, BANKS> words;
    for (int lane = first; lane < first + together; lane++) {
      if (!(request.lanes >> lane & 1)) continue;
      for (size_t i = 0; i < (bytes + WORD - 1) / WORD; i++) {
        uint64_t word = request.address[lane] / WORD + i;
        auto& bank = words[word % BANKS];
        if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
      }
    }
    size_t most = 0;
    for (auto& bank : words) most = std::max(most, bank.size());
    count.taken += most;
    count.least += most > 0;
  }
}

void count_sectors(const Request& request, size_t bytes, Count& count) {
  std::map<uint64_t, uint32_t> sectors;       // which of their bytes are asked for
  for (int lane = 0; lane < WARP; lane++)
    if (request.lanes >> lane & 1)
      for (uint64_t at = request.address[lane]; at < request.address[lane] + bytes; at++)
        sectors[at / SECTOR] |= 1u << at % SECTOR;
  int asked = 0;
  for (auto& [sector, mask] : sectors) asked += __builtin_popcount(mask);
  count.taken += sectors.size();
  count.least += (asked + SECTOR - 1) / SECTOR;
}

void close(const Instruction& instruction, const Request& request) {
  auto [site, shared, bytes, write] = instruction;
  Count& count = counts[instruction];
  count.requests++;
  shared ? count_wavefronts(request, bytes, count) : count_sectors(request, bytes, count);
}

}  // namespace

void record_access(const void* site, uint64_t address, size_t bytes, bool write) {
  Instruction instruction{site, in_shared(address), bytes, write};
  Open& own = open[{current->warp(), instruction}];
  int lane = current->lane();
  size_t at = own.executions[lane]++ - own.dropped;
  if (at == own.requests.size()) own.requests.emplace_back();
  Request& request = own.requests[at];
  request.lanes |= 1u << lane;
  request.address[lane] = offset_of(address);
  while (!own.requests.empty() && own.requests.front().lanes == 0xFFFFFFFF) {
    close(instruction, own.requests.front());
    own.requests.pop_front();
    own.dropped++;
  }
}

void reset_accesses() { open.clear(); }

void end_accesses() {
  for (auto& [key, own] : open)
    for (auto& request : own.requests) close(key.second, request);
  open.clear();
}

// Lines of tabs between kernel, file, the place of the instruction in its library, and numbers.
void report_accesses(const std::string& kernel, const char* file) {
  for (auto& [instruction, count] : counts) {
    auto [site, shared, bytes, write] = instruction;
    Dl_info library;
    dladdr(site, &library);
    report += kernel + '\t' + file + '\t' + std::to_string((uint64_t)site - (uint64_t)library.dli_fbase);
    for (long long n : {(long long)shared, (long long)write, (long long)bytes, count.requests, count.least, count.taken})
      report += '\t' + std::to_string(n);
    report += '\n';
  }
  counts.clear();
}

}  // namespace emulation

using namespace emulation;

void emu_set_counting(int on) {
  settings.counting = on;
  counts.clear();
  report.clear();
}

const char* emu_take_accesses() {
  static std::string taken;
  taken = std::exchange(report, {});
  return taken.c_str();
}
