// Loads the model and runs it once:  ./host model [NAME=SIZE ...] [NAME=FILE ...]
// NAME=SIZE is the size of a symbolic dimension (default: the smallest legal one, or 1). NAME=FILE is a raw file of the
// elements of an input (default: zeros). The outputs are printed: float32 as numbers, others as bytes.
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <map>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "model.h"

// The sizes and the files of the arguments; each must name a dimension or an input of the model.
std::map<std::string, std::string> arguments(int argc, char** argv) {
  std::set<std::string> names;
  for (const lowering::TensorSpec& spec : model::spec.inputs) {
    names.insert(spec.name);
    for (const lowering::Dim& dim : spec.dims) names.insert(dim.name);
  }
  std::map<std::string, std::string> values;
  for (int k = 2; k < argc; ++k) {
    const std::string text = argv[k];
    if (text.rfind('=') == std::string::npos) throw std::invalid_argument(text + ": write NAME=SIZE or NAME=FILE");
    const std::string name = text.substr(0, text.rfind('='));
    if (name.empty() || !names.count(name)) throw std::invalid_argument(name + " is neither an input nor a dimension of one");
    values[name] = text.substr(text.rfind('=') + 1);
  }
  return values;
}

int64_t size_of(const std::string& name, const std::string& text) {
  int64_t size = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), size);
  if (error != std::errc() || end != text.data() + text.size() || size < 0) {
    throw std::invalid_argument(name + "=" + text + ": write a size, a whole number from 0 on");
  }
  return size;
}

int main(int argc, char** argv) try {
  if (argc < 2) throw std::invalid_argument("say where the folder with model.h is: ./host model");
  const std::map<std::string, std::string> values = arguments(argc, argv);
  const lowering::Model loaded(argv[1], model::spec);
  const bool on_gpu = !model::spec.codes[0].architecture.empty();

  std::vector<std::vector<char>> memory;  // of the inputs; tensors are views of it
  std::map<std::string, lowering::Tensor> inputs;
  for (const lowering::TensorSpec& spec : model::spec.inputs) {
    std::vector<int64_t> shape;
    size_t bytes = (tvm::ffi::StringToDLDataType(spec.dtype).bits + 7) / 8;
    for (const lowering::Dim& dim : spec.dims) {
      const auto range = model::spec.ranges.find(dim.name);
      const int64_t least = range == model::spec.ranges.end() ? 1 : range->second.first;
      const auto size = dim.name.empty() ? values.end() : values.find(dim.name);
      shape.push_back(!dim.name.empty() ? size == values.end() ? least : size_of(dim.name, size->second) : dim.size);
      const size_t count = static_cast<size_t>(shape.back());
      if (count != 0 && bytes > SIZE_MAX / 2 / count) throw std::invalid_argument(spec.name + " does not fit into memory");
      bytes *= count;
    }
    memory.emplace_back(std::max<size_t>(bytes, 1));
    if (const auto path = values.find(spec.name); path != values.end()) {
      std::ifstream file(path->second, std::ios::binary);
      if (!file.read(memory.back().data(), static_cast<std::streamsize>(bytes)) || file.peek() != EOF) {
        throw std::invalid_argument(path->second + " has not the " + std::to_string(bytes) + " bytes of " + spec.name);
      }
    }
    const lowering::Tensor view = lowering::view(memory.back().data(), spec.dtype, shape);
    inputs.emplace(spec.name, on_gpu ? lowering::details::copy_tensor(view, lowering::gpu(0)) : view);
  }

  for (const auto& [name, result] : loaded.run(inputs)) {
    const lowering::Tensor output = on_gpu ? lowering::details::copy_tensor(result, lowering::cpu()) : result;
    const bool floats = lowering::details::describe_mod(output.dtype()) == "float32";
    std::printf("%s: %s [", name.c_str(), lowering::details::describe_mod(output.dtype()).c_str());
    for (int axis = 0; axis < output.ndim(); ++axis) std::printf(" %lld", static_cast<long long>(output.size(axis)));
    std::printf(" ]");
    const char *at = lowering::details::begin(output), *end = lowering::details::end(output);
    for (end = std::min<const char*>(end, at + 32); at < end; at += floats ? 4 : 1) {
      floats ? std::printf(" %.9g", *reinterpret_cast<const float*>(at)) : std::printf(" %02x", *at & 255);
    }
    std::printf("\n");
  }
} catch (const std::bad_alloc&) {
  std::fprintf(stderr, "there is not enough memory for inputs of these sizes\n");
  return 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
