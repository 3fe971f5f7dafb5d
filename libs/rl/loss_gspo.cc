#include <algorithm>
#include <cmath>

#include "libs/base/status_macros.h"
#include "libs/rl/clip_range.h"

// GSPO (2507.18071): the ratio of a sequence is s = exp(mean_t(logp − old_logp)), the mean over trainable tokens and
// the logarithm at most 10; every token has ratio sg[s]·π/sg[π] and PPO's clip. Ranges are small: 3e-4 and 4e-4.
namespace moerl::rl {
namespace {

constexpr double kMaxLogSequenceRatio = 10.0;

absl::Status Validate(const PolicyLossConfig& config) {
  MOERL_RETURN_IF_ERROR(RefuseDualClip("gspo", config));
  return ValidateClipRange("gspo", config, 1.0);
}

void Compute(const PolicyLossConfig& config, const SequenceInput& in, SequenceLoss& out) {
  double sum = 0.0;
  int64_t num_tokens = 0;
  for (size_t t = 0; t < in.trainable.size(); ++t) {
    out.loss[t] = out.grad[t] = 0.0;
    if (in.trainable[t] == 0) continue;
    sum += in.logp[t] - in.old_logp[t];
    ++num_tokens;
  }
  if (num_tokens == 0) return;
  const double log_ratio = sum / static_cast<double>(num_tokens);
  const double s = std::exp(std::min(log_ratio, kMaxLogSequenceRatio));
  const bool is_capped = log_ratio > kMaxLogSequenceRatio;

  for (size_t t = 0; t < in.trainable.size(); ++t) {
    if (in.trainable[t] == 0) continue;
    // The token's ratio sg[s]·π/sg[π] has the value s and the derivative s.
    const ClippedTerm term = ClipTerm(in.advantages[t], s, config.clip_low, config.clip_high);
    out.loss[t] = term.loss;
    out.grad[t] = term.passes_gradient && !is_capped ? -in.advantages[t] * s : 0.0;
    out.num_clipped_low += term.clipped == Clipped::kLow;
    out.num_clipped_high += term.clipped == Clipped::kHigh;
  }
}

}  // namespace

PolicyLoss GspoLoss() { return {"gspo", "2507.18071", &Validate, &Compute}; }

}  // namespace moerl::rl
