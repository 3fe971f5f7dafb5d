#ifndef MOERL_LIBS_MODEL_ROUTER_H_
#define MOERL_LIBS_MODEL_ROUTER_H_

#include <cmath>

#include "libs/model/batch.h"
#include "libs/model/config.h"
#include "libs/model/transformer.h"
#include "libs/tensor/backend.h"

namespace moerl::model {

// How this family turns router logits into weights, and its attention scale.
tensor::RouterKind RouterKindOf(const ModelConfig& config);
inline float AttentionScale(const ModelConfig& config) { return 1.0f / std::sqrt(static_cast<float>(config.head_dim)); }

// Adds one MoE layer's statistics over a packed batch to `result` (see ForwardResult): tokens by expert, the
// load-balance loss of each sequence and the z-loss.
//   balance(s) = E / (k T_s) * sum_e n_e * mean_t p_te           (Fedus et al., 2022, per sequence; where scores are
//                                       sigmoids, p is their share: DeepSeek-AI, 2024, arXiv 2412.19437, eq. 17-20)
//   z          = sum_t logsumexp(logits_t)^2                     (Zoph et al., 2022)
void AddRouterStatistics(const ModelConfig& config, int moe_layer, absl::Span<const int64_t> offsets,
                         const MlpSaved& saved, ForwardResult* result);

// Gradients of d_balance * balance and d_z * z: with respect to probs [T, E], and to logits [T, E].
struct RouterLossGradients {
  tensor::Mat d_probs, d_logits;  // null data where the factor is zero
};
RouterLossGradients RouterLossBackward(const Engine& engine, absl::Span<const int64_t> offsets, const MlpSaved& saved,
                                       float d_balance, float d_z, Arena& temp);

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_ROUTER_H_
