#ifndef MOERL_LIBS_RL_LOSS_H_
#define MOERL_LIBS_RL_LOSS_H_

#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/status.h"

// Policy losses. A loss sees one sequence at a time (GSPO needs all of it, the others look token by token) and gives
// each token's loss and its derivative with respect to that token's log-probability; weighting, off-policy correction
// and KL are applied by the objective. Adding a loss is one file and its entry in loss.cc.
//
// Letters: r_t = exp(clamp(logp_t − old_logp_t, ±20)), A the advantage, ε the clip range.
namespace moerl::rl {

// Log-ratios are clamped to this before exp; the derivative beyond it is zero.
inline constexpr double kMaxLogRatio = 20.0;

struct PolicyLossConfig {
  double clip_low = 0.2;
  double clip_high = 0.2;
  double dual_clip = 0.0;           // c of the dual clip, > 1; 0 is off
  double probability_gap = 0.2;     // dppo: the largest move of a token's probability that still earns a gradient
  double log_ratio_penalty = 1e-3;  // dppo: factor of log²r
};

// One sequence; every span has the sequence's length. Tokens with trainable 0 are neither read nor written but for
// zeros in the outputs.
struct SequenceInput {
  std::span<const double> logp;      // current policy
  std::span<const double> old_logp;  // the policy that the ratio is taken against
  std::span<const double> advantages;
  std::span<const uint8_t> trainable;
};

struct SequenceLoss {
  std::span<double> loss;        // out: L_t, 0 where not trainable
  std::span<double> grad;        // out: dL_t / dlogp_t, stop-gradients as in the paper
  int64_t num_clipped_low = 0;   // tokens held back by the lower bound (their gradient is zero, CISPO's is bounded)
  int64_t num_clipped_high = 0;  // by the upper bound
};

// A loss by name: its defaults, which fields make no sense, and the formula.
struct PolicyLoss {
  std::string_view name;
  std::string_view paper;
  absl::Status (*validate)(const PolicyLossConfig& config);
  void (*compute)(const PolicyLossConfig& config, const SequenceInput& in, SequenceLoss& out);
};

// All registered losses, by name: ppo_clip, gspo, cispo, dppo.
std::span<const PolicyLoss> PolicyLosses();

// Null if there is none of that name.
const PolicyLoss* FindPolicyLoss(std::string_view name);

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_LOSS_H_
