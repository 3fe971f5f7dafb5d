#include "libs/rl/warm_start.h"

#include "absl/strings/str_format.h"
#include "libs/base/check.h"

namespace moerl::rl {

bool ShouldMeasure(const WarmStartConfig& config, int64_t num_steps) {
  return num_steps >= config.max_steps || num_steps % config.measure_every_steps == 0;
}

WarmStartVerdict JudgeWarmStart(const WarmStartConfig& config, int64_t num_steps, double sampled_pass_rate) {
  MOERL_CHECK(sampled_pass_rate >= 0.0 && sampled_pass_rate <= 1.0);
  if (sampled_pass_rate > config.pass_rate_max) return WarmStartVerdict::kAboveBand;
  if (sampled_pass_rate >= config.pass_rate_min) return WarmStartVerdict::kInBand;
  return num_steps >= config.max_steps ? WarmStartVerdict::kGiveUp : WarmStartVerdict::kContinue;
}

std::string DescribeVerdict(const WarmStartConfig& config, WarmStartVerdict verdict, int64_t num_steps,
                            double sampled_pass_rate) {
  const std::string measured =
      absl::StrFormat("warm start: sampled pass rate %.3f after %d steps, band %.3f to %.3f", sampled_pass_rate,
                      num_steps, config.pass_rate_min, config.pass_rate_max);
  switch (verdict) {
    case WarmStartVerdict::kContinue:
      return measured + ": going on";
    case WarmStartVerdict::kInBand:
      return measured + ": reinforcement learning begins";
    case WarmStartVerdict::kAboveBand:
      return measured +
             ": past the band, less is left to learn; measure more often (measure_every_steps) or lower the "
             "learning rate";
    case WarmStartVerdict::kGiveUp:
      return measured +
             ": max_steps reached, no group would have a success to learn from; raise max_steps or the "
             "learning rate, or take an easier task";
  }
  return measured;
}

}  // namespace moerl::rl
