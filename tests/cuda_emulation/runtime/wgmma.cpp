// wgmma.mma_async: D [64, n] = A [64, 16] B [16, n] (+ D), by the 128 threads of a warpgroup, done when they wait for it.
#include "wgmma.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "asynchronous.h"
#include "elements.h"
#include "memory.h"
#include "meeting.h"
#include "settings.h"
#include "tensor_map.h"

namespace emulation {
namespace {

constexpr int M = 64, K = 16, MAX_N = 256;
constexpr int WARPS_OF_GROUP = WARPGROUP / WARP;

// The shared-memory matrix descriptor of the PTX manual. A row is an index along M or N.
struct Descriptor {
  uint32_t start, leading, stride;       // bytes
  int swizzle;                           // as in a tensor map

  Descriptor(uint64_t bits, int rank) {    // of a block of the cluster
    static const int swizzles[4] = {0, 3, 2, 1};
    start = in_block((bits & 0x3FFF) << 4, rank);
    leading = (bits >> 16 & 0x3FFF) << 4;
    stride = (bits >> 32 & 0x3FFF) << 4;
    swizzle = swizzles[bits >> 62];
    if (bits >> 49 & 7) fail("wgmma: a matrix descriptor with a base offset is not emulated");
  }

  // Core matrices are 8 rows of 16 bytes. With a swizzle of w bytes a row is w bytes wide and 8 rows follow each other.
  uint32_t at(int row, int k, bool transposed) const {
    int width = 16 << swizzle, across = transposed ? row : k, along = transposed ? k : row;
    uint32_t bytes = 2 * across;
    uint32_t address = start + along % 8 * width + bytes % width;
    if (swizzle == 0) address += along / 8 * (transposed ? leading : stride) + bytes / 16 * (transposed ? stride : leading);
    else if (transposed) address += along / 8 * stride + bytes / width * leading;
    else address += along / 8 * stride + bytes / width * width;
    return swizzled(address, swizzle);
  }
};

struct Registers {
  float* const* d;
  const emu_register* a;
};

// One instruction, of 128 threads.
struct Matmul {
  int n, kind, rank;
  bool a_in_registers, a_transposed, b_transposed, accumulate;
  int scale_a, scale_b;
  uint64_t a_descriptor, b_descriptor;
  std::vector<float*> d;                 // [128][n / 2]
  std::vector<emu_register> a;           // [128][4]

  template <class F>
  void for_each_a(F f) const {           // f(row, k, thread, register, half) of the fragment of A
    for (int thread = 0; thread < WARPGROUP; thread++) {
      int g = thread % 32 / 4, t = thread % 4, first = thread / 32 * 16;
      for (int r = 0; r < 4; r++)
        for (int e = 0; e < 2; e++) f(first + g + r % 2 * 8, 2 * t + e + r / 2 * 8, thread, r, e);
    }
  }

  void run() const {
    static float A[M][K], B[K][MAX_N], R[M][MAX_N];
    auto element = [this](uint32_t address) {
      uint16_t bits;
      memcpy(&bits, shared(address), 2);
      return to_float(bits, kind);
    };
    if (a_in_registers) {
      for_each_a([this](int row, int k, int thread, int r, int e) {
        auto& x = a[thread * 4 + r];
        A[row][k] = scale_a * to_float((x.where ? *x.where : x.value) >> 16 * e, kind);
      });
    } else {
      Descriptor from(a_descriptor, rank);
      for (int m = 0; m < M; m++)
        for (int k = 0; k < K; k++) A[m][k] = scale_a * element(from.at(m, k, a_transposed));
    }
    Descriptor from(b_descriptor, rank);
    for (int j = 0; j < n; j++)
      for (int k = 0; k < K; k++) B[k][j] = scale_b * element(from.at(j, k, b_transposed));
    for (int m = 0; m < M; m++) {
      std::fill(R[m], R[m] + n, 0.0f);
      for (int k = 0; k < K; k++)
        for (int j = 0; j < n; j++) R[m][j] += A[m][k] * B[k][j];
    }
    for (int thread = 0; thread < WARPGROUP; thread++) {
      int g = thread % 32 / 4, t = thread % 4, first = thread / 32 * 16;
      for (int i = 0; i < n / 2; i++) {
        float value = R[first + g + i / 2 % 2 * 8][i / 4 * 8 + 2 * t + i % 2];
        float& sum = *d[thread * (n / 2) + i];
        sum = canonical(accumulate ? sum + value : value);
      }
    }
  }
};

// A commit group, or the open one.
struct Group {
  std::vector<std::shared_ptr<Matmul>> matmuls;
  bool done = false;

