// Helpers of the C++ that ptx.py writes for PTX instructions.
#pragma once

namespace emu {

template <class To, class From>
inline To as(From from) {                // registers of the same size store any type
  if constexpr (std::is_arithmetic_v<From> && std::is_arithmetic_v<To> && sizeof(To) != sizeof(From)) return (To)from;
  else return bits<To>(from);
}

// Two floats as one register of two halves; PTX names the upper one first.
template <class T>
inline uint32_t pack(float high, float low) {
  return (uint32_t)T(high).bits << 16 | T(low).bits;
}

// a b + c of the lower and of the upper halves, rounded to a float and then to a half.
template <class T>
inline uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    T x, y, z;
    x.bits = a >> shift, y.bits = b >> shift, z.bits = c >> shift;
    d |= (uint32_t)T(fmaf((float)x, (float)y, (float)z)).bits << shift;
  }
  return d;
}

// Four of the eight bytes of two registers, low first; the selectors' bits of signs are not supported here.
inline uint32_t permute(uint32_t low, uint32_t high, uint32_t selectors) {
  uint64_t bytes = (uint64_t)high << 32 | low;
  uint32_t d = 0;
  for (int n = 0; n < 4; n++) d |= (uint32_t)(uint8_t)(bytes >> 8 * (selectors >> 4 * n & 7)) << 8 * n;
  return d;
}

// A float8_e4m3fn: no infinity, and NaN where all bits but that of the sign are ones.
inline float from_e4m3(uint32_t code) {
  int exponent = code >> 3 & 15, mantissa = code & 7;
  float size = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  if ((code & 0x7F) == 0x7F) size = NAN;
  return code & 0x80 ? -size : size;
}

// Elements of a vector that emu_access has announced.
template <class T>
__attribute__((no_sanitize("thread"))) T load(const void* address, int offset = 0) {
  return *(const T*)((const char*)address + offset);
}
template <class T>
__attribute__((no_sanitize("thread"))) void store(void* address, T value, int offset = 0) {
  *(T*)((char*)address + offset) = value;
}

}  // namespace emu

// The pointer of an address operand of PTX.
inline void* emu_generic(uint32_t address) { return emu_shared_pointer(address); }
inline void* emu_generic(const void* pointer) { return (void*)pointer; }
inline void* emu_generic(uint64_t pointer) { return (void*)pointer; }
