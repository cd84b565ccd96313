// Run compiled models of onnx-lowering in C++17 applications.
//
//   #include "out/model.h"                                   // generated next to model.so
//   lowering::Model model("out", model::spec);
//   auto outputs = model.run({{"x", lowering::view(x.data(), {4, 64})}});
//   const float* y = static_cast<const float*>(outputs.at("y").data_ptr());
//
// Requires the headers of tvm_ffi (`tvm-ffi-config --cxxflags`), libtvm_ffi and libtvm_runtime:
//   g++ -std=c++17 main.cc $(tvm-ffi-config --cxxflags --ldflags --libs)
//       -L$TVM/lib -Wl,--no-as-needed -ltvm_runtime -Wl,-rpath,$TVM/lib
//
// A decoder that reads an encoder's output has a setup, which runs once per sequence and computes its inputs:
//   lowering::Model setup("out", model::setup);
//   auto inputs = setup.run({{"encoder_hidden_states", states}});  // then the decoder's, by the same names
//
// Models for GPUs also need libtvm_runtime_cuda (-ltvm_runtime_cuda). Their tensors are in the memory of one GPU, at
// multiples of 16 bytes: view(pointer, "float16", shape, lowering::gpu(0)), and Model(folder, spec, 0). A call returns
// when its kernels are enqueued, on the stream set by TVMFFIEnvSetStream, or else on the default stream. That stream
// may capture: after a run of the same tensors in the same thread, whose outputs have been freed, a run only enqueues
// kernels. docs/gpu_steps.md lists the requirements while the graph is used.
//
// Errors are exceptions: std::runtime_error for an artifact that cannot be loaded, std::invalid_argument for impossible
// tensors and for inputs that the model does not take. All inputs are checked before anything is written. Sizes that do
// not fit together inside the model, and indices out of bounds, are found by the code during a call: rows of donated
// caches may have been written by then. Tensors have elements of the storage types in model.h: one int4 per int8,
// strings as the int32 ids of the manifest. A call takes at most 1024 threads. Code and weights are read into memory
// when a model is loaded, so later changes of the files do not matter. CRC-32 detects accidental damage of the code;
// of weights.bin only the size is checked: load only artifacts that you trust.
//
// Every artifact has a copy of this file: an include guard handles that, and #pragma once would not.
#ifndef LOWERING_HOST_HPP
#define LOWERING_HOST_HPP

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/tvm_ffi.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace lowering {

using Tensor = tvm::ffi::Tensor;

// -- the contents of model.h -----------------------------------------------------------------------------------------

// A size, or the name of a symbolic one. Names may contain any bytes.
struct Dim {
  int64_t size;
  std::string name;  // "": the size is static
};

// donated_to is the output that takes over an input's memory. It is -1 for inputs that are only read.
struct TensorSpec {
  std::string name, dtype;
  std::vector<Dim> dims;
  int donated_to;
};

struct WeightSpec {
  std::string dtype;
  std::vector<int64_t> dims;
  size_t offset, nbytes;
};

// The code for GPUs of one architecture ("sm_90a"), or for CPUs ("").
struct CodeSpec {
  std::string file, architecture;
  uint32_t crc;
};

// Caches of a static capacity: the input `length` is their number of valid rows. tokens is the input whose size along
// axis is the number of rows that a call adds, or "" if no input has it. rows is the largest such number, 0 for any.
struct Slots {
  std::string length, tokens;
  int64_t axis, capacity, rows;
};

struct Spec {
  std::vector<TensorSpec> inputs, outputs;
  std::vector<WeightSpec> weights;
  std::map<std::string, std::pair<int64_t, int64_t>> ranges;
  std::vector<std::string> cpu_features;
  int threads;
  std::vector<CodeSpec> codes;
  std::vector<Slots> slots;  // at most one
};

// -- tensors ---------------------------------------------------------------------------------------------------------

inline DLDevice cpu() { return {kDLCPU, 0}; }
inline DLDevice gpu(int number) { return {kDLCUDA, number}; }

// Return a tensor over memory of the caller, which must outlive it. The memory is contiguous and aligned to the
// elements. Throws std::invalid_argument for unknown element types, negative sizes, and elements without memory.
inline Tensor view(const void* data, const std::string& dtype, const std::vector<int64_t>& shape,
                   DLDevice device = cpu()) {
  struct Borrowed {
    void* data;
    void AllocData(DLTensor* tensor) { tensor->data = data; }
    void FreeData(DLTensor*) {}
  };
  DLDataType type{};
  try {
    type = tvm::ffi::StringToDLDataType(dtype);
  } catch (const std::exception&) {
    // reported below
  }
  if (type.bits == 0) throw std::invalid_argument("there is no element type '" + dtype + "'");
  if (std::any_of(shape.begin(), shape.end(), [](int64_t size) { return size < 0; })) {
    throw std::invalid_argument("a tensor has no negative sizes");
  }
  if (data == nullptr && std::count(shape.begin(), shape.end(), 0) == 0) {
    throw std::invalid_argument("a tensor with elements needs memory, not a null pointer");
  }
  return Tensor::FromNDAlloc(Borrowed{const_cast<void*>(data)}, tvm::ffi::ShapeView(shape.data(), shape.size()), type,
                             device);
}

template <class T>
Tensor view(const T* data, const std::vector<int64_t>& shape) {
  static_assert(std::is_arithmetic_v<T>, "name the element type: view(data, \"bfloat16\", shape)");
  std::string dtype = std::is_same_v<T, bool>        ? "bool"
                      : std::is_floating_point_v<T>  ? "float" + std::to_string(8 * sizeof(T))
                      : std::is_unsigned_v<T>        ? "uint" + std::to_string(8 * sizeof(T))
                                                     : "int" + std::to_string(8 * sizeof(T));
  return view(static_cast<const void*>(data), dtype, shape);
}

namespace details {

inline char* begin(const Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset(); }
inline char* end(const Tensor& tensor) { return begin(tensor) + tvm::ffi::GetDataSize(*tensor.GetDLTensorPtr()); }

inline Tensor copy_tensor(const Tensor& source, DLDevice device) {
  const auto function = [](const char* name) { return tvm::ffi::Function::GetGlobalRequired(name); };
  const tvm::ffi::Shape shape(source.shape());
  const auto copy = function("runtime.TVMTensorAllocWithScope")(shape, source.dtype(), device, nullptr);
  function("runtime.TVMTensorCopyFromTo")(source, copy);
  return copy.cast<Tensor>();
}

// Return whether code for an architecture runs on GPUs of compute capability major.minor: those of the same major and
// at least the same minor version, also for a family ("sm_100f"). Code that uses features of one architecture
// ("sm_90a") runs only on that one.
inline bool runs_on(const std::string& architecture, int major, int minor) {
  const std::string number = architecture.substr(3);
  const int built = std::stoi(number), built_major = built / 10, built_minor = built % 10;
  if (number.back() == 'a') return built_major == major && built_minor == minor;
  return built_major == major && built_minor <= minor;
}

// CRC-32 (ISO-HDLC), as in zlib.
inline uint32_t crc32(const std::string& bytes) {
  uint32_t crc = ~0u;
  for (unsigned char byte : bytes) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0u);
  }
  return ~crc;
}

