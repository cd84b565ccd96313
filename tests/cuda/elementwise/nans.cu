// Conversions and arithmetic of NaNs, and moves, an element by each thread.
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define HERE (blockIdx.x * blockDim.x + threadIdx.x)

extern "C" __global__ void narrowed(const float* f, half* h, nv_bfloat16* b, uint32_t* pairs) {
  h[HERE] = __float2half_rn(f[HERE]);
  b[HERE] = __float2bfloat16_rn(f[HERE]);
  asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pairs[HERE]) : "f"(f[HERE]), "f"(f[HERE]));
}

extern "C" __global__ void widened(const half* h, const nv_bfloat16* b, float* of_h, float* of_b) {
  of_h[HERE] = __half2float(h[HERE]);
  of_b[HERE] = __bfloat162float(b[HERE]);
}

extern "C" __global__ void computed(const half* h, const nv_bfloat16* b, const float* f, half* of_h, nv_bfloat16* of_b,
                                    float* of_x, float* largest) {
  of_h[HERE] = __hadd(h[HERE], h[HERE]);
  of_b[HERE] = __hmul(b[HERE], b[HERE]);
  of_x[HERE] = __fmaf_rn(f[HERE], f[HERE], f[HERE]);
  asm volatile("max.NaN.f32 %0, %1, %2;" : "=f"(largest[HERE]) : "f"(f[HERE]), "f"(f[HERE]));
}

extern "C" __global__ void of_float8(const uint16_t* pairs, uint32_t* h) {
  asm volatile("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h[HERE]) : "h"(pairs[HERE]));
}

extern "C" __global__ void moved(const half* h, const nv_bfloat16* b, const float* f, half* to_h, nv_bfloat16* to_b,
                                 float* to_x) {
  to_h[HERE] = h[HERE];
  to_b[HERE] = b[HERE];
  to_x[HERE] = f[HERE];
}
