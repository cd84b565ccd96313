// The contents of a CUtensorMap here: the tensor that a bulk tensor copy moves boxes of.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emulation {

constexpr int MAX_RANK = 5;
constexpr uint32_t TENSOR_MAP_MAGIC = 0x544D4150;

// Dimension 0 is the contiguous one. stride[0] is not used: elements lie side by side.
struct TensorMap {
  uint32_t magic;
  uint8_t rank, element_bytes, swizzle, reserved;     // swizzle: 0 none, 1 32 bytes, 2 64 bytes, 3 128 bytes
  char* base;
  uint64_t stride[MAX_RANK];                          // bytes
  uint32_t last[MAX_RANK];                            // extent less one
  uint16_t box[MAX_RANK];
  uint8_t unused[128 - 16 - 8 * MAX_RANK - 4 * MAX_RANK - 2 * MAX_RANK];

  size_t box_bytes() const;
};
static_assert(sizeof(TensorMap) == 128, "the size of a CUtensorMap");

// Address bits 4 and up are exclusive-ored with bits 7 and up: 1, 2 or 3 bits for 32, 64 or 128 bytes.
inline uint32_t swizzled(uint32_t address, int swizzle) {
  return address ^ ((address >> 7 & ((1u << swizzle) - 1)) << 4);
}

// The map of a kernel's parameter, checked.
const TensorMap& tensor_map(const void* map);

}  // namespace emulation
