// What users of other systems have hit, one test a symptom.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "libs/rl/advantage_gae.h"
#include "libs/rl/advantage_group.h"
#include "libs/rl/dynamic_sampling.h"
#include "libs/rl/environment.h"
#include "libs/rl/objective.h"
#include "libs/rl/routing_replay.h"
#include "libs/rl/transcript.h"
#include "tests/unit/rl/step_builder.h"

namespace moerl::rl {
namespace {

using testing::Each;
using testing::HasSubstr;

Recipe RecipeOf(const AlgorithmOptions& options) {
  absl::StatusOr<Recipe> recipe = MakeRecipe(options);
  EXPECT_TRUE(recipe.ok()) << recipe.status();
  return *std::move(recipe);
}

Recipe Grpo() { return RecipeOf({}); }

// A step whose rollout ran the very same weights as the trainer: every log-probability equal.
RandomStep OnPolicyStep(uint32_t seed) {
  RandomStep step = MakeRandomStep(seed);
  size_t i = 0;
  for (Group& group : step.groups) {
    for (Sample& sample : group.samples) {
      for (size_t t = 0; t < sample.run.size(); ++t) {
        sample.run.logprobs[t] = step.logp[i][group.prompt.size() + t];
        sample.run.versions[t] = {1, 10};
      }
      step.scores[i].old_logp = step.logp[i];
      ++i;
    }
  }
  return step;
}

UpdateSummary SummaryOf(const Recipe& recipe, const RandomStep& step) {
  const auto objective = PolicyObjective::Create(recipe, step.groups, step.scores, Context(recipe.kl.coefficient));
  EXPECT_TRUE(objective.ok()) << objective.status();
  const PackedBatch packed = step.Pack(objective->UpdateOrdinals(0));
  const auto result = objective->Evaluate(0, packed.view());
  EXPECT_TRUE(result.ok()) << result.status();
  return Summarize(result->reports);
}

void ExpectRefused(const absl::Status& status, const std::string& words) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(words));
}

TEST(Symptom, RolloutAndTrainerLogProbabilitiesDifferAndNobodyNotices) {
  RandomStep step = OnPolicyStep(1);
  const UpdateSummary equal = SummaryOf(Grpo(), step);
  EXPECT_EQ(equal.mismatch_tokens, equal.num_tokens);
  EXPECT_EQ(equal.max_abs_mismatch, 0.0);
  EXPECT_EQ(equal.mismatch_kl, 0.0);
  EXPECT_EQ(equal.effective_sample_fraction, 1.0);

  step.groups[2].samples[1].run.logprobs[0] -= 0.25f;  // one token of one sample; the first is always trainable
  const UpdateSummary different = SummaryOf(Grpo(), step);
  EXPECT_NEAR(different.max_abs_mismatch, 0.25, 1e-6);
  EXPECT_NEAR(different.mean_abs_mismatch * static_cast<double>(different.mismatch_tokens), 0.25, 1e-6);
  EXPECT_NEAR(different.mismatch_kl * static_cast<double>(different.mismatch_tokens), std::exp(0.25) - 1 - 0.25, 1e-6);
}

TEST(Symptom, WrongTemperatureMakesRatiosTwoAtTemperatureSixTenths) {
  RandomStep step = OnPolicyStep(2);
  for (Group& group : step.groups) group.sampling.temperature = 0.6;
  StepContext context = Context();
  ExpectRefused(PolicyObjective::Create(Grpo(), step.groups, {}, context).status(),
                "sampled at temperature 0.6, the trainer computes at 1");
  context.trainer_temperature = 0.6;
  EXPECT_TRUE(PolicyObjective::Create(Grpo(), step.groups, {}, context).ok());
}

TEST(Symptom, TopPWithoutKeptIdsBiasesTheTrainer) {
  RandomStep step = OnPolicyStep(3);
  step.groups[1].sampling.top_p = 0.9;
  ExpectRefused(PolicyObjective::Create(Grpo(), step.groups, {}, Context()).status(), "without the kept ids");
  for (Sample& sample : step.groups[1].samples) {
    sample.run.kept_counts.assign(sample.run.size(), 1);
    sample.run.kept_ids = sample.run.ids;
  }
  ExpectRefused(PolicyObjective::Create(Grpo(), step.groups, {}, Context()).status(),
                "which the trainer does not renormalise");
  StepContext context = Context();
  context.renormalises_kept_ids = true;
  EXPECT_TRUE(PolicyObjective::Create(Grpo(), step.groups, {}, context).ok());
}

constexpr RouteShape Routes(int64_t num_tokens) { return {num_tokens, 2, 2, 8}; }

