#ifndef MOERL_LIBS_RL_ROUTING_REPLAY_H_
#define MOERL_LIBS_RL_ROUTING_REPLAY_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"

// Routing replay R3 (2510.11370): the rollout records which experts each token went to, the trainer sends it to the
// same ones. Indices are replayed, weights never: they come from the trainer's own router logits s, gathered at the
// recorded experts I, so that the router still learns:
//   g_i = e^{s_i} / Σ_{j∈I} e^{s_j},   i ∈ I
namespace moerl::rl {

// Expert ids of one sample, [tokens, layers, top_k] row-major, one byte an id while there are at most 256 experts and
// two (little-endian) beyond. `tokens` are those that were run through the model: all of the sample but the last one
// drawn, or all of it; the engine that wrote it says which.
struct RouteShape {
  int64_t num_tokens = 0;
  int64_t num_layers = 0;  // MoE layers
  int32_t top_k = 0;
  int32_t num_experts = 0;

  int32_t bytes_per_id() const { return num_experts <= 256 ? 1 : 2; }
  int64_t num_bytes() const { return num_tokens * num_layers * top_k * bytes_per_id(); }
};

// INVALID_ARGUMENT unless the payload has exactly tokens × layers × top_k ids, each a known expert and no expert twice
// for one token and layer. The message names the token and the layer.
absl::Status CheckRoutes(const RouteShape& shape, std::string_view payload);

// An engine that continues a sample reports the routes of the *whole* sequence: they replace what is there, never
// follow it. INVALID_ARGUMENT if `full` does not have `shape`, or does not begin with the routes kept so far.
absl::Status ReplaceRoutes(const RouteShape& shape, std::string_view full, std::string& kept);

// Weights of the replayed experts from the dense logits of one token; `selected` and `weights` have top_k entries.
void ReplayWeights(std::span<const double> logits, std::span<const int32_t> selected, std::span<double> weights);

// dL/dlogits (added to) from dL/dweights: g_i (ḡ_i − Σ_j g_j ḡ_j) for i ∈ I, nothing elsewhere.
void ReplayWeightsBackward(std::span<const double> weights, std::span<const int32_t> selected,
                           std::span<const double> grad_weights, std::span<double> grad_logits);

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_ROUTING_REPLAY_H_
