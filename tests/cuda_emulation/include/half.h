// float16 and bfloat16: every operation rounds to the type. TF32: a float32 whose last 13 bits are 0.
//
// A NaN that comes out of arithmetic or a conversion is canonical, all bits but that of the sign set, whatever NaN went
// in: so do GPUs, and what cuda_fp16.hpp and cuda_bf16.hpp compute on a host (__internal_float2half and the like). Only
// bfloat16 to float32 keeps a NaN, as it moves bits.
#pragma once

namespace emu {

constexpr uint16_t NAN_OF_16_BITS = 0x7FFF;

// The result of an instruction in float32.
inline float canonical(float value) {
  constexpr uint32_t nan = 0x7FFFFFFF;
  if (value != value) memcpy(&value, &nan, 4);
  return value;
}

inline uint16_t to_bits(float value, _Float16*) {
  if (value != value) return NAN_OF_16_BITS;
  _Float16 rounded = (_Float16)value;
  uint16_t bits;
  memcpy(&bits, &rounded, 2);
  return bits;
}
inline float from_bits(uint16_t bits, _Float16*) {
  _Float16 value;
  memcpy(&value, &bits, 2);
  return canonical((float)value);
}

struct Bfloat16;
// To the nearest, ties to even.
inline uint16_t to_bits(float value, Bfloat16*) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return NAN_OF_16_BITS;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline float from_bits(uint16_t bits, Bfloat16*) {
  uint32_t wide = uint32_t(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

// To the nearest, ties away from zero.
inline uint32_t to_tf32(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return value != value ? 0x7FFFE000 : (bits + 0x1000) & ~0x1FFFu;
}

// 16 bits that count as a float.
template <class Format>
struct Small {
  uint16_t bits;

  Small() = default;
  __forceinline__ Small(const Small&) = default;
  __forceinline__ Small(const volatile Small& other) : bits(other.bits) {}
  Small(float value) : bits(to_bits(value, (Format*)nullptr)) {}
  Small(double value) : Small((float)value) {}
  template <class I, class = std::enable_if_t<std::is_integral_v<I>>>
  Small(I value) : Small((float)value) {}
  template <class F, class = std::enable_if_t<!std::is_same_v<F, Format>>>
  explicit Small(Small<F> other) : Small((float)other) {}
  __forceinline__ Small& operator=(const Small&) = default;
  __forceinline__ void operator=(const Small& other) volatile { bits = other.bits; }
  __forceinline__ operator float() const { return from_bits(bits, (Format*)nullptr); }

  friend Small operator+(Small a, Small b) { return (float)a + (float)b; }
  friend Small operator-(Small a, Small b) { return (float)a - (float)b; }
  friend Small operator*(Small a, Small b) { return (float)a * (float)b; }
  friend Small operator/(Small a, Small b) { return (float)a / (float)b; }
  friend Small operator-(Small a) { a.bits ^= 0x8000; return a; }
  friend bool operator<(Small a, Small b) { return (float)a < (float)b; }
  friend bool operator>(Small a, Small b) { return (float)a > (float)b; }
  friend bool operator<=(Small a, Small b) { return (float)a <= (float)b; }
  friend bool operator>=(Small a, Small b) { return (float)a >= (float)b; }
  friend bool operator==(Small a, Small b) { return (float)a == (float)b; }
  friend bool operator!=(Small a, Small b) { return (float)a != (float)b; }
  __forceinline__ Small& operator+=(Small b) { return *this = *this + b; }
  __forceinline__ Small& operator-=(Small b) { return *this = *this - b; }
  __forceinline__ Small& operator*=(Small b) { return *this = *this * b; }
  __forceinline__ Small& operator/=(Small b) { return *this = *this / b; }
};

template <class T>
struct alignas(4) Pair {
  T x, y;
  Pair() = default;
  Pair(T x, T y) : x(x), y(y) {}
};

}  // namespace emu

using half = emu::Small<_Float16>;
using nv_bfloat16 = emu::Small<emu::Bfloat16>;
using __half = half;
using __nv_bfloat16 = nv_bfloat16;
using half2 = emu::Pair<half>;
using nv_bfloat162 = emu::Pair<nv_bfloat16>;
using __half2 = half2;
using __nv_bfloat162 = nv_bfloat162;

// What cuda_fp16.h and cuda_bf16.h define for both types alike.
#define EMU_HALF_UNARY(name, expression) \
  inline half name(half a) { float x = a; return half(expression); } \
  inline nv_bfloat16 name(nv_bfloat16 a) { float x = a; return nv_bfloat16(expression); }
EMU_HALF_UNARY(hexp, expf(x))
EMU_HALF_UNARY(hexp2, exp2f(x))
EMU_HALF_UNARY(hexp10, exp10f(x))
EMU_HALF_UNARY(hlog, logf(x))
EMU_HALF_UNARY(hlog2, log2f(x))
EMU_HALF_UNARY(hlog10, log10f(x))
EMU_HALF_UNARY(hsqrt, sqrtf(x))
EMU_HALF_UNARY(hrsqrt, 1.0f / sqrtf(x))
EMU_HALF_UNARY(hrcp, 1.0f / x)
EMU_HALF_UNARY(hsin, sinf(x))
EMU_HALF_UNARY(hcos, cosf(x))
EMU_HALF_UNARY(htanh, tanhf(x))
EMU_HALF_UNARY(hfloor, floorf(x))
EMU_HALF_UNARY(hceil, ceilf(x))
EMU_HALF_UNARY(hrint, rintf(x))
EMU_HALF_UNARY(htrunc, truncf(x))
EMU_HALF_UNARY(__habs, fabsf(x))
EMU_HALF_UNARY(__hneg, -x)
#undef EMU_HALF_UNARY

#define EMU_HALF_BINARY(name, expression) \
  inline half name(half a, half b) { float x = a, y = b; return half(expression); } \
  inline nv_bfloat16 name(nv_bfloat16 a, nv_bfloat16 b) { float x = a, y = b; return nv_bfloat16(expression); } \
  inline half2 name##2(half2 a, half2 b) { return {name(a.x, b.x), name(a.y, b.y)}; } \
  inline nv_bfloat162 name##2(nv_bfloat162 a, nv_bfloat162 b) { return {name(a.x, b.x), name(a.y, b.y)}; }
EMU_HALF_BINARY(__hadd, x + y)
EMU_HALF_BINARY(__hsub, x - y)
EMU_HALF_BINARY(__hmul, x * y)
EMU_HALF_BINARY(__hmax, fmaxf(x, y))
EMU_HALF_BINARY(__hmin, fminf(x, y))
inline half __hdiv(half a, half b) { return a / b; }
inline nv_bfloat16 __hdiv(nv_bfloat16 a, nv_bfloat16 b) { return a / b; }
#undef EMU_HALF_BINARY

inline half __hfma(half a, half b, half c) { return fmaf(a, b, c); }
inline nv_bfloat16 __hfma(nv_bfloat16 a, nv_bfloat16 b, nv_bfloat16 c) { return fmaf(a, b, c); }
inline half2 __hfma2(half2 a, half2 b, half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
inline nv_bfloat162 __hfma2(nv_bfloat162 a, nv_bfloat162 b, nv_bfloat162 c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}

#define EMU_HALF_COMPARE(name, op) \
  inline bool name(half a, half b) { return a op b; } \
  inline bool name(nv_bfloat16 a, nv_bfloat16 b) { return a op b; }
EMU_HALF_COMPARE(__heq, ==)
EMU_HALF_COMPARE(__hne, !=)
EMU_HALF_COMPARE(__hlt, <)
EMU_HALF_COMPARE(__hle, <=)
EMU_HALF_COMPARE(__hgt, >)
EMU_HALF_COMPARE(__hge, >=)
#undef EMU_HALF_COMPARE
inline bool __hisnan(half a) { return std::isnan((float)a); }
inline bool __hisnan(nv_bfloat16 a) { return std::isnan((float)a); }

inline half __float2half(float x) { return x; }
inline half __float2half_rn(float x) { return x; }
inline half __double2half(double x) { return x; }
inline float __half2float(half x) { return x; }
inline nv_bfloat16 __float2bfloat16(float x) { return x; }
inline nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline nv_bfloat16 __double2bfloat16(double x) { return x; }
inline float __bfloat162float(nv_bfloat16 x) { return x; }
inline half2 make_half2(half x, half y) { return {x, y}; }
inline half2 __halves2half2(half x, half y) { return {x, y}; }
inline half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline half2 __half2half2(half x) { return {x, x}; }
inline half __low2half(half2 a) { return a.x; }
inline half __high2half(half2 a) { return a.y; }
inline nv_bfloat162 __halves2bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return {x, y}; }
inline nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
inline nv_bfloat162 __bfloat162bfloat162(nv_bfloat16 x) { return {x, x}; }
inline unsigned short __half_as_ushort(half x) { return x.bits; }
inline half __ushort_as_half(unsigned short bits) { half x; x.bits = bits; return x; }
inline unsigned short __bfloat16_as_ushort(nv_bfloat16 x) { return x.bits; }
inline nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { nv_bfloat16 x; x.bits = bits; return x; }