TEST(Symptom, RoutesAreConcatenatedTwiceAfterAPartialRolloutResumes) {
  const std::string prefix = {0, 1, 2, 3, 4, 5, 6, 7};        // two tokens
  const std::string full = prefix + std::string{1, 2, 3, 4};  // and a third
  std::string kept = prefix;
  ASSERT_TRUE(ReplaceRoutes(Routes(3), full, kept).ok());
  EXPECT_EQ(kept, full);
  ExpectRefused(ReplaceRoutes(Routes(3), full.substr(8), kept),
                "4 bytes, expected 12 (3 tokens x 2 layers x 2 experts");
  ExpectRefused(ReplaceRoutes(Routes(3), prefix + full, kept), "20 bytes, expected 12");
  std::string other = full;
  std::swap(other[0], other[1]);
  ExpectRefused(ReplaceRoutes(Routes(3), other, kept), "do not begin with the 12 bytes kept before");
  EXPECT_EQ(kept, full);
}

TEST(Symptom, ReplayedRoutesGiveZeroGradientOrAWrongSlice) {
  // Not the chosen experts' probabilities scattered into zeros: the dense logits, gathered, with a gradient.
  const std::vector<double> logits = {0.1, 2.0, -1.0, 0.4};
  const std::vector<int32_t> selected = {2, 0};
  std::vector<double> weights(2), grad(4, 0.0);
  ReplayWeights(logits, selected, weights);
  EXPECT_NEAR(weights[0] + weights[1], 1.0, 1e-15);
  EXPECT_NEAR(weights[1] / weights[0], std::exp(1.1), 1e-12);
  ReplayWeightsBackward(weights, selected, std::vector<double>{1.0, 0.0}, grad);
  EXPECT_GT(std::abs(grad[2]), 0.1);
  // And a payload that is not tokens × layers × k, names an unknown expert, or one twice, is no payload.
  ExpectRefused(CheckRoutes(Routes(2), std::string(7, '\0')), "7 bytes, expected 8");
  ExpectRefused(CheckRoutes(Routes(2), std::string{0, 1, 2, 3, 4, 5, 6, 8}),
                "token 1 layer 1 names expert 8, there are 8");
  ExpectRefused(CheckRoutes(Routes(2), std::string{0, 1, 2, 2, 4, 5, 6, 7}), "token 0 layer 1 names expert 2 twice");
  // Beyond 256 experts an id has two bytes.
  const RouteShape wide{1, 1, 2, 300};
  EXPECT_TRUE(CheckRoutes(wide, std::string{'\x2b', '\x01', '\x00', '\x01'}).ok());
  ExpectRefused(CheckRoutes(wide, std::string{'\x2c', '\x01', '\x00', '\x01'}), "names expert 300, there are 300");
}

TEST(Symptom, StalePrefixCacheAfterAWeightSyncLooksLikeStaleTokens) {
  // A rollout that says "version 10" but computed with older weights shows as mismatch; one that says "version 8" does
  // not.
  RandomStep step = OnPolicyStep(4);
  Sample& sample = step.groups[0].samples[0];
  sample.run.logprobs[0] -= 0.87f;
  EXPECT_NEAR(SummaryOf(Grpo(), step).max_abs_mismatch, 0.87, 1e-6);
  sample.run.versions[0] = {1, 8};
  const UpdateSummary honest = SummaryOf(Grpo(), step);
  EXPECT_EQ(honest.max_abs_mismatch, 0.0);
  EXPECT_EQ(honest.mismatch_tokens, honest.num_tokens - 1);
  EXPECT_EQ(honest.staleness[2], 1);
  EXPECT_EQ(honest.staleness[0], honest.num_tokens - 1);
  // The same number from before a fork is another version.
  sample.run.versions[0] = {0, 10};
  EXPECT_EQ(SummaryOf(Grpo(), step).mismatch_tokens, honest.num_tokens - 1);
}

TEST(Symptom, GenerationFailureBecomesAZeroReward) {
  RandomStep step = OnPolicyStep(5);
  step.groups[1].samples[2].reward.reset();
  step.groups[1].samples[2].failure = "verifier timeout";
  ExpectRefused(PolicyObjective::Create(Grpo(), step.groups, {}, Context()).status(),
                "group 101 sample 2: has no reward (verifier timeout); drop the whole group");
  const OutcomeLimits limits{.reward_min = 0.0, .reward_max = 1.0, .vocab_size = 10};
  for (double reward : {-0.1, 1.1, std::nan(""), std::numeric_limits<double>::infinity()}) {
    const StepOutcome outcome = CheckOutcome(Judgement{{}, reward, true}, limits);
    ASSERT_TRUE(std::holds_alternative<Failure>(outcome)) << reward;
    EXPECT_EQ(std::get<Failure>(outcome).reason, FailureReason::kRewardOutOfRange);
  }
  EXPECT_EQ(std::get<Failure>(CheckOutcome(Judgement{{3, 10}, 0.5, false}, limits)).reason,
            FailureReason::kBadObservation);
  EXPECT_TRUE(std::holds_alternative<Judgement>(CheckOutcome(Judgement{{3, 9}, 0.5, false}, limits)));
}

