#include "libs/model/router.h"

#include <vector>

#include "libs/tensor/math.h"

namespace moerl::model {

using tensor::DType;

namespace {

// Rows of one sequence that chose each expert.
std::vector<int64_t> CountChoices(const ModelConfig& c, const std::vector<int32_t>& ids, int64_t begin, int64_t end) {
  std::vector<int64_t> counts(c.num_experts, 0);
  for (int64_t i = begin * c.top_k; i < end * c.top_k; ++i) ++counts[ids[i]];
  return counts;
}

}  // namespace

tensor::RouterKind RouterKindOf(const ModelConfig& config) {
  if (config.scores_by_sigmoid) {
    return config.norm_topk_prob ? tensor::RouterKind::kSigmoidTopKNormalised : tensor::RouterKind::kSigmoidTopK;
  }
  if (config.family == Family::kMixtral) return tensor::RouterKind::kTopKSoftmax;
  return config.norm_topk_prob ? tensor::RouterKind::kSoftmaxTopKNormalised : tensor::RouterKind::kSoftmaxTopK;
}

void AddRouterStatistics(const ModelConfig& c, int moe_layer, absl::Span<const int64_t> offsets, const MlpSaved& saved,
                         ForwardResult* result) {
  const int64_t rows = saved.logits.rows;
  if (rows == 0) return;
  for (int64_t t = 0; t < rows; ++t) {
    const double lse = static_cast<double>(saved.router_stats[t].max) + saved.router_stats[t].log_sum;
    result->z_loss[moe_layer] += lse * lse;
  }
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    const std::vector<int64_t> counts = CountChoices(c, saved.ids, offsets[s], offsets[s + 1]);
    const double length = static_cast<double>(offsets[s + 1] - offsets[s]);
    double sum = 0;
    for (int64_t t = offsets[s]; t < offsets[s + 1]; ++t) {
      const float* p = saved.probs.Row<float>(t);
      for (int64_t i = 0; i < c.num_experts; ++i) sum += static_cast<double>(counts[i]) * p[i];
    }
    result->balance_loss[moe_layer] += static_cast<double>(c.num_experts) / (c.top_k * length) * sum / length;
    for (int64_t i = 0; i < c.num_experts; ++i) result->expert_tokens[moe_layer * c.num_experts + i] += counts[i];
  }
}

RouterLossGradients RouterLossBackward(const Engine& e, absl::Span<const int64_t> offsets, const MlpSaved& saved,
                                       float d_balance, float d_z, Arena& temp) {
  const ModelConfig& c = e.config;
  const int64_t rows = saved.logits.rows;
  RouterLossGradients out;
  if (rows == 0) return out;
  if (d_balance != 0) {
    out.d_probs = temp.Take(DType::kF32, rows, c.num_experts);
    for (size_t s = 0; s + 1 < offsets.size(); ++s) {
      const std::vector<int64_t> counts = CountChoices(c, saved.ids, offsets[s], offsets[s + 1]);
      const double length = static_cast<double>(offsets[s + 1] - offsets[s]);
      const double factor = d_balance * static_cast<double>(c.num_experts) / (c.top_k * length * length);
      for (int64_t t = offsets[s]; t < offsets[s + 1]; ++t) {
        float* d = out.d_probs.Row<float>(t);
        for (int64_t i = 0; i < c.num_experts; ++i) d[i] = static_cast<float>(factor * counts[i]);
      }
    }
  }
  if (d_z != 0) {
    out.d_logits = temp.Take(DType::kF32, rows, c.num_experts);
    for (int64_t t = 0; t < rows; ++t) {
      const float lse = saved.router_stats[t].max + saved.router_stats[t].log_sum;
      const float* p = saved.probs.Row<float>(t);
      float* d = out.d_logits.Row<float>(t);
      const float* z = saved.logits.Row<float>(t);
      for (int64_t i = 0; i < c.num_experts; ++i) {
        const float softmax = c.scores_by_sigmoid ? tensor::Exp(z[i] - lse) : p[i];
        d[i] = 2.0f * d_z * lse * softmax;
      }
    }
  }
  return out;
}

}  // namespace moerl::model
