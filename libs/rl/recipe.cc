#include "libs/rl/recipe.h"

#include <array>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "libs/base/check.h"
#include "libs/base/status_macros.h"

namespace moerl::rl {
namespace {

// What an algorithm's name stands for, before the configuration's own fields.
struct Algorithm {
  std::string_view name;
  AdvantageKind advantage;
  std::string_view loss;
  double clip_low;
  double clip_high;
  Aggregation aggregation;
  OldPolicy old_policy = OldPolicy::kStepStart;
  OffPolicyCorrection off_policy = OffPolicyCorrection::kTis;
  double off_policy_cap = 2.0;
  double off_policy_low = 0.5;
  double dynamic_sampling_refills = 0.0;
};

constexpr std::array<Algorithm, 12> kAlgorithms = {{
    {"grpo", AdvantageKind::kGrpo, "ppo_clip", 0.2, 0.2, Aggregation::kTokenMean},
    {"dr_grpo", AdvantageKind::kDrGrpo, "ppo_clip", 0.2, 0.2, Aggregation::kSeqMeanTokenSumNorm},
    {.name = "dapo",
     .advantage = AdvantageKind::kGrpo,
     .loss = "ppo_clip",
     .clip_low = 0.2,
     .clip_high = 0.28,
     .aggregation = Aggregation::kTokenMean,
     .dynamic_sampling_refills = 2.0},
    {"gspo", AdvantageKind::kGrpo, "gspo", 3e-4, 4e-4, Aggregation::kSeqMeanTokenMean},
    {"cispo", AdvantageKind::kGrpo, "cispo", 1.0, 4.0, Aggregation::kTokenMean},
    {"rloo", AdvantageKind::kRloo, "ppo_clip", 0.2, 0.2, Aggregation::kTokenMean},
    {"reinforce_pp", AdvantageKind::kReinforcePp, "ppo_clip", 0.2, 0.2, Aggregation::kTokenMean},
    {"reinforce_pp_baseline", AdvantageKind::kReinforcePpBaseline, "ppo_clip", 0.2, 0.2, Aggregation::kTokenMean},
    {"maxrl", AdvantageKind::kMaxRl, "ppo_clip", 0.2, 0.2, Aggregation::kTokenMean},
    {"ppo", AdvantageKind::kGae, "ppo_clip", 0.2, 0.2, Aggregation::kTokenMean},
    {.name = "decoupled_ppo",
     .advantage = AdvantageKind::kGrpo,
     .loss = "ppo_clip",
     .clip_low = 0.2,
     .clip_high = 0.2,
     .aggregation = Aggregation::kTokenMean,
     .off_policy = OffPolicyCorrection::kIcepop,
     .off_policy_cap = 5.0,
     .off_policy_low = 0.0},
    {"dppo", AdvantageKind::kGrpo, "dppo", 0.2, 0.2, Aggregation::kTokenMean, OldPolicy::kRollout,
     OffPolicyCorrection::kNone},
}};

const Algorithm* FindAlgorithm(std::string_view name) {
  for (const Algorithm& algorithm : kAlgorithms) {
    if (algorithm.name == name) return &algorithm;
  }
  return nullptr;
}

template <typename... Words>
absl::Status FieldError(std::string_view field, const Words&... words) {
  return absl::InvalidArgumentError(absl::StrCat("algorithm.", std::string(field), ": ", words...));
}

absl::Status CheckRange(std::string_view field, double found, double least, double most) {
  if (found >= least && found <= most) return absl::OkStatus();
  return FieldError(field, found, "; use ", least, " to ", most);
}

// Fields that the named algorithm does not read are refused rather than ignored.
absl::Status RefuseUnread(const AlgorithmOptions& options, const Recipe& recipe) {
  const bool has_critic = recipe.advantage == AdvantageKind::kGae;
  const bool has_token_returns = has_critic || recipe.advantage == AdvantageKind::kReinforcePp;
  const bool clips_ratio = recipe.loss->name != "dppo";
  struct Unread {
    std::string_view field;
    bool is_set;
    bool is_read;
    std::string_view who_reads;
  };
  const std::array<Unread, 9> fields = {{
      {"clip_low", options.clip_low.has_value(), clips_ratio, "all but dppo"},
      {"clip_high", options.clip_high.has_value(), clips_ratio, "all but dppo"},
      {"gamma", options.gamma.has_value(), has_token_returns, "ppo and reinforce_pp"},
      {"gae_lambda", options.gae_lambda.has_value(), has_critic, "ppo"},
      {"value_clip", options.value_clip.has_value(), has_critic, "ppo"},
      {"value_coefficient", options.value_coefficient.has_value(), has_critic, "ppo"},
      {"length_norm", options.length_norm.has_value(), recipe.aggregation == Aggregation::kSeqMeanTokenSumNorm,
       "aggregation seq_mean_token_sum_norm"},
      {"off_policy_cap", options.off_policy_cap.has_value(), recipe.off_policy.correction != OffPolicyCorrection::kNone,
       "an off_policy correction"},
      {"off_policy_low", options.off_policy_low.has_value(),
       recipe.off_policy.correction == OffPolicyCorrection::kIcepop ||
           recipe.off_policy.correction == OffPolicyCorrection::kGeometric,
       "off_policy icepop and geometric"},
  }};
  for (const Unread& field : fields) {
    if (!field.is_set || field.is_read) continue;
    return FieldError(field.field, std::string(recipe.name), " does not read it (read by ",
                      std::string(field.who_reads), "); leave it out");
  }
  return absl::OkStatus();
}

// KL is on when a coefficient above zero is given; an estimator or a place without one is a mistake worth naming.
absl::StatusOr<KlConfig> ResolveKl(const AlgorithmOptions& options) {
  KlConfig kl;
  kl.coefficient = options.kl_coefficient.value_or(0.0);
  kl.place = options.kl_place.value_or(KlPlace::kLoss);
  kl.target = options.kl_target.value_or(0.0);
  const bool is_on = kl.coefficient > 0.0;
  if (!is_on && options.kl_estimator.value_or(KlEstimator::kNone) != KlEstimator::kNone) {
    return FieldError("kl_estimator",
                      "set, but kl_coefficient is 0: no KL is computed; set kl_coefficient (0.001 is usual)");
  }
  if (!is_on && kl.target > 0.0) {
    return FieldError("kl_target", "set, but kl_coefficient is 0, which no factor moves; set kl_coefficient");
  }
  if (is_on) {
    const KlEstimator usual = kl.place == KlPlace::kReward ? KlEstimator::kK1 : KlEstimator::kK3;
    kl.estimator = options.kl_estimator.value_or(usual);
    if (kl.estimator == KlEstimator::kNone) kl.estimator = usual;
  }
  MOERL_RETURN_IF_ERROR(ValidateKl(kl));
  return kl;
}

absl::Status CheckWhole(const AlgorithmOptions& options, const Recipe& recipe) {
  MOERL_RETURN_IF_ERROR(CheckRange("gamma", recipe.gamma, 0.0, 1.0));
  MOERL_RETURN_IF_ERROR(CheckRange("gae_lambda", recipe.gae_lambda, 0.0, 1.0));
  MOERL_RETURN_IF_ERROR(CheckRange("value_clip", recipe.value_clip, 0.0, 1000.0));
  MOERL_RETURN_IF_ERROR(CheckRange("value_coefficient", recipe.value_coefficient, 0.0, 1000.0));
  MOERL_RETURN_IF_ERROR(CheckRange("entropy_coefficient", recipe.entropy_coefficient, 0.0, 10.0));
  MOERL_RETURN_IF_ERROR(CheckRange("num_mini_batches", recipe.num_mini_batches, 1, 1024));
  MOERL_RETURN_IF_ERROR(CheckRange("num_epochs", recipe.num_epochs, 1, 64));
  MOERL_RETURN_IF_ERROR(CheckRange("dynamic_sampling_refills", recipe.dynamic_sampling.max_refill, 0.0, 64.0));
  MOERL_RETURN_IF_ERROR(recipe.loss->validate(recipe.loss_config));
  MOERL_RETURN_IF_ERROR(ValidateOffPolicy(recipe.off_policy));
  MOERL_RETURN_IF_ERROR(RefuseUnread(options, recipe));

  if (recipe.aggregation == Aggregation::kSeqMeanTokenSumNorm && !(recipe.length_norm > 0.0)) {
    return FieldError("length_norm", recipe.length_norm,
                      "; seq_mean_token_sum_norm divides by it: set it or rollout.sampling.max_new_tokens");
  }
  if (recipe.overlong_cache_tokens < 0 || recipe.overlong_cache_tokens > recipe.overlong_max_tokens) {
    return FieldError("overlong_cache_tokens", recipe.overlong_cache_tokens, "; use 0 (off) to max_new_tokens, ",
                      recipe.overlong_max_tokens);
  }
  if (recipe.old_policy == OldPolicy::kRollout && recipe.off_policy.correction != OffPolicyCorrection::kNone) {
    return FieldError("off_policy", std::string(recipe.name),
                      " takes its ratio against the rollout policy already: every weight would be 1; use none");
  }
  if (recipe.name == "decoupled_ppo" && recipe.off_policy.correction == OffPolicyCorrection::kNone) {
    return FieldError("off_policy",
                      "decoupled_ppo is PPO times a correction; use tis, icepop, sequence or geometric, or "
                      "the algorithm grpo");
  }
  if (recipe.loss->name == "gspo" && recipe.aggregation != Aggregation::kSeqMeanTokenMean) {
    return FieldError("aggregation", std::string(AggregationName(recipe.aggregation)),
                      " with gspo: one ratio a sequence is averaged over sequences; use seq_mean_token_mean");
  }
  if (recipe.dynamic_sampling.enabled && !recipe.is_group_relative()) {
    return FieldError("dynamic_sampling_refills", std::string(recipe.name),
                      " learns from groups whose rewards are all equal too; use 0");
  }
  if (recipe.advantage == AdvantageKind::kMaxRl && recipe.overlong_cache_tokens > 0) {
    return FieldError("overlong_cache_tokens",
                      "maxrl divides by the mean reward, which a penalty makes negative; use 0");
  }
  if (recipe.advantage == AdvantageKind::kMaxRl && recipe.kl.coefficient > 0.0 && recipe.kl.place == KlPlace::kReward) {
    return FieldError("kl_place", "maxrl divides by the mean reward, which a penalty makes negative; use loss");
  }
  if (recipe.is_group_relative() && options.samples_per_prompt == 1) {
    return absl::InvalidArgumentError(absl::StrCat("trainer.samples_per_prompt: 1, but ", recipe.name,
                                                   " compares the samples of one prompt; use at least 2"));
  }
  return absl::OkStatus();
}

}  // namespace

bool Recipe::needs_old_logp() const { return old_policy == OldPolicy::kStepStart && num_updates() > 1; }
bool Recipe::needs_ref_logp() const { return kl.estimator != KlEstimator::kNone; }
bool Recipe::needs_values() const { return advantage == AdvantageKind::kGae; }
bool Recipe::needs_entropy() const { return entropy_coefficient > 0.0; }

bool Recipe::is_group_relative() const {
  return advantage != AdvantageKind::kGae && advantage != AdvantageKind::kReinforcePp;
}

std::vector<std::string_view> AlgorithmNames() {
  std::vector<std::string_view> names;
  for (const Algorithm& algorithm : kAlgorithms) names.push_back(algorithm.name);
  return names;
}

absl::StatusOr<Recipe> MakeRecipe(const AlgorithmOptions& options) {
  const Algorithm* algorithm = FindAlgorithm(options.name);
  if (algorithm == nullptr) {
    std::vector<std::string> names;
    for (std::string_view name : AlgorithmNames()) names.emplace_back(name);
    return FieldError("name", "unknown algorithm \"", options.name, "\"; use one of ", absl::StrJoin(names, ", "));
  }
  Recipe recipe;
  recipe.name = options.name;
  recipe.advantage = algorithm->advantage;
  recipe.gamma = options.gamma.value_or(1.0);
  recipe.gae_lambda = options.gae_lambda.value_or(1.0);
  recipe.loss = FindPolicyLoss(algorithm->loss);
  MOERL_CHECK(recipe.loss != nullptr);
  recipe.loss_config.clip_low = options.clip_low.value_or(algorithm->clip_low);
  recipe.loss_config.clip_high = options.clip_high.value_or(algorithm->clip_high);
  recipe.loss_config.dual_clip = options.dual_clip.value_or(0.0);
  recipe.old_policy = algorithm->old_policy;
  recipe.aggregation = options.aggregation.value_or(algorithm->aggregation);
  recipe.length_norm = options.length_norm.value_or(0.0);
  if (recipe.length_norm == 0.0) recipe.length_norm = static_cast<double>(options.max_new_tokens);
  recipe.value_clip = options.value_clip.value_or(0.5);
  recipe.value_coefficient = options.value_coefficient.value_or(1.0);
  MOERL_ASSIGN_OR_RETURN(recipe.kl, ResolveKl(options));
  recipe.off_policy.correction = options.off_policy.value_or(algorithm->off_policy);
  recipe.off_policy.cap = options.off_policy_cap.value_or(algorithm->off_policy_cap);
  recipe.off_policy.low = options.off_policy_low.value_or(algorithm->off_policy_low);
  recipe.entropy_coefficient = options.entropy_coefficient.value_or(0.0);
  recipe.routing_replay = options.routing_replay.value_or(false);
  recipe.dynamic_sampling.max_refill = options.dynamic_sampling_refills.value_or(algorithm->dynamic_sampling_refills);
  recipe.dynamic_sampling.enabled = recipe.dynamic_sampling.max_refill > 0.0;
  recipe.overlong_max_tokens = options.max_new_tokens;
  recipe.overlong_cache_tokens = options.overlong_cache_tokens.value_or(0);
  recipe.num_mini_batches = options.num_mini_batches.value_or(1);
  recipe.num_epochs = options.num_epochs.value_or(1);
  MOERL_RETURN_IF_ERROR(CheckWhole(options, recipe));
  return recipe;
}

}  // namespace moerl::rl