TEST(Symptom, PaddingCountsAsResponseWhenThereIsNoEndOfSequence) {
  // All tokens are the padding id, which is the end-of-sequence id too: only lengths can tell.
  EXPECT_THAT(TrainableFromLengths(3, 5), testing::ElementsAre(1, 1, 1, 0, 0));
  EXPECT_THAT(TrainableFromLengths(0, 2), testing::ElementsAre(0, 0));
  RandomStep step = OnPolicyStep(6);
  RandomStep same_ids = step;
  for (Group& group : same_ids.groups) {
    for (Sample& sample : group.samples) sample.run.ids.assign(sample.run.size(), 0);
  }
  EXPECT_EQ(SummaryOf(Grpo(), step).num_tokens, SummaryOf(Grpo(), same_ids).num_tokens);
  EXPECT_EQ(SummaryOf(Grpo(), step).loss, SummaryOf(Grpo(), same_ids).loss);
}

TEST(Symptom, MaskedSamplesLeaveTheNumeratorButNotTheDenominator) {
  for (std::string_view mode : {"token_mean", "seq_mean_token_mean", "seq_mean_token_sum"}) {
    AlgorithmOptions options;
    options.aggregation = *ParseAggregation(mode);
    const RandomStep step = MakeRandomStep(7);
    RandomStep masked = step;  // one sample of the last group masked whole, as for truncated ones
    std::vector<uint8_t>& trainable = masked.groups[3].samples[0].run.trainable;
    std::fill(trainable.begin(), trainable.end(), 0);

    // The loss with the sample masked is the one computed over the other samples alone with counts of the others alone.
    const auto objective = PolicyObjective::Create(RecipeOf(options), masked.groups, masked.scores, Context());
    ASSERT_TRUE(objective.ok());
    const UpdateCounts& counts = objective->update_counts(0);
    EXPECT_EQ(counts.num_sequences, 15);
    const PackedBatch packed = masked.Pack(objective->UpdateOrdinals(0));
    const auto result = objective->Evaluate(0, packed.view());
    ASSERT_TRUE(result.ok());
    int64_t tokens = 0;
    double sum = 0.0;
    for (const SampleReport& report : result->reports) {
      tokens += report.num_tokens;
      if (report.ordinal == 12) {
        EXPECT_EQ(report.policy_loss, 0.0);
        EXPECT_EQ(report.num_tokens, 0);
      }
      sum += report.policy_loss;
    }
    EXPECT_EQ(tokens, counts.num_tokens);
    EXPECT_NE(sum, 0.0);
  }
}

TEST(Symptom, PerRankTokenMeanBiasesTheGradient) {
  // One long sample on one rank, many short ones on the other: every token weighs the same all the same.
  RandomStep step = MakeRandomStep(8, {.num_groups = 2, .samples_per_group = 2, .has_masked_tokens = false});
  const auto objective = PolicyObjective::Create(Grpo(), step.groups, step.scores, Context());
  ASSERT_TRUE(objective.ok());
  double sum = 0.0;
  for (int64_t ordinal = 0; ordinal < 4; ++ordinal) {
    const PackedBatch packed = step.Pack(std::vector<int64_t>{ordinal});
    const auto result = objective->Evaluate(0, packed.view());
    ASSERT_TRUE(result.ok());
    sum += result->loss;
  }
  const PackedBatch packed = step.Pack(objective->UpdateOrdinals(0));
  EXPECT_NEAR(objective->Evaluate(0, packed.view())->loss, sum, 1e-12);
}

TEST(Symptom, KlStillPullsInAGroupThatTeachesNothing) {
  AlgorithmOptions options;
  options.kl_coefficient = 0.1;
  RandomStep step = MakeRandomStep(9);
  for (Sample& sample : step.groups[1].samples) sample.reward = 0.5;
  const Recipe recipe = RecipeOf(options);
  const auto objective = PolicyObjective::Create(recipe, step.groups, step.scores, Context(0.1));
  ASSERT_TRUE(objective.ok());
  EXPECT_EQ(objective->stats().num_constant_groups, 1);
  const auto gradient_of = [&](std::vector<int64_t> ordinals) {
    const PackedBatch packed = step.Pack(ordinals);
    return objective->Evaluate(0, packed.view())->grad_logp;
  };
  EXPECT_THAT(gradient_of({4, 5, 6, 7}), Each(0.0f));
  EXPECT_THAT(gradient_of({0, 1, 2, 3}), testing::Contains(testing::Ne(0.0f)));
}

