#include "services/trainer/learner.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <numeric>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "libs/base/config.h"

namespace moerl::trainer {
namespace {

constexpr char kConfig[] = R"(
name: test
model:
  compute: fp32
  init: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 16,
         num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 32, max_position_embeddings: 64}
task: {name: reverse}
trainer: {num_threads: 1, learning_rate: 0.001, samples_per_prompt: 4, prompts_per_step: 3}
rollout: {sampling: {max_new_tokens: 8}}
)";

RunSettings Settings(const std::vector<std::string>& overrides) {
  v1::Config config;
  const absl::Status parsed = ParseConfig(kConfig, "test", overrides, config);
  EXPECT_TRUE(parsed.ok()) << parsed;
  auto settings = ResolveRunSettings(config);
  EXPECT_TRUE(settings.ok()) << settings.status();
  return *std::move(settings);
}

// Three groups of four samples; in each, one is rewarded.
StepJob SomeJob(const RunSettings& settings, int64_t step) {
  std::mt19937 random(static_cast<uint32_t>(step));
  StepJob job;
  job.step = step;
  job.version = {1, step - 1};
  for (uint64_t g = 0; g < 3; ++g) {
    rl::Group& group = job.groups.emplace_back();
    group.group_id = g;
    group.prompt = settings.prompts->Get(g)->token_ids;
    group.sampling = settings.sampling;
    for (uint32_t i = 0; i < 4; ++i) {
      rl::Sample& sample = group.samples.emplace_back();
      sample.group_id = g;
      sample.sample_index = i;
      const size_t length = 1 + random() % 8;
      for (size_t t = 0; t < length; ++t) {
        sample.run.ids.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(settings.model.vocab_size)));
        sample.run.logprobs.push_back(-3.0f);
        sample.run.versions.push_back(job.version);
        sample.run.trainable.push_back(1);
      }
      sample.reward = i == g ? 1.0 : 0.0;
    }
  }
  return job;
}

