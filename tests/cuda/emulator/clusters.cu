// A cluster of two blocks, right and wrong, for test_clusters.py: each brings half of a box for both, and lets go of it at
// both.

#include <cuda.h>
#include <cuda_fp16.h>

__device__ unsigned at(const void* p) { return __cvta_generic_to_shared(p); }
__device__ unsigned rank() {
  unsigned r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ void init(uint64_t* bar, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at(bar)), "r"(count) : "memory");
}
__device__ void expect(uint64_t* bar, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at(bar)), "r"(bytes) : "memory");
}
__device__ void arrive(unsigned address) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
}
__device__ void arrive_here(unsigned address) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
}
__device__ unsigned in_block(uint64_t* bar, unsigned block) {
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at(bar)), "r"(block));
  return there;
}
__device__ void wait(uint64_t* bar, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred P1;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 P1, [%0], %1;\n"
      "@P1 bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}\n" ::"r"(at(bar)), "r"(parity) : "memory");
}
__device__ void meet() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
__device__ void load(void* to, const CUtensorMap* map, int row, uint64_t* bar, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
      ::"r"(at(to)), "l"(map), "r"(0), "r"(row), "r"(at(bar)), "h"(blocks) : "memory");
}

// Steps, of which the right kernel has ALL: meeting before and after, letting go at the other block, copies for both, and
// doing the former by an instruction that reaches other blocks.
enum { MEET_FIRST = 1, MEET_LAST = 2, OTHER = 4, BOTH = 8, REMOTE = 16, ALL = 31 };
constexpr int ROWS = 8, HALF = 4;

// y [2 turns, 2 blocks, 8, 64] := boxes of x [2 turns, 8, 64], for each block.
extern "C" __global__ void __launch_bounds__(128)
    shared_boxes(const __grid_constant__ CUtensorMap x, const half* of_x, half* y, int steps) {
  extern __shared__ __align__(128) half tile[];
  __shared__ uint64_t full;
  __shared__ uint64_t empty;
  if (threadIdx.x == 0) {
    init(&full, 1);
    init(&empty, 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (steps & MEET_FIRST) meet();
  else __syncthreads();
  for (int turn = 0; turn < 2; ++turn) {
    if (threadIdx.x == 0) {
      if (turn) wait(&empty, 0);
      expect(&full, ROWS * 128);
      int first = rank() * HALF;
      load(tile + first * 64, &x, turn * ROWS + first, &full, steps & BOTH ? 3 : 1 << rank());
    }
    wait(&full, turn);
    for (int i = threadIdx.x; i < ROWS * 64; i += 128) y[(turn * 2 + rank()) * ROWS * 64 + i] = tile[i];
    __syncwarp();
    if (threadIdx.x % 32 < 2) {
      unsigned block = steps & OTHER ? threadIdx.x % 32 : rank();
      if (steps & REMOTE) arrive(in_block(&empty, block));
      else arrive_here(in_block(&empty, block));
    }
  }
  if (steps & MEET_LAST) meet();
}

// The blocks and ranks, and a word that each reads of what the other told by the barrier alone.
extern "C" __global__ void __launch_bounds__(128) ranks(int* y) {
  if (threadIdx.x == 0) y[blockIdx.x] = 100 * rank() + blockIdx.x;
  meet();
  if (threadIdx.x == 0) y[gridDim.x + blockIdx.x] = y[blockIdx.x ^ 1];
}

extern "C" __global__ void __launch_bounds__(128) not_awaited(int* y) {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  y[threadIdx.x] = 0;
}
