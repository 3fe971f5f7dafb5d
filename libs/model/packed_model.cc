#include "libs/model/packed_model.h"

#include <algorithm>
#include <numeric>

#include "libs/model/backend.h"

namespace moerl::model {

using tensor::Backend;
using tensor::ConstMat;
using tensor::DType;
using tensor::PackedWeight;

PackedModel::PackedModel(const ModelConfig& c, const WeightsOptions& options, Backend& backend)
    : local_experts(options.local_experts), config_(c), dtype_(DTypeOf(options.compute)) {
  if (local_experts.empty()) {
    local_experts.resize(c.num_experts);
    std::iota(local_experts.begin(), local_experts.end(), 0);
  }
  local_index_.assign(c.num_experts, -1);
  for (size_t i = 0; i < local_experts.size(); ++i) local_index_[local_experts[i]] = static_cast<int>(i);

  const auto packed = [&](int64_t groups, int64_t n, int64_t k) {
    return backend.NewPacked(dtype_, groups, n, k, options.with_backward);
  };
  const int64_t h = c.hidden_size, groups = static_cast<int64_t>(local_experts.size());
  embedding = backend.NewTensor(dtype_, {c.vocab_size, h});
  if (options.value_head) {
    value_head = packed(1, 1, h);
  } else {
    head = packed(1, c.vocab_size, h);
  }
  final_norm.resize(h);
  layers.resize(c.num_layers);
  for (int64_t i = 0; i < c.num_layers; ++i) {
    PackedLayer& layer = layers[i];
    layer.attention_norm.resize(h);
    layer.mlp_norm.resize(h);
    layer.qkv = packed(1, c.q_size() + 2 * c.kv_size(), h);
    layer.o = packed(1, h, c.q_size());
    if (c.qkv_bias) layer.qkv_bias.resize(c.q_size() + 2 * c.kv_size());
    if (c.o_bias) layer.o_bias.resize(h);
    if (c.qk_norm != QkNorm::kNone) {
      const bool full = c.qk_norm == QkNorm::kFull;
      layer.q_norm.resize(full ? c.q_size() : c.head_dim);
      layer.k_norm.resize(full ? c.kv_size() : c.head_dim);
    }
    if (!c.layer_has_experts[i]) {
      layer.gate_up = packed(1, 2 * c.intermediate_size, h);
      layer.down = packed(1, h, c.intermediate_size);
      if (c.mlp_bias) {
        layer.gate_up_bias.resize(2 * c.intermediate_size);
        layer.down_bias.resize(h);
      }
      continue;
    }
    layer.router = packed(1, c.num_experts, h);
    if (c.has_router_bias) layer.router_bias.resize(c.num_experts);
    layer.expert_gate_up = packed(groups, 2 * c.moe_intermediate_size, h);
    layer.expert_down = packed(groups, h, c.moe_intermediate_size);
    if (c.shared_expert_intermediate_size > 0) {
      layer.shared_gate_up = packed(1, 2 * c.shared_expert_intermediate_size, h);
      layer.shared_down = packed(1, h, c.shared_expert_intermediate_size);
      if (c.gates_shared_expert) layer.shared_router = packed(1, 1, h);
    }
  }
}

void PackedModel::Put(const Parameter& p, const float* values, Backend& backend) {
  const ModelConfig& c = config_;
  PackedLayer* layer = p.layer < 0 ? nullptr : &layers[p.layer];
  const ConstMat source(values, p.rows, p.cols);
  const auto pack = [&](PackedWeight& w, int64_t row_begin, int64_t group = 0) {
    backend.Pack(source, group, row_begin, &w);
  };
  const auto copy = [&](std::vector<float>& to, int64_t begin = 0) {
    for (int64_t i = 0; i < p.cols; ++i) {
      to[begin + i] = dtype_ == DType::kF32 ? values[i] : tensor::RoundToBf16(values[i]);
    }
  };
  switch (p.role) {
    case Role::kEmbedding:
      backend.Cast(source, embedding.mat());
      if (c.tie_word_embeddings && head.n > 0) pack(head, 0);
      return;
    case Role::kFinalNorm:
      return copy(final_norm);
    case Role::kLmHead:
      return pack(head, 0);
    case Role::kValueHead:
      return pack(value_head, 0);
    case Role::kAttentionNorm:
      return copy(layer->attention_norm);
    case Role::kQ:
      return pack(layer->qkv, 0);
    case Role::kK:
      return pack(layer->qkv, c.q_size());
    case Role::kV:
      return pack(layer->qkv, c.q_size() + c.kv_size());
    case Role::kQBias:
      return copy(layer->qkv_bias);
    case Role::kKBias:
      return copy(layer->qkv_bias, c.q_size());
    case Role::kVBias:
      return copy(layer->qkv_bias, c.q_size() + c.kv_size());
    case Role::kQNorm:
      return copy(layer->q_norm);
    case Role::kKNorm:
      return copy(layer->k_norm);
    case Role::kO:
      return pack(layer->o, 0);
    case Role::kOBias:
      return copy(layer->o_bias);
    case Role::kMlpNorm:
      return copy(layer->mlp_norm);
    case Role::kGate:
      return pack(layer->gate_up, 0);
    case Role::kUp:
      return pack(layer->gate_up, c.intermediate_size);
    case Role::kDown:
      return pack(layer->down, 0);
    case Role::kGateBias:
      return copy(layer->gate_up_bias);
    case Role::kUpBias:
      return copy(layer->gate_up_bias, c.intermediate_size);
    case Role::kDownBias:
      return copy(layer->down_bias);
    case Role::kRouter:
      return pack(layer->router, 0);
    case Role::kRouterBias:
      layer->router_bias.assign(values, values + p.cols);
      return;
    case Role::kExpertGate:
      return pack(layer->expert_gate_up, 0, LocalExpert(p.expert));
    case Role::kExpertUp:
      return pack(layer->expert_gate_up, c.moe_intermediate_size, LocalExpert(p.expert));
    case Role::kExpertDown:
      return pack(layer->expert_down, 0, LocalExpert(p.expert));
    case Role::kSharedGate:
      return pack(layer->shared_gate_up, 0);
    case Role::kSharedUp:
      return pack(layer->shared_gate_up, c.shared_expert_intermediate_size);
    case Role::kSharedDown:
      return pack(layer->shared_down, 0);
    case Role::kSharedRouter:
      return pack(layer->shared_router, 0);
  }
}

}  // namespace moerl::model
