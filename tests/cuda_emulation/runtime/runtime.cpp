// libcudart.so.13: the runtime functions that TVM imports. Work is done when it is enqueued; nothing can be timed.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "calls.h"
#include "driver.h"
#include "fibers.h"
#include "memory.h"
#include "settings.h"
#include "streams.h"

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
    case 16: return settings.sm_count;
    case 38: return 50 << 20;                      // L2 cache
    case 39: return 2048;                          // threads per SM
    case 75: return settings.major;
    case 76: return settings.minor;
    case 81: case 97: return settings.shared_memory;   // shared memory per SM, per block at most
    case 82: return 65536;                         // registers per SM
    default: return 0;
  }
}

std::map<const void*, size_t> pinned;            // host memory that the device can reach: address -> bytes

bool is_pinned(const void* pointer, size_t bytes) {
  auto next = pinned.upper_bound(pointer);
  if (next == pinned.begin()) return false;
  auto [begin, size] = *std::prev(next);
  return (const char*)pointer + bytes <= (const char*)begin + size;
}

}  // namespace

extern "C" {

int cudaGetDeviceCount(int* n) { return *n = 1, 0; }
int cudaGetDevice(int* device) { return note_call(__func__), *device = 0, 0; }
int cudaSetDevice(int device) { return note_call(__func__), device ? done(101) : 0; }
int cudaDeviceGetAttribute(int* value, int id, int device) {
  note_call(__func__);
  return device ? done(101) : (*value = attribute(id), 0);
}

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
  note_call(__func__);
  if (CUresult refused = check_unsafe(__func__)) return done(refused);
  *pointer = allocate(bytes);
  return *pointer ? 0 : refuse(__func__, "out of emulated memory", CUDA_ERROR_OUT_OF_MEMORY);
}
int cudaFree(void* pointer) {
  note_call(__func__);
  if (CUresult refused = check_unsafe(__func__)) return done(refused);
  return !pointer || release(pointer) ? 0 : refuse(__func__, "not the beginning of an allocation", CUDA_ERROR_INVALID_VALUE);
}
int cudaMallocHost(void** pointer, size_t bytes) {
  note_call(__func__);
  if (CUresult refused = check_unsafe(__func__)) return done(refused);
  pinned[*pointer = malloc(bytes)] = bytes;
  return 0;
}
int cudaFreeHost(void* pointer) {
  note_call(__func__);
  if (CUresult refused = check_unsafe(__func__)) return done(refused);
  return pinned.erase(pointer), free(pointer), 0;
}

int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, void* stream) {
  note_call(__func__, stream);
  for (const void* side : {(const void*)to, from}) {
    bool on_device = in_arena((uint64_t)side);
    if (bytes && on_device && !accessible((uint64_t)side, bytes))
      return refuse(__func__, "bytes outside of an allocation", CUDA_ERROR_INVALID_VALUE);
    if (bytes && !on_device && captures(stream) && !is_pinned(side, bytes))
      return done(refuse_capture(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, __func__, stream, "a copy of pageable host memory"));
  }
  return done(enqueue(__func__, stream, [=] {
    for (const void* side : {(const void*)to, from})
      if (bytes && in_arena((uint64_t)side) && !accessible((uint64_t)side, bytes))
        return refuse_call(CUDA_ERROR_INVALID_VALUE, "cudaMemcpyAsync", "bytes outside of an allocation");
    memmove(to, from, bytes);
    return CUDA_SUCCESS;
  }));
}
int cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, void* stream) {
  return cudaMemcpyAsync(to, from, bytes, 0, stream);
}

int cudaStreamCreateWithFlags(void** stream, unsigned flags) {
  note_call("cudaStreamCreate");
  return *stream = make_stream(!(flags & 1)), 0;
}
int cudaStreamCreate(void** stream) { return cudaStreamCreateWithFlags(stream, 0); }
int cudaStreamDestroy(void* stream) { return note_call(__func__, stream), done(destroy_stream(stream)); }
int cudaStreamSynchronize(void* stream) { return note_call(__func__, stream), done(check_wait(__func__, stream)); }

// Outside of a capture nothing is left to wait for; inside, events would join streams to it, which is not emulated.
int event(const char* call, void* stream) {
  note_call(call, stream);
  return captures(stream) ? done(refuse_capture(CUDA_ERROR_NOT_SUPPORTED, call, stream, "events of captures are not emulated")) : 0;
}
int cudaStreamWaitEvent(void* stream, void*, unsigned) { return event(__func__, stream); }
int cudaEventCreate(void** event) { return note_call(__func__), *event = malloc(1), 0; }
int cudaEventDestroy(void* event) { return note_call(__func__), free(event), 0; }
int cudaEventRecord(void*, void* stream) { return event(__func__, stream); }
int cudaEventSynchronize(void*) { return note_call(__func__), done(check_unsafe(__func__)); }
int cudaEventElapsedTime(float*, void*, void*) { return refuse("cudaEventElapsedTime", "an emulation cannot be timed"); }

int cudaStreamBeginCapture(void* stream, int mode) { return note_call(__func__, stream), done(begin_capture(stream, mode)); }
int cudaStreamEndCapture(void* stream, void** graph) { return note_call(__func__, stream), done(end_capture(stream, graph)); }
int cudaGraphInstantiate(void** executable, void* graph, unsigned long long) {
  return note_call(__func__), done(instantiate(executable, graph));
}
int cudaGraphLaunch(void* executable, void* stream) { return note_call(__func__, stream), done(launch_graph(executable, stream)); }
int cudaGraphDestroy(void* graph) { return note_call(__func__), done(destroy_graph(graph)); }
int cudaGraphExecDestroy(void* executable) { return note_call(__func__), done(destroy_executable(executable)); }

int cudaGetLastError() {
  int code = last_error;
  last_error = 0;
  return code;
}
int cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(int code) { return error_name(code); }
const char* cudaGetErrorString(int code) { return error_text(code); }
}
