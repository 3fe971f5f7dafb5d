#include "libs/rl/recipe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

namespace moerl::rl {
namespace {

using testing::HasSubstr;

AlgorithmOptions Named(const char* name) {
  AlgorithmOptions options;
  options.name = name;
  options.max_new_tokens = 32;
  return options;
}

TEST(Recipe, EveryAlgorithmHasWorkingDefaults) {
  EXPECT_EQ(AlgorithmNames().size(), 12u);
  for (std::string_view name : AlgorithmNames()) {
    const absl::StatusOr<Recipe> recipe = MakeRecipe(Named(std::string(name).c_str()));
    ASSERT_TRUE(recipe.ok()) << recipe.status();
    EXPECT_FALSE(recipe->needs_old_logp()) << name;  // one update a step: the current policy is the old one
    EXPECT_FALSE(recipe->needs_ref_logp()) << name;
    EXPECT_EQ(recipe->needs_values(), name == "ppo") << name;
  }
  const Recipe dapo = *MakeRecipe(Named("dapo"));
  EXPECT_EQ(dapo.loss_config.clip_high, 0.28);
  EXPECT_TRUE(dapo.dynamic_sampling.enabled);
  EXPECT_EQ(dapo.aggregation, Aggregation::kTokenMean);
  const Recipe gspo = *MakeRecipe(Named("gspo"));
  EXPECT_EQ(gspo.loss_config.clip_low, 3e-4);
  EXPECT_EQ(gspo.aggregation, Aggregation::kSeqMeanTokenMean);
  const Recipe dr_grpo = *MakeRecipe(Named("dr_grpo"));
  EXPECT_EQ(dr_grpo.length_norm, 32.0);
  const Recipe decoupled = *MakeRecipe(Named("decoupled_ppo"));
  EXPECT_EQ(decoupled.off_policy.cap, 5.0);
  EXPECT_EQ(decoupled.off_policy.low, 0.0);
}

TEST(Recipe, SaysWhatTheTrainerHasToCompute) {
  AlgorithmOptions options = Named("grpo");
  options.num_mini_batches = 2;
  options.num_epochs = 3;
  options.kl_coefficient = 0.01;
  options.entropy_coefficient = 0.001;
  const Recipe recipe = *MakeRecipe(options);
  EXPECT_EQ(recipe.num_updates(), 6);
  EXPECT_TRUE(recipe.needs_old_logp());
  EXPECT_TRUE(recipe.needs_ref_logp());
  EXPECT_TRUE(recipe.needs_entropy());
  EXPECT_EQ(recipe.kl.estimator, KlEstimator::kK3);
  options.kl_place = KlPlace::kReward;
  EXPECT_EQ(MakeRecipe(options)->kl.estimator, KlEstimator::kK1);
  options = Named("dppo");
  options.num_epochs = 2;
  EXPECT_FALSE(MakeRecipe(options)->needs_old_logp());  // its ratio is against the rollout
}

TEST(Recipe, RefusesCombinationsThatMakeNoSenseByName) {
  struct Case {
    const char* algorithm;
    std::function<void(AlgorithmOptions&)> change;
    const char* words;
  };
  using O = AlgorithmOptions;
  const Case cases[] = {
      {"magic", [](O&) {}, "algorithm.name: unknown algorithm \"magic\"; use one of grpo, dr_grpo"},
      {"grpo", [](O& o) { o.kl_coefficient = 0.1, o.kl_estimator = KlEstimator::kK1; }, "kl_estimator: k1 in the loss"},
      {"grpo", [](O& o) { o.kl_estimator = KlEstimator::kK3; }, "kl_estimator: set, but kl_coefficient is 0"},
      {"grpo", [](O& o) { o.kl_target = 0.1; }, "kl_target: set, but kl_coefficient is 0"},
      {"grpo", [](O& o) { o.kl_coefficient = -1; }, "kl_coefficient: -1"},
      {"grpo", [](O& o) { o.value_clip = 0.2; }, "value_clip: grpo does not read it (read by ppo)"},
      {"grpo", [](O& o) { o.value_coefficient = 0.2; }, "value_coefficient: grpo does not read it"},
      {"grpo", [](O& o) { o.gae_lambda = 0.9; }, "gae_lambda: grpo does not read it"},
      {"grpo", [](O& o) { o.gamma = 0.9; }, "gamma: grpo does not read it (read by ppo and reinforce_pp)"},
      {"grpo", [](O& o) { o.length_norm = 10; }, "length_norm: grpo does not read it"},
      {"grpo", [](O& o) { o.off_policy_low = 0.1; }, "off_policy_low: grpo does not read it"},
      {"grpo", [](O& o) { o.off_policy = OffPolicyCorrection::kNone, o.off_policy_cap = 3; },
       "off_policy_cap: grpo does not read it"},
      {"grpo", [](O& o) { o.off_policy_cap = 0.5; }, "off_policy_cap: 0.5; a cap below 1"},
      {"grpo", [](O& o) { o.off_policy = OffPolicyCorrection::kIcepop, o.off_policy_low = 1.5; },
       "off_policy_low: 1.5"},
      {"grpo", [](O& o) { o.samples_per_prompt = 1; }, "samples_per_prompt: 1, but grpo compares"},
      {"grpo", [](O& o) { o.dual_clip = 0.5; }, "dual_clip: 0.5"},
      {"grpo", [](O& o) { o.clip_low = 1.5; }, "clip_low: 1.5 for ppo_clip"},
      {"grpo", [](O& o) { o.clip_high = -0.1; }, "clip_high: -0.1"},
      {"grpo", [](O& o) { o.num_epochs = 0; }, "num_epochs: 0; use 1 to 64"},
      {"grpo", [](O& o) { o.num_mini_batches = 0; }, "num_mini_batches: 0; use 1 to 1024"},
      {"grpo", [](O& o) { o.overlong_cache_tokens = 33; },
       "overlong_cache_tokens: 33; use 0 (off) to max_new_tokens, 32"},
      {"grpo", [](O& o) { o.entropy_coefficient = -1; }, "entropy_coefficient: -1"},
      {"dr_grpo", [](O& o) { o.max_new_tokens = 0; }, "length_norm: 0; seq_mean_token_sum_norm divides by it"},
      {"cispo", [](O& o) { o.dual_clip = 3; }, "dual_clip: cispo has no dual clip"},
      {"gspo", [](O& o) { o.dual_clip = 3; }, "dual_clip: gspo has no dual clip"},
      {"gspo", [](O& o) { o.aggregation = Aggregation::kTokenMean; }, "aggregation: token_mean with gspo"},
      {"dppo", [](O& o) { o.clip_low = 0.1; }, "clip_low: dppo does not read it"},
      {"dppo", [](O& o) { o.off_policy = OffPolicyCorrection::kTis; },
       "off_policy: dppo takes its ratio against the rollout"},
      {"decoupled_ppo", [](O& o) { o.off_policy = OffPolicyCorrection::kNone; },
       "off_policy: decoupled_ppo is PPO times a correction"},
      {"ppo", [](O& o) { o.dynamic_sampling_refills = 1; }, "dynamic_sampling_refills: ppo learns from groups"},
      {"ppo", [](O& o) { o.gamma = 1.1; }, "gamma: 1.1; use 0 to 1"},
      {"maxrl", [](O& o) { o.overlong_cache_tokens = 4; }, "overlong_cache_tokens: maxrl divides by the mean reward"},
      {"maxrl", [](O& o) { o.kl_coefficient = 0.1, o.kl_place = KlPlace::kReward; }, "kl_place: maxrl divides"},
  };
  for (const Case& bad : cases) {
    AlgorithmOptions options = Named(bad.algorithm);
    bad.change(options);
    const absl::Status status = MakeRecipe(options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.words;
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.words));
  }
}

TEST(Recipe, NamesParseBack) {
  for (const char* name : {"token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"}) {
    EXPECT_EQ(AggregationName(*ParseAggregation(name)), name);
  }
  for (const char* name : {"none", "k1", "k2", "k3"}) EXPECT_EQ(KlEstimatorName(*ParseKlEstimator(name)), name);
  for (const char* name : {"none", "tis", "icepop", "sequence", "geometric"}) {
    EXPECT_EQ(OffPolicyCorrectionName(*ParseOffPolicyCorrection(name)), name);
  }
  EXPECT_EQ(ParseAggregation("mean").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ParseKlEstimator("k4").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ParseOffPolicyCorrection("mis").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Recipe, EveryLossIsFoundByItsNameAndNamesItsPaper) {
  for (const PolicyLoss& loss : PolicyLosses()) {
    EXPECT_EQ(FindPolicyLoss(loss.name), &loss);
    EXPECT_FALSE(loss.paper.empty());
  }
  EXPECT_EQ(FindPolicyLoss("nothing"), nullptr);
}

}  // namespace
}  // namespace moerl::rl
