// Kernels whose number of wavefronts and sectors is fixed; a block of one warp.
#include <cstdint>

__device__ uint32_t at(const void* shared) { return (uint32_t)__cvta_generic_to_shared(shared); }

// Words `stride` apart.
extern "C" __global__ void __launch_bounds__(32) scalars(float* y, int stride) {
  __shared__ float s[32 * 33];
  s[threadIdx.x * stride] = threadIdx.x;
  y[threadIdx.x] = s[threadIdx.x * stride];
}

// Vectors of 8 and 16 bytes, so many of them apart.
extern "C" __global__ void __launch_bounds__(32) vectors(float2* y, float4* z, int stride) {
  __shared__ __align__(16) float s[32 * 4 * 8];
  y[threadIdx.x] = ((float2*)s)[threadIdx.x * stride];
  z[threadIdx.x] = ((float4*)s)[threadIdx.x * stride];
}

// Two bytes of each lane, and one address of all.
extern "C" __global__ void __launch_bounds__(32) small(uint16_t* y) {
  __shared__ uint16_t s[64];
  s[threadIdx.x] = threadIdx.x;
  y[threadIdx.x] = s[5];
}

// Rows of `stride` halves, as ldmatrix and cp.async reach them.
extern "C" __global__ void __launch_bounds__(32) matrices(const uint4* x, uint32_t* y, int stride, int copies) {
  __shared__ __align__(16) uint16_t s[32 * 72];
  uint32_t row = at(s + threadIdx.x * stride), a, b, c, d;
  if (copies) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(row), "l"(x + threadIdx.x) : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(row));
  y[threadIdx.x] = a ^ b ^ c ^ d;
}

// Lanes below a number, each element `stride` apart, in a loop; PTX of 16 bytes for the result.
extern "C" __global__ void __launch_bounds__(32) gathered(const float* x, float* y, int stride, int lanes) {
  float sum = 0;
  for (int i = 0; i < 3; i++)
    if (threadIdx.x < lanes) sum += x[(i * 32 + threadIdx.x) * stride];
  asm volatile("st.global.v4.f32 [%0], {%1, %1, %1, %1};" ::"l"(y + 4 * threadIdx.x), "f"(sum) : "memory");
}

extern "C" __global__ void __launch_bounds__(32) restricted(const float* __restrict__ x, float* __restrict__ y, int from,
                                                            int to) {
  y[to + threadIdx.x] = x[from + threadIdx.x] + 1;
}

extern "C" __global__ void __launch_bounds__(32) unrestricted(const float* x, float* y, int from, int to) {
  y[to + threadIdx.x] = x[from + threadIdx.x] + 1;
}