TEST(Symptom, RoundingResidueOfEqualRewardsIsBlownUpFourThousandTimes) {
  const double tenth = 0.1f, thirds = 0.1f + 0.2f, sum = 0.3f;
  EXPECT_THAT(GrpoAdvantages(std::vector<double>{tenth, 0.1, tenth, 0.1}, 1e-6), Each(0.0));
  EXPECT_THAT(GrpoAdvantages(std::vector<double>{thirds, sum, 0.3}, 1e-6), Each(0.0));
  // A large common offset does not swallow the differences: two passes.
  const std::vector<double> far = GrpoAdvantages(std::vector<double>{1e6 + 1, 1e6, 1e6 + 1, 1e6 + 2}, 0.0);
  const std::vector<double> near = GrpoAdvantages(std::vector<double>{1, 0, 1, 2}, 0.0);
  EXPECT_THAT(far, testing::Pointwise(testing::DoubleNear(1e-9), near));
}

TEST(Symptom, DynamicSamplingCrashesWhenTooManyGroupsAreConstant) {
  const DynamicSamplingConfig config{.enabled = true, .max_refill = 2.0};
  const std::vector<double> constant = {0, 0, 0}, informative = {0, 1, 0};
  int64_t dropped = 0, kept = 0, kept_at_bound = 0;
  for (int groups = 0; kept < 8; ++groups) {
    ASSERT_LT(groups, 100);  // it ends
    const GroupVerdict verdict = JudgeGroup(config, constant, 8, dropped);
    dropped += verdict == GroupVerdict::kDropAndRefill;
    kept_at_bound += verdict == GroupVerdict::kKeepAtBound;
    kept += verdict != GroupVerdict::kDropAndRefill;
  }
  EXPECT_EQ(dropped, 16);
  EXPECT_EQ(kept_at_bound, 8);
  EXPECT_EQ(JudgeGroup(config, informative, 8, 16), GroupVerdict::kKeep);
  EXPECT_EQ(JudgeGroup({}, constant, 8, 0), GroupVerdict::kKeep);
}

TEST(Symptom, MaskedCriticValuesLeakIntoGae) {
  const std::vector<double> rewards = {0, 0, 5, 0, 1};
  std::vector<double> values = {0.2, 0.3, 99.0, 0.4, 0.5};
  const std::vector<uint8_t> trainable = {1, 1, 0, 1, 1};
  std::vector<double> advantages(5), returns(5), other_advantages(5), other_returns(5);
  GaeAdvantages(0.99, 0.95, rewards, values, trainable, advantages, returns);
  values[2] = std::nan("");
  GaeAdvantages(0.99, 0.95, rewards, values, trainable, other_advantages, other_returns);
  EXPECT_EQ(advantages, other_advantages);
  EXPECT_EQ(returns, other_returns);
  EXPECT_EQ(advantages[2], 0.0);
}

TEST(Symptom, RewardLandsOnAMaskedTailToken) {
  AlgorithmOptions options;
  options.name = "ppo";
  RandomStep step = MakeRandomStep(10, {.num_groups = 1, .samples_per_group = 1, .has_masked_tokens = false});
  Sample& sample = step.groups[0].samples[0];
  for (auto* array : {&sample.run.logprobs}) array->assign(4, -0.5f);
  sample.run.ids.assign(4, 1);
  sample.run.versions.assign(4, {1, 10});
  sample.run.trainable = {1, 1, 1, 0};  // the environment had the last word
  sample.reward = 1.0;
  const size_t length = step.groups[0].prompt.size() + 4;
  step.scores[0].old_logp.assign(length, -0.5f);
  step.scores[0].ref_logp.assign(length, -0.5f);
  step.scores[0].values.assign(length, 0.25f);
  const auto objective = PolicyObjective::Create(RecipeOf(options), step.groups, step.scores, Context());
  ASSERT_TRUE(objective.ok()) << objective.status();
  EXPECT_THAT(objective->returns(0), testing::ElementsAre(1.0, 1.0, 1.0, 0.0));
}

