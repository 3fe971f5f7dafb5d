#ifndef MOERL_LIBS_RL_OFF_POLICY_H_
#define MOERL_LIBS_RL_OFF_POLICY_H_

#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Correction for tokens that another policy chose than the one the ratio is taken against: stale weights, or an engine
// that computes otherwise. The weight is detached and multiplies the token's policy loss. With
// d_t = old_logp − rollout_logp (old, never the current policy):
//   tis        min(e^{d_t}, cap)                      truncated importance sampling, by token
//   icepop     e^{d_t} inside [low, cap], else 0      masked; denominators stay as they are
//   sequence   min(e^{Σ d}, cap)                      one weight a sequence
//   geometric  e^{mean d} inside [low, cap], else 0   one weight a sequence, independent of its length
// For the same weights and tokens every weight is exactly 1. fengyao.notion.site/off-policy-rl; 2505.24298 (decoupled
// PPO is PPO against the recomputed policy with tis).
namespace moerl::rl {

enum class OffPolicyCorrection { kNone, kTis, kIcepop, kSequence, kGeometric };

struct OffPolicyConfig {
  OffPolicyCorrection correction = OffPolicyCorrection::kTis;
  double cap = 2.0;
  double low = 0.5;
};

absl::StatusOr<OffPolicyCorrection> ParseOffPolicyCorrection(std::string_view name);
std::string_view OffPolicyCorrectionName(OffPolicyCorrection correction);

// INVALID_ARGUMENT unless 0 ≤ low ≤ 1 ≤ cap.
absl::Status ValidateOffPolicy(const OffPolicyConfig& config);

// Sums over any set of sequences, of the weights before truncation and masking, one for each trainable token.
struct CorrectionStats {
  int64_t num_tokens = 0;
  int64_t num_truncated = 0;  // tokens whose weight was cut to the cap
  int64_t num_masked = 0;     // tokens whose weight became 0
  double sum_weight = 0.0;
  double sum_weight_squared = 0.0;

  void Add(const CorrectionStats& other);
  // Effective sample size as a part of the tokens, (Σw)² / (n Σw²), in (0, 1]; 1 if there are no tokens.
  double effective_fraction() const;
};

// Fills `weights` (0 where not trainable, 1 everywhere else without correction). All spans have the sequence's length.
CorrectionStats CorrectionWeights(const OffPolicyConfig& config, std::span<const double> old_logp,
                                  std::span<const double> rollout_logp, std::span<const uint8_t> trainable,
                                  std::span<double> weights);

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_OFF_POLICY_H_
