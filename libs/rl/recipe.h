#ifndef MOERL_LIBS_RL_RECIPE_H_
#define MOERL_LIBS_RL_RECIPE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "libs/rl/aggregation.h"
#include "libs/rl/dynamic_sampling.h"
#include "libs/rl/kl.h"
#include "libs/rl/loss.h"
#include "libs/rl/off_policy.h"

// A recipe is a named choice of parts: how advantages come from rewards, which loss, how tokens are weighted, what is
// corrected. `AlgorithmOptions` is what a configuration says (config.proto, AlgorithmConfig): a name and what differs
// from its defaults; enumerations are in the order of their namesakes there. `MakeRecipe` resolves it once; the rest of
// the library reads only the `Recipe`.
namespace moerl::rl {

struct AlgorithmOptions {
  std::string name = "grpo";  // see AlgorithmNames()
  std::optional<double> clip_low;
  std::optional<double> clip_high;
  std::optional<double> dual_clip;
  std::optional<Aggregation> aggregation;
  std::optional<double> length_norm;  // 0 takes max_new_tokens
  std::optional<double> gamma;
  std::optional<double> gae_lambda;
  std::optional<double> value_clip;
  std::optional<double> value_coefficient;
  std::optional<double> kl_coefficient;  // 0 is off
  std::optional<KlEstimator> kl_estimator;
  std::optional<KlPlace> kl_place;
  std::optional<double> kl_target;
  std::optional<OffPolicyCorrection> off_policy;
  std::optional<double> off_policy_cap;
  std::optional<double> off_policy_low;
  std::optional<double> entropy_coefficient;
  std::optional<bool> routing_replay;
  std::optional<int32_t> num_mini_batches;
  std::optional<int32_t> num_epochs;
  std::optional<double> dynamic_sampling_refills;  // 0 is off
  std::optional<int64_t> overlong_cache_tokens;    // 0 is off
  int64_t max_new_tokens = 0;                      // rollout.sampling.max_new_tokens
  int64_t samples_per_prompt = 0;                  // trainer.samples_per_prompt; 0 if not known yet
};

enum class AdvantageKind { kGrpo, kDrGrpo, kRloo, kMaxRl, kReinforcePp, kReinforcePpBaseline, kGae };

// Whose log-probabilities the ratio is taken against.
enum class OldPolicy {
  kStepStart,  // the weights the step starts from; with one update a step that is the current policy, at no cost
  kRollout,    // the policy that chose the tokens, as it reported them
};

struct Recipe {
  std::string name;
  AdvantageKind advantage = AdvantageKind::kGrpo;
  double advantage_epsilon = 1e-6;  // GRPO's ε beside the standard deviation
  double gamma = 1.0;
  double gae_lambda = 1.0;

  const PolicyLoss* loss = nullptr;
  PolicyLossConfig loss_config;
  OldPolicy old_policy = OldPolicy::kStepStart;
  Aggregation aggregation = Aggregation::kTokenMean;
  double length_norm = 0.0;  // tokens

  double value_clip = 0.5;
  double value_coefficient = 1.0;
  KlConfig kl;  // coefficient: where an adaptive one starts
  OffPolicyConfig off_policy;
  double entropy_coefficient = 0.0;
  bool routing_replay = false;
  DynamicSamplingConfig dynamic_sampling;
  int64_t overlong_max_tokens = 0;
  int64_t overlong_cache_tokens = 0;
  int32_t num_mini_batches = 1;
  int32_t num_epochs = 1;

  // What the trainer has to compute for every sample before the first update of a step.
  bool needs_old_logp() const;  // more than one update: step-start log-probabilities are no longer the current ones
  bool needs_ref_logp() const;
  bool needs_values() const;
  bool needs_entropy() const;  // with every forward pass
  int32_t num_updates() const { return num_mini_batches * num_epochs; }
  bool is_group_relative() const;  // advantages compare the samples of one prompt
};

// grpo dr_grpo dapo gspo cispo rloo reinforce_pp reinforce_pp_baseline maxrl ppo decoupled_ppo dppo
std::vector<std::string_view> AlgorithmNames();

// INVALID_ARGUMENT names the field, what was found, and what would be accepted: unknown names, fields that the
// algorithm does not read (a value clip without critic, a dual clip for CISPO), k1 in the loss, group-relative
// advantages with one sample a prompt, a correction against the policy the ratio is already taken against.
absl::StatusOr<Recipe> MakeRecipe(const AlgorithmOptions& options);

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_RECIPE_H_
