#ifndef MOERL_LIBS_RL_CLIP_RANGE_H_
#define MOERL_LIBS_RL_CLIP_RANGE_H_

#include <algorithm>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "libs/rl/loss.h"

// Internal to the library: PPO's clip of one ratio, shared by ppo_clip and gspo, and its legal range.
namespace moerl::rl {

enum class Clipped { kNo, kLow, kHigh };

struct ClippedTerm {
  double loss = 0.0;
  bool passes_gradient = true;
  Clipped clipped = Clipped::kNo;
};

// max(−A r, −A clip(r, 1−ε_low, 1+ε_high)). On a tie the unclipped branch counts: inside the range both are equal.
inline ClippedTerm ClipTerm(double advantage, double r, double clip_low, double clip_high) {
  const double free = -advantage * r;
  const double held = -advantage * std::clamp(r, 1.0 - clip_low, 1.0 + clip_high);
  if (free >= held) return {free, true, Clipped::kNo};
  return {held, false, r > 1.0 ? Clipped::kHigh : Clipped::kLow};
}

inline absl::Status ValidateClipRange(std::string_view loss, const PolicyLossConfig& config, double low_max) {
  if (!(config.clip_low >= 0.0 && config.clip_low <= low_max)) {
    return absl::InvalidArgumentError(absl::StrCat("algorithm.clip_low: ", config.clip_low, " for ", std::string(loss),
                                                   "; the lower bound is 1 - clip_low, use 0 to ", low_max));
  }
  if (!(config.clip_high >= 0.0 && config.clip_high < 1e6)) {
    return absl::InvalidArgumentError(absl::StrCat("algorithm.clip_high: ", config.clip_high, " for ",
                                                   std::string(loss),
                                                   "; the upper bound is 1 + clip_high, use 0 or more"));
  }
  return absl::OkStatus();
}

inline absl::Status RefuseDualClip(std::string_view loss, const PolicyLossConfig& config) {
  if (config.dual_clip == 0.0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("algorithm.dual_clip: ", std::string(loss),
                   " has no dual clip; leave it out or use an algorithm with PPO's clip"));
}

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_CLIP_RANGE_H_
