#ifndef MOERL_LIBS_MODEL_CONFIG_H_
#define MOERL_LIBS_MODEL_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace moerl::model {

// The families whose tensor names and conventions we know. A dense model is an MoE with no expert layers.
enum class Family { kLlama, kQwen2, kQwen3, kMixtral, kQwen2Moe, kQwen3Moe, kOlmoe, kGlm4Moe };

// Hugging Face's `model_type` ("qwen3_moe") and `architectures[0]` ("Qwen3MoeForCausalLM") of a family.
absl::string_view ModelType(Family family);
absl::string_view ArchitectureName(Family family);

// The type of published weights and of GEMM inputs; accumulation, residual stream, norms, router logits, softmax and
// log-probabilities are fp32 either way.
enum class Compute { kFp32, kBf16 };
absl::StatusOr<Compute> ParseCompute(absl::string_view name);  // "fp32" or "bf16"
absl::string_view ComputeName(Compute compute);

// RMSNorm on queries and keys: none; one gain per head dimension (Qwen3); one over the whole projection (OLMoE).
enum class QkNorm { kNone, kPerHead, kFull };

// Rotary position embedding. Angles are computed in fp32, as transformers does. `dynamic` and `longrope` are refused.
struct RopeConfig {
  enum class Scaling { kNone, kLinear, kLlama3, kYarn };
  float theta = 10000.0f;
  Scaling scaling = Scaling::kNone;
  double partial_factor = 1.0;                // GLM-4.5: part of a head's columns that turn, from the first
  float factor = 1.0f;                        // linear, llama3, yarn
  float low_freq_factor = 1.0f;               // llama3
  float high_freq_factor = 4.0f;              // llama3
  int64_t original_max_position = 0;          // llama3, yarn
  float beta_fast = 32.0f, beta_slow = 1.0f;  // yarn
  float attention_factor = 1.0f;              // yarn: cos and sin are multiplied by it
  bool truncate = true;                       // yarn: correction range rounded to whole dimensions

  bool operator==(const RopeConfig&) const = default;
};

// One architecture, whatever its family: the next one is new fields, not a new class.
struct ModelConfig {
  Family family = Family::kQwen3Moe;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t num_layers = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t max_position = 0;       // context length in tokens
  int64_t intermediate_size = 0;  // of a dense layer's MLP; 0 when every layer has experts
  float rms_norm_eps = 1e-6f;
  bool tie_word_embeddings = false;
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  QkNorm qk_norm = QkNorm::kNone;
  std::optional<float> clip_qkv;  // OLMoE: projections clamped to ±clip_qkv before the heads are split
  RopeConfig rope;

  // Experts. Empty `layer_has_experts` never occurs: it has num_layers entries.
  std::vector<bool> layer_has_experts;
  int64_t num_experts = 0;  // 0 in a dense model
  int64_t top_k = 0;
  int64_t moe_intermediate_size = 0;
  int64_t shared_expert_intermediate_size = 0;  // 0: no shared expert (Qwen2-MoE and GLM-4.5 have one)
  bool gates_shared_expert = true;              // by a sigmoid (Qwen2-MoE), or added as it is
  bool norm_topk_prob = false;
  bool scores_by_sigmoid = false;      // each expert's score is the sigmoid of its logit, not a softmax's share
  bool has_router_bias = false;        // `e_score_correction_bias` is added to the scores where experts are chosen
  float routed_scaling_factor = 1.0f;  // multiplies the routing weights

  // Used by random initialisation and export only.
  float initializer_range = 0.02f;
  std::vector<int64_t> eos_token_ids;  // may be empty
  std::optional<int64_t> bos_token_id, pad_token_id;

  int64_t num_moe_layers() const;
  int64_t q_size() const { return num_heads * head_dim; }
  int64_t kv_size() const { return num_kv_heads * head_dim; }
  int64_t rotary_dim() const { return static_cast<int64_t>(static_cast<double>(head_dim) * rope.partial_factor); }
  // Parameters in total, and those one token touches (top_k experts a layer, embedding row not counted).
  int64_t num_parameters() const;
  int64_t num_active_parameters() const;

  bool operator==(const ModelConfig&) const = default;
};

// Reads the text of a Hugging Face config.json (both the `rope_scaling`/`rope_theta` and the newer `rope_parameters`
// spelling). INVALID_ARGUMENT names the field, what was found and what is legal; UNIMPLEMENTED names what is known and
// refused: another model_type, dynamic or longrope scaling, router jitter, attention dropout, an active sliding window,
// an activation other than SiLU, experts chosen by group (n_group, topk_group).
absl::StatusOr<ModelConfig> ParseConfig(absl::string_view json);

// Reads DIR/config.json.
absl::StatusOr<ModelConfig> LoadConfig(const std::string& directory);

// The config.json that `transformers` reads back to the same model; ParseConfig(FormatConfig(c, d)) == c.
// `torch_dtype` is "float32" or "bfloat16".
std::string FormatConfig(const ModelConfig& config, absl::string_view torch_dtype);

// Checks the relations between fields (head counts divide, top_k <= num_experts, every size positive and below 2^31).
absl::Status ValidateConfig(const ModelConfig& config);

// Names everything that the bits of a forward pass depend on beside weights and tokens: backend, compute type, the
// combine tree's wire block, kernel revision. Two processes with equal fingerprints compute equal log-probabilities.
std::string NumericsFingerprint(const ModelConfig& config, Compute compute);

// Inverse frequencies of RoPE, rotary_dim/2 of them, after scaling, and the factor that cos and sin are multiplied by.
struct RopeFrequencies {
  std::vector<float> inverse;
  float attention_factor = 1.0f;
};
RopeFrequencies ComputeRopeFrequencies(const ModelConfig& config);

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_CONFIG_H_
