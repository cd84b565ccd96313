// Elements as the tensor cores take them.
#pragma once
#include <cstdint>
#include <cstring>

namespace emulation {

constexpr int BFLOAT16 = 1, TF32 = 2;      // of the element kinds of interface.h

inline float to_float(uint16_t bits, int kind) {
  if (kind == BFLOAT16) {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  }
  _Float16 value;
  memcpy(&value, &bits, 2);
  return value;
}

// A sum of the tensor cores: a NaN has all bits but that of the sign set.
inline float canonical(float value) {
  constexpr uint32_t nan = 0x7FFFFFFF;
  if (value != value) memcpy(&value, &nan, 4);
  return value;
}

}  // namespace emulation
