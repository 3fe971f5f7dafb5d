// The gradient of the whole objective against finite differences of a slow, obvious version of its loss, in double,
// with stop-gradients written out: `logp` moves, `fixed` does not.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "libs/rl/objective.h"
#include "libs/rl/routing_replay.h"
#include "tests/unit/rl/step_builder.h"

namespace moerl::rl {
namespace {

using Row = std::vector<double>;

struct Oracle {
  const Recipe& recipe;
  const RandomStep& step;
  const PolicyObjective& objective;
  double kl_coefficient;

  size_t prompt(size_t i) const { return step.group_of(i).prompt.size(); }
  const TokenRun& run(size_t i) const { return step.sample(i).run; }
  double Old(size_t i, size_t t) const {
    return recipe.old_policy == OldPolicy::kRollout ? run(i).logprobs[t] : step.scores[i].old_logp[prompt(i) + t];
  }

  double TokensOf(size_t i) const { return std::count(run(i).trainable.begin(), run(i).trainable.end(), 1); }

  double Weight(size_t i, double all_tokens, double sequences) const {
    switch (recipe.aggregation) {
      case Aggregation::kTokenMean:
        return 1 / all_tokens;
      case Aggregation::kSeqMeanTokenMean:
        return 1 / sequences / TokensOf(i);
      case Aggregation::kSeqMeanTokenSum:
        return 1 / sequences;
      default:
        return 1 / sequences / recipe.length_norm;
    }
  }

  double MeanLogRatio(size_t i, const Row& logp) const {
    double sum = 0;
    for (size_t t = 0; t < run(i).size(); ++t) {
      if (run(i).trainable[t]) sum += logp[t] - Old(i, t);
    }
    return sum / TokensOf(i);
  }

  double Correction(size_t i, size_t t) const {
    const auto gap = [&](size_t u) { return Old(i, u) - run(i).logprobs[u]; };
    double sum = 0;
    for (size_t u = 0; u < run(i).size(); ++u) sum += run(i).trainable[u] ? gap(u) : 0;
    const double token = std::exp(gap(t)), sequence = std::exp(sum), geometric = std::exp(sum / TokensOf(i));
    const double cap = recipe.off_policy.cap, low = recipe.off_policy.low;
    switch (recipe.off_policy.correction) {
      case OffPolicyCorrection::kNone:
        return 1;
      case OffPolicyCorrection::kTis:
        return std::min(token, cap);
      case OffPolicyCorrection::kIcepop:
        return token < low || token > cap ? 0 : token;
      case OffPolicyCorrection::kSequence:
        return std::min(sequence, cap);
      default:
        return geometric < low || geometric > cap ? 0 : geometric;
    }
  }

  double Policy(size_t i, size_t t, const Row& logp, const Row& fixed) const {
    const double advantage = objective.advantages(static_cast<int64_t>(i))[t];
    const double low = 1 - recipe.loss_config.clip_low, high = 1 + recipe.loss_config.clip_high;
    const double r = std::exp(logp[t] - Old(i, t)), fixed_r = std::exp(fixed[t] - Old(i, t));
    if (recipe.loss->name == "cispo") {
      return -std::clamp(fixed_r, std::max(low, 0.0), high) * advantage * logp[t];
    }
    if (recipe.loss->name == "dppo") {
      const double moved = std::exp(fixed[t]) - std::exp(Old(i, t));
      const double keep = (advantage > 0 && moved > 0.2) || (advantage < 0 && moved < -0.2) ? 0 : 1;
      return -keep * advantage * r + 1e-3 * std::pow(logp[t] - Old(i, t), 2);
    }
    double ratio = r;
    if (recipe.loss->name == "gspo") {
      ratio = std::exp(MeanLogRatio(i, fixed)) * std::exp(logp[t]) / std::exp(fixed[t]);
    }
    double loss = std::max(-advantage * ratio, -advantage * std::clamp(ratio, low, high));
    const double dual = recipe.loss_config.dual_clip;
    if (dual > 0 && advantage < 0) loss = std::min(loss, -advantage * dual);
    return loss;
  }

