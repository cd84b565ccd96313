// libcudart.so.13: the runtime functions that TVM imports. Everything is synchronous; nothing can be timed.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "driver.h"
#include "fibers.h"
#include "memory.h"
#include "settings.h"

using namespace emulation;

namespace {

int last_error = 0;

int done(int code) {
  if (code) last_error = code;
  return code;
}

int refuse(const char* call, const char* why, CUresult code = CUDA_ERROR_NOT_SUPPORTED) {
  return done(refuse_call(code, call, why));
}

// cudaDeviceAttr
int attribute(int id) {
  switch (id) {
    case 1: return 1024;                           // threads per block
    case 2: case 3: return 1024;                   // block x, y
    case 4: return 64;                             // block z
    case 5: return 0x7FFFFFFF;                     // grid x
    case 6: case 7: return 65535;                  // grid y, z
    case 8: return 48 << 10;                       // shared memory per block
    case 10: return 32;                            // warp
    case 12: return 65536;                         // registers per block
    case 13: return 1;                             // clock rate, kHz: there is none
    case 16: return settings.multiprocessors;
    case 38: return 50 << 20;                      // L2 cache
    case 39: return 2048;                          // threads per SM
    case 75: return settings.major;
    case 76: return settings.minor;
    case 81: case 97: return settings.shared_memory;   // shared memory per SM, per block at most
    case 82: return 65536;                         // registers per SM
    default: return 0;
  }
}

}  // namespace

extern "C" {

int cudaGetDeviceCount(int* n) { return *n = 1, 0; }
int cudaGetDevice(int* device) { return *device = 0, 0; }
int cudaSetDevice(int device) { return device ? done(101) : 0; }
int cudaDeviceGetAttribute(int* value, int id, int device) { return device ? done(101) : (*value = attribute(id), 0); }

// The first fields of cudaDeviceProp; TVM reads no others.
int cudaGetDeviceProperties(void* properties, int) {
  struct Properties {
    char name[256], uuid[16], luid[8];
    unsigned nodes;
    size_t memory, shared;
  };
  auto& p = *(Properties*)properties;
  memset(&p, 0, sizeof p);
  snprintf(p.name, sizeof p.name, "CPU emulation (no GPU)");
  p.memory = bytes_free();
  p.shared = 48 << 10;
  return 0;
}

int cudaMemGetInfo(size_t* free, size_t* total) { return *free = *total = bytes_free(), 0; }
int cudaMalloc(void** pointer, size_t bytes) {
  *pointer = allocate(bytes);
  return *pointer ? 0 : refuse("cudaMalloc", "out of emulated memory", CUDA_ERROR_OUT_OF_MEMORY);
}
int cudaFree(void* pointer) {
  return !pointer || release(pointer) ? 0 : refuse("cudaFree", "not the beginning of an allocation", CUDA_ERROR_INVALID_VALUE);
}
int cudaMallocHost(void** pointer, size_t bytes) { return *pointer = malloc(bytes), 0; }
int cudaFreeHost(void* pointer) { return free(pointer), 0; }

int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, void*) {
  for (const void* side : {(const void*)to, from})
    if (bytes && in_arena((uint64_t)side) && !accessible((uint64_t)side, bytes))
      return refuse("cudaMemcpyAsync", "bytes outside of an allocation", CUDA_ERROR_INVALID_VALUE);
  memmove(to, from, bytes);
  return 0;
}
int cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, void* stream) {
  return cudaMemcpyAsync(to, from, bytes, 0, stream);
}

int cudaStreamCreate(void** stream) { return *stream = malloc(1), 0; }
int cudaStreamCreateWithFlags(void** stream, unsigned) { return cudaStreamCreate(stream); }
int cudaStreamDestroy(void* stream) { return free(stream), 0; }
int cudaStreamSynchronize(void*) { return 0; }
int cudaStreamWaitEvent(void*, void*, unsigned) { return 0; }
int cudaEventCreate(void** event) { return *event = malloc(1), 0; }
int cudaEventDestroy(void* event) { return free(event), 0; }
int cudaEventRecord(void*, void*) { return 0; }
int cudaEventSynchronize(void*) { return 0; }
int cudaEventElapsedTime(float*, void*, void*) { return refuse("cudaEventElapsedTime", "an emulation cannot be timed"); }

int cudaStreamBeginCapture(void*, int) { return refuse("cudaStreamBeginCapture", "graphs are not emulated"); }
int cudaStreamEndCapture(void*, void**) { return refuse("cudaStreamEndCapture", "graphs are not emulated"); }
int cudaGraphInstantiate(void**, void*, unsigned long long) { return refuse("cudaGraphInstantiate", "graphs are not emulated"); }
int cudaGraphLaunch(void*, void*) { return refuse("cudaGraphLaunch", "graphs are not emulated"); }
int cudaGraphDestroy(void*) { return 0; }
int cudaGraphExecDestroy(void*) { return 0; }

int cudaGetLastError() {
  int code = last_error;
  last_error = 0;
  return code;
}
int cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(int code) { return error_name(code); }
const char* cudaGetErrorString(int code) { return error_text(code); }
}
