#include "tensor_map.h"

#include <cstring>

#include "calls.h"
#include "driver.h"
#include "failure.h"

namespace emulation {

size_t TensorMap::box_bytes() const {
  size_t bytes = element_bytes;
  for (int i = 0; i < rank; i++) bytes *= box[i];
  return bytes;
}

const TensorMap& tensor_map(const void* map) {
  auto& result = *(const TensorMap*)map;
  if ((uint64_t)map % 64) fail("a tensor map at an address that is not aligned to 64 bytes");
  if (result.magic != TENSOR_MAP_MAGIC) fail("a tensor map that cuTensorMapEncodeTiled did not make");
  return result;
}

}  // namespace emulation

using namespace emulation;

namespace {

// Bytes of CUtensorMapDataType: u8 u16 u32 s32 u64 s64 f16 f32 f64 bf16 f32-ftz tf32 tf32-ftz
const int ELEMENT_BYTES[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
const int FIRST_FLOAT = 6;

CUresult refuse(const char* why) { return refuse_call(CUDA_ERROR_INVALID_VALUE, "cuTensorMapEncodeTiled", why); }

}  // namespace

CUresult cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* base, const uint64_t* dims,
                                const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                                int interleave, int swizzle, int l2_promotion, int fill) {
  note_call(__func__);
  if (!map || (uint64_t)map % 64) return refuse("the map is not aligned to 64 bytes");
  if (type < 0 || type >= (int)(sizeof ELEMENT_BYTES / sizeof *ELEMENT_BYTES)) return refuse("unknown element type");
  if (rank < 1 || rank > MAX_RANK) return refuse("the rank is not 1 to 5");
  if (!base || (uint64_t)base % 16) return refuse("the tensor is not aligned to 16 bytes");
  if (interleave) return refuse("interleaved layouts are not emulated");
  if (swizzle < 0 || swizzle > 3) return refuse("unknown swizzle");
  if (l2_promotion < 0 || l2_promotion > 3) return refuse("unknown L2 promotion");
  if (fill != 0) return refuse(type < FIRST_FLOAT ? "a NaN fill of integers" : "a NaN fill is not emulated");

  TensorMap result{};
  result.magic = TENSOR_MAP_MAGIC;
  result.rank = rank;
  result.element_bytes = ELEMENT_BYTES[type];
  result.swizzle = swizzle;
  result.base = (char*)base;
  for (unsigned i = 0; i < rank; i++) {
    if (!dims[i] || dims[i] > uint64_t(1) << 32) return refuse("an extent is 0 or above 2^32");
    if (!box[i] || box[i] > 256) return refuse("an extent of the box is 0 or above 256");
    if (!element_strides[i] || element_strides[i] > 8) return refuse("an element stride is 0 or above 8");
    if (element_strides[i] != 1) return refuse("element strides above 1 are not emulated");
    result.last[i] = dims[i] - 1;
    result.box[i] = box[i];
    if (!i) continue;
    if (strides[i - 1] % 16) return refuse("a stride is no multiple of 16 bytes");
    if (strides[i - 1] >= uint64_t(1) << 40) return refuse("a stride of 2^40 bytes or more");
    result.stride[i] = strides[i - 1];
  }
  size_t inner = box[0] * result.element_bytes;
  if (inner % 16) return refuse("the inner extent of the box is no multiple of 16 bytes");
  if (swizzle && inner > size_t(16) << swizzle) return refuse("the inner extent of the box exceeds the swizzle");
  memcpy(map, &result, sizeof result);
  return CUDA_SUCCESS;
}
