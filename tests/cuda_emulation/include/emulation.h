// Everything that CUDA source may refer to, for g++. Precompiled, and included before every generated source.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>

#include "interface.h"

#define __CUDA_ARCH__ 900
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))    // each use has instructions of its own
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __restrict__                    // launches see to it, see runtime/aliasing.h
#define threadIdx emu_thread_index()
#define blockIdx emu_block_index()
#define blockDim emu_block_size()
#define gridDim emu_grid_size()
#define warpSize 32
#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN
#define CUDART_INF ((double)INFINITY)
#define CUDART_NAN ((double)NAN)
using std::isfinite;
using std::isinf;
using std::isnan;
template <class T>
__forceinline__ T max(T a, T b) { return a < b ? b : a; }
template <class T>
__forceinline__ T min(T a, T b) { return b < a ? b : a; }

struct alignas(64) CUtensorMap {
  uint64_t opaque[16];
};

#include "half.h"
#include "vectors.h"
#include "intrinsics.h"
#include "registers.h"

// A kernel's arguments from the array of pointers to them that a launch passes.
template <class... P, size_t... i>
__attribute__((no_sanitize("thread"))) void emu_call(void (*kernel)(P...), void** arguments, std::index_sequence<i...>) {
  kernel(*(std::remove_cv_t<P>*)arguments[i]...);
}
template <class... P>
__attribute__((no_sanitize("thread"))) void emu_call(void (*kernel)(P...), void** arguments) {
  emu_call(kernel, arguments, std::index_sequence_for<P...>());
}
template <class... P>
const size_t* emu_bytes(void (*)(P...)) {
  static constexpr size_t bytes[] = {sizeof(P)..., 0};
  return bytes;
}