  void run() {
    if (!done)
      for (auto& matmul : matmuls) matmul->run();
    done = true;
  }
};

// Of one warpgroup. Groups are counted from 1.
struct Queue {
  Group open;
  std::deque<Group> committed;             // the last ones
  uint32_t number = 1;                     // of the open group
  uint32_t waited[WARPS_OF_GROUP] = {};    // up to which group each warp has waited
  bool fenced[WARPS_OF_GROUP] = {};        // a wgmma.fence since the last wait
};

std::vector<Queue> queues;
Queue& queue() { return queues[current->number / WARPGROUP]; }
int first_warp() { return current->warp() / WARPS_OF_GROUP * WARPS_OF_GROUP; }
int agent() { return WGMMA_AT + first_warp(); }

// Whether each warp of the warpgroup has what the operand's bytes need: a past, a proxy fence, room.
void check_operand(const Operation& operation, uint64_t descriptor, int rows, bool transposed, const char* what) {
  Descriptor from(descriptor, current->rank);
  if (from.swizzle && from.start % 16) fail("%s: the descriptor is not aligned to 16 bytes", what);
  for (int row = 0; row < rows; row += transposed ? 8 : 1)
    for (int k = 0; k < K; k += transposed ? 1 : 8) {
      uint32_t address = from.at(row, k, transposed);
      shared(address, 16, 16, what);
      order_operation(operation, Proxy::async, address, 16, false, what);
    }
}

bool touches(const Matmul& matmul, uint64_t address, size_t bytes, bool write) {
  int thread = current->number % WARPGROUP;
  for (int i = 0; i < matmul.n / 2; i++) {
    uint64_t at = (uint64_t)matmul.d[thread * (matmul.n / 2) + i];
    if (at < address + bytes && address < at + 4) return true;
  }
  if (matmul.a_in_registers && write)
    for (int r = 0; r < 4; r++) {
      uint64_t at = (uint64_t)matmul.a[thread * 4 + r].where;
      if (at && at < address + bytes && address < at + 4) return true;
    }
  return false;
}

}  // namespace

void reset_wgmma() { queues.assign(block.threads / WARPGROUP + 1, Queue()); }

void end_wgmma() {
  for (auto& own : queues)
    if (!own.open.matmuls.empty() || !own.committed.empty()) fail("the block ended without waiting for its wgmmas");
}

void check_registers(uint64_t address, size_t bytes, bool write) {
  Queue& own = queue();
  auto check = [&](const Group& group) {
    for (auto& matmul : group.matmuls)
      if (touches(*matmul, address, bytes, write))
        fail("%s of a register that a wgmma in flight %s", write ? "write" : "read", write ? "uses" : "writes");
  };
  if (!own.open.matmuls.empty()) check(own.open);
  uint32_t waited = own.waited[current->warp() - first_warp()], number = own.number;
  for (auto group = own.committed.rbegin(); group != own.committed.rend() && --number > waited; ++group) check(*group);
}

}  // namespace emulation

using namespace emulation;

void emu_wgmma_fence() {
  static const char key = 0;
  meet_warpgroup(&key, "wgmma.fence", nullptr, [](void**) {
    std::fill_n(queue().fenced, WARPS_OF_GROUP, true);
  });
}

void emu_wgmma(float* const* d, int n, int kind, const emu_register* a, uint64_t a_descriptor, uint64_t b_descriptor,
               uint32_t scale_d, int scale_a, int scale_b, int a_transposed, int b_transposed) {
  static const char keys[MAX_N / 8 + 1][2] = {};
  struct Call {
    Registers registers;
    uint64_t a_descriptor, b_descriptor;
    uint32_t scale_d;
  } own{{d, a}, a_descriptor, b_descriptor, scale_d};
  meet_warpgroup(&keys[n / 8][kind], "wgmma.mma_async", &own, [=](void** calls) {
    for (bool fenced : queue().fenced)
      if (!fenced) fail("wgmma.mma_async without a wgmma.fence after the last wgmma.wait_group");
    settings.matmuls++;
    auto matmul = std::make_shared<Matmul>();
    matmul->n = n;
    matmul->kind = kind;
    matmul->rank = current->rank;
    matmul->a_in_registers = a != nullptr;
    matmul->a_transposed = a_transposed;
    matmul->b_transposed = b_transposed;
    matmul->accumulate = scale_d != 0;
    matmul->scale_a = scale_a;
    matmul->scale_b = scale_b;
    matmul->a_descriptor = a_descriptor;
    matmul->b_descriptor = b_descriptor;
    for (int i = 0; i < WARPGROUP; i++) {
      auto& call = *(Call*)calls[i];
      if (call.a_descriptor != a_descriptor || call.b_descriptor != b_descriptor || call.scale_d != scale_d)
        fail("wgmma.mma_async with operands that differ between threads of the warpgroup");
      matmul->d.insert(matmul->d.end(), call.registers.d, call.registers.d + n / 2);
      if (a) matmul->a.insert(matmul->a.end(), call.registers.a, call.registers.a + 4);
    }
    // What all four warps have seen; each must have waited for what they multiply.
    Clock past = clock_of(first_warp());
    for (int w = 1; w < WARPS_OF_GROUP; w++) past.meet(clock_of(first_warp() + w));
    Operation operation = emulation::operation(agent(), queue().number, past);
    if (!a) check_operand(operation, a_descriptor, M, a_transposed, "wgmma: read of A");
    check_operand(operation, b_descriptor, n, b_transposed, "wgmma: read of B");
    if (settings.arrivals == Arrivals::at_once) matmul->run();
    queue().open.matmuls.push_back(matmul);
  });
}

void emu_wgmma_commit() {
  static const char key = 0;
  meet_warpgroup(&key, "wgmma.commit_group", nullptr, [](void**) {
    queue().committed.push_back(std::move(queue().open));
    queue().open = Group();
    queue().number++;
  });
}

// Each warp waits for its share alone: another one's may not be done.
void emu_wgmma_wait(int left) {
  static const char keys[8] = {};
  meet_warp(&keys[left & 7], "wgmma.wait_group", nullptr, [left](void**) {
    Queue& own = queue();
    int warp = current->warp() - first_warp();
    uint32_t last = own.number > (uint32_t)left ? own.number - 1 - left : 0;     // group to wait for
    for (size_t i = 0; i < own.committed.size(); i++)
      if (own.number - own.committed.size() + i <= last && settings.arrivals != Arrivals::at_once)
        own.committed[i].run();
    own.waited[warp] = std::max(own.waited[warp], last);
    own.fenced[warp] = false;
    uint32_t all = *std::min_element(own.waited, own.waited + WARPS_OF_GROUP);
    while (!own.committed.empty() && own.number - own.committed.size() <= all) own.committed.pop_front();
    uint32_t& seen = clock_of_warp().at[WGMMA_AT + current->warp()];
    seen = std::max(seen, last);
  });
}
