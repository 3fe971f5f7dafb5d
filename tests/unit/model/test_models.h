#ifndef MOERL_TESTS_UNIT_MODEL_TEST_MODELS_H_
#define MOERL_TESTS_UNIT_MODEL_TEST_MODELS_H_

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "libs/base/check.h"
#include "libs/model/batch.h"
#include "libs/model/weights.h"

// Small models and batches for tests.
namespace moerl::model {

// A Qwen3-MoE with odd sizes: two layers, GQA, QK-norm.
inline ModelConfig SmallMoe() {
  ModelConfig c;
  c.family = Family::kQwen3Moe;
  c.vocab_size = 37;
  c.hidden_size = 20;
  c.num_layers = 2;
  c.num_heads = 4;
  c.num_kv_heads = 2;
  c.head_dim = 6;
  c.max_position = 1024;
  c.qk_norm = QkNorm::kPerHead;
  c.layer_has_experts = {true, true};
  c.num_experts = 5;
  c.top_k = 2;
  c.moe_intermediate_size = 9;
  c.norm_topk_prob = true;
  c.initializer_range = 0.25f;
  return c;
}

// A Qwen2-MoE with a shared expert, biases and one dense layer.
inline ModelConfig SharedExpertMoe() {
  ModelConfig c = SmallMoe();
  c.family = Family::kQwen2Moe;
  c.qk_norm = QkNorm::kNone;
  c.qkv_bias = true;
  c.norm_topk_prob = false;
  c.layer_has_experts = {false, true};
  c.intermediate_size = 14;
  c.shared_expert_intermediate_size = 7;
  return c;
}

inline ModelConfig ClippedOlmoe() {
  ModelConfig c = SmallMoe();
  c.family = Family::kOlmoe;
  c.qk_norm = QkNorm::kFull;
  c.norm_topk_prob = false;
  c.clip_qkv = 0.9f;
  return c;
}

inline ModelConfig TiedDense() {
  ModelConfig c = SmallMoe();
  c.family = Family::kLlama;
  c.qk_norm = QkNorm::kNone;
  c.layer_has_experts = {false, false};
  c.num_experts = c.top_k = c.moe_intermediate_size = 0;
  c.norm_topk_prob = false;
  c.intermediate_size = 22;
  c.tie_word_embeddings = true;
  c.qkv_bias = c.o_bias = c.mlp_bias = true;
  return c;
}

inline ModelConfig SmallMixtral() {
  ModelConfig c = SmallMoe();
  c.family = Family::kMixtral;
  c.qk_norm = QkNorm::kNone;
  return c;
}

// A GLM-4.5: sigmoid scores with a selection bias, an ungated shared expert, one dense layer, RoPE over part of a head.
inline ModelConfig SmallGlm() {
  ModelConfig c = SmallMoe();
  c.family = Family::kGlm4Moe;
  c.qkv_bias = true;
  c.rope.partial_factor = 0.5;
  c.head_dim = 8;
  c.layer_has_experts = {false, true};
  c.intermediate_size = 14;
  c.shared_expert_intermediate_size = 2 * c.moe_intermediate_size;
  c.gates_shared_expert = false;
  c.scores_by_sigmoid = c.has_router_bias = true;
  c.routed_scaling_factor = 1.75f;
  return c;
}

// Every parameter random, vectors too.
inline TensorSet RandomEverything(const ModelConfig& config, uint64_t seed) {
  TensorSet set = RandomParameters(config, seed);
  std::mt19937 random(static_cast<uint32_t>(seed));
  std::normal_distribution<float> normal(0.0f, 0.2f);
  for (const TensorView& view : set.views()) {
    if (view.shape.size() != 1) continue;
    float* values = reinterpret_cast<float*>(const_cast<char*>(view.bytes.data()));
    for (int64_t i = 0; i < view.shape[0]; ++i) values[i] += normal(random);
  }
  return set;
}

inline std::shared_ptr<const Weights> MakeWeights(const ModelConfig& config, uint64_t seed, Compute compute) {
  WeightsOptions options;
  options.compute = compute;
  auto weights = Weights::FromTensors(config, RandomEverything(config, seed).views(), options);
  MOERL_CHECK(weights.ok());
  return *weights;
}

inline std::vector<int32_t> RandomTokens(std::mt19937& random, int64_t count, int64_t vocab) {
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % vocab);
  return tokens;
}

inline PackedBatch Pack(const std::vector<std::vector<int32_t>>& sequences) {
  PackedBatch batch;
  batch.offsets.push_back(0);
  for (const auto& sequence : sequences) {
    batch.tokens.insert(batch.tokens.end(), sequence.begin(), sequence.end());
    batch.offsets.push_back(batch.num_tokens());
  }
  return batch;
}

// A fresh directory that is removed at the end of the test.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "moerl_model_XXXXXX").string();
    MOERL_CHECK(mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace moerl::model

#endif  // MOERL_TESTS_UNIT_MODEL_TEST_MODELS_H_
