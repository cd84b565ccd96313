// An application that has its calls of a model captured on its own stream: graph_host FOLDER prints the totals of y and of the
// first cache after each step, captured or not as the second argument says.
#include <cuda_runtime_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "model.h"

namespace {

constexpr int64_t kBatch = 2, kHeads = 4, kKvHeads = 2, kHeadDim = 32, kCapacity = 600;

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

struct Array {
  void* data = nullptr;
  size_t bytes;
  explicit Array(size_t bytes) : bytes(bytes) {
    check(cudaMalloc(&data, bytes));
    set(std::vector<char>(bytes).data());
  }
  void set(const void* values) {
    check(cudaMemcpyAsync(data, values, bytes, cudaMemcpyHostToDevice, nullptr));
    check(cudaStreamSynchronize(nullptr));
  }
};

double sum(const void* data, size_t count) {
  std::vector<float> values(count);
  check(cudaMemcpyAsync(values.data(), data, count * sizeof(float), cudaMemcpyDeviceToHost, nullptr));
  check(cudaStreamSynchronize(nullptr));
  double total = 0;
  for (size_t i = 0; i < count; ++i) total += values[i] * double(i % 7 + 1);
  return total;
}

}  // namespace

int main(int, char** arguments) try {
  const bool captured = std::strcmp(arguments[2], "captured") == 0;
  const lowering::Model model(arguments[1], model::spec);
  const size_t row = kBatch * kHeadDim, cache = row * kKvHeads * kCapacity;
  Array q(4 * row * kHeads), k(4 * row * kKvHeads), v(k.bytes), at(8 * kBatch), cache_k(4 * cache), cache_v(4 * cache);
  const auto view = [](const Array& array, const char* type, const std::vector<int64_t>& shape) {
    return lowering::view(array.data, type, shape, lowering::gpu(0));
  };
  const std::map<std::string, lowering::Tensor> inputs{
      {"q", view(q, "float32", {kBatch, kHeads, 1, kHeadDim})},
      {"k", view(k, "float32", {kBatch, kKvHeads, 1, kHeadDim})},
      {"v", view(v, "float32", {kBatch, kKvHeads, 1, kHeadDim})},
      {"write_indices", view(at, "int64", {kBatch})},
      {"cache_k", view(cache_k, "float32", {kBatch, kKvHeads, kCapacity, kHeadDim})},
      {"cache_v", view(cache_v, "float32", {kBatch, kKvHeads, kCapacity, kHeadDim})},
  };

  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  if (TVMFFIEnvSetStream(kDLCUDA, 0, stream, nullptr) != 0) throw std::runtime_error("no stream");
  std::map<std::string, lowering::Tensor> outputs;
  cudaGraphExec_t executable = nullptr;
  for (int64_t step = 0; step < 6; ++step) {
    for (Array* array : {&q, &k, &v}) {
      std::vector<float> values(array->bytes / sizeof(float));
      for (size_t i = 0; i < values.size(); ++i) values[i] = float((i * 37 + step * 101) % 64) / 64 - 0.5f;
      array->set(values.data());
    }
    at.set(std::vector<int64_t>(kBatch, step).data());
    if (!captured || step == 0) {
      outputs.clear();  // a capture cannot allocate: what the last call had is there for the next
      outputs = model.run(inputs);
    } else {
      if (executable == nullptr) {
        outputs.clear();
        cudaGraph_t graph;
        check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        outputs = model.run(inputs);
        check(cudaStreamEndCapture(stream, &graph));
        check(cudaGraphInstantiate(&executable, graph, 0));
        check(cudaGraphDestroy(graph));
      }
      check(cudaGraphLaunch(executable, stream));
    }
    check(cudaStreamSynchronize(stream));
    std::printf("%.9g %.9g\n", sum(outputs.at("y").data_ptr(), row * kHeads), sum(cache_k.data, cache));
  }
  if (outputs.at("present_k").data_ptr() != cache_k.data) throw std::logic_error("the cache was not updated in place");
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