std::vector<float> AllWeights(const Learner& learner, const RunSettings& settings) {
  std::vector<float> all;
  const model::ParameterTable table(settings.model);
  for (const model::Parameter& parameter : table.parameters()) {
    const auto values = learner.policy().master(parameter.name);
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

class LearnerTest : public testing::TestWithParam<std::string> {
 protected:
  LearnerTest() : settings_(Settings({"algorithm.name=" + GetParam()})), ranks_(MakeSingleRank()) {}

  std::unique_ptr<Learner> Start() {
    auto learner = Learner::Create(settings_, *ranks_);
    EXPECT_TRUE(learner.ok()) << learner.status();
    EXPECT_TRUE((*learner)->BeginReinforcement().ok());
    return *std::move(learner);
  }

  void Train(Learner& learner, int64_t step) {
    const auto report = learner.TrainStep(SomeJob(settings_, step));
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_FALSE(report->is_skipped) << report->skipped_because;
  }

  RunSettings settings_;
  std::unique_ptr<RankGroup> ranks_;
};

TEST_P(LearnerTest, GoesOnFromSavedStateToTheSameBits) {
  const std::string directory = testing::TempDir() + "/learner-" + std::to_string(getpid());
  std::filesystem::create_directories(directory);
  auto undisturbed = Start();
  Train(*undisturbed, 1);
  ASSERT_TRUE(undisturbed->SaveState(directory).ok());
  Train(*undisturbed, 2);

  auto resumed = Learner::Create(settings_, *ranks_);
  ASSERT_TRUE(resumed.ok());
  ASSERT_TRUE((*resumed)->RestoreState(directory, 1).ok());
  Train(**resumed, 2);
  EXPECT_EQ(AllWeights(*undisturbed, settings_), AllWeights(**resumed, settings_));
  std::filesystem::remove_all(directory);
}

TEST_P(LearnerTest, GivesNearlyTheSameWeightsInSmallerMicroBatches) {
  auto whole = Start();
  Train(*whole, 1);
  settings_ = Settings({"algorithm.name=" + GetParam(), "trainer.micro_batch_tokens=32"});
  auto parts = Start();
  Train(*parts, 1);
  const std::vector<float> a = AllWeights(*whole, settings_);
  const std::vector<float> b = AllWeights(*parts, settings_);
  // Adam's first step is the learning rate times the sign of a gradient: where one is rounding only, signs may differ.
  int64_t num_different = 0;
  for (size_t i = 0; i < a.size(); ++i) num_different += std::abs(a[i] - b[i]) > 1e-4f;
  EXPECT_LT(num_different, static_cast<int64_t>(a.size() / 1000));
}

INSTANTIATE_TEST_SUITE_P(Algorithms, LearnerTest, testing::Values("grpo", "ppo", "gspo"));

TEST(Learner, ReportsWhereTrainerAndRolloutDisagree) {
  const RunSettings settings = Settings({});
  const auto ranks = MakeSingleRank();
  auto learner = Learner::Create(settings, *ranks);
  ASSERT_TRUE(learner.ok());
  ASSERT_TRUE((*learner)->BeginReinforcement().ok());
  const auto report = (*learner)->TrainStep(SomeJob(settings, 1));
  ASSERT_TRUE(report.ok());
  ASSERT_TRUE(report->mismatch.has_value());
  EXPECT_EQ(report->mismatch->ordinal, 0);
  EXPECT_EQ(report->mismatch->token, 0);
  EXPECT_EQ(report->mismatch->rollout_logprob, -3.0);
  EXPECT_GT(report->first.max_abs_mismatch, 0.0);
  EXPECT_EQ(report->trained.size(), 3u);
  EXPECT_EQ(report->trained[0].num_samples, 4);
}

// Sets a sample to `length` tokens of version `job.version`.
void Resize(StepJob& job, size_t ordinal, size_t length) {
  rl::TokenRun& run = job.groups[ordinal / 4].samples[ordinal % 4].run;
  run.ids.resize(length, 5);
  run.logprobs.resize(length, -3.0f);
  run.versions.resize(length, job.version);
  run.trainable.resize(length, 1);
}

// The micro-batch of each ordinal, on one rank.
std::map<int64_t, size_t> PlacesInMicroBatches(const StepBatch& batch, int64_t micro_batch_tokens) {
  std::vector<int64_t> ordinals(static_cast<size_t>(batch.num_samples()));
  std::iota(ordinals.begin(), ordinals.end(), 0);
  const auto packing = rl::PackSamples(ordinals, batch.Lengths(ordinals), micro_batch_tokens, 1);
  EXPECT_TRUE(packing.ok()) << packing.status();
  std::map<int64_t, size_t> places;
  for (size_t i = 0; i < packing->ranks[0].size(); ++i) {
    for (const int64_t ordinal : packing->ranks[0][i]) places[ordinal] = i;
  }
  return places;
}

// Samples 5 and 9 differ; `length_5` and `length_9` say which of them is computed first (longer ones are). The report
// must name sample 5, token 2, in either order.
void ExpectFirstDifferenceNamed(size_t length_5, size_t length_9) {
  const RunSettings settings = Settings({"trainer.micro_batch_tokens=24"});
  const auto ranks = MakeSingleRank();
  auto learner = Learner::Create(settings, *ranks);
  ASSERT_TRUE(learner.ok()) << learner.status();
  ASSERT_TRUE((*learner)->BeginReinforcement().ok());
  StepJob job = SomeJob(settings, 1);
  Resize(job, 5, length_5);
  Resize(job, 9, length_9);
  const StepBatch batch(job, settings.model, false);
  const std::map<int64_t, size_t> places = PlacesInMicroBatches(batch, 24);
  ASSERT_EQ(places.at(9) < places.at(5), length_9 > length_5);
  ASSERT_NE(places.at(9), places.at(5));
  for (int64_t ordinal = 0; ordinal < batch.num_samples(); ++ordinal) {
    const auto scored =
        model::Score(*(*learner)->policy().weights(), batch.Pack(std::vector<int64_t>{ordinal}), {.num_threads = 1});
    ASSERT_TRUE(scored.ok()) << scored.status();
    std::vector<float>& logprobs =
        job.groups[static_cast<size_t>(ordinal / 4)].samples[static_cast<size_t>(ordinal % 4)].run.logprobs;
    std::copy(scored->logprobs.end() - static_cast<int64_t>(logprobs.size()), scored->logprobs.end(), logprobs.begin());
  }
  StepJob disagreeing = job;
  disagreeing.groups[1].samples[1].run.logprobs[2] -= 0.25f;
  disagreeing.groups[1].samples[1].run.logprobs[3] -= 1.0f;
  disagreeing.groups[2].samples[1].run.logprobs[0] -= 2.0f;
  const auto report = (*learner)->TrainStep(disagreeing);
  ASSERT_TRUE(report.ok()) << report.status();
  ASSERT_TRUE(report->mismatch.has_value());
  EXPECT_EQ(report->mismatch->ordinal, 5);
  EXPECT_EQ(report->mismatch->token, 2);
  EXPECT_EQ(report->mismatch->trainer_logprob, job.groups[1].samples[1].run.logprobs[2]);
  EXPECT_EQ(report->mismatch->rollout_logprob, disagreeing.groups[1].samples[1].run.logprobs[2]);
  EXPECT_EQ(report->mismatch_trace.tokens.size(), job.groups[1].prompt.size() + 3);

  // Without the edits nothing differs: a fresh learner has the weights that were scored.
  auto agreeing = Learner::Create(settings, *ranks);
  ASSERT_TRUE(agreeing.ok()) << agreeing.status();
  ASSERT_TRUE((*agreeing)->BeginReinforcement().ok());
  const auto clean = (*agreeing)->TrainStep(job);
  ASSERT_TRUE(clean.ok()) << clean.status();
  EXPECT_FALSE(clean->mismatch.has_value());
  EXPECT_EQ(clean->first.max_abs_mismatch, 0.0);
}

TEST(Learner, NamesTheFirstTokenThatDiffersWhenALaterSampleIsComputedFirst) { ExpectFirstDifferenceNamed(5, 8); }

TEST(Learner, NamesTheFirstTokenThatDiffersWhenALaterSampleIsComputedLast) { ExpectFirstDifferenceNamed(8, 1); }

TEST(Learner, KeepsTheWeightsWhenAllRewardsAreEqual) {
  const RunSettings settings = Settings({"algorithm.aux_loss_coefficient=0"});
  const auto ranks = MakeSingleRank();
  auto learner = Learner::Create(settings, *ranks);
  ASSERT_TRUE(learner.ok());
  const std::vector<float> before = AllWeights(**learner, settings);
  StepJob job = SomeJob(settings, 1);
  for (rl::Group& group : job.groups) {
    for (rl::Sample& sample : group.samples) sample.reward = 1.0;
  }
  const auto report = (*learner)->TrainStep(job);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->stats.num_informative_groups, 0);
  EXPECT_EQ(AllWeights(**learner, settings), before);
}

TEST(Learner, MovesRouterBiasesByTheRateAndResumesToTheSameBits) {
  const RunSettings settings =
      Settings({"model.init.architecture=glm4_moe", "algorithm.router_bias_update_rate=0.125"});
  const auto ranks = MakeSingleRank();
  auto learner = Learner::Create(settings, *ranks);
  ASSERT_TRUE(learner.ok()) << learner.status();
  ASSERT_TRUE((*learner)->BeginReinforcement().ok());
  ASSERT_TRUE((*learner)->TrainStep(SomeJob(settings, 1)).ok());
  const auto bias = (*learner)->policy().master("model.layers.1.mlp.gate.e_score_correction_bias");
  ASSERT_EQ(bias.size(), 4u);
  int num_moved = 0;
  for (const float b : bias) {
    EXPECT_TRUE(b == 0.125f || b == -0.125f || b == 0.0f) << b;
    num_moved += b != 0.0f;
  }
  EXPECT_GT(num_moved, 0);

  const std::string directory = testing::TempDir() + "/learner-bias-" + std::to_string(getpid());
  std::filesystem::create_directories(directory);
  ASSERT_TRUE((*learner)->SaveState(directory).ok());
  ASSERT_TRUE((*learner)->TrainStep(SomeJob(settings, 2)).ok());
  auto resumed = Learner::Create(settings, *ranks);
  ASSERT_TRUE(resumed.ok());
  ASSERT_TRUE((*resumed)->RestoreState(directory, 1).ok());
  ASSERT_TRUE((*resumed)->TrainStep(SomeJob(settings, 2)).ok());
  EXPECT_EQ(AllWeights(**learner, settings), AllWeights(**resumed, settings));
  std::filesystem::remove_all(directory);
}

TEST(RunSettings, RefusesToMoveABiasThatTheModelLacks) {
  v1::Config config;
  ASSERT_TRUE(ParseConfig(kConfig, "test", {"algorithm.router_bias_update_rate=0.001"}, config).ok());
  const auto settings = ResolveRunSettings(config);
  ASSERT_FALSE(settings.ok());
  EXPECT_THAT(std::string(settings.status().message()), testing::HasSubstr("qwen3_moe has no router bias"));
}

// Two sequences, of three tokens and of two.
TEST(MicroBatch, ValuesATokenByTheStateBeforeIt) {
  const std::vector<int64_t> offsets = {0, 3, 5};
  EXPECT_THAT(ValuesBeforeTokens({1, 2, 3, 4, 5}, offsets), testing::ElementsAre(0, 1, 2, 0, 4));
  EXPECT_THAT(GradientsOfHead({9, 1, 2, 9, 3}, offsets), testing::ElementsAre(1, 2, 0, 3, 0));
}

TEST(RunSettings, WarmsUpAndDecaysTheLearningRate) {
  const RunSettings settings = Settings({"trainer.num_steps=110", "trainer.warmup_steps=10", "trainer.schedule=cosine",
                                         "trainer.min_learning_rate=0.0001"});
  EXPECT_NEAR(settings.LearningRate(1), 0.0001, 1e-9);
  EXPECT_NEAR(settings.LearningRate(10), 0.001, 1e-9);
  EXPECT_NEAR(settings.LearningRate(60), 0.00055, 1e-9);
  EXPECT_NEAR(settings.LearningRate(110), 0.0001, 1e-9);
}

}  // namespace
}  // namespace moerl::trainer
