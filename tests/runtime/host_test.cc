// Checks host.hpp against the models `cache`, `dense`, `inside`, `shared`, `threads` and `translator` of modules.py, whose
// logits for one token are in translator.bin. Prints what fails.
#include <sched.h>
#include <unistd.h>

#include <cstdio>
#include <set>
#include <thread>

#define LOWERING_MODEL cache
#include "cache/model.h"
#undef LOWERING_MODEL
#define LOWERING_MODEL dense
#include "dense/model.h"
#undef LOWERING_MODEL
#define LOWERING_MODEL inside
#include "inside/model.h"
#undef LOWERING_MODEL
#define LOWERING_MODEL shared
#include "shared/model.h"
#undef LOWERING_MODEL
#define LOWERING_MODEL threads
#include "threads/model.h"
#undef LOWERING_MODEL
#define LOWERING_MODEL translator
#include "translator/model.h"

using lowering::Model;
using lowering::Tensor;
using lowering::view;

int failures = 0;

void expect(bool ok, const char* what) {
  if (!ok) std::printf("FAILED: %s\n", what), ++failures;
}

// Runs f and compares what it throws.
template <class Exception, class F>
void expect_error(F f, const std::string& wanted) {
  try {
    f();
  } catch (const Exception& error) {
    const std::string message = error.what();
    if (message.find(wanted) != std::string::npos) return;
    std::printf("FAILED: '%s' says '%s'\n", wanted.c_str(), error.what()), ++failures;
    return;
  }
  std::printf("FAILED: no error '%s'\n", wanted.c_str()), ++failures;
}

void test_cache(const std::string& folder) {
  const Model model(folder + "/cache", cache::spec);
  std::vector<float> past(2 * 5 * 4), fresh(2 * 4, 1), other(2 * 5 * 4);
  std::vector<int64_t> index{1, 3};
  using Inputs = std::map<std::string, Tensor>;
  const Inputs inputs{
      {"past", view(past.data(), {2, 5, 4})},
      {"new", view(fresh.data(), {2, 4})},
      {"index", view(index.data(), {2})},
  };
  const auto with = [&](const char* name, const Tensor& tensor) {
    Inputs changed = inputs;
    changed.insert_or_assign(name, tensor);
    return changed;
  };
  const auto refused = [&](const Inputs& wrong, const char* message) {
    expect_error<std::invalid_argument>([&] { model.run(wrong); }, message);
  };
  refused({{"past", inputs.at("past")}, {"new", inputs.at("new")}}, "input 'index' is missing");
  refused(with("x", inputs.at("new")), "there is no input 'x'");
  std::vector<double> doubles(8);
  refused(with("new", view(doubles.data(), {2, 4})), "input 'new' must be float32, not float64");
  refused(with("new", view(fresh.data(), {8})), "input 'new' must have 2 dimensions, not 1");
  refused(with("new", view(fresh.data(), {4, 2})), "input 'new' must have size 2 of 'b' along axis 0, not 4");
  refused(with("past", view(past.data(), {2, 4, 5})), "input 'past' must have size 4 along axis 2, not 5");
  refused(with("new", view(past.data() + 36, {2, 4})), "input 'past' is donated but shares memory with input 'new'");
  refused(with("new", Tensor()), "input 'new' is not a tensor");
  using Shape = std::vector<int64_t>;
  const auto impossible = [](const void* data, const char* dtype, const Shape& shape, const char* message) {
    expect_error<std::invalid_argument>([&] { view(data, dtype, shape); }, message);
  };
  impossible(nullptr, "float32", {2, 4}, "needs memory, not a null pointer");
  impossible(nullptr, "float32", {}, "needs memory, not a null pointer");
  impossible(fresh.data(), "float99x", {2, 4}, "there is no element type 'float99x'");
  impossible(fresh.data(), "", {2, 4}, "there is no element type ''");
  impossible(fresh.data(), "tensor", {2, 4}, "there is no element type 'tensor'");
  impossible(fresh.data(), "float32", {2, -4}, "no negative sizes");
  expect(view(nullptr, "float32", {0, 4}).numel() == 0, "no elements need no memory");
  struct Strange {
    void AllocData(DLTensor* tensor) { tensor->data = nullptr; }
    void FreeData(DLTensor*) {}
  };
  const int64_t shape[] = {2, 4};
  const auto strange = [&](DLDataType dtype) {
    return Tensor::FromNDAlloc(Strange{}, tvm::ffi::ShapeView(shape, 2), dtype, lowering::cpu());
  };
  refused(with("new", strange({kDLFloat, 32, 1})), "input 'new' has no memory");
  refused(with("new", strange({250, 32, 1})), "input 'new' must be float32, not ");
  for (int threads : {-1, 1025, 1 << 30}) {
    expect_error<std::invalid_argument>([&] { model.run(inputs, threads); }, "threads must be 0 to 1024, not");
  }
  const char* odd = reinterpret_cast<char*>(fresh.data()) + 1;
  refused(with("new", view(odd, "float32", {1, 4})), "input 'new' is not aligned to its elements");
  for (float x : past) expect(x == 0, "nothing is written before all inputs are checked");

  const auto outputs = model.run(inputs);
  expect(outputs.at("present").data_ptr() == past.data(), "the cache is updated in place");
  for (int64_t k = 0; k < 40; ++k) expect(past[k] == (k / 4 == 1 || k / 4 == 8), "only the new rows are written");
  const float* total = static_cast<const float*>(outputs.at("total").data_ptr());
  for (int k = 0; k < 8; ++k) expect(total[k] == 1, "total");
}

