#include <algorithm>

#include "libs/base/status_macros.h"
#include "libs/rl/clip_range.h"
#include "libs/rl/ratio.h"

// CISPO (2506.13585): L_t = −sg[clip(r, 1−ε_low, 1+ε_high)]·A·logp. The weight is clipped, no token is dropped.
// ε_low ≥ 1 means no lower bound; ε_high is 4 to 5 (2510.13786).
namespace moerl::rl {
namespace {

absl::Status Validate(const PolicyLossConfig& config) {
  MOERL_RETURN_IF_ERROR(RefuseDualClip("cispo", config));
  return ValidateClipRange("cispo", config, 1e6);
}

void Compute(const PolicyLossConfig& config, const SequenceInput& in, SequenceLoss& out) {
  const double low = std::max(0.0, 1.0 - config.clip_low);
  const double high = 1.0 + config.clip_high;
  for (size_t t = 0; t < in.trainable.size(); ++t) {
    out.loss[t] = out.grad[t] = 0.0;
    if (in.trainable[t] == 0) continue;
    const double r = TokenRatio(in.logp[t], in.old_logp[t]).r;
    const double weight = std::clamp(r, low, high);
    out.loss[t] = -weight * in.advantages[t] * in.logp[t];
    out.grad[t] = -weight * in.advantages[t];
    out.num_clipped_low += r < low;
    out.num_clipped_high += r > high;
  }
}

}  // namespace

PolicyLoss CispoLoss() { return {"cispo", "2506.13585, 2510.13786", &Validate, &Compute}; }

}  // namespace moerl::rl
