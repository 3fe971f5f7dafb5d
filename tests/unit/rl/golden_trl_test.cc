// tests/golden/rl_trl.json: loss and gradient of TRL's own trainer and of PyTorch autograd (make_rl_trl.py beside it).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "libs/rl/advantage_group.h"
#include "libs/rl/advantage_reinforce.h"
#include "libs/rl/aggregation.h"
#include "libs/rl/kl.h"
#include "libs/rl/loss.h"
#include "libs/rl/loss_value.h"
#include "libs/rl/off_policy.h"

namespace moerl::rl {
namespace {

constexpr double kTolerance = 1e-9;
using Row = std::vector<double>;
using Rows = std::vector<Row>;

const nlohmann::json& Golden() {
  static const nlohmann::json golden = [] {
    std::ifstream file(std::string(MOERL_SOURCE_DIR) + "/tests/golden/rl_trl.json");
    return nlohmann::json::parse(file);
  }();
  return golden;
}

Rows Input(const char* name) { return Golden()["inputs"][name].get<Rows>(); }
std::vector<std::vector<uint8_t>> Mask() { return Golden()["inputs"]["mask"].get<std::vector<std::vector<uint8_t>>>(); }
double LengthNorm() { return Golden()["inputs"]["max_completion"].get<double>(); }

// Per-token losses and gradients of one row.
struct Terms {
  Row loss;
  Row grad;
};
using RowTerms = std::function<Terms(size_t row)>;

void ExpectMatches(const nlohmann::json& expected, Aggregation aggregation, const RowTerms& terms) {
  const auto mask = Mask();
  std::vector<int64_t> lengths;
  for (const auto& row : mask) lengths.push_back(std::count(row.begin(), row.end(), 1));
  const UpdateCounts counts = CountUpdate(lengths);
  double loss = 0.0;
  for (size_t i = 0; i < mask.size(); ++i) {
    const Terms of_row = terms(i);
    const double weight = TokenWeight(aggregation, counts, lengths[i], LengthNorm());
    for (size_t t = 0; t < mask[i].size(); ++t) {
      if (mask[i][t]) loss += weight * of_row.loss[t];
      const double grad = mask[i][t] ? weight * of_row.grad[t] : 0.0;
      EXPECT_NEAR(grad, expected["grad"][i][t].get<double>(), kTolerance) << "row " << i << " token " << t;
    }
  }
  EXPECT_NEAR(loss, expected["loss"].get<double>(), kTolerance);
}

RowTerms Policy(const char* name, PolicyLossConfig config, const char* old_name = "old",
                OffPolicyConfig correction = {.correction = OffPolicyCorrection::kNone}) {
  return [=](size_t i) {
    const Row logp = Input("new")[i], old_logp = Input(old_name)[i], rollout = Input("rollout")[i];
    const std::vector<uint8_t> mask = Mask()[i];
    const Row advantages(logp.size(), Golden()["inputs"]["advantages"][i].get<double>());
    Terms terms{Row(logp.size()), Row(logp.size())};
    SequenceLoss out{terms.loss, terms.grad};
    FindPolicyLoss(name)->compute(config, {logp, old_logp, advantages, mask}, out);
    Row weights(logp.size());
    CorrectionWeights(correction, old_logp, rollout, mask, weights);
    for (size_t t = 0; t < logp.size(); ++t) terms.loss[t] *= weights[t], terms.grad[t] *= weights[t];
    return terms;
  };
}

// `policy` (none: zero) plus a KL term.
RowTerms WithKl(const RowTerms& policy, double coefficient, KlEstimator estimator, bool unbiased) {
  return [=](size_t i) {
    const Row logp = Input("new")[i], old_logp = Input("old")[i], ref = Input("ref")[i];
    Terms terms = policy ? policy(i) : Terms{Row(logp.size(), 0.0), Row(logp.size(), 0.0)};
    for (size_t t = 0; t < logp.size(); ++t) {
      const KlTerm kl = KlLoss(estimator, unbiased, logp[t], old_logp[t], ref[t]);
      terms.loss[t] += coefficient * kl.value;
      terms.grad[t] += coefficient * kl.grad;
    }
    return terms;
  };
}

TEST(GoldenTrl, LossesAndGradientsOfTrlsTrainer) {
  const nlohmann::json& trl = Golden()["trl"];
  const PolicyLossConfig usual{.clip_low = 0.2, .clip_high = 0.2};
  ExpectMatches(trl["ppo_clip seq_mean_token_mean"], Aggregation::kSeqMeanTokenMean, Policy("ppo_clip", usual));
  ExpectMatches(trl["ppo_clip token_mean"], Aggregation::kTokenMean, Policy("ppo_clip", usual));
  ExpectMatches(trl["ppo_clip seq_mean_token_sum"], Aggregation::kSeqMeanTokenSum, Policy("ppo_clip", usual));
  ExpectMatches(trl["ppo_clip seq_mean_token_sum_norm"], Aggregation::kSeqMeanTokenSumNorm, Policy("ppo_clip", usual));
  ExpectMatches(trl["clip_higher token_mean"], Aggregation::kTokenMean,
                Policy("ppo_clip", {.clip_low = 0.2, .clip_high = 0.28}));
  ExpectMatches(trl["dual_clip token_mean"], Aggregation::kTokenMean,
                Policy("ppo_clip", {.clip_low = 0.2, .clip_high = 0.2, .dual_clip = 1.4}));
  ExpectMatches(trl["gspo seq_mean_token_mean"], Aggregation::kSeqMeanTokenMean,
                Policy("gspo", {.clip_low = 3e-2, .clip_high = 4e-2}));
  ExpectMatches(trl["cispo token_mean"], Aggregation::kTokenMean, Policy("cispo", {.clip_low = 1.0, .clip_high = 0.2}));
  ExpectMatches(trl["tis token_mean"], Aggregation::kTokenMean,
                Policy("ppo_clip", usual, "old", {.correction = OffPolicyCorrection::kTis, .cap = 1.2}));
  ExpectMatches(trl["kl_k3 token_mean"], Aggregation::kTokenMean,
                WithKl(Policy("ppo_clip", usual), 0.3, KlEstimator::kK3, false));
  ExpectMatches(trl["kl_k3_unbiased token_mean"], Aggregation::kTokenMean,
                WithKl(Policy("ppo_clip", usual), 0.3, KlEstimator::kK3, true));
}

TEST(GoldenTrl, EntropyBonusOfTrlsTrainer) {
  const nlohmann::json& expected = Golden()["trl"]["entropy token_mean"];
  const auto mask = Mask();
  const Rows entropies = Input("entropies");
  double tokens = 0.0, sum = 0.0;
  for (size_t i = 0; i < mask.size(); ++i) {
    for (size_t t = 0; t < mask[i].size(); ++t) tokens += mask[i][t], sum += mask[i][t] * entropies[i][t];
  }
  EXPECT_NEAR(expected["loss"].get<double>() - Golden()["trl"]["ppo_clip token_mean"]["loss"].get<double>(),
              -0.05 * sum / tokens, kTolerance);
  for (size_t i = 0; i < mask.size(); ++i) {
    for (size_t t = 0; t < mask[i].size(); ++t) {
      EXPECT_NEAR(expected["grad_entropy"][i][t].get<double>(), mask[i][t] ? -0.05 / tokens : 0.0, kTolerance);
    }
  }
}

TEST(GoldenTrl, LossesAndGradientsOfAutograd) {
  const nlohmann::json& autograd = Golden()["autograd"];
  ExpectMatches(autograd["gspo_token seq_mean_token_mean"], Aggregation::kSeqMeanTokenMean,
                Policy("gspo", {.clip_low = 3e-2, .clip_high = 4e-2}));
  ExpectMatches(autograd["dppo token_mean"], Aggregation::kTokenMean, Policy("dppo", {}, "rollout"));
  ExpectMatches(autograd["decoupled token_mean"], Aggregation::kTokenMean,
                Policy("ppo_clip", {.clip_low = 0.2, .clip_high = 0.2}, "old",
                       {.correction = OffPolicyCorrection::kIcepop, .cap = 1.5, .low = 0.0}));
  ExpectMatches(autograd["k1 token_mean"], Aggregation::kTokenMean, WithKl(nullptr, 1.0, KlEstimator::kK1, false));
  ExpectMatches(autograd["k2 token_mean"], Aggregation::kTokenMean, WithKl(nullptr, 1.0, KlEstimator::kK2, false));
  ExpectMatches(autograd["k3 token_mean"], Aggregation::kTokenMean, WithKl(nullptr, 1.0, KlEstimator::kK3, false));
  ExpectMatches(autograd["value_clip token_mean"], Aggregation::kTokenMean, [](size_t i) {
    const Row values = Input("values")[i];
    Terms terms{Row(values.size()), Row(values.size())};
    ValueLoss(0.2, values, Input("old_values")[i], Input("returns")[i], Mask()[i], terms.loss, terms.grad);
    return terms;
  });
}

TEST(GoldenTrl, WhiteningAndGroupAdvantages) {
  Rows numbers = Golden()["whiten"]["numbers"].get<Rows>();
  const Rows expected = Golden()["whiten"]["whitened"].get<Rows>();
  const auto mask = Mask();
  std::vector<MaskedSequence> sequences;
  for (size_t i = 0; i < numbers.size(); ++i) sequences.push_back({numbers[i], mask[i]});
  ASSERT_TRUE(Whiten(sequences));
  for (size_t i = 0; i < numbers.size(); ++i) {
    for (size_t t = 0; t < numbers[i].size(); ++t) {
      if (mask[i][t] == 0) continue;
      EXPECT_NEAR(numbers[i][t], expected[i][t], kTolerance);
    }
  }
  const auto rewards = Golden()["group"]["rewards"].get<Row>();
  EXPECT_THAT(GrpoAdvantages(rewards, 1e-4),
              testing::Pointwise(testing::DoubleNear(kTolerance), Golden()["group"]["grpo"].get<Row>()));
  EXPECT_THAT(RlooAdvantages(rewards),
              testing::Pointwise(testing::DoubleNear(kTolerance), Golden()["group"]["rloo"].get<Row>()));
}

}  // namespace
}  // namespace moerl::rl
