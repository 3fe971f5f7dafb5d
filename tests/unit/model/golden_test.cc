// Log-probabilities and gradients against transformers and PyTorch: tests/golden/model_golden.py.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>

#include "libs/model/training.h"

namespace moerl::model {
namespace {

template <typename T>
std::vector<T> Values(const TensorView& view) {
  std::vector<T> out(view.bytes.size() / sizeof(T));
  std::memcpy(out.data(), view.bytes.data(), view.bytes.size());
  return out;
}

struct Golden {
  ModelConfig config;
  std::unique_ptr<SafetensorsDirectory> model;
  std::unique_ptr<SafetensorsFile> file;

  const TensorView& At(const std::string& name) const {
    for (const TensorView& view : file->tensors()) {
      if (view.name == name) return view;
    }
    ADD_FAILURE() << "golden has no " << name;
    return file->tensors()[0];
  }
  PackedBatch Batch() const {
    PackedBatch batch;
    batch.tokens = Values<int32_t>(At("tokens"));
    batch.offsets = Values<int64_t>(At("offsets"));
    return batch;
  }
};

std::vector<std::string> Cases() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(MOERL_SOURCE_DIR "/tests/golden/model")) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

class GoldenCase : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const std::string directory = MOERL_SOURCE_DIR "/tests/golden/model/" + GetParam();
    auto config = LoadConfig(directory);
    ASSERT_TRUE(config.ok()) << config.status();
    auto model = SafetensorsDirectory::Open(directory);
    ASSERT_TRUE(model.ok()) << model.status();
    auto file = SafetensorsFile::Open(directory + "/golden.safetensors");
    ASSERT_TRUE(file.ok()) << file.status();
    golden_ = {*config, *std::move(model), *std::move(file)};
  }

  std::unique_ptr<TrainerModel> Trainer(bool recompute) {
    TrainerModelOptions options;
    options.compute = Compute::kFp32;
    options.recompute = recompute;
    auto model = TrainerModel::Create(golden_.config, golden_.model->tensors(), options);
    EXPECT_TRUE(model.ok()) << model.status();
    return *std::move(model);
  }

  Golden golden_;
};

TEST_P(GoldenCase, HasLogProbabilitiesWithin1e5) {
  auto result = Trainer(false)->Forward(golden_.Batch());
  ASSERT_TRUE(result.ok()) << result.status();
  const std::vector<float> expected = Values<float>(golden_.At("logprobs"));
  ASSERT_EQ(result->logprobs.size(), expected.size());
  float worst = 0;
  for (size_t t = 0; t < expected.size(); ++t) worst = std::max(worst, std::fabs(result->logprobs[t] - expected[t]));
  RecordProperty("worst", std::to_string(worst));
  EXPECT_LE(worst, 1e-5f);
}

TEST_P(GoldenCase, HasGradientsWithin1e4OfEachTensorsLargest) {
  auto model = Trainer(false);
  ASSERT_TRUE(model->Forward(golden_.Batch()).ok());
  BackwardInput input;
  input.d_logprobs = Values<float>(golden_.At("d_logprobs"));
  ASSERT_TRUE(model->Backward(input).ok());
  const ParameterTable table(golden_.config);
  for (const Parameter& p : table.parameters()) {
    if (p.role == Role::kRouterBias) {  // a buffer in transformers
      for (const float d : model->gradient(p.name)) EXPECT_EQ(d, 0.0f) << p.name;
      continue;
    }
    const float scale = Values<float>(golden_.At("scale." + p.name))[0];
    const std::vector<int16_t> expected = Values<int16_t>(golden_.At("grad." + p.name));
    const absl::Span<const float> found = model->gradient(p.name);
    ASSERT_EQ(found.size(), expected.size()) << p.name;
    float worst = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      worst = std::max(worst, std::fabs(found[i] - scale * static_cast<float>(expected[i]) / 32767.0f));
    }
    EXPECT_LE(worst, 1e-4f * scale) << p.name << " largest " << scale;
  }
}

TEST_P(GoldenCase, WritesADirectoryThatReadsBackTheSame) {
  const std::string directory = testing::TempDir() + "/golden_" + GetParam();
  ASSERT_TRUE(WriteModelDirectory(directory, golden_.config, golden_.model->tensors(), Compute::kBf16).ok());
  auto config = LoadConfig(directory);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_TRUE(*config == golden_.config);
  auto again = SafetensorsDirectory::Open(directory);
  ASSERT_TRUE(again.ok()) << again.status();
  for (const TensorView& view : golden_.model->tensors()) {
    const TensorView* copy = (*again)->Find(view.name);
    ASSERT_NE(copy, nullptr) << view.name;
    EXPECT_EQ(copy->shape, view.shape) << view.name;
    EXPECT_TRUE(copy->bytes == view.bytes) << view.name;
  }
  std::filesystem::remove_all(directory);
}

INSTANTIATE_TEST_SUITE_P(Transformers, GoldenCase, testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param; });

TEST(Golden, CoversEveryFamilyThreeTimesUnusedExpertsAndLongContexts) {
  std::map<Family, int> families;
  int unused = 0;
  int64_t longest = 0;
  for (const std::string& name : Cases()) {
    const std::string directory = MOERL_SOURCE_DIR "/tests/golden/model/" + name;
    ++families[LoadConfig(directory)->family];
    auto file = SafetensorsFile::Open(directory + "/golden.safetensors");
    for (const TensorView& view : (*file)->tensors()) {
      if (view.name == "experts_without_tokens") unused += Values<int64_t>(view)[0] > 0;
      if (view.name == "offsets") longest = std::max(longest, Values<int64_t>(view)[1]);
    }
  }
  EXPECT_EQ(families.size(), 8u);
  for (const auto& [family, count] : families) EXPECT_GE(count, 3) << ModelType(family);
  EXPECT_GE(unused, 3);
  EXPECT_GT(longest, 2000);
}

}  // namespace
}  // namespace moerl::model