void test_dense(const std::string& folder) {
  std::unique_ptr<Model> model = std::make_unique<Model>(folder + "/dense", dense::spec);
  std::vector<float> x(3 * 64, 1);
  const auto first = model->run({{"x", view(x.data(), {3, 64})}});
  std::vector<std::thread> callers;
  for (int k = 1; k <= 8; ++k) {
    callers.emplace_back([&, k] {
      std::vector<float> mine(k * 64, 1);
      for (int i = 0; i < 200; ++i) {
        const auto outputs = model->run({{"x", view(mine.data(), {k, 64})}}, 1 + i % 2);
        const float* y = static_cast<const float*>(outputs.at("y").data_ptr());
        const bool same = std::equal(y, y + 32, static_cast<const float*>(first.at("y").data_ptr()));
        if (!same || outputs.at("y").size(0) != k) std::printf("FAILED: concurrent callers\n"), ++failures;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  model.reset();
  const float* y = static_cast<const float*>(first.at("y").data_ptr());
  for (int k = 0; k < 32; ++k) expect(y[k] == y[32 + k], "outputs outlive the model");
  expect_error<std::runtime_error>([&] { Model(folder + "/cache", dense::spec); }, "not the one that model.h was");
  expect_error<std::runtime_error>([&] { Model(folder + "/nowhere", dense::spec); }, "nowhere/model.so' is missing");
  lowering::Spec future = dense::spec;
  future.cpu_features.push_back("avx1024");
  expect_error<std::runtime_error>([&] { Model(folder + "/dense", future); }, "built for a CPU with avx1024, which");
  lowering::Spec longer = dense::spec;
  longer.weights.back().offset += 4096;
  expect_error<std::runtime_error>([&] { Model(folder + "/dense", longer); }, "weights.bin' is too short");
}

void test_threads(const std::string& folder) {
  const Model model(folder + "/threads", threads::spec);
  std::vector<int32_t> x(16, 100);
  const auto count = [&](int n) {
    const Tensor who = model.run({{"x", view(x.data(), {16})}}, n).at("who");
    const int32_t* ids = static_cast<const int32_t*>(who.data_ptr());
    return std::set<int32_t>(ids, ids + 16).size();
  };
  cpu_set_t before, after;
  sched_getaffinity(0, sizeof before, &before);
  expect(count(0) == static_cast<size_t>(CPU_COUNT(&before)), "as many threads as the mask has CPUs");
  expect(count(1) == 1 && count(4) == 4, "as many threads as are asked for");
  expect(count(1024) == 16, "at most as many as there is work");
  sched_getaffinity(0, sizeof after, &after);
  expect(CPU_EQUAL(&before, &after), "the caller's affinity stays");
}

// Every model is loaded from a path that the linker has not seen, and from files that may change.
void test_loading(const std::string& folder) {
  std::vector<float> x(3 * 64, 1), four(4, 1);
  for (int round = 0; round < 3; ++round) {
    const Model first(folder + "/shared", shared::spec), second(folder + "/dense", dense::spec);
    expect(first.run({{"x", view(four.data(), {4})}}).at("y").numel() == 4, "the code of the first");
    expect(second.run({{"x", view(x.data(), {3, 64})}}).at("s").numel() == 3, "the code of the second");
  }
  const Model model(folder + "/dense", dense::spec);
  const auto before = model.run({{"x", view(x.data(), {3, 64})}});
  const Model fresh(folder + "/dense", dense::spec);
  for (const char* name : {"/dense/weights.bin", "/dense/model.so"}) {
    expect(truncate((folder + name).c_str(), 0) == 0, name);
  }
  const auto after = fresh.run({{"x", view(x.data(), {3, 64})}});
  const float* a = static_cast<const float*>(before.at("s").data_ptr());
  expect(std::equal(a, a + 3, static_cast<const float*>(after.at("s").data_ptr())), "files that are cut off later do not matter");
  expect_error<std::runtime_error>([&] { Model(folder + "/dense", dense::spec); }, "model.so' is missing or not the one");
}

void test_inside(const std::string& folder) {
  const Model model(folder + "/inside", inside::spec);
  std::vector<float> x(3, 1), y(4, 1);
  for (int round = 0; round < 2; ++round) {
    const auto run = [&](int64_t size) {
      return model.run({{"x", view(x.data(), {3})}, {"y", view(y.data(), {size})}});
    };
    expect_error<std::invalid_argument>([&] { run(4); }, "the model cannot run on these inputs: ");
    expect(static_cast<const float*>(run(3).at("z").data_ptr())[0] == 2, "the model runs on");
  }
}

void test_shared(const std::string& folder) {
  const Model model(folder + "/shared", shared::spec);
  std::vector<float> x(4, 5);
  for (int round = 0; round < 2; ++round) {
    const auto outputs = model.run({{"x", view(x.data(), {4})}});
    const std::map<std::string, float> first{{"same", 5}, {"w", 0}, {"y", -5}, {"again", -5}, {"constant", 9}};
    for (const auto& [name, value] : first) {
      float* data = static_cast<float*>(outputs.at(name).data_ptr());
      expect(data[0] == value, "an output changes with another, an input, a weight or a constant");
      data[0] += 100;
    }
  }
}

void test_setup(const std::string& folder) {
  const Model setup(folder + "/translator", translator::setup), decoder(folder + "/translator", translator::spec);
  std::vector<float> states(7 * 16, 0.5f), past(4 * 4 * 48 * 4);
  std::vector<int64_t> ids{1}, length{0};
  auto inputs = setup.run({{"encoder_hidden_states", view(states.data(), {1, 7, 16})}});
  inputs.insert_or_assign("input_ids", view(ids.data(), {1, 1}));
  inputs.insert_or_assign("past_length", view(length.data(), {}));
  for (int k = 0; k < 4; ++k) {
    const std::string name = "past_key_values." + std::to_string(k / 2) + ".self." + (k % 2 ? "value" : "key");
    inputs.insert_or_assign(name, view(past.data() + k * 4 * 48 * 4, {1, 4, 48, 4}));
  }
  const Tensor logits = decoder.run(inputs).at("logits");
  std::ifstream file(folder + "/translator.bin", std::ios::binary);
  const std::string wanted{std::istreambuf_iterator<char>(file), {}};
  const char* data = static_cast<const char*>(logits.data_ptr());
  expect(wanted == std::string(data, data + 4 * logits.numel()), "a decoder reads what its setup gives");
}

int main(int, char** argv) {
  test_cache(argv[1]);
  test_dense(argv[1]);
  test_shared(argv[1]);
  test_setup(argv[1]);
  test_threads(argv[1]);
  test_inside(argv[1]);
  test_loading(argv[1]);
  return failures != 0;
}
