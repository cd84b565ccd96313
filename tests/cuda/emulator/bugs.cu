// Small kernels, right and wrong, for test_emulator.py.

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ unsigned at(const void* p) { return __cvta_generic_to_shared(p); }

__device__ void mbarrier_init(uint64_t* bar, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at(bar)), "r"(count) : "memory");
}
__device__ void mbarrier_expect(uint64_t* bar, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at(bar)), "r"(bytes) : "memory");
}
__device__ void mbarrier_arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at(bar)) : "memory");
}
__device__ void mbarrier_wait(uint64_t* bar, unsigned parity) {
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
__device__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- shared memory

extern "C" __global__ void __launch_bounds__(128) reverse(const float* x, float* y) {
  __shared__ float s[128];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[127 - threadIdx.x];
}

extern "C" __global__ void __launch_bounds__(128) no_barrier(const float* x, float* y) {
  __shared__ float s[128];
  s[threadIdx.x] = x[threadIdx.x];
  y[threadIdx.x] = s[127 - threadIdx.x];
}

// the second use of s is not separated from the first
extern "C" __global__ void __launch_bounds__(128) no_second_barrier(const float* x, float* y) {
  __shared__ float s[128];
  for (int i = 0; i < 2; ++i) {
    s[threadIdx.x] = x[threadIdx.x] + i;
    __syncthreads();
    y[threadIdx.x] = s[127 - threadIdx.x];
  }
}

extern "C" __global__ void __launch_bounds__(128) static_bounds(float* y, int beyond) {
  __shared__ float s[128];
  __shared__ float t[128];
  t[threadIdx.x] = 0;
  s[(int)threadIdx.x + beyond] = 1;
  y[threadIdx.x] = t[threadIdx.x];
}

extern "C" __global__ void __launch_bounds__(128) dynamic_bounds(float* y, int beyond) {
  extern __shared__ __align__(16) float d[];
  d[threadIdx.x + beyond] = 1;
  __syncthreads();
  y[threadIdx.x] = d[threadIdx.x];
}

extern "C" __global__ void __launch_bounds__(128) not_written(float* y) {
  __shared__ float s[128];
  if (threadIdx.x % 2) s[threadIdx.x] = 1;
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x ^ 64];
}

// ---- device memory

extern "C" __global__ void device_bounds(const float* x, float* y, int at, int to) { y[to] = x[at]; }

extern "C" __global__ void misaligned(const float* x, float* y, int at) {
  *(float4*)y = *(const float4*)(x + at);
}

extern "C" __global__ void host_memory(const float* x, float* y) { *y = *(const float*)*(const unsigned long long*)x; }

// ---- meeting points

extern "C" __global__ void __launch_bounds__(32) divergent(float* y) {
  if (threadIdx.x < 16) y[threadIdx.x] = __shfl_sync(0xFFFFFFFFu, 1.0f, 0, 32);
  else y[threadIdx.x] = __ballot_sync(0xFFFFFFFFu, 1);
}

extern "C" __global__ void __launch_bounds__(64) deadlock(float* y) {
  if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;" ::: "memory");
  else asm volatile("bar.sync 2, 64;" ::: "memory");
  y[threadIdx.x] = 0;
}

// a producer that arrives, a consumer that waits
extern "C" __global__ void __launch_bounds__(64) named(const float* x, float* y) {
  __shared__ float s[32];
  if (threadIdx.x < 32) {
    s[threadIdx.x] = x[threadIdx.x];
    asm volatile("bar.arrive 3, 64;" ::: "memory");
  } else {
    asm volatile("bar.sync 3, 64;" ::: "memory");
    y[threadIdx.x - 32] = s[threadIdx.x - 32];
  }
}

// the phase waits for bytes that do not come
extern "C" __global__ void __launch_bounds__(32) over_arrived(float* y) {
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) {
    mbarrier_init(&bar, 1);
    mbarrier_expect(&bar, 16);
    mbarrier_arrive(&bar);
  }
  y[threadIdx.x] = 0;
}

// ---- cp.async

__device__ void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at(to)), "l"(from) : "memory");
}

extern "C" __global__ void __launch_bounds__(32) copies(const float* x, float* y, int wait) {
  __shared__ __align__(16) float s[128];
  copy16(s + 4 * threadIdx.x, x + 4 * threadIdx.x);
  asm volatile("cp.async.commit_group;");
  if (wait) asm volatile("cp.async.wait_group 0;" ::: "memory");
  else asm volatile("cp.async.wait_group 1;" ::: "memory");
  __syncthreads();
  for (int i = 0; i < 4; ++i) y[threadIdx.x + 32 * i] = s[127 - threadIdx.x - 32 * i];
}

// ---- bulk tensor copies: a box of [rows, 64] halves comes, is doubled, and goes

__device__ void load_box(void* to, const CUtensorMap* map, int column, int row, uint64_t* bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(at(to)),
               "l"(map), "r"(column), "r"(row), "r"(at(bar)) : "memory");
}
__device__ void store_box(const CUtensorMap* map, int column, int row, const void* from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(column), "r"(row),
               "r"(at(from)) : "memory");
}

enum { INIT_FENCE = 1, WAIT = 2, PROXY_FENCE = 4, STORE_WAIT = 8, ALL = 15 };

extern "C" __global__ void __launch_bounds__(128)
    boxes(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap y, const half* of_x, half* of_y, int rows,
          int steps, int displace) {
  extern __shared__ __align__(1024) half tile[];
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) {
    mbarrier_init(&bar, 1);
    if (steps & INIT_FENCE) fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_expect(&bar, rows * 128);
    load_box(tile + displace, &x, -3, blockIdx.x * rows - 1, &bar);
  }
  if (steps & WAIT) mbarrier_wait(&bar, 0);
  for (int i = threadIdx.x; i < rows * 64; i += 128) tile[i] = tile[i] + tile[i];
  if (steps & PROXY_FENCE) fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    store_box(&y, 0, blockIdx.x * rows, tile);
    asm volatile("cp.async.bulk.commit_group;");
    if (steps & STORE_WAIT) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}