inline std::set<std::string> cpu_flags() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("flags", 0) != 0 && line.rfind("Features", 0) != 0) continue;
    std::istringstream fields(line.substr(line.find(':') + 1));
    return {std::istream_iterator<std::string>(fields), {}};
  }
  return {};
}

// Return the text of a virtual machine's error for the caller of a model, as runtime/failures.py does.
inline std::string describe_failure(const std::exception& error) {
  const std::string text = error.what();
  const auto* raised = dynamic_cast<const tvm::ffi::Error*>(&error);
  if (raised != nullptr && raised->kind() == "ValueError") return raised->message();
  if (text.find("storage allocation failure") != std::string::npos || text.find("bad_alloc") != std::string::npos) {
    return "a tensor inside it would need more memory than there is, or have a negative size. Make the inputs smaller; "
           "if sizes are the contents of an input, check those.";
  }
  return "a kernel failed on them.";
}

inline std::string describe_mod(DLDataType dtype) {
  try {
    return tvm::ffi::DLDataTypeToString(dtype);
  } catch (const std::exception&) {
    return "an unknown element type";
  }
}

// Load a model.so from an anonymous memory file: the checked bytes are the ones that run.
inline tvm::ffi::Module load_code(const std::string& code, const std::string& path) try {
  struct Descriptor {
    int number = memfd_create("model.so", MFD_CLOEXEC);
    ~Descriptor() { close(number); }
  } file;
  for (size_t done = 0; done < code.size();) {
    const ssize_t n = write(file.number, code.data() + done, code.size() - done);
    if (n <= 0) throw std::runtime_error("no memory for it");
    done += static_cast<size_t>(n);
  }
  // The linker treats a path that it has seen as the library loaded from it, and descriptor numbers are reused. Inode
  // numbers are not reused while in use: the bits of the number select between two spellings of the same folder.
  std::string name = "/proc/self/fd";
  struct stat status;
  if (fstat(file.number, &status) != 0) throw std::runtime_error("no memory for it");
  for (ino_t bits = status.st_ino; bits != 0; bits /= 2) name += bits % 2 ? "//." : "/.";
  name += "/" + std::to_string(file.number);
  const auto load = tvm::ffi::Function::GetGlobalRequired("ffi.Module.load_from_file.so");
  return load(name, "so").cast<tvm::ffi::Module>();
} catch (const std::exception& error) {
  throw std::runtime_error("'" + path + "' cannot be loaded: " + error.what());
}

