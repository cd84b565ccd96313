// A C++ application that embeds a compiled model: decodes tokens with caches that are updated in place, and checks
// every result against attention computed by hand. See Makefile for how to build it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "model.h"

namespace {

constexpr int64_t kBatch = 2, kHeads = 4, kKvHeads = 2, kHeadDim = 32, kCapacity = 64, kTokens = 40;

// One query against the first `length` rows of its head's caches (Attention-24 with nonpad_kv_seqlen).
std::vector<double> attend(const float* q, const float* k, const float* v, int64_t length) {
  std::vector<double> p(length), y(kHeadDim);
  double max = -INFINITY, sum = 0;
  for (int64_t t = 0; t < length; ++t) {
    for (int64_t d = 0; d < kHeadDim; ++d) p[t] += double{q[d]} * k[t * kHeadDim + d] / std::sqrt(double{kHeadDim});
    max = std::max(max, p[t]);
  }
  for (double& s : p) sum += s = std::exp(s - max);
  for (int64_t t = 0; t < length; ++t) {
    for (int64_t d = 0; d < kHeadDim; ++d) y[d] += p[t] / sum * v[t * kHeadDim + d];
  }
  return y;
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string folder = argc > 1 ? argv[1] : "artifact";
  const lowering::Model model(folder, model::spec);

  std::vector<float> q(kBatch * kHeads * kHeadDim), k(kBatch * kKvHeads * kHeadDim), v(k.size());
  std::vector<float> cache_k(kBatch * kKvHeads * kCapacity * kHeadDim), cache_v(cache_k.size());
  std::vector<int64_t> write_indices(kBatch);
  const std::vector<int64_t> cache_shape{kBatch, kKvHeads, kCapacity, kHeadDim};

  // The tensors are views of these vectors: made once, their contents change from token to token.
  const std::map<std::string, lowering::Tensor> inputs{
      {"q", lowering::view(q.data(), {kBatch, kHeads, 1, kHeadDim})},
      {"k", lowering::view(k.data(), {kBatch, kKvHeads, 1, kHeadDim})},
      {"v", lowering::view(v.data(), {kBatch, kKvHeads, 1, kHeadDim})},
      {"write_indices", lowering::view(write_indices.data(), {kBatch})},
      {"cache_k", lowering::view(cache_k.data(), cache_shape)},
      {"cache_v", lowering::view(cache_v.data(), cache_shape)},
  };

  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  double worst = 0;
  for (int64_t token = 0; token < kTokens; ++token) {
    for (std::vector<float>* array : {&q, &k, &v}) {
      for (float& x : *array) x = normal(random);
    }
    std::fill(write_indices.begin(), write_indices.end(), token);

    const auto outputs = model.run(inputs);

    if (outputs.at("present_k").data_ptr() != cache_k.data()) throw std::logic_error("the cache was not updated");
    const float* y = static_cast<const float*>(outputs.at("y").data_ptr());
    for (int64_t head = 0; head < kBatch * kHeads; ++head) {
      const int64_t row = head / (kHeads / kKvHeads) * kCapacity * kHeadDim;
      const auto expected = attend(&q[head * kHeadDim], &cache_k[row], &cache_v[row], token + 1);
      for (int64_t d = 0; d < kHeadDim; ++d) worst = std::max(worst, std::abs(y[head * kHeadDim + d] - expected[d]));
    }
  }
  std::printf("%d tokens, max error %.1e\n", int{kTokens}, worst);
  return worst < 1e-5 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
