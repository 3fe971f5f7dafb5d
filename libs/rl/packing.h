#ifndef MOERL_LIBS_RL_PACKING_H_
#define MOERL_LIBS_RL_PACKING_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"

namespace moerl::rl {

// Who computes which samples of an update, and in which micro-batches: [rank][micro-batch] lists of ordinals, ascending
// in each. Every rank has the same number of micro-batches (some may be empty): ranks meet in every MoE layer.
struct Packing {
  std::vector<std::vector<std::vector<int64_t>>> ranks;
  int64_t num_micro_batches() const { return ranks.empty() ? 0 : static_cast<int64_t>(ranks[0].size()); }
};

// Longest samples first, each to the rank with the fewest tokens, there to the first micro-batch it fits:
// deterministic, no micro-batch above `max_tokens`. `lengths[i]` is the number of tokens of the sample `ordinals[i]`,
// prompt included. INVALID_ARGUMENT names a sample longer than max_tokens.
absl::StatusOr<Packing> PackSamples(std::span<const int64_t> ordinals, std::span<const int64_t> lengths,
                                    int64_t max_tokens, int32_t num_ranks);

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_PACKING_H_
