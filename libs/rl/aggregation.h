#ifndef MOERL_LIBS_RL_AGGREGATION_H_
#define MOERL_LIBS_RL_AGGREGATION_H_

#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/statusor.h"

// How per-token losses become one number. Every mode is a weighted sum over trainable tokens whose weight is the same
// for all tokens of a sequence and depends only on that sequence's length and on counts of the *whole* update, over
// all micro-batches and ranks. So a micro-batch adds its share, and neither its size nor its rank shows in the
// gradient.
//
//   token_mean               1 / tokens of the update          (DAPO, 2503.14476)
//   seq_mean_token_mean      1 / (sequences · tokens of this)  (GRPO, 2402.03300)
//   seq_mean_token_sum       1 / sequences
//   seq_mean_token_sum_norm  1 / (sequences · constant)        (Dr. GRPO, 2503.20783)
namespace moerl::rl {

enum class Aggregation { kTokenMean, kSeqMeanTokenMean, kSeqMeanTokenSum, kSeqMeanTokenSumNorm };

absl::StatusOr<Aggregation> ParseAggregation(std::string_view name);
std::string_view AggregationName(Aggregation aggregation);

// Counts over one whole update. One effective mask serves numerator and denominator: a sequence without trainable
// tokens is no sequence.
struct UpdateCounts {
  int64_t num_tokens = 0;     // trainable tokens
  int64_t num_sequences = 0;  // sequences with at least one of them
  friend bool operator==(const UpdateCounts&, const UpdateCounts&) = default;
};

// `trainable_tokens` holds the number of trainable tokens of each sequence of the update.
UpdateCounts CountUpdate(std::span<const int64_t> trainable_tokens);

// The weight of each token of a sequence with `num_tokens` trainable ones; 0 if there are none. `length_norm` is the
// constant of seq_mean_token_sum_norm, in tokens.
double TokenWeight(Aggregation aggregation, const UpdateCounts& counts, int64_t num_tokens, double length_norm);

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_AGGREGATION_H_
