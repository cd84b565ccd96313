// Functions of CUDA C++ that are not in the C++ library: arithmetic, warps, atomics.
#pragma once

// ---- arithmetic; the fast ones are exact here
inline float __expf(float x) { return emu::canonical(expf(x)); }
inline float __exp10f(float x) { return emu::canonical(exp10f(x)); }
inline float __logf(float x) { return emu::canonical(logf(x)); }
inline float __log2f(float x) { return emu::canonical(log2f(x)); }
inline float __log10f(float x) { return emu::canonical(log10f(x)); }
inline float __powf(float x, float y) { return emu::canonical(powf(x, y)); }
inline float __sinf(float x) { return emu::canonical(sinf(x)); }
inline float __cosf(float x) { return emu::canonical(cosf(x)); }
inline float __tanf(float x) { return emu::canonical(tanf(x)); }
inline float __fdividef(float x, float y) { return emu::canonical(x / y); }
inline float __frcp_rn(float x) { return emu::canonical(1.0f / x); }
inline float __fsqrt_rn(float x) { return emu::canonical(sqrtf(x)); }
inline float __frsqrt_rn(float x) { return emu::canonical(1.0f / sqrtf(x)); }
inline float __saturatef(float x) { return emu::canonical(fminf(fmaxf(x, 0.0f), 1.0f)); }
inline float __fadd_rn(float x, float y) { return emu::canonical(x + y); }
inline float __fmul_rn(float x, float y) { return emu::canonical(x * y); }
inline float __fmaf_rn(float x, float y, float z) { return emu::canonical(fmaf(x, y, z)); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __mulhi(int a, int b) { return (int64_t)a * b >> 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return (uint64_t)a * b >> 32; }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; i++) c += (int8_t)(a >> 8 * i) * (int8_t)(b >> 8 * i);
  return c;
}
template <class T>
__forceinline__ T __ldg(const T* p) { return *p; }

namespace emu {
template <class To, class From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
}  // namespace emu
inline int __float_as_int(float x) { return emu::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return emu::bits<unsigned>(x); }
inline float __int_as_float(int x) { return emu::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return emu::bits<float>(x); }
inline long long __double_as_longlong(double x) { return emu::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return emu::bits<double>(x); }

// ---- addresses
inline uint32_t __cvta_generic_to_shared(const void* p) { return emu_shared_address(p); }

// ---- meeting points and fences; ordinary loads and stores take effect at once here, so memory fences have nothing to do
inline void __syncthreads() { emu_barrier(0, 0, 0); }
inline int __syncthreads_count(int predicate) { return emu_barrier_count(predicate); }
inline int __syncthreads_or(int predicate) { return emu_barrier_count(predicate) != 0; }
inline int __syncthreads_and(int predicate) { return emu_barrier_count(!predicate) == 0; }
inline void __syncwarp(unsigned mask = 0xFFFFFFFF) { emu_syncwarp(mask); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) {}
[[noreturn]] inline void __trap() { emu_trap("__trap()"); }
inline unsigned __activemask() { return emu_active_mask(); }
inline void cudaGridDependencySynchronize() {}
inline void cudaTriggerProgrammaticLaunchCompletion() {}

// ---- warps
namespace emu {
inline int lane() {
  emu_dim t = emu_thread_index(), n = emu_block_size();
  return (t.x + n.x * (t.y + n.y * t.z)) % 32;
}
template <class T>
T shuffle(unsigned mask, T value, int source) {
  static_assert(sizeof(T) <= 8);
  uint64_t word = 0;
  memcpy(&word, &value, sizeof value);
  word = emu_shuffle(mask, word, source);
  memcpy(&value, &word, sizeof value);
  return value;
}
}  // namespace emu
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return emu::shuffle(mask, value, (emu::lane() & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32) {
  int lane = emu::lane(), source = lane ^ with;
  return emu::shuffle(mask, value, source / width <= lane / width ? source : -1);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  int lane = emu::lane();
  return emu::shuffle(mask, value, (lane & (width - 1)) + (int)delta < width ? lane + (int)delta : -1);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  int lane = emu::lane();
  return emu::shuffle(mask, value, (lane & (width - 1)) >= (int)delta ? lane - (int)delta : -1);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) { return emu_ballot(mask, predicate); }
inline int __any_sync(unsigned mask, int predicate) { return emu_ballot(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return emu_ballot(mask, !predicate) == 0; }

// ---- atomics: a thread is never interrupted between two of its instructions
namespace emu {
template <class T, class F>
__attribute__((no_sanitize("thread"))) T atomic(T* address, F change) {
  emu_access(address, sizeof(T), EMU_ATOMIC);
  T before = *address;
  *address = change(before);
  return before;
}
}  // namespace emu
template <class T>
__forceinline__ T atomicAdd(T* p, T v) { return emu::atomic(p, [v](T x) { return T(x + v); }); }
template <class T>
__forceinline__ T atomicSub(T* p, T v) { return emu::atomic(p, [v](T x) { return T(x - v); }); }
template <class T>
__forceinline__ T atomicMax(T* p, T v) { return emu::atomic(p, [v](T x) { return x > v ? x : v; }); }
template <class T>
__forceinline__ T atomicMin(T* p, T v) { return emu::atomic(p, [v](T x) { return x < v ? x : v; }); }
template <class T>
__forceinline__ T atomicOr(T* p, T v) { return emu::atomic(p, [v](T x) { return T(x | v); }); }
template <class T>
__forceinline__ T atomicAnd(T* p, T v) { return emu::atomic(p, [v](T x) { return T(x & v); }); }
template <class T>
__forceinline__ T atomicExch(T* p, T v) { return emu::atomic(p, [v](T) { return v; }); }
template <class T>
__forceinline__ T atomicCAS(T* p, T expected, T v) { return emu::atomic(p, [=](T x) { return x == expected ? v : x; }); }
