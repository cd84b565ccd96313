// libcuda.so.1: the driver functions that TVM imports. A "cubin" is a shared library made from generated CUDA source.
#include "driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "accesses.h"
#include "aliasing.h"
#include "calls.h"
#include "fibers.h"
#include "memory.h"
#include "settings.h"
#include "streams.h"

namespace emulation {
namespace {

constexpr size_t DEFAULT_SHARED = 48 << 10;      // static and dynamic, without cuFuncSetAttribute

// Bytes of static shared memory.
size_t static_bytes(const emu_kernel& kernel) {
  size_t bytes = 0;
  for (int i = 0; i < kernel.arrays; i++) bytes += kernel.shared[i].bytes;
  return bytes;
}

struct Function {
  std::string name;
  const emu_kernel* kernel;
  size_t most_dynamic;
};

struct Module {
  void* library;
  std::vector<Function*> functions;
};

const struct {
  int code;
  const char *name, *text;
} ERRORS[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
};

CUresult refuse_launch(const char* why, CUresult code = CUDA_ERROR_INVALID_VALUE) {
  return refuse_call(code, "cuLaunchKernelEx", why);
}

enum { COOPERATIVE = 2, CLUSTER = 4, PROGRAMMATIC_SERIALIZATION = 6 };

// CUDA_SUCCESS if the launch is one that the device could do.
CUresult check_launch(const CUlaunchConfig& c, const Function& function) {
  static char why[256];
  size_t fixed = static_bytes(*function.kernel), block_threads = (size_t)c.block_x * c.block_y * c.block_z;
  if (!c.grid_x || !c.grid_y || !c.grid_z || !block_threads) return refuse_launch("an extent of the grid or block is 0");
  if (c.grid_x > 0x7FFFFFFF || c.grid_y > 65535 || c.grid_z > 65535) return refuse_launch("the grid is too large");
  if (c.block_x > 1024 || c.block_y > 1024 || c.block_z > 64 || block_threads > MAX_THREADS)
    return refuse_launch("the block is too large");
  int most = function.kernel->max_threads;
  if (most && block_threads > (size_t)most) {
    snprintf(why, sizeof why, "%zu threads in a block of a kernel with __launch_bounds__(%d)", block_threads, most);
    return refuse_launch(why);
  }
  if (c.shared_bytes > function.most_dynamic || c.shared_bytes + fixed > settings.shared_memory) {
    snprintf(why, sizeof why, "%u bytes of dynamic and %zu of static shared memory; %zu in all and %zu dynamic are allowed",
             c.shared_bytes, fixed, settings.shared_memory, function.most_dynamic);
    return refuse_launch(why);
  }
  for (unsigned i = 0; i < c.attribute_count; i++) {
    auto& attribute = c.attributes[i];
    if (attribute.id == PROGRAMMATIC_SERIALIZATION) continue;      // launches follow each other here anyway
    if (attribute.id == COOPERATIVE && !attribute.value) continue;
    if (attribute.id == CLUSTER) {
      auto [x, y, z] = attribute.cluster;
      if (x == 1 && y == 1 && z == 1) continue;
      if (settings.major < 9) return refuse_launch("clusters need compute capability 9.0");
      if (!x || c.grid_x % x) return refuse_launch("the grid is no multiple of the cluster");
      if (x <= MAX_CLUSTER && y == 1 && z == 1 && block_threads * x <= MAX_THREADS && block_threads % WARPGROUP == 0) continue;
      return refuse_launch("clusters of other than 2 to 8 whole blocks along x, with at most 1024 threads in all, are not "
                           "emulated", CUDA_ERROR_NOT_SUPPORTED);
    }
    snprintf(why, sizeof why, "launch attribute %d is not emulated (cooperative launches)", attribute.id);
    return refuse_launch(why, CUDA_ERROR_NOT_SUPPORTED);
  }
  return CUDA_SUCCESS;
}

// Blocks of a cluster, along x.
int cluster_of(const CUlaunchConfig& config) {
  for (unsigned i = 0; i < config.attribute_count; i++)
    if (config.attributes[i].id == CLUSTER) return config.attributes[i].cluster.x;
  return 1;
}

// The launch's attributes may be gone.
CUresult run_kernel(const CUlaunchConfig& config, int cluster, const Function& function, void** parameters) {
  block = Block();
  block.grid = {config.grid_x, config.grid_y, config.grid_z};
  block.size = {config.block_x, config.block_y, config.block_z};
  block.cluster = cluster;
  block.each = config.block_x * config.block_y * config.block_z;
  block.threads = block.cluster * block.each;
  lay_out_shared(*function.kernel, config.shared_bytes, block.cluster);
  parameters = with_windows(*function.kernel, parameters);
  size_t clusters = (size_t)config.grid_x * config.grid_y * config.grid_z / block.cluster;
  for (size_t i = 0; i < clusters; i++) {
    size_t at = (settings.descending ? clusters - 1 - i : i) * block.cluster;
    block.index = {unsigned(at % config.grid_x), unsigned(at / config.grid_x % config.grid_y),
                   unsigned(at / config.grid_x / config.grid_y)};
    if (!run_block(function.kernel->entry, parameters)) {
      set_failure((function.name + ", " + failure()).c_str());
      return CUDA_ERROR_LAUNCH_FAILED;
    }
  }
  report_accesses(function.name, function.kernel->file);
  return CUDA_SUCCESS;
}

// What a graph keeps of a launch. Tensor maps demand 64 bytes of alignment.
struct Parameters {
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> lines;
  std::vector<void*> pointers;