// `size` bytes of a file from `begin` on, read into anonymous pages: a mapping would end the process if the file is
// truncated.
class Memory {
 public:
  Memory(const std::string& path, size_t begin, size_t size) : size(size) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat status;
    const bool is_open = file >= 0 && fstat(file, &status) == 0;
    const bool is_large_enough = is_open && static_cast<size_t>(status.st_size) >= begin + size;
    if (is_large_enough) {
      void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (address != MAP_FAILED) data = static_cast<char*>(address);
    }
    size_t done = 0;
    if (data != nullptr) {
#ifdef MADV_HUGEPAGE
      madvise(data, size, MADV_HUGEPAGE);  // advice that not every kernel supports
#endif
      for (ssize_t n = 1; n > 0 && done < size; done += n > 0 ? static_cast<size_t>(n) : 0) {
        n = pread(file, data + done, size - done, static_cast<off_t>(begin + done));
      }
    }
    if (file >= 0) close(file);
    if (data != nullptr && done == size) return;
    if (data != nullptr) munmap(data, size);
    throw std::runtime_error("'" + path + (is_open && !is_large_enough ? "' is too short" : "' cannot be read"));
  }
  ~Memory() { munmap(data, size); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data = nullptr;
  size_t size = 0;
};

}  // namespace details

// -- the model -------------------------------------------------------------------------------------------------------

// A loaded artifact. Any number of threads may run it at the same time.
class Model {
 public:
  // Load the artifact. spec is the one of the model.h in `folder`; number is that of the GPU, for models that run on
  // one.
  Model(const std::string& folder, const Spec& spec, int number = 0)
      : spec_(spec), device_(spec.codes.at(0).architecture.empty() ? cpu() : gpu(number)) {
    const CodeSpec& code_spec = choose(folder);
    const std::string path = folder + "/" + code_spec.file;
    std::ifstream file(path, std::ios::binary);
    const std::string code{std::istreambuf_iterator<char>(file), {}};
    if (details::crc32(code) != code_spec.crc) {
      throw std::runtime_error("'" + path + "' is missing or not the one that model.h was generated with");
    }
    const std::set<std::string> flags = details::cpu_flags();
    for (const std::string& feature : spec.cpu_features) {
      if (!flags.count(feature)) {
        throw std::runtime_error("'" + folder + "' was built for a CPU with " + feature + ", which this one lacks");
      }
    }
    executable_ = details::load_code(code, path);
    load_ = executable_.value()->GetFunction("vm_load_executable").value();
    set_threads_ = executable_.value()->GetFunction("lowering_set_threads", true).value();
    read_weights(folder + "/weights.bin");
  }

