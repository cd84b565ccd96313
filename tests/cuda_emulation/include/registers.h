// Helpers of the C++ that ptx.py writes for PTX instructions.
#pragma once

namespace emu {

template <class To, class From>
inline To as(From from) {                // registers of the same size hold any type
  if constexpr (std::is_arithmetic_v<From> && std::is_arithmetic_v<To> && sizeof(To) != sizeof(From)) return (To)from;
  else return bits<To>(from);
}

// Two floats as one register of two halves; PTX names the upper one first.
template <class T>
inline uint32_t pack(float high, float low) {
  return (uint32_t)T(high).bits << 16 | T(low).bits;
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

// The pointer behind an address operand of PTX.
inline void* emu_generic(uint32_t address) { return emu_shared_pointer(address); }
inline void* emu_generic(const void* pointer) { return (void*)pointer; }
inline void* emu_generic(uint64_t pointer) { return (void*)pointer; }
