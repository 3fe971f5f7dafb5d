#ifndef MOERL_LIBS_MODEL_BATCH_H_
#define MOERL_LIBS_MODEL_BATCH_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "libs/model/config.h"

namespace moerl::model {

inline constexpr int64_t kBatchTokensMax = int64_t{1} << 24;
inline constexpr uint16_t kNoRoute = 0xFFFF;

// Whole sequences one after another, without padding. Token i of a sequence is at position i. T tokens, N sequences.
struct PackedBatch {
  std::vector<int32_t> tokens;   // [T]
  std::vector<int64_t> offsets;  // [N + 1], from 0 to T; every sequence has at least one token
  // Which tokens' log-probabilities are wanted, [T]; empty: all but each sequence's first. Only the rows before these
  // go through the vocabulary, so mark just what the loss uses. A sequence's first token never has one.
  std::vector<uint8_t> wanted;
  std::vector<float> temperature;  // [N]; empty: 1. 0 means 1, as in sampling
  // Kept ids of token t are kept_ids[kept_offsets[t] .. kept_offsets[t + 1]), ascending; an empty range keeps all.
  // Empty kept_offsets: all keep all. The kept set must contain the token.
  std::vector<int64_t> kept_offsets;  // [T + 1] or empty
  std::vector<int32_t> kept_ids;
  // Routing replay (R3): expert ids per token, [T, MoE layers, top_k]; kNoRoute in a row's first entry routes it
  // freely. The router's own scores are gathered at these ids, so gradients reach it. Empty: all route freely.
  std::vector<uint16_t> routes;

  int64_t num_tokens() const { return static_cast<int64_t>(tokens.size()); }
  int64_t num_sequences() const { return offsets.empty() ? 0 : static_cast<int64_t>(offsets.size()) - 1; }
};

// INVALID_ARGUMENT names the field and the index. An empty batch (no sequence) is legal: a rank without work.
absl::Status ValidateBatch(const PackedBatch& batch, const ModelConfig& config);

// What a forward pass says about a batch. Arrays are indexed by token; entries that were not wanted are 0.
struct ForwardResult {
  std::vector<float> logprobs;  // [T] of token t given its prefix, after temperature, over the kept set
  std::vector<float> entropy;   // [T] of the distribution token t was drawn from (tempered, kept), in nats
  std::vector<float> values;    // [T] value head at token t; only with one
  // Router statistics, by MoE layer.
  std::vector<int64_t> expert_tokens;  // [MoE layers, experts] rows routed to each expert
  // Per sequence s: E / (k T_s) * sum_e n_e * mean_t p_te, summed over sequences (1 each when balanced); p is the
  // softmax over all experts, or the share of the sigmoid scores.
  std::vector<double> balance_loss;  // [MoE layers]
  std::vector<double> z_loss;        // [MoE layers] sum over tokens of logsumexp(router logits)^2
  std::vector<uint16_t> routes;      // [T, MoE layers, top_k], when asked for
};

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_BATCH_H_