  // Run the model and return the outputs by name. Those that take over a donated input's memory are views of it; others
  // own their memory. threads: 1 to 1024, or 0 for the compiled number, or else the CPUs available to the calling
  // thread.
  std::map<std::string, Tensor> run(const std::map<std::string, Tensor>& inputs, int threads = 0) const {
    if (threads < 0 || threads > 1024) {
      throw std::invalid_argument("threads must be 0 to 1024, not " + std::to_string(threads));
    }
    std::vector<Tensor> arguments = check(inputs);
    std::vector<tvm::ffi::AnyView> packed(arguments.begin(), arguments.end());
    if (!weights_.empty()) packed.emplace_back(weights_);

    const Machine machine = take();
    set_threads_(threads > 0 ? threads : spec_.threads);
    tvm::ffi::Any result;
    try {
      machine.main.CallPacked(packed.data(), static_cast<int32_t>(packed.size()), &result);
    } catch (const std::exception& error) {
      set_threads_(0);
      give_back(machine);
      throw std::invalid_argument("the model cannot run on these inputs: " + details::describe_failure(error));
    }
    set_threads_(0);
    machine.release();
    give_back(machine);

    const auto results = result.cast<tvm::ffi::Array<Tensor>>();
    std::map<std::string, Tensor> outputs;
    std::set<char*> returned;
    for (size_t k = 0; k < spec_.outputs.size(); ++k) {
      outputs.emplace(spec_.outputs[k].name, own(results[k], static_cast<int>(k), arguments, &returned));
    }
    return outputs;
  }

 private:
  // A virtual machine runs one call at a time.
  struct Machine {
    tvm::ffi::Function main, release;
  };

