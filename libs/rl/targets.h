#ifndef MOERL_LIBS_RL_TARGETS_H_
#define MOERL_LIBS_RL_TARGETS_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "libs/rl/batch.h"
#include "libs/rl/recipe.h"

// From rewards to what the losses aim at: one advantage (and with a critic one return) a token, over a whole step. No
// rank sees only a part: whitening and group means need all of it, so every rank computes the same from the same input.
namespace moerl::rl {

struct SampleTargets {
  std::vector<double> advantages;  // [C], 0 where not trainable
  std::vector<double> returns;     // [C] with a critic, else empty
  int64_t num_tokens = 0;          // trainable
  bool is_group_constant = false;  // rewards of its group are all equal, and the recipe compares within groups
};

// About the rewards and advantages of a step.
struct StepStats {
  int64_t num_groups = 0;
  int64_t num_samples = 0;
  int64_t num_tokens = 0;              // trainable
  int64_t num_informative_groups = 0;  // rewards differ
  int64_t num_constant_groups = 0;     // rewards all equal, among them those of a single sample
  int64_t num_single_sample_groups = 0;
  int64_t num_empty_samples = 0;  // no trainable token: no gradient, not in any denominator
  int64_t num_truncated_samples = 0;
  bool is_whitening_degenerate = false;  // whitened advantages were all equal and became zeros
  double reward_mean = 0.0;              // as the environment gave it
  double reward_std = 0.0;
  double reward_min = 0.0;
  double reward_max = 0.0;
  double overlong_penalty_mean = 0.0;
  double kl_penalty_mean = 0.0;  // taken from the reward, by sample
  double advantage_mean = 0.0;   // over trainable tokens
  double advantage_std = 0.0;
  double completion_tokens_mean = 0.0;
};

struct StepTargets {
  std::vector<SampleTargets> samples;  // by ordinal
  StepStats stats;
};

// Rewards are shaped first: overlong penalty added; KL in the reward taken off, token by token where the algorithm has
// token rewards (ppo, reinforce_pp), else as a sum; against old_logp where there is one, else the rollout's. A token
// reward lands on the last trainable token. Input must have passed the checks of PolicyObjective::Create.
// INVALID_ARGUMENT for a negative reward under maxrl, naming the sample.
absl::StatusOr<StepTargets> ComputeTargets(const Recipe& recipe, std::span<const Group> groups,
                                           std::span<const SampleScores> scores, double kl_coefficient);

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_TARGETS_H_
