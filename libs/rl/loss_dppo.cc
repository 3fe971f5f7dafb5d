#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "libs/base/status_macros.h"
#include "libs/rl/clip_range.h"
#include "libs/rl/ratio.h"

// Divergence PPO (2602.04879), binary form: with Δp = exp(logp) − exp(old_logp), a token moves no further when A > 0
// and Δp > gap, or A < 0 and Δp < −gap; otherwise L_t = −A r. Every token pays penalty·log²r.
namespace moerl::rl {
namespace {

absl::Status Validate(const PolicyLossConfig& config) {
  MOERL_RETURN_IF_ERROR(RefuseDualClip("dppo", config));
  if (config.probability_gap > 0.0 && config.probability_gap <= 1.0 && config.log_ratio_penalty >= 0.0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("dppo: probability gap ", config.probability_gap, " and penalty ",
                                                 config.log_ratio_penalty, "; use a gap in (0, 1] and a penalty >= 0"));
}

void Compute(const PolicyLossConfig& config, const SequenceInput& in, SequenceLoss& out) {
  for (size_t t = 0; t < in.trainable.size(); ++t) {
    out.loss[t] = out.grad[t] = 0.0;
    if (in.trainable[t] == 0) continue;
    const double advantage = in.advantages[t];
    const double moved = std::exp(in.logp[t]) - std::exp(in.old_logp[t]);
    const bool too_high = advantage > 0.0 && moved > config.probability_gap;
    const bool too_low = advantage < 0.0 && moved < -config.probability_gap;
    const double log_ratio = std::clamp(in.logp[t] - in.old_logp[t], -kMaxLogRatio, kMaxLogRatio);
    const Ratio ratio = TokenRatio(in.logp[t], in.old_logp[t]);
    const bool keeps = !too_high && !too_low;
    out.loss[t] = (keeps ? -advantage * ratio.r : 0.0) + config.log_ratio_penalty * log_ratio * log_ratio;
    out.grad[t] = (keeps ? -advantage * ratio.grad : 0.0) +
                  (ratio.grad != 0.0 ? 2.0 * config.log_ratio_penalty * log_ratio : 0.0);
    out.num_clipped_low += too_low;
    out.num_clipped_high += too_high;
  }
}

}  // namespace

PolicyLoss DppoLoss() { return {"dppo", "2602.04879", &Validate, &Compute}; }

}  // namespace moerl::rl
