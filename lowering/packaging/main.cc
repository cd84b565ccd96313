// Loads the model and runs it once:  ./host model [NAME=SIZE ...] [NAME=FILE ...]
// NAME=SIZE is the size of a symbolic dimension (its smallest legal one, or 1, else); NAME=FILE the elements of an input
// in a file of nothing else (zeros else). What outputs hold is printed: float32 as numbers, others as bytes.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "model.h"

int main(int argc, char** argv) try {
  if (argc < 2) throw std::invalid_argument("say where the folder with model.h is: ./host model");
  std::map<std::string, std::string> said;
  for (int k = 2; k < argc; ++k) {
    const std::string text = argv[k];
    if (text.rfind('=') == std::string::npos) throw std::invalid_argument(text + ": write NAME=SIZE or NAME=FILE");
    said[text.substr(0, text.rfind('='))] = text.substr(text.rfind('=') + 1);
  }
  const lowering::Model loaded(argv[1], model::spec);
  const bool on_gpu = !model::spec.codes[0].architecture.empty();

  std::vector<std::vector<char>> memory;  // of the inputs, which tensors are views of
  std::map<std::string, lowering::Tensor> inputs;
  for (const lowering::TensorSpec& spec : model::spec.inputs) {
    std::vector<int64_t> shape;
    size_t bytes = (tvm::ffi::StringToDLDataType(spec.dtype).bits + 7) / 8;
    for (const lowering::Dim& dim : spec.dims) {
      const auto range = model::spec.ranges.find(dim.name);
      const int64_t least = range == model::spec.ranges.end() ? 1 : range->second.first;
      const auto size = dim.name.empty() ? said.end() : said.find(dim.name);
      shape.push_back(!dim.name.empty() ? size == said.end() ? least : std::stoll(size->second) : dim.size);
      bytes *= static_cast<size_t>(shape.back());
    }
    memory.emplace_back(std::max<size_t>(bytes, 1));
    if (said.count(spec.name)) {
      std::ifstream file(said[spec.name], std::ios::binary);
      if (!file.read(memory.back().data(), static_cast<std::streamsize>(bytes)) || file.peek() != EOF) {
        throw std::invalid_argument(said[spec.name] + " has not the " + std::to_string(bytes) + " bytes of " + spec.name);
      }
    }
    const lowering::Tensor view = lowering::view(memory.back().data(), spec.dtype, shape);
    inputs.emplace(spec.name, on_gpu ? lowering::details::copy_of(view, lowering::gpu(0)) : view);
  }

  for (const auto& [name, result] : loaded.run(inputs)) {
    const lowering::Tensor output = on_gpu ? lowering::details::copy_of(result, lowering::cpu()) : result;
    const bool floats = lowering::details::name_of(output.dtype()) == "float32";
    std::printf("%s: %s [", name.c_str(), lowering::details::name_of(output.dtype()).c_str());
    for (int axis = 0; axis < output.ndim(); ++axis) std::printf(" %lld", static_cast<long long>(output.size(axis)));
    std::printf(" ]");
    const char *at = lowering::details::begin(output), *end = lowering::details::end(output);
    for (end = std::min<const char*>(end, at + 32); at < end; at += floats ? 4 : 1) {
      floats ? std::printf(" %.9g", *reinterpret_cast<const float*>(at)) : std::printf(" %02x", *at & 255);
    }
    std::printf("\n");
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