TEST(Symptom, TextRoundTripChangesTokensInASecondTurn) {
  Transcript transcript(std::vector<int32_t>{5, 6});
  transcript.AppendAction(std::vector<int32_t>{10, 11}, false);
  transcript.AppendObservation(std::vector<int32_t>{20});
  // The answer comes back as a whole sequence; "10 11" was decoded and encoded to "12".
  const absl::Status changed = transcript.AppendActionFromFull(std::vector<int32_t>{5, 6, 12, 20, 30}, false);
  ExpectRefused(changed, "token 2 of 5 was 10, the answer has 12; a sequence only grows");
  ExpectRefused(transcript.AppendActionFromFull(std::vector<int32_t>{5, 6, 10}, false),
                "token 3 of 5 was 11, the answer ends there");
  EXPECT_EQ(transcript.turns().size(), 3u);
  ASSERT_TRUE(transcript.AppendActionFromFull(std::vector<int32_t>{5, 6, 10, 11, 20, 30}, true).ok());
  EXPECT_THAT(transcript.tokens(), testing::ElementsAre(5, 6, 10, 11, 20, 30));
  EXPECT_THAT(transcript.trainable(), testing::ElementsAre(0, 0, 1, 1, 0, 1));
  EXPECT_TRUE(transcript.turns().back().is_truncated);
}

TEST(Symptom, PackedSamplesLeakIntoEachOther) {
  RandomStep step = MakeRandomStep(11);
  const auto objective = PolicyObjective::Create(Grpo(), step.groups, step.scores, Context());
  ASSERT_TRUE(objective.ok());
  const PackedBatch alone = step.Pack(std::vector<int64_t>{3});
  const auto expected = objective->Evaluate(0, alone.view());
  // Its neighbours change: nothing of it does.
  for (float shift : {0.0f, -1.5f}) {
    for (size_t i : {2u, 4u}) {
      for (float& logp : step.logp[i]) logp += shift;
    }
    const PackedBatch packed = step.Pack(std::vector<int64_t>{2, 3, 4});
    const auto result = objective->Evaluate(0, packed.view());
    ASSERT_TRUE(result.ok());
    EXPECT_EQ(result->reports[1].policy_loss, expected->reports[0].policy_loss);
    for (size_t t = 0; t < alone.logp.size(); ++t) {
      EXPECT_EQ(result->grad_logp[static_cast<size_t>(packed.offsets[1]) + t], expected->grad_logp[t]);
    }
  }
  // Offsets that do not fit the samples are refused, not read.
  PackedBatch shifted = step.Pack(std::vector<int64_t>{2, 3});
  ++shifted.offsets[1];
  EXPECT_EQ(objective->Evaluate(0, shifted.view()).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Symptom, SuddenNanSpreadsToTheWeights) {
  RandomStep step = MakeRandomStep(12);
  const auto objective = PolicyObjective::Create(Grpo(), step.groups, step.scores, Context());
  ASSERT_TRUE(objective.ok());
  for (float bad : {std::nanf(""), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    PackedBatch packed = step.Pack(objective->UpdateOrdinals(0));
    packed.logp[static_cast<size_t>(packed.offsets[6]) + step.groups[1].prompt.size()] = bad;
    ExpectRefused(objective->Evaluate(0, packed.view()).status(), "group 101 sample 2: log-probability is ");
  }
}

TEST(Symptom, SamplesAreCountedToTheWrongGroup) {
  RandomStep step = MakeRandomStep(13);
  std::swap(step.groups[0].samples[1], step.groups[2].samples[1]);
  ExpectRefused(PolicyObjective::Create(Grpo(), step.groups, {}, Context()).status(),
                "group 102 sample 1: found in group 100");
  step = MakeRandomStep(13);
  step.groups[0].samples[1] = step.groups[0].samples[2];
  ExpectRefused(PolicyObjective::Create(Grpo(), step.groups, {}, Context()).status(),
                "group 100 sample 2: index repeats");
  step = MakeRandomStep(13);
  step.groups[3] = step.groups[1];
  ExpectRefused(PolicyObjective::Create(Grpo(), step.groups, {}, Context()).status(), "group 101: twice in one step");
}

TEST(Symptom, ARunThatCannotLearnGoesOnSilently) {
  DeadStartWatch watch(3);
  EXPECT_FALSE(watch.AddStep(0));
  EXPECT_FALSE(watch.AddStep(0));
  EXPECT_TRUE(watch.AddStep(0));
  EXPECT_FALSE(watch.AddStep(0));  // said once
  EXPECT_FALSE(watch.AddStep(1));
  EXPECT_FALSE(watch.AddStep(0));
  EXPECT_FALSE(watch.AddStep(0));
  EXPECT_TRUE(watch.AddStep(0));
}

}  // namespace
}  // namespace moerl::rl
