#include "libs/rl/dynamic_sampling.h"

#include "libs/rl/advantage_group.h"

namespace moerl::rl {

GroupVerdict JudgeGroup(const DynamicSamplingConfig& config, std::span<const double> rewards, int64_t groups_per_step,
                        int64_t num_dropped) {
  if (!config.enabled || !DescribeGroup(rewards).is_constant) return GroupVerdict::kKeep;
  const double bound = config.max_refill * static_cast<double>(groups_per_step);
  return static_cast<double>(num_dropped) < bound ? GroupVerdict::kDropAndRefill : GroupVerdict::kKeepAtBound;
}

}  // namespace moerl::rl