  Parameters(const emu_kernel& kernel, void** given) {
    size_t count = 0;
    auto lines_of = [&](int i) { return (kernel.bytes[i] + sizeof(Line) - 1) / sizeof(Line); };
    for (int i = 0; i < kernel.parameters; i++) count += lines_of(i);
    lines.resize(count);
    for (int i = 0, at = 0; i < kernel.parameters; at += lines_of(i++)) {
      pointers.push_back(&lines[at]);
      memcpy(&lines[at], given[i], kernel.bytes[i]);
    }
  }
};

std::set<void*> functions;    // of modules that are loaded

}  // namespace

CUresult refuse_call(CUresult code, const char* call, const char* why) {
  set_failure((std::string(call) + ": " + why).c_str());
  return code;
}

const char* error_name(int code) {
  for (auto& error : ERRORS)
    if (error.code == code) return error.name;
  return "CUDA_ERROR_UNKNOWN";
}

// With the reason, so that it is in the message of TVM's exception.
const char* error_text(int code) {
  static std::string text;
  for (auto& error : ERRORS)
    if (error.code == code) text = error.text;
  if (code && *failure()) text += std::string(" (emulation: ") + failure() + ")";
  return text.c_str();
}

}  // namespace emulation

using namespace emulation;

extern "C" {

CUresult cuModuleLoadData(void** result, const void* image) {
  note_call(__func__);
  if (CUresult refused = check_unsafe(__func__)) return refused;
  auto bytes = (const unsigned char*)image;
  if (memcmp(bytes, "\x7F" "ELF", 4)) return refuse_call(CUDA_ERROR_INVALID_IMAGE, "cuModuleLoadData", "not made for the emulation");
  // The size is not given: the table of sections is the last thing in the file.
  uint64_t sections;
  uint16_t section_bytes, section_count;
  memcpy(&sections, bytes + 0x28, 8);
  memcpy(&section_bytes, bytes + 0x3A, 2);
  memcpy(&section_count, bytes + 0x3C, 2);
  size_t size = sections + (size_t)section_bytes * section_count;

  char path[] = "/tmp/cuda_emulation_XXXXXX";
  int file = mkstemp(path);
  if (file < 0) return refuse_call(CUDA_ERROR_INVALID_IMAGE, "cuModuleLoadData", "no temporary file");
  FILE* out = fdopen(file, "wb");
  bool written = fwrite(bytes, 1, size, out) == size;
  written = fclose(out) == 0 && written;
  void* library = written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
  unlink(path);
  if (!library) return refuse_call(CUDA_ERROR_INVALID_IMAGE, "cuModuleLoadData", written ? dlerror() : "disk full");
  *result = new Module{library, {}};
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(void* handle) {
  note_call(__func__);
  if (CUresult refused = check_unsafe(__func__)) return refused;
  auto module = (Module*)handle;
  for (auto* function : module->functions) {
    functions.erase(function);
    delete function;
  }
  dlclose(module->library);
  delete module;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(void** result, void* handle, const char* name) {
  note_call(__func__);
  auto module = (Module*)handle;
  auto kernel = (const emu_kernel*)dlsym(module->library, (std::string("emu_kernel_") + name).c_str());
  if (!kernel) return refuse_call(CUDA_ERROR_NOT_FOUND, "cuModuleGetFunction", name);
  *result = new Function{name, kernel, DEFAULT_SHARED - std::min(DEFAULT_SHARED, static_bytes(*kernel))};
  module->functions.push_back((Function*)*result);
  functions.insert(*result);
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(void* handle, int attribute, int value) {
  note_call(__func__);
  constexpr int MAX_DYNAMIC_SHARED = 8;
  if (attribute != MAX_DYNAMIC_SHARED) return CUDA_SUCCESS;        // hints about caches
  if (value < 0 || (size_t)value > settings.shared_memory)
    return refuse_call(CUDA_ERROR_INVALID_VALUE, "cuFuncSetAttribute", "more shared memory than the device has");
  ((Function*)handle)->most_dynamic = value;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, void* handle, void** parameters, void** extra) {
  auto& function = *(Function*)handle;
  note_call(__func__, config->stream);
  if (extra) return refuse_launch("parameters in `extra` are not emulated", CUDA_ERROR_NOT_SUPPORTED);
  if (CUresult refused = check_launch(*config, function)) return refused;
  int cluster = cluster_of(*config);
  if (!captures(config->stream))
    return enqueue(__func__, config->stream, [&] { return run_kernel(*config, cluster, function, parameters); });
  auto copy = std::make_shared<Parameters>(*function.kernel, parameters);
  return enqueue(__func__, config->stream, [config = *config, cluster, handle, copy]() mutable {
    if (!functions.count(handle)) return refuse_launch("a kernel of a module that was unloaded", CUDA_ERROR_INVALID_HANDLE);
    return run_kernel(config, cluster, *(Function*)handle, copy->pointers.data());
  });
}

CUresult cuGetErrorName(CUresult code, const char** text) { return *text = error_name(code), CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult code, const char** text) { return *text = error_text(code), CUDA_SUCCESS; }

CUresult cuDeviceGetName(char* text, int bytes, int) {
  snprintf(text, bytes, "CPU emulation of sm_%d%d (no GPU)", settings.major, settings.minor);
  return CUDA_SUCCESS;
}
}
