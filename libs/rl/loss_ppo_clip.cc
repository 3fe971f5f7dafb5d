#include "absl/strings/str_cat.h"
#include "libs/rl/clip_range.h"
#include "libs/rl/ratio.h"

// PPO's clipped surrogate (1707.06347): L_t = max(−A r, −A clip(r, 1−ε_low, 1+ε_high)). ε_high > ε_low is DAPO's
// clip-higher (2503.14476). With dual_clip c > 1 a negative advantage costs at most: L_t = min(L_t, −A c) (1912.09729).
// Decoupled PPO (2505.24298) is this loss against the recomputed policy, times the token correction of off_policy.h.
namespace moerl::rl {
namespace {

absl::Status Validate(const PolicyLossConfig& config) {
  if (config.dual_clip != 0.0 && !(config.dual_clip > 1.0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("algorithm.dual_clip: ", config.dual_clip,
                     "; the bound is at least the clipped ratio: above 1 (3 is usual), 0 is off"));
  }
  return ValidateClipRange("ppo_clip", config, 1.0);
}

void Compute(const PolicyLossConfig& config, const SequenceInput& in, SequenceLoss& out) {
  for (size_t t = 0; t < in.trainable.size(); ++t) {
    out.loss[t] = out.grad[t] = 0.0;
    if (in.trainable[t] == 0) continue;
    const double advantage = in.advantages[t];
    const Ratio ratio = TokenRatio(in.logp[t], in.old_logp[t]);
    ClippedTerm term = ClipTerm(advantage, ratio.r, config.clip_low, config.clip_high);
    if (config.dual_clip > 0.0 && advantage < 0.0 && -advantage * config.dual_clip < term.loss) {
      term = {-advantage * config.dual_clip, false, Clipped::kHigh};
    }
    out.loss[t] = term.loss;
    out.grad[t] = term.passes_gradient ? -advantage * ratio.grad : 0.0;
    out.num_clipped_low += term.clipped == Clipped::kLow;
    out.num_clipped_high += term.clipped == Clipped::kHigh;
  }
}

}  // namespace

PolicyLoss PpoClipLoss() { return {"ppo_clip", "1707.06347, 1912.09729, 2503.14476", &Validate, &Compute}; }

}  // namespace moerl::rl
