#ifndef MOERL_LIBS_RL_DYNAMIC_SAMPLING_H_
#define MOERL_LIBS_RL_DYNAMIC_SAMPLING_H_

#include <cstdint>
#include <span>

// DAPO's dynamic sampling (2503.14476): a finished group whose rewards are all equal is dropped and another prompt
// takes its place. The refill is bounded; at the bound the step trains what there is, and says so.
namespace moerl::rl {

struct DynamicSamplingConfig {
  bool enabled = false;
  // At most this many dropped groups a step, as a multiple of the groups of a step (dynamic_sampling_refills).
  double max_refill = 2.0;
};

enum class GroupVerdict {
  kKeep,           // has something to teach
  kDropAndRefill,  // constant; another prompt is worth its cost
  kKeepAtBound,    // constant, but the step has used up its refill
};

// Pure: the same step with the same history gives the same verdict after a restart. `num_dropped` counts the groups
// already dropped for this reason while this step was filled. Groups are judged in number order.
GroupVerdict JudgeGroup(const DynamicSamplingConfig& config, std::span<const double> rewards, int64_t groups_per_step,
                        int64_t num_dropped);

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_DYNAMIC_SAMPLING_H_
