#ifndef MOERL_LIBS_RL_TRAJECTORY_H_
#define MOERL_LIBS_RL_TRAJECTORY_H_

// The tokens of one sample after its prompt, with everything training needs to know about each.
// Rollout workers report them in append-only parts; the trainer keeps them in its ledger.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "libs/base/lineage.h"

namespace moerl::rl {

// A run of consecutive tokens. Every array has one entry a token, but
//   routes       routed expert ids, `routes.size() / size()` bytes a token, or empty (not recorded)
//   kept_counts  how many ids sampling kept of each token's distribution, or empty (all were kept)
//   kept_ids     those ids, ascending within a token, one token after the other
// Tokens that an environment wrote have trainable = 0, log-probability 0 and the version that ran then.
// Thread-compatible value.
struct TokenRun {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  std::vector<VersionName> versions;
  std::vector<uint8_t> trainable;
  std::string routes;
  std::vector<int32_t> kept_counts;
  std::vector<int32_t> kept_ids;

  size_t size() const { return ids.size(); }
  bool empty() const { return ids.empty(); }
  bool operator==(const TokenRun&) const = default;

  // Appends `next`, whose arrays must be recorded in the same way (both with routes or both without).
  void Append(const TokenRun& next);
  // Tokens [begin, end).
  TokenRun Slice(size_t begin, size_t end) const;
  // INVALID_ARGUMENT naming the array whose length does not fit, a NaN or positive log-probability, kept ids that are
  // not a token's, or routes other than `route_bytes_per_token` a token (CheckRoutes judges the ids in them).
  absl::Status Validate(int64_t vocab_size, int64_t route_bytes_per_token) const;
  // XXH3-64 of the ids as little-endian 32-bit integers in order: the digest of a finished sample.
  uint64_t IdsDigest() const;
};

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_TRAJECTORY_H_