  double Kl(size_t i, size_t t, const Row& logp, const Row& fixed) const {
    if (recipe.kl.estimator == KlEstimator::kNone || recipe.kl.place == KlPlace::kReward) return 0;
    const double d = logp[t] - step.scores[i].ref_logp[prompt(i) + t];
    const bool is_k2 = recipe.kl.estimator == KlEstimator::kK2;
    const double k = is_k2 ? d * d / 2 : std::exp(-d) - 1 + d;
    const double r = std::exp((is_k2 ? fixed[t] : logp[t]) - Old(i, t));
    return kl_coefficient * (recipe.kl.unbiased ? r * k : k);
  }

  // Loss of the whole step.
  double Loss(const std::vector<Row>& logp, const std::vector<Row>& fixed) const {
    double all_tokens = 0, sequences = 0;
    for (size_t i = 0; i < logp.size(); ++i) {
      all_tokens += TokensOf(i);
      sequences += TokensOf(i) > 0;
    }
    double loss = 0;
    for (size_t i = 0; i < logp.size(); ++i) {
      for (size_t t = 0; t < run(i).size(); ++t) {
        if (!run(i).trainable[t]) continue;
        loss += Weight(i, all_tokens, sequences) *
                (Correction(i, t) * Policy(i, t, logp[i], fixed[i]) + Kl(i, t, logp[i], fixed[i]));
      }
    }
    return loss;
  }
};

std::vector<Row> CompletionLogp(const RandomStep& step) {
  std::vector<Row> rows;
  for (size_t i = 0; i < step.num_samples(); ++i) {
    rows.emplace_back(step.logp[i].begin() + static_cast<ptrdiff_t>(step.group_of(i).prompt.size()),
                      step.logp[i].end());
  }
  return rows;
}

void ExpectGradientMatches(const AlgorithmOptions& options, uint32_t seed, const std::string& what) {
  const absl::StatusOr<Recipe> recipe = MakeRecipe(options);
  ASSERT_TRUE(recipe.ok()) << what << ": " << recipe.status();
  Recipe exact = *recipe;
  exact.kl.skip_constant_groups = false;
  const RandomStep step = MakeRandomStep(seed);
  const auto objective = PolicyObjective::Create(exact, step.groups, step.scores, Context(exact.kl.coefficient));
  ASSERT_TRUE(objective.ok()) << what << ": " << objective.status();
  const std::vector<int64_t> all = objective->UpdateOrdinals(0);
  const PackedBatch packed = step.Pack(all);
  const auto result = objective->Evaluate(0, packed.view());
  ASSERT_TRUE(result.ok()) << result.status();

  const Oracle oracle{exact, step, *objective, exact.kl.coefficient};
  const std::vector<Row> fixed = CompletionLogp(step);
  const UpdateSummary summary = Summarize(result->reports);
  EXPECT_NEAR(summary.policy_loss + summary.kl_loss, oracle.Loss(fixed, fixed), 1e-9) << what;

  constexpr double kStep = 1e-6;
  std::vector<Row> moved = fixed;
  for (size_t i = 0; i < fixed.size(); ++i) {
    for (size_t t = 0; t < fixed[i].size(); ++t) {
      moved[i][t] = fixed[i][t] + kStep;
      const double up = oracle.Loss(moved, fixed);
      moved[i][t] = fixed[i][t] - kStep;
      const double down = oracle.Loss(moved, fixed);
      moved[i][t] = fixed[i][t];
      const size_t at = static_cast<size_t>(packed.offsets[i]) + step.group_of(i).prompt.size() + t;
      EXPECT_NEAR(result->grad_logp[at], (up - down) / (2 * kStep), 2e-7) << what << ": sample " << i << " token " << t;
    }
  }
}

constexpr Aggregation kAggregations[] = {Aggregation::kTokenMean, Aggregation::kSeqMeanTokenMean,
                                         Aggregation::kSeqMeanTokenSum, Aggregation::kSeqMeanTokenSumNorm};

TEST(LossGradient, OfEveryAlgorithmAndAggregationIsTheFiniteDifference) {
  for (std::string_view name : AlgorithmNames()) {
    for (Aggregation aggregation : kAggregations) {
      if (name == "gspo" && aggregation != Aggregation::kSeqMeanTokenMean) continue;
      AlgorithmOptions options;
      options.name = std::string(name);
      options.aggregation = aggregation;
      options.max_new_tokens = 12;
      ExpectGradientMatches(options, 1, absl::StrCat(options.name, " ", std::string(AggregationName(aggregation))));
    }
  }
}

TEST(LossGradient, WithKlInTheLossIsTheFiniteDifference) {
  for (KlEstimator estimator : {KlEstimator::kK2, KlEstimator::kK3}) {
    AlgorithmOptions options;
    options.kl_coefficient = 0.3;
    options.kl_estimator = estimator;
    ExpectGradientMatches(options, 2, std::string(KlEstimatorName(estimator)));
  }
}

TEST(LossGradient, WithEveryCorrectionIsTheFiniteDifference) {
  for (OffPolicyCorrection correction :
       {OffPolicyCorrection::kNone, OffPolicyCorrection::kTis, OffPolicyCorrection::kIcepop,
        OffPolicyCorrection::kSequence, OffPolicyCorrection::kGeometric}) {
    AlgorithmOptions options;
    options.off_policy = correction;
    ExpectGradientMatches(options, 3, std::string(OffPolicyCorrectionName(correction)));
  }
}

TEST(LossGradient, WithDualClipAndClipHigherIsTheFiniteDifference) {
  AlgorithmOptions options;
  options.name = "dapo";
  options.dual_clip = 1.2;
  ExpectGradientMatches(options, 4, "dual clip");
}

TEST(LossGradient, OfTheBiasedKlFormIsItsOwnFiniteDifference) {
  for (KlEstimator estimator : {KlEstimator::kK1, KlEstimator::kK2, KlEstimator::kK3}) {
    for (double logp : {-2.0, -0.7, -0.1}) {
      const double h = 1e-6;
      const double numeric =
          (KlEstimate(estimator, logp + h, -1.0).value - KlEstimate(estimator, logp - h, -1.0).value) / (2 * h);
      EXPECT_NEAR(KlEstimate(estimator, logp, -1.0).grad, numeric, 1e-8);
    }
  }
}

TEST(LossGradient, OfAClampedRatioOrKlIsZero) {
  for (const PolicyLoss& loss : PolicyLosses()) {
    if (loss.name == "cispo") continue;  // its gradient goes through logp, the ratio is a detached weight
    const std::vector<double> logp = {-0.1}, old_logp = {-30.0}, advantages = {-1.0};
    const std::vector<uint8_t> trainable = {1};
    std::vector<double> value(1), grad(1);
    SequenceLoss out{value, grad};
    loss.compute({}, {logp, old_logp, advantages, trainable}, out);
    EXPECT_TRUE(std::isfinite(value[0])) << loss.name;
    EXPECT_EQ(grad[0], 0.0) << loss.name;
  }
  for (KlEstimator estimator : {KlEstimator::kK1, KlEstimator::kK2, KlEstimator::kK3}) {
    EXPECT_EQ(KlEstimate(estimator, -60.0, -1.0).grad, 0.0);
    EXPECT_EQ(std::abs(KlEstimate(estimator, -60.0, -1.0).value), 10.0);
  }
}

TEST(LossGradient, OfTheValueIsTheFiniteDifference) {
  AlgorithmOptions options;
  options.name = "ppo";
  options.value_clip = 0.2;
  options.value_coefficient = 0.7;
  const Recipe recipe = *MakeRecipe(options);
  const RandomStep step = MakeRandomStep(5);
  const auto objective = PolicyObjective::Create(recipe, step.groups, step.scores, Context());
  ASSERT_TRUE(objective.ok()) << objective.status();
  const PackedBatch packed = step.Pack(objective->UpdateOrdinals(0));
  const auto result = objective->Evaluate(0, packed.view());
  ASSERT_TRUE(result.ok());

  const double tokens = static_cast<double>(objective->update_counts(0).num_tokens);
  int num_clipped = 0;
  for (size_t i = 0; i < step.num_samples(); ++i) {
    const size_t prompt = step.group_of(i).prompt.size();
    for (size_t t = 0; t < step.sample(i).run.size(); ++t) {
      const double old_value = step.scores[i].values[prompt + t];
      const double target = objective->returns(static_cast<int64_t>(i))[t];
      const auto loss = [&](double v) {
        const double held = std::min(std::max(v, old_value - 0.2), old_value + 0.2);
        return 0.5 * std::max(std::pow(v - target, 2), std::pow(held - target, 2)) * 0.7 / tokens;
      };
      const double v = step.value[i][prompt + t], h = 1e-6;
      const double expected = step.sample(i).run.trainable[t] ? (loss(v + h) - loss(v - h)) / (2 * h) : 0.0;
      EXPECT_NEAR(result->grad_values[static_cast<size_t>(packed.offsets[i]) + prompt + t], expected, 1e-7);
      num_clipped += step.sample(i).run.trainable[t] && expected == 0.0;
    }
  }
  EXPECT_GT(num_clipped, 0);
  EXPECT_EQ(Summarize(result->reports).value_clip_fraction * tokens, num_clipped);
}

TEST(LossGradient, OfTheEntropyBonusIsItsCoefficientTimesTheWeight) {
  AlgorithmOptions options;
  options.entropy_coefficient = 0.01;
  const RandomStep step = MakeRandomStep(6);
  const auto objective = PolicyObjective::Create(*MakeRecipe(options), step.groups, {}, Context());
  ASSERT_TRUE(objective.ok());
  const PackedBatch packed = step.Pack(objective->UpdateOrdinals(0));
  const auto result = objective->Evaluate(0, packed.view());
  ASSERT_TRUE(result.ok());
  double expected_loss = 0.0;
  const double tokens = static_cast<double>(objective->update_counts(0).num_tokens);
  for (size_t i = 0; i < step.num_samples(); ++i) {
    const size_t first = static_cast<size_t>(packed.offsets[i]) + step.group_of(i).prompt.size();
    for (size_t t = 0; t < step.sample(i).run.size(); ++t) {
      const bool counts = step.sample(i).run.trainable[t];
      EXPECT_FLOAT_EQ(result->grad_entropy[first + t], counts ? static_cast<float>(-0.01 / tokens) : 0.0f);
      if (counts) expected_loss -= 0.01 * packed.entropy[first + t] / tokens;
    }
  }
  EXPECT_NEAR(Summarize(result->reports).entropy_loss, expected_loss, 1e-12);
}

TEST(LossGradient, OfReplayedRoutesIsTheFiniteDifferenceAndReachesOnlyTheirLogits) {
  const std::vector<double> logits = {1.0, 0.2, -0.5, 0.9};
  const std::vector<int32_t> selected = {0, 2};
  const std::vector<double> upstream = {0.7, -1.3};
  std::vector<double> weights(2), grad(4, 0.0);
  ReplayWeights(logits, selected, weights);
  ReplayWeightsBackward(weights, selected, upstream, grad);
  for (size_t e = 0; e < logits.size(); ++e) {
    const auto loss = [&](double h) {
      std::vector<double> moved = logits, w(2);
      moved[e] += h;
      ReplayWeights(moved, selected, w);
      return w[0] * upstream[0] + w[1] * upstream[1];
    };
    EXPECT_NEAR(grad[e], (loss(1e-6) - loss(-1e-6)) / 2e-6, 1e-9);
  }
  EXPECT_NE(grad[0], 0.0);
  EXPECT_EQ(grad[1], 0.0);
}

}  // namespace
}  // namespace moerl::rl
