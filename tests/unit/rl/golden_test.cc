// Every value of tests/golden/rl_formulas.json, to 1e-6. Its numbers come from an independent implementation.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "libs/rl/advantage_gae.h"
#include "libs/rl/advantage_group.h"
#include "libs/rl/aggregation.h"
#include "libs/rl/kl.h"
#include "libs/rl/loss.h"
#include "libs/rl/loss_value.h"
#include "libs/rl/off_policy.h"
#include "libs/rl/overlong.h"
#include "libs/rl/routing_replay.h"

namespace moerl::rl {
namespace {

constexpr double kTolerance = 1e-6;
using Rows = std::vector<std::vector<double>>;

const nlohmann::json& Golden() {
  static const nlohmann::json golden = [] {
    std::ifstream file(std::string(MOERL_SOURCE_DIR) + "/tests/golden/rl_formulas.json");
    return nlohmann::json::parse(file);
  }();
  return golden;
}

Rows Input(const char* name) { return Golden()["inputs"][name].get<Rows>(); }

std::vector<std::vector<uint8_t>> Mask() { return Golden()["inputs"]["mask"].get<std::vector<std::vector<uint8_t>>>(); }

constexpr double kLengthNorm = 5.0;

// Aggregates per-token losses of the three sequences as the objective does.
double Aggregate(const Rows& losses, Aggregation aggregation) {
  const auto mask = Mask();
  std::vector<int64_t> lengths;
  for (const auto& row : mask) lengths.push_back(std::count(row.begin(), row.end(), 1));
  const UpdateCounts counts = CountUpdate(lengths);
  double sum = 0.0;
  for (size_t i = 0; i < losses.size(); ++i) {
    for (size_t t = 0; t < losses[i].size(); ++t) {
      if (mask[i][t]) sum += TokenWeight(aggregation, counts, lengths[i], kLengthNorm) * losses[i][t];
    }
  }
  return sum;
}

Rows Losses(const char* name, const PolicyLossConfig& config, const Rows* weights = nullptr) {
  const PolicyLoss* loss = FindPolicyLoss(name);
  EXPECT_NE(loss, nullptr);
  EXPECT_TRUE(loss->validate(config).ok()) << loss->validate(config);
  const Rows logp = Input("new"), old_logp = Input("old");
  const auto mask = Mask();
  const auto advantage = Golden()["inputs"]["adv"].get<std::vector<double>>();
  Rows losses;
  for (size_t i = 0; i < logp.size(); ++i) {
    const std::vector<double> advantages(logp[i].size(), advantage[i]);
    std::vector<double> row(logp[i].size()), grad(logp[i].size());
    SequenceLoss out{row, grad};
    loss->compute(config, {logp[i], old_logp[i], advantages, mask[i]}, out);
    for (size_t t = 0; weights != nullptr && t < row.size(); ++t) row[t] *= (*weights)[i][t];
    losses.push_back(row);
  }
  return losses;
}

Rows Weights(OffPolicyCorrection correction, double cap, double low) {
  const Rows old_logp = Input("old"), rollout = Input("rollout");
  const auto mask = Mask();
  Rows weights;
  for (size_t i = 0; i < mask.size(); ++i) {
    std::vector<double> row(mask[i].size());
    CorrectionWeights({correction, cap, low}, old_logp[i], rollout[i], mask[i], row);
    weights.push_back(row);
  }
  return weights;
}

void ExpectAllModes(const Rows& losses, const nlohmann::json& expected) {
  EXPECT_NEAR(Aggregate(losses, Aggregation::kTokenMean), expected["token-mean"], kTolerance);
  EXPECT_NEAR(Aggregate(losses, Aggregation::kSeqMeanTokenMean), expected["seq-mean-token-mean"], kTolerance);
  EXPECT_NEAR(Aggregate(losses, Aggregation::kSeqMeanTokenSum), expected["seq-mean-token-sum"], kTolerance);
  EXPECT_NEAR(Aggregate(losses, Aggregation::kSeqMeanTokenSumNorm), expected["seq-mean-token-sum-norm"], kTolerance);
}

TEST(Golden, PpoClipInEveryAggregation) {
  ExpectAllModes(Losses("ppo_clip", {.clip_low = 0.2, .clip_high = 0.2}), Golden()["ppo_clip_0.2_0.2"]);
}

TEST(Golden, ClipHigherInEveryAggregation) {
  ExpectAllModes(Losses("ppo_clip", {.clip_low = 0.2, .clip_high = 0.28}), Golden()["ppo_clip_higher_0.2_0.28"]);
}

TEST(Golden, DualClip) {
  const Rows losses = Losses("ppo_clip", {.clip_low = 0.2, .clip_high = 0.2, .dual_clip = 1.2});
  EXPECT_NEAR(Aggregate(losses, Aggregation::kTokenMean), Golden()["ppo_dualclip_c1.2_0.2_0.2_token-mean"], kTolerance);
}

TEST(Golden, TruncatedImportanceSamplingTimesTheLoss) {
  const Rows weights = Weights(OffPolicyCorrection::kTis, 2.0, 0.0);
  const Rows losses = Losses("ppo_clip", {.clip_low = 0.2, .clip_high = 0.28}, &weights);
  EXPECT_NEAR(Aggregate(losses, Aggregation::kTokenMean), Golden()["ppo_0.2_0.28_with_token_TIS2.0_token-mean"],
              kTolerance);
}

TEST(Golden, GspoLossAndRatio) {
  const Rows losses = Losses("gspo", {.clip_low = 3e-4, .clip_high = 4e-4});
  EXPECT_NEAR(Aggregate(losses, Aggregation::kSeqMeanTokenMean), Golden()["gspo_loss_3e-4_4e-4_seq-mean-token-mean"],
              kTolerance);
  // With a range that never clips, a token's loss is −A·s.
  const Rows free = Losses("gspo", {.clip_low = 1.0, .clip_high = 100.0});
  const auto advantage = Golden()["inputs"]["adv"].get<std::vector<double>>();
  const auto ratio = Golden()["gspo_ratio"].get<std::vector<double>>();
  for (size_t i = 0; i < ratio.size(); ++i) EXPECT_NEAR(free[i][0] / -advantage[i], ratio[i], kTolerance);
}

TEST(Golden, Cispo) {
  EXPECT_NEAR(Aggregate(Losses("cispo", {.clip_low = 1.0, .clip_high = 4.0}), Aggregation::kTokenMean),
              Golden()["cispo_low1.0_high4.0_token-mean"], kTolerance);
  EXPECT_NEAR(Aggregate(Losses("cispo", {.clip_low = 0.2, .clip_high = 0.28}), Aggregation::kTokenMean),
              Golden()["cispo_0.2_0.28_token-mean"], kTolerance);
}

TEST(Golden, KlEstimators) {
  const Rows logp = Input("new"), ref = Input("ref");
  const std::pair<const char*, KlEstimator> all[] = {
      {"k1", KlEstimator::kK1}, {"k2", KlEstimator::kK2}, {"k3", KlEstimator::kK3}};
  for (const auto& [name, estimator] : all) {
    Rows values = logp;
    for (size_t i = 0; i < logp.size(); ++i) {
      for (size_t t = 0; t < logp[i].size(); ++t) values[i][t] = KlEstimate(estimator, logp[i][t], ref[i][t]).value;
    }
    EXPECT_NEAR(Aggregate(values, Aggregation::kTokenMean), Golden()["kl_token-mean"][name], kTolerance) << name;
  }
}

TEST(Golden, OffPolicyWeights) {
  const auto expect_rows = [](const Rows& found, const Rows& expected) {
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_THAT(found[i], testing::Pointwise(testing::DoubleNear(kTolerance), expected[i]));
    }
  };
  expect_rows(Weights(OffPolicyCorrection::kTis, 2.0, 0.0), Golden()["tis_token_cap2"].get<Rows>());
  expect_rows(Weights(OffPolicyCorrection::kIcepop, 2.0, 0.5), Golden()["icepop_0.5_2"].get<Rows>());
  const auto sequence = Golden()["tis_seq_cap2"].get<std::vector<double>>();
  const auto geometric = Golden()["geo_ratio"].get<std::vector<double>>();
  for (size_t i = 0; i < sequence.size(); ++i) {
    EXPECT_NEAR(Weights(OffPolicyCorrection::kSequence, 2.0, 0.0)[i][0], sequence[i], kTolerance);
    EXPECT_NEAR(Weights(OffPolicyCorrection::kGeometric, 100.0, 0.0)[i][0], geometric[i], kTolerance);
  }
}

TEST(Golden, GaePassesOverMaskedTokens) {
  const nlohmann::json& in = Golden()["inputs"]["gae"];
  const auto rewards = in["rewards"].get<std::vector<double>>();
  const auto values = in["values"].get<std::vector<double>>();
  const auto mask = in["mask"].get<std::vector<uint8_t>>();
  const std::tuple<const char*, double, double> all[] = {{"gae_g1_l1", 1.0, 1.0}, {"gae_g0.99_l0.95", 0.99, 0.95}};
  for (const auto& [name, gamma, lambda] : all) {
    std::vector<double> advantages(mask.size()), returns(mask.size());
    GaeAdvantages(gamma, lambda, rewards, values, mask, advantages, returns);
    EXPECT_THAT(advantages,
                testing::Pointwise(testing::DoubleNear(kTolerance), Golden()[name][0].get<std::vector<double>>()));
    EXPECT_THAT(returns,
                testing::Pointwise(testing::DoubleNear(kTolerance), Golden()[name][1].get<std::vector<double>>()));
  }
}

TEST(Golden, GroupAdvantages) {
  const nlohmann::json& golden = Golden()["grpo"];
  const auto rewards = golden["R"].get<std::vector<double>>();  // the first is 1, the second 0
  const GroupStats stats = DescribeGroup(rewards);
  EXPECT_NEAR(stats.mean, golden["mean"], kTolerance);
  EXPECT_NEAR(stats.std, golden["std_unbiased"], kTolerance);
  EXPECT_NEAR(GrpoAdvantages(rewards, 1e-6)[0], golden["adv_pos"], kTolerance);
  EXPECT_NEAR(GrpoAdvantages(rewards, 1e-6)[1], golden["adv_neg"], kTolerance);
  EXPECT_NEAR(DrGrpoAdvantages(rewards)[0], golden["dr_grpo_pos"], kTolerance);
  EXPECT_NEAR(RlooAdvantages(rewards)[0], golden["rloo_pos"], kTolerance);
  EXPECT_NEAR(RlooAdvantages(rewards)[1], golden["rloo_neg"], kTolerance);
  EXPECT_NEAR(MaxRlAdvantages(rewards)[0], golden["maxrl_pos"], kTolerance);
  // The population's standard deviation is what we do not use; its golden values tell the two apart.
  const double population = stats.std * std::sqrt(7.0 / 8.0);
  EXPECT_NEAR(population, golden["std_population"], kTolerance);
  EXPECT_NEAR((1.0 - stats.mean) / (population + 1e-6), golden["adv_pos_pop"], kTolerance);
}

TEST(Golden, ValueClip) {
  const nlohmann::json& in = Golden()["inputs"]["value_clip"];
  const auto values = in["predicted"].get<std::vector<double>>();
  const std::vector<uint8_t> mask(values.size(), 1);
  std::vector<double> loss(values.size()), grad(values.size());
  ValueLoss(in["clip"], values, in["old"].get<std::vector<double>>(), in["returns"].get<std::vector<double>>(), mask,
            loss, grad);
  EXPECT_NEAR((loss[0] + loss[1] + loss[2]) / 3.0, Golden()["value_clip0.2_loss"], kTolerance);
}

TEST(Golden, RoutingReplayGathersTheTrainersOwnLogits) {
  const nlohmann::json& golden = Golden()["r3"];
  const auto logits = golden["logits"].get<std::vector<double>>();
  const auto selected = golden["replay"].get<std::vector<int32_t>>();
  std::vector<double> weights(selected.size());
  ReplayWeights(logits, selected, weights);
  for (const char* name : {"weights_softmax_over_selected", "renorm"}) {
    EXPECT_THAT(weights, testing::Pointwise(testing::DoubleNear(kTolerance), golden[name].get<std::vector<double>>()));
  }
  // The full softmax at the same experts, renormalised, is the same.
  const auto full = golden["full_softmax_gathered"].get<std::vector<double>>();
  for (size_t i = 0; i < full.size(); ++i) EXPECT_NEAR(full[i] / (full[0] + full[1]), weights[i], 2e-6);
}

TEST(Golden, OverlongPenalty) {
  for (const auto& [length, penalty] : Golden()["dapo_overlong_Lmax20_Lcache4"].items()) {
    EXPECT_NEAR(OverlongPenalty(std::stoll(length), 20, 4), penalty, kTolerance) << length;
  }
}

}  // namespace
}  // namespace moerl::rl
