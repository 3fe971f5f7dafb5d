// What holds for every algorithm, whatever the step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "libs/rl/objective.h"
#include "tests/unit/rl/step_builder.h"

namespace moerl::rl {
namespace {

using testing::HasSubstr;

std::vector<Recipe> AllRecipes() {
  std::vector<Recipe> recipes;
  for (std::string_view name : AlgorithmNames()) {
    for (int variant = 0; variant < 3; ++variant) {
      AlgorithmOptions options;
      options.name = std::string(name);
      options.max_new_tokens = 12;
      if (variant == 1) options.kl_coefficient = 0.1;
      if (variant == 2 && name != "maxrl") {
        options.kl_coefficient = 0.1;
        options.kl_place = KlPlace::kReward;
        options.overlong_cache_tokens = 4;
      }
      options.entropy_coefficient = 0.01;
      options.num_epochs = 2;
      recipes.push_back(*MakeRecipe(options));
    }
  }
  return recipes;
}

struct StepRun {
  StepStats stats;
  std::vector<MicroBatchResult> updates;
};

StepRun Evaluate(const Recipe& recipe, const RandomStep& step) {
  StepRun run;
  const auto objective = PolicyObjective::Create(recipe, step.groups, step.scores, Context(recipe.kl.coefficient));
  EXPECT_TRUE(objective.ok()) << recipe.name << ": " << objective.status();
  if (!objective.ok()) return run;
  run.stats = objective->stats();
  for (int32_t update = 0; update < objective->num_updates(); ++update) {
    const PackedBatch packed = step.Pack(objective->UpdateOrdinals(update));
    auto result = objective->Evaluate(update, packed.view());
    EXPECT_TRUE(result.ok()) << recipe.name << ": " << result.status();
    if (result.ok()) run.updates.push_back(*std::move(result));
  }
  return run;
}

void ExpectFinite(const Recipe& recipe, const StepRun& run) {
  for (const MicroBatchResult& update : run.updates) {
    EXPECT_TRUE(std::isfinite(update.loss)) << recipe.name;
    for (const auto* grads : {&update.grad_logp, &update.grad_values, &update.grad_entropy}) {
      for (float grad : *grads) EXPECT_TRUE(std::isfinite(grad)) << recipe.name;
    }
    const UpdateSummary summary = Summarize(update.reports);
    for (double number : {summary.loss, summary.mean_ratio, summary.max_ratio, summary.min_ratio, summary.kl_old,
                          summary.kl_ref, summary.clip_fraction, summary.effective_sample_fraction,
                          summary.mean_abs_mismatch, summary.mismatch_kl, summary.mean_entropy, summary.mean_logp}) {
      EXPECT_TRUE(std::isfinite(number)) << recipe.name;
    }
  }
  for (double number : {run.stats.reward_mean, run.stats.reward_std, run.stats.advantage_mean, run.stats.advantage_std,
                        run.stats.completion_tokens_mean, run.stats.kl_penalty_mean, run.stats.overlong_penalty_mean}) {
    EXPECT_TRUE(std::isfinite(number)) << recipe.name;
  }
}

void ExpectNoGradient(const Recipe& recipe, const StepRun& run) {
  for (const MicroBatchResult& update : run.updates) {
    for (float grad : update.grad_logp) EXPECT_EQ(grad, 0.0f) << recipe.name;
  }
}

TEST(Property, MaskedTokensNeverInfluenceAnything) {
  for (const Recipe& recipe : AllRecipes()) {
    for (uint32_t seed = 1; seed <= 4; ++seed) {
      const RandomStep clean = MakeRandomStep(seed);
      RandomStep dirty = clean;  // every number of every masked token, and of every prompt, becomes nonsense
      const float nan = std::numeric_limits<float>::quiet_NaN();
      int64_t num_masked = 0;
      size_t i = 0;
      for (Group& group : dirty.groups) {
        for (Sample& sample : group.samples) {
          for (size_t at = 0; at < dirty.logp[i].size(); ++at) {
            const bool in_prompt = at < group.prompt.size();
            if (!in_prompt && sample.run.trainable[at - group.prompt.size()]) continue;
            for (auto* array : {&dirty.logp[i], &dirty.value[i], &dirty.entropy[i], &dirty.scores[i].old_logp,
                                &dirty.scores[i].ref_logp, &dirty.scores[i].values}) {
              (*array)[at] = nan;
            }
            if (in_prompt) continue;
            const size_t t = at - group.prompt.size();
            sample.run.logprobs[t] = nan;
            sample.run.versions[t] = {9, 99};
            sample.run.ids[t] = -5;
            ++num_masked;
          }
          ++i;
        }
      }
      ASSERT_GT(num_masked, 5);
      const StepRun a = Evaluate(recipe, clean), b = Evaluate(recipe, dirty);
      ASSERT_EQ(a.updates.size(), b.updates.size());
      for (size_t u = 0; u < a.updates.size(); ++u) {
        EXPECT_EQ(a.updates[u].grad_logp, b.updates[u].grad_logp) << recipe.name << " seed " << seed;
        EXPECT_EQ(a.updates[u].grad_values, b.updates[u].grad_values) << recipe.name << " seed " << seed;
        EXPECT_EQ(a.updates[u].grad_entropy, b.updates[u].grad_entropy) << recipe.name << " seed " << seed;
        EXPECT_EQ(a.updates[u].loss, b.updates[u].loss) << recipe.name << " seed " << seed;
      }
    }
  }
}

TEST(Property, AnAllMaskedStepGivesZerosAndACounter) {
  for (const Recipe& recipe : AllRecipes()) {
    RandomStep step = MakeRandomStep(20);
    for (Group& group : step.groups) {
      for (Sample& sample : group.samples) std::fill(sample.run.trainable.begin(), sample.run.trainable.end(), 0);
    }
    const StepRun run = Evaluate(recipe, step);
    ExpectFinite(recipe, run);
    ExpectNoGradient(recipe, run);
    EXPECT_EQ(run.stats.num_empty_samples, 16);
    EXPECT_EQ(run.stats.num_tokens, 0);
    EXPECT_EQ(Summarize(run.updates[0].reports).num_empty_samples, 16);
  }
}

TEST(Property, EmptyCompletionsGiveZerosAndACounter) {
  for (const Recipe& recipe : AllRecipes()) {
    RandomStep step = MakeRandomStep(21);
    for (size_t i : {0u, 5u, 6u}) {
      Group& group = step.groups[i / 4];
      group.samples[i % 4].run = {};
      const size_t prompt = group.prompt.size();
      for (auto* array : {&step.logp[i], &step.value[i], &step.entropy[i], &step.scores[i].old_logp,
                          &step.scores[i].ref_logp, &step.scores[i].values}) {
        array->resize(prompt);
      }
    }
    const StepRun run = Evaluate(recipe, step);
    ExpectFinite(recipe, run);
    EXPECT_EQ(run.stats.num_empty_samples, 3);
  }
}

TEST(Property, AStepWithoutGroupsOrSamplesGivesZeros) {
  for (const Recipe& recipe : AllRecipes()) {
    const auto objective = PolicyObjective::Create(recipe, {}, {}, Context());
    ASSERT_TRUE(objective.ok());
    EXPECT_EQ(objective->stats().num_samples, 0);
    EXPECT_TRUE(objective->UpdateOrdinals(0).empty());
    const std::vector<int64_t> offsets = {0};
    const auto result =
        objective->Evaluate(0, {.ordinals = {}, .offsets = offsets, .logp = {}, .values = {}, .entropy = {}});
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->loss, 0.0);
    EXPECT_EQ(Summarize(result->reports).mean_ratio, 1.0);
  }
}

TEST(Property, SingleSampleGroupsGiveZerosAndACounter) {
  for (const Recipe& recipe : AllRecipes()) {
    if (!recipe.is_group_relative()) continue;
    const RandomStep step = MakeRandomStep(22, {.num_groups = 5, .samples_per_group = 1});
    const StepRun run = Evaluate(recipe, step);
    ExpectFinite(recipe, run);
    if (recipe.loss->name != "dppo") ExpectNoGradient(recipe, run);  // its log²r term asks for no advantage
    EXPECT_EQ(run.stats.num_single_sample_groups, 5);
    EXPECT_EQ(run.stats.num_constant_groups, 5);
    EXPECT_EQ(run.stats.num_informative_groups, 0);
    EXPECT_EQ(run.stats.advantage_std, 0.0);
  }
}

TEST(Property, ZeroVarianceGroupsGiveZerosAndACounter) {
  for (const Recipe& recipe : AllRecipes()) {
    if (!recipe.is_group_relative()) continue;
    if (recipe.kl.place == KlPlace::kReward || recipe.overlong_cache_tokens > 0) continue;  // shaping tells them apart
    RandomStep step = MakeRandomStep(23);
    for (Group& group : step.groups) {
      for (Sample& sample : group.samples) sample.reward = 0.7;
    }
    const StepRun run = Evaluate(recipe, step);
    ExpectFinite(recipe, run);
    if (recipe.loss->name != "dppo") ExpectNoGradient(recipe, run);
    EXPECT_EQ(run.stats.num_constant_groups, 4);
    EXPECT_EQ(run.stats.advantage_std, 0.0);
  }
}

TEST(Property, EqualReturnsWhitenToZerosAndAFlag) {
  AlgorithmOptions options;
  options.name = "reinforce_pp";
  RandomStep step = MakeRandomStep(24);
  for (Group& group : step.groups) {
    for (Sample& sample : group.samples) sample.reward = 0.7;
  }
  const StepRun run = Evaluate(*MakeRecipe(options), step);
  EXPECT_TRUE(run.stats.is_whitening_degenerate);
  EXPECT_EQ(run.stats.advantage_std, 0.0);
}

TEST(Property, WhitenedAdvantagesHaveMeanZeroAndUnitVariance) {
  for (const char* name : {"ppo", "reinforce_pp", "reinforce_pp_baseline"}) {
    AlgorithmOptions options;
    options.name = name;
    const StepRun run = Evaluate(*MakeRecipe(options), MakeRandomStep(25));
    const double n = static_cast<double>(run.stats.num_tokens);
    EXPECT_NEAR(run.stats.advantage_mean, 0.0, 1e-12) << name;
    EXPECT_NEAR(run.stats.advantage_std * std::sqrt(n / (n - 1)), 1.0, 1e-5) << name;
    EXPECT_FALSE(run.stats.is_whitening_degenerate) << name;
  }
}

TEST(Property, ExtremeLogProbabilitiesStayFinite) {
  for (const Recipe& recipe : AllRecipes()) {
    RandomStep step = MakeRandomStep(26);
    for (size_t i = 0; i < step.num_samples(); ++i) {
      const size_t at = step.group_of(i).prompt.size();
      step.logp[i][at] = i % 2 == 0 ? -1e4f : -1e-30f;
      step.scores[i].old_logp[at] = i % 3 == 0 ? -1e4f : 0.0f;
      step.scores[i].ref_logp[at] = i % 5 == 0 ? -1e4f : 0.0f;
      step.groups[i / 4].samples[i % 4].run.logprobs[0] = i % 7 == 0 ? -1e4f : 0.0f;
    }
    ExpectFinite(recipe, Evaluate(recipe, step));
  }
}

TEST(Property, NonFiniteInputIsAnErrorThatNamesTheSample) {
  AlgorithmOptions options;
  options.name = "ppo";
  options.kl_coefficient = 0.1;
  options.num_epochs = 2;
  options.entropy_coefficient = 0.01;
  const Recipe recipe = *MakeRecipe(options);
  const RandomStep clean = MakeRandomStep(27);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const size_t first = clean.groups[2].prompt.size();  // of the completion of ordinal 9

  const auto create = [&](const RandomStep& step) {
    const absl::Status status = PolicyObjective::Create(recipe, step.groups, step.scores, Context(0.1)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("group 102 sample 1: "));
    return std::string(status.message());
  };
  RandomStep step = clean;
  step.groups[2].samples[1].reward = nan;
  EXPECT_THAT(create(step), HasSubstr("reward"));
  step = clean;
  step.groups[2].samples[1].run.logprobs[0] = nan;
  EXPECT_THAT(create(step), HasSubstr("log-probability"));
  step = clean;
  step.scores[9].old_logp[first] = nan;
  EXPECT_THAT(create(step), HasSubstr("old_logp"));
  step = clean;
  step.scores[9].ref_logp[first] = nan;
  EXPECT_THAT(create(step), HasSubstr("ref_logp"));
  step = clean;
  step.scores[9].values[first] = nan;
  EXPECT_THAT(create(step), HasSubstr("values"));
  step = clean;
  step.scores[9].values.pop_back();
  EXPECT_THAT(create(step), HasSubstr("expected"));
  step = clean;
  step.groups[2].samples[1].run.versions[0] = {1, 11};
  EXPECT_THAT(create(step), HasSubstr("newer than the trainer's 10"));

  const auto objective = PolicyObjective::Create(recipe, clean.groups, clean.scores, Context(0.1));
  ASSERT_TRUE(objective.ok());
  const auto evaluate = [&](const RandomStep& dirty) {
    const PackedBatch packed = dirty.Pack(objective->UpdateOrdinals(0));
    const absl::Status status = objective->Evaluate(0, packed.view()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("group 102 sample 1: "));
  };
  for (auto member : {&RandomStep::logp, &RandomStep::value, &RandomStep::entropy}) {
    step = clean;
    (step.*member)[9][first] = nan;
    evaluate(step);
  }
}

}  // namespace
}  // namespace moerl::rl
