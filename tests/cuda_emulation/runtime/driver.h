// The parts of the CUDA driver's and runtime's interfaces that TVM uses, with the ABI of CUDA 13.
#pragma once
#include <cstddef>
#include <cstdint>

enum CUresult {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_INVALID_IMAGE = 200,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_ILLEGAL_STATE = 401,
  CUDA_ERROR_NOT_FOUND = 500,
  CUDA_ERROR_LAUNCH_FAILED = 719,
  CUDA_ERROR_NOT_SUPPORTED = 801,
  CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
  CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
  CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
  CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
};

struct CUlaunchAttribute {
  int id;
  char padding[4];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int value;
  };
};

struct CUlaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void* stream;
  CUlaunchAttribute* attributes;
  unsigned attribute_count;
};

namespace emulation {

// Remembers why a call failed, for cuGetErrorString; returns the code.
CUresult refuse_call(CUresult code, const char* call, const char* why);
const char* error_name(int code);
const char* error_text(int code);

}  // namespace emulation

extern "C" CUresult cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* base, const uint64_t* dims,
                                           const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                                           int interleave, int swizzle, int l2_promotion, int fill);