  Machine take() const {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!machines_.empty()) {
        Machine machine = machines_.back();
        machines_.pop_back();
        return machine;
      }
    }
    const auto machine = load_().cast<tvm::ffi::Module>();
    const int type = device_.device_type, number = device_.device_id;
    machine->GetFunction("vm_initialization").value()(type, number, 2, int{kDLCPU}, 0, 2);
    return {machine->GetFunction("main").value(), machine->GetFunction("release").value()};
  }

  void give_back(const Machine& machine) const {
    std::lock_guard<std::mutex> lock(mutex_);
    machines_.push_back(machine);
  }

  // Return the code to run. Throws if there is none for this machine.
  const CodeSpec& choose(const std::string& folder) const {
    if (!tvm::ffi::Function::GetGlobal("ffi.Module.load_from_bytes.relax.VMExecutable").has_value()) {
      throw std::runtime_error("libtvm_runtime is not loaded: link it with -Wl,--no-as-needed -ltvm_runtime");
    }
    if (device_.device_type == kDLCPU) return spec_.codes[0];
    if (!tvm::ffi::Function::GetGlobal("ffi.Module.load_from_bytes.cuda").has_value()) {
      throw std::runtime_error("libtvm_runtime_cuda is not loaded: link it with -Wl,--no-as-needed -ltvm_runtime_cuda");
    }
    constexpr int kComputeVersion = 4;
    const auto attribute = tvm::ffi::Function::GetGlobalRequired("runtime.GetDeviceAttr");
    const auto version = attribute(int{kDLCUDA}, device_.device_id, kComputeVersion);
    if (version.type_index() == tvm::ffi::TypeIndex::kTVMFFINone) throw std::runtime_error("there is no such GPU");
    const std::string here = version.cast<tvm::ffi::String>();
    const int major = std::stoi(here), minor = std::stoi(here.substr(here.find('.') + 1));
    const CodeSpec* best = nullptr;
    for (const CodeSpec& code : spec_.codes) {
      const auto newer = [](const CodeSpec& a, const CodeSpec& b) {
        const auto rank = [](const std::string& architecture) {
          return 3 * std::stoi(architecture.substr(3)) + (architecture.back() == 'a' ? 2 : architecture.back() == 'f');
        };
        return rank(a.architecture) > rank(b.architecture);
      };
      if (details::runs_on(code.architecture, major, minor) && (!best || newer(code, *best))) best = &code;
    }
    if (best) return *best;
    throw std::runtime_error("'" + folder + "' was built for other GPUs than that of compute capability " + here);
  }

  void read_weights(const std::string& path) {
    if (spec_.weights.empty()) return;
    // A model and its setup each use a range of the file. Empty weights have memory of their own, too.
    const WeightSpec &first = spec_.weights.front(), &last = spec_.weights.back();
    const size_t size = last.offset + std::max<size_t>(last.nbytes, 1) - first.offset;
    memory_ = std::make_unique<details::Memory>(path, first.offset, size);
    for (const WeightSpec& weight : spec_.weights) {
      const Tensor tensor = view(memory_->data + weight.offset - first.offset, weight.dtype, weight.dims);
      weights_.push_back(device_.device_type == kDLCPU ? tensor : details::copy_tensor(tensor, device_));
    }
  }

  // Return the inputs in order. Throws before anything is written.
  std::vector<Tensor> check(const std::map<std::string, Tensor>& inputs) const {
    std::vector<Tensor> arguments;
    std::map<std::string, int64_t> sizes;
    for (const TensorSpec& spec : spec_.inputs) {
      const auto tensor_entry = inputs.find(spec.name);
      if (tensor_entry == inputs.end()) reject(spec, "is missing");
      check(spec, tensor_entry->second, &sizes);
      arguments.push_back(tensor_entry->second);
    }
    for (const auto& input : inputs) {
      const auto has_name = [&](const TensorSpec& spec) { return input.first == spec.name; };
      if (std::none_of(spec_.inputs.begin(), spec_.inputs.end(), has_name)) {
        throw std::invalid_argument("there is no input '" + input.first + "'");
      }
    }
    for (size_t i = 0; i < arguments.size(); ++i) {
      for (size_t j = 0; spec_.inputs[i].donated_to >= 0 && j < arguments.size(); ++j) {
        const Tensor &a = arguments[i], &b = arguments[j];
        const bool can_overlap = i != j && a.numel() > 0 && b.numel() > 0;
        if (can_overlap && details::begin(a) < details::end(b) && details::begin(b) < details::end(a)) {
          reject(spec_.inputs[i], quoted("is donated but shares memory with input ", spec_.inputs[j].name));
        }
      }
    }
    for (const Slots& slots : spec_.slots) check(slots, inputs);
    return arguments;
  }

  // Check that the caches have room for the rows that the call adds.
  void check(const Slots& slots, const std::map<std::string, Tensor>& inputs) const {
    const Tensor length = details::copy_tensor(inputs.at(slots.length), cpu());
    const int64_t used = *reinterpret_cast<const int64_t*>(details::begin(length));
    const int64_t rows = slots.tokens.empty() ? 0 : inputs.at(slots.tokens).size(slots.axis);
    if (used < 0 || used > slots.capacity - rows) {
      throw std::invalid_argument("the caches have " + std::to_string(slots.capacity) +
                                  " slots: " + std::to_string(used) + quoted(" tokens are in them (", slots.length) +
                                  ") and " + std::to_string(rows) + " more do not fit");
    }
    if (slots.rows > 0 && rows > slots.rows) {
      throw std::invalid_argument("a call adds at most " + std::to_string(slots.rows) + " tokens, and this one adds " +
                                  std::to_string(rows) + ": make several calls");
    }
  }

  void check(const TensorSpec& spec, const Tensor& tensor, std::map<std::string, int64_t>* sizes) const {
    if (!tensor.defined()) reject(spec, "is not a tensor");
    const std::string dtype = details::describe_mod(tensor.dtype());
    if (dtype != spec.dtype) reject(spec, "must be " + spec.dtype + ", not " + dtype);
    const DLDevice device = tensor.device();
    const bool on_gpu = device_.device_type != kDLCPU;
    if (device.device_type != device_.device_type || device.device_id != device_.device_id) {
      reject(spec, on_gpu ? "is not in the memory of the model's GPU" : "is not in the CPU's memory");
    }
    if (!tensor.IsContiguous()) reject(spec, "is not contiguous");
    if (tensor.data_ptr() == nullptr && tensor.numel() > 0) reject(spec, "has no memory");
    const size_t itemsize = static_cast<size_t>(tensor.dtype().bits + 7) / 8;
    const size_t alignment = on_gpu ? 16 : itemsize;
    if (reinterpret_cast<uintptr_t>(details::begin(tensor)) % alignment) {
      reject(spec, on_gpu ? "is not aligned to 16 bytes" : "is not aligned to its elements");
    }
    if (static_cast<size_t>(tensor.ndim()) != spec.dims.size()) {
      const std::string expected = std::to_string(spec.dims.size()), actual = std::to_string(tensor.ndim());
      reject(spec, "must have " + expected + " dimensions, not " + actual);
    }
    for (size_t axis = 0; axis < spec.dims.size(); ++axis) {
      const Dim& dim = spec.dims[axis];
      const int64_t size = tensor.size(static_cast<int64_t>(axis));
      const int64_t expected = dim.name.empty() ? dim.size : sizes->emplace(dim.name, size).first->second;
      if (size != expected) {
        const std::string dim_text = dim.name.empty() ? "" : quoted(" of ", dim.name);
        const std::string where = dim_text + " along axis " + std::to_string(axis);
        reject(spec, "must have size " + std::to_string(expected) + where + ", not " + std::to_string(size));
      }
      const auto range = dim.name.empty() ? spec_.ranges.end() : spec_.ranges.find(dim.name);
      if (range != spec_.ranges.end() && (size < range->second.first || size > range->second.second)) {
        const std::string legal = std::to_string(range->second.first) + " to " + std::to_string(range->second.second);
        const std::string actual = std::to_string(size) + quoted(" in dimension ", dim.name);
        reject(spec, "has size " + actual + "; the model takes " + legal);
      }
    }
  }

  static std::string quoted(const std::string& text, const std::string& name) { return text + "'" + name + "'"; }

  [[noreturn]] static void reject(const TensorSpec& spec, const std::string& what) {
    throw std::invalid_argument("input '" + spec.name + "' " + what);
  }

  // Return the result, or a copy if it is memory of an input that is not donated to it, of a weight, of another output,
  // or of a constant of the code. The code itself refers to a constant, in addition to the array of results and this
  // reference.
  Tensor own(const Tensor& result, int output, const std::vector<Tensor>& arguments, std::set<char*>* returned) const {
    char* address = details::begin(result);
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (address != details::begin(arguments[i])) continue;
      return spec_.inputs[i].donated_to == output ? result : details::copy_tensor(result, device_);
    }
    const auto contains = [address](const Tensor& t) {
      return address >= details::begin(t) && address < details::end(t);
    };
    const bool is_weight = std::any_of(weights_.begin(), weights_.end(), contains);
    const bool is_returned = !returned->insert(address).second;
    return is_weight || is_returned || result.use_count() > 2 ? details::copy_tensor(result, device_) : result;
  }

  const Spec spec_;
  const DLDevice device_;
  tvm::ffi::Optional<tvm::ffi::Module> executable_;
  tvm::ffi::Function load_, set_threads_;
  std::unique_ptr<details::Memory> memory_;
  tvm::ffi::Array<Tensor> weights_;
  mutable std::mutex mutex_;
  mutable std::vector<Machine> machines_;
};

}  // namespace lowering

#endif  // LOWERING_HOST_HPP
