#include "libs/model/parameters.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace moerl::model {
namespace {

int64_t RoleKey(Role role, int layer, int expert) {
  return (static_cast<int64_t>(role) << 48) | (static_cast<int64_t>(layer + 1) << 24) |
         static_cast<int64_t>(expert + 1);
}

// Collects parameters with the names of one family.
struct Builder {
  const ModelConfig& config;
  std::vector<Parameter> out;

  void Matrix(std::string name, Role role, int layer, int expert, int64_t rows, int64_t cols) {
    out.push_back({std::move(name), role, layer, expert, rows, cols, false});
  }
  void Vector(std::string name, Role role, int layer, int64_t size) {
    out.push_back({std::move(name), role, layer, -1, 1, size, true});
  }

  void Attention(int layer, const std::string& prefix) {
    const ModelConfig& c = config;
    const int64_t h = c.hidden_size, q = c.q_size(), kv = c.kv_size();
    const std::string a = absl::StrCat(prefix, "self_attn.");
    Vector(prefix + "input_layernorm.weight", Role::kAttentionNorm, layer, h);
    Matrix(a + "q_proj.weight", Role::kQ, layer, -1, q, h);
    Matrix(a + "k_proj.weight", Role::kK, layer, -1, kv, h);
    Matrix(a + "v_proj.weight", Role::kV, layer, -1, kv, h);
    if (c.qkv_bias) {
      Vector(a + "q_proj.bias", Role::kQBias, layer, q);
      Vector(a + "k_proj.bias", Role::kKBias, layer, kv);
      Vector(a + "v_proj.bias", Role::kVBias, layer, kv);
    }
    if (c.qk_norm != QkNorm::kNone) {
      const bool full = c.qk_norm == QkNorm::kFull;
      Vector(a + "q_norm.weight", Role::kQNorm, layer, full ? q : c.head_dim);
      Vector(a + "k_norm.weight", Role::kKNorm, layer, full ? kv : c.head_dim);
    }
    Matrix(a + "o_proj.weight", Role::kO, layer, -1, h, q);
    if (c.o_bias) Vector(a + "o_proj.bias", Role::kOBias, layer, h);
  }

  void DenseMlp(int layer, const std::string& prefix) {
    const int64_t h = config.hidden_size, i = config.intermediate_size;
    Matrix(prefix + "mlp.gate_proj.weight", Role::kGate, layer, -1, i, h);
    Matrix(prefix + "mlp.up_proj.weight", Role::kUp, layer, -1, i, h);
    Matrix(prefix + "mlp.down_proj.weight", Role::kDown, layer, -1, h, i);
    if (!config.mlp_bias) return;
    Vector(prefix + "mlp.gate_proj.bias", Role::kGateBias, layer, i);
    Vector(prefix + "mlp.up_proj.bias", Role::kUpBias, layer, i);
    Vector(prefix + "mlp.down_proj.bias", Role::kDownBias, layer, h);
  }

  void Experts(int layer, const std::string& prefix) {
    const ModelConfig& c = config;
    const int64_t h = c.hidden_size, i = c.moe_intermediate_size;
    const bool mixtral = c.family == Family::kMixtral;
    const std::string block = absl::StrCat(prefix, mixtral ? "block_sparse_moe." : "mlp.");
    Matrix(block + "gate.weight", Role::kRouter, layer, -1, c.num_experts, h);
    if (c.has_router_bias) Vector(block + "gate.e_score_correction_bias", Role::kRouterBias, layer, c.num_experts);
    // Gate and up of all experts, then all downs: the order of the grouped weights, so that a gradient is one matrix.
    const auto expert = [&](int e, absl::string_view name) {
      return absl::StrCat(block, "experts.", e, ".", name, ".weight");
    };
    for (int e = 0; e < c.num_experts; ++e) {
      Matrix(expert(e, mixtral ? "w1" : "gate_proj"), Role::kExpertGate, layer, e, i, h);
      Matrix(expert(e, mixtral ? "w3" : "up_proj"), Role::kExpertUp, layer, e, i, h);
    }
    for (int e = 0; e < c.num_experts; ++e) {
      Matrix(expert(e, mixtral ? "w2" : "down_proj"), Role::kExpertDown, layer, e, h, i);
    }
    const int64_t s = c.shared_expert_intermediate_size;
    if (s == 0) return;
    const std::string shared = block + (c.gates_shared_expert ? "shared_expert." : "shared_experts.");
    Matrix(shared + "gate_proj.weight", Role::kSharedGate, layer, -1, s, h);
    Matrix(shared + "up_proj.weight", Role::kSharedUp, layer, -1, s, h);
    Matrix(shared + "down_proj.weight", Role::kSharedDown, layer, -1, h, s);
    if (c.gates_shared_expert) Matrix(block + "shared_expert_gate.weight", Role::kSharedRouter, layer, -1, 1, h);
  }
};

}  // namespace

ParameterTable::ParameterTable(const ModelConfig& config, bool value_head) {
  Builder builder{config, {}};
  builder.Matrix("model.embed_tokens.weight", Role::kEmbedding, -1, -1, config.vocab_size, config.hidden_size);
  for (int layer = 0; layer < config.num_layers; ++layer) {
    const std::string prefix = absl::StrCat("model.layers.", layer, ".");
    builder.Attention(layer, prefix);
    builder.Vector(prefix + "post_attention_layernorm.weight", Role::kMlpNorm, layer, config.hidden_size);
    if (config.layer_has_experts[layer]) {
      builder.Experts(layer, prefix);
    } else {
      builder.DenseMlp(layer, prefix);
    }
  }
  builder.Vector("model.norm.weight", Role::kFinalNorm, -1, config.hidden_size);
  if (value_head) {
    builder.Matrix("value_head.weight", Role::kValueHead, -1, -1, 1, config.hidden_size);
  } else if (!config.tie_word_embeddings) {
    builder.Matrix("lm_head.weight", Role::kLmHead, -1, -1, config.vocab_size, config.hidden_size);
  }
  parameters_ = std::move(builder.out);
  by_name_.reserve(parameters_.size());
  by_role_.reserve(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& p = parameters_[i];
    by_name_.emplace(p.name, static_cast<int>(i));
    by_role_.emplace(RoleKey(p.role, p.layer, p.expert), static_cast<int>(i));
  }
}

int ParameterTable::Find(absl::string_view name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? -1 : it->second;
}

int ParameterTable::Find(Role role, int layer, int expert) const {
  const auto it = by_role_.find(RoleKey(role, layer, expert));
  return it == by_role_.end() ? -1 : it->second;
}

}  // namespace moerl::model
