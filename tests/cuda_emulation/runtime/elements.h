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

}  // namespace emulation
