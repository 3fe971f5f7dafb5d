#include "libs/model/weights.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "libs/base/env.h"
#include "libs/model/training.h"
#include "tests/unit/model/test_models.h"

namespace moerl::model {
namespace {

std::string ErrorOf(const ModelConfig& config, const std::vector<TensorView>& tensors, WeightsOptions options = {}) {
  const auto weights = Weights::FromTensors(config, tensors, options);
  return weights.ok() ? "accepted" : std::string(weights.status().message());
}

TEST(Weights, SaysWhatIsMissingUnexpectedMisshapenOrNotFinite) {
  const ModelConfig config = SmallMoe();
  const TensorSet set = RandomParameters(config, 3);
  std::vector<TensorView> tensors = set.views();
  EXPECT_EQ(ErrorOf(config, tensors), "accepted");

  std::vector<TensorView> broken(tensors.begin() + 2, tensors.end());
  EXPECT_EQ(ErrorOf(config, broken), "tensor \"model.embed_tokens.weight\" [37,20] is missing, and 1 more");

  broken = tensors;
  broken[1].name = "model.layers.0.surprise";
  EXPECT_NE(ErrorOf(config, broken).find("\"model.layers.0.surprise\" is not a parameter of this qwen3_moe"),
            std::string::npos);

  broken = tensors;
  broken.push_back(broken[0]);
  EXPECT_NE(ErrorOf(config, broken).find("given twice"), std::string::npos);

  broken = tensors;
  std::swap(broken[0].shape[0], broken[0].shape[1]);
  EXPECT_NE(ErrorOf(config, broken).find("expected shape [37,20], found [20,37]"), std::string::npos);

  broken = tensors;
  broken[0].dtype = FileDType::kI32;
  EXPECT_NE(ErrorOf(config, broken).find("bytes of I32"), std::string::npos);

  broken = tensors;
  std::string bytes(broken[0].bytes);
  const float nan = NAN;
  std::memcpy(bytes.data() + 7 * sizeof(float), &nan, sizeof(nan));
  broken[0].bytes = bytes;
  EXPECT_NE(ErrorOf(config, broken).find("\"model.embed_tokens.weight\": element 7 is nan"), std::string::npos);
}

TEST(Weights, LeavesOutTheTokenPredictionLayerOfAGlmAndNeedsItsRouterBias) {
  const ModelConfig config = SmallGlm();
  const TensorSet set = RandomEverything(config, 3);
  std::vector<TensorView> tensors = set.views();
  tensors.push_back(tensors[1]);
  tensors.back().name = "model.layers.2.eh_proj.weight";
  EXPECT_EQ(ErrorOf(config, tensors), "accepted");
  tensors.back().name = "model.layers.3.eh_proj.weight";
  EXPECT_NE(ErrorOf(config, tensors).find("not a parameter"), std::string::npos);
  tensors.pop_back();
  std::erase_if(tensors,
                [](const TensorView& view) { return view.name.find("e_score_correction_bias") != view.name.npos; });
  EXPECT_EQ(ErrorOf(config, tensors), "tensor \"model.layers.1.mlp.gate.e_score_correction_bias\" [5] is missing");
}

TEST(Weights, WritesAGlmsRouterBiasInFp32WhateverTheComputeType) {
  const ModelConfig config = SmallGlm();
  const TensorSet set = RandomEverything(config, 3);
  const TemporaryDirectory directory;
  ASSERT_TRUE(WriteModelDirectory(directory.path(), config, set.views(), Compute::kBf16).ok());
  const auto files = SafetensorsDirectory::Open(directory.path());
  ASSERT_TRUE(files.ok()) << files.status();
  for (const TensorView& view : set.views()) {
    const TensorView* written = (*files)->Find(view.name);
    ASSERT_NE(written, nullptr) << view.name;
    const bool is_bias = view.name.find("e_score_correction_bias") != std::string::npos;
    EXPECT_EQ(written->dtype, is_bias ? FileDType::kF32 : FileDType::kBF16) << view.name;
    if (is_bias) {
      EXPECT_EQ(written->bytes, view.bytes);
    }
  }
}

TEST(Weights, TakesOnlyTheLocalExperts) {
  const ModelConfig config = SmallMoe();
  const TensorSet set = RandomParameters(config, 3);
  WeightsOptions options;
  options.local_experts = {1, 4};
  std::vector<TensorView> local;
  for (const TensorView& view : set.views()) {
    if (view.name.find("experts.0.") == std::string::npos) local.push_back(view);
  }
  EXPECT_EQ(ErrorOf(config, local, options), "accepted");
  options.local_experts = {4, 1};
  EXPECT_NE(ErrorOf(config, local, options).find("ascending"), std::string::npos);
  options.local_experts = {0};
  EXPECT_NE(ErrorOf(config, local, options).find("missing"), std::string::npos);
}

TEST(Weights, IgnoresTheHeadOfATiedModelUnlessItIsAnother) {
  const ModelConfig config = TiedDense();
  const TensorSet set = RandomParameters(config, 3);
  std::vector<TensorView> tensors = set.views();
  TensorView head = tensors[0];
  head.name = "lm_head.weight";
  tensors.push_back(head);
  EXPECT_EQ(ErrorOf(config, tensors), "accepted");
  std::string other(head.bytes);
  other[0] = static_cast<char>(other[0] ^ 1);
  tensors.back().bytes = other;
  EXPECT_NE(ErrorOf(config, tensors).find("config.json says tie_word_embeddings"), std::string::npos);
  EXPECT_EQ(ErrorOf(config, tensors, {.value_head = true}), "accepted");
}

TEST(Weights, AModelWrittenOverAnotherIsTheOneThatIsRead) {
  const ModelConfig config = SmallMoe();
  const TemporaryDirectory directory;
  uint64_t seed = 0;
  for (const int64_t shard_bytes_max : {int64_t{10'000}, int64_t{1} << 30, int64_t{10'000}}) {
    const TensorSet set = RandomParameters(config, ++seed);
    const std::string path = directory.path() + "/a/b";
    ASSERT_TRUE(WriteModelDirectory(path, config, set.views(), Compute::kFp32, shard_bytes_max).ok());
    const auto files = SafetensorsDirectory::Open(path);
    ASSERT_TRUE(files.ok()) << files.status();
    for (const TensorView& view : set.views()) EXPECT_EQ((*files)->Find(view.name)->bytes, view.bytes) << view.name;
    // transformers looks for this file first, we for the index.
    EXPECT_EQ(PosixEnv()->Exists(path + "/model.safetensors"), shard_bytes_max > 10'000);
  }
}

TEST(RandomParameters, DependOnSeedAndNameAlone) {
  const ModelConfig small = SmallMoe();
  ModelConfig deep = small;
  deep.num_layers = 3;
  deep.layer_has_experts = {true, true, true};
  const TensorSet a = RandomParameters(small, 5), b = RandomParameters(small, 5), c = RandomParameters(small, 6),
                  d = RandomParameters(deep, 5);
  EXPECT_TRUE(a.views()[0].bytes == b.views()[0].bytes);
  EXPECT_FALSE(a.views()[0].bytes == c.views()[0].bytes);
  for (size_t i = 0; i < 10; ++i) EXPECT_TRUE(a.views()[i].bytes == d.views()[i].bytes) << a.views()[i].name;
}

TEST(RandomParameters, HaveTheConfiguredDeviation) {
  ModelConfig config = SmallMoe();
  config.vocab_size = 5000;
  const TensorSet set = RandomParameters(config, 1);
  const float* values = reinterpret_cast<const float*>(set.views()[0].bytes.data());
  double sum = 0, squares = 0;
  const int n = 5000 * 20;
  for (int i = 0; i < n; ++i) sum += values[i], squares += static_cast<double>(values[i]) * values[i];
  EXPECT_NEAR(sum / n, 0, 0.005);
  EXPECT_NEAR(std::sqrt(squares / n), 0.25, 0.005);
}

TEST(Decode, ReadsEveryFloatingPointType) {
  const uint16_t half[] = {0x3C00, 0xC000, 0x0001, 0x7BFF}, bf16[] = {0x3F80, 0xC000};
  const double f64[] = {0.5, -3.0};
  float out[4];
  const auto bytes = [](const auto& v) { return absl::string_view(reinterpret_cast<const char*>(v), sizeof(v)); };
  ASSERT_TRUE(DecodeToFloat({"h", FileDType::kF16, {4}, bytes(half)}, out).ok());
  EXPECT_EQ(out[0], 1.0f);
  EXPECT_EQ(out[1], -2.0f);
  EXPECT_EQ(out[2], std::ldexp(1.0f, -24));
  EXPECT_EQ(out[3], 65504.0f);
  ASSERT_TRUE(DecodeToFloat({"b", FileDType::kBF16, {2}, bytes(bf16)}, out).ok());
  EXPECT_EQ(out[1], -2.0f);
  ASSERT_TRUE(DecodeToFloat({"d", FileDType::kF64, {2}, bytes(f64)}, out).ok());
  EXPECT_EQ(out[0], 0.5f);
}

TEST(Upcycle, ComputesWhatTheDenseModelDid) {
  ModelConfig dense = TiedDense();
  dense.qkv_bias = dense.o_bias = dense.mlp_bias = false;
  const TensorSet set = RandomEverything(dense, 11);
  const auto moe = Upcycle(dense, set.views(), {.num_experts = 4, .top_k = 2, .seed = 1});
  ASSERT_TRUE(moe.ok()) << moe.status();
  EXPECT_EQ(moe->config.family, Family::kMixtral);
  WeightsOptions options;
  options.compute = Compute::kFp32;
  const auto before = Weights::FromTensors(dense, set.views(), options);
  const auto after = Weights::FromTensors(moe->config, moe->tensors.views(), options);
  ASSERT_TRUE(before.ok() && after.ok()) << after.status();
  std::mt19937 random(1);
  const PackedBatch batch = Pack({RandomTokens(random, 30, dense.vocab_size)});
  const auto a = Score(**before, batch), b = Score(**after, batch);
  ASSERT_TRUE(a.ok() && b.ok());
  for (size_t t = 0; t < a->logprobs.size(); ++t) EXPECT_NEAR(a->logprobs[t], b->logprobs[t], 1e-5);
}

TEST(Upcycle, RefusesWhatHasNoCounterpart) {
  ModelConfig c = SmallMoe();
  EXPECT_FALSE(Upcycle(c, {}, {}).ok());
  c = TiedDense();
  EXPECT_NE(Upcycle(c, {}, {}).status().message().find("biases"), std::string::npos);
}

}  // namespace
}  // namespace moerl::model
