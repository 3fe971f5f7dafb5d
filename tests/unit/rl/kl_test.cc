// The KL loss's expected gradient against the exact gradient of KL(π ‖ π_ref), by enumeration of a small vocabulary.
#include "libs/rl/kl.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

namespace moerl::rl {
namespace {

using Row = std::vector<double>;

Row LogSoftmax(const Row& logits) {
  double sum = 0.0;
  for (double z : logits) sum += std::exp(z);
  Row logp;
  for (double z : logits) logp.push_back(z - std::log(sum));
  return logp;
}

const Row kLogits = {0.3, -1.2, 0.9, 0.1, -0.4, 1.4, -2.0};
const Row kOldLogits = {0.1, -0.8, 1.2, -0.3, 0.2, 0.9, -1.5};
const Row kRefLogits = {-0.5, 0.4, 0.7, 0.6, -1.0, 0.2, 0.3};

double ExactKl(const Row& logits) {
  const Row p = LogSoftmax(logits), q = LogSoftmax(kRefLogits);
  double kl = 0.0;
  for (size_t a = 0; a < p.size(); ++a) kl += std::exp(p[a]) * (p[a] - q[a]);
  return kl;
}

Row ExactGradient() {
  Row grad;
  for (size_t i = 0; i < kLogits.size(); ++i) {
    Row up = kLogits, down = kLogits;
    up[i] += 1e-6;
    down[i] -= 1e-6;
    grad.push_back((ExactKl(up) - ExactKl(down)) / 2e-6);
  }
  return grad;
}

// E over tokens drawn from `sampler` of dLoss/dlogp · ∇_logits logp.
Row ExpectedGradient(KlEstimator estimator, bool unbiased, const Row& sampler_logits) {
  const Row p = LogSoftmax(kLogits), old = LogSoftmax(sampler_logits), q = LogSoftmax(kRefLogits);
  Row grad(p.size(), 0.0);
  for (size_t a = 0; a < p.size(); ++a) {
    const double weight = std::exp(old[a]) * KlLoss(estimator, unbiased, p[a], old[a], q[a]).grad;
    for (size_t i = 0; i < p.size(); ++i) grad[i] += weight * ((a == i ? 1.0 : 0.0) - std::exp(p[i]));
  }
  return grad;
}

double Distance(const Row& a, const Row& b) {
  double most = 0.0;
  for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
  return most;
}

TEST(Kl, EstimatorsAreUnbiasedButForK2) {
  const Row p = LogSoftmax(kLogits), q = LogSoftmax(kRefLogits);
  const auto expected = [&](KlEstimator estimator) {
    double sum = 0.0;
    for (size_t a = 0; a < p.size(); ++a) sum += std::exp(p[a]) * KlEstimate(estimator, p[a], q[a]).value;
    return sum;
  };
  EXPECT_NEAR(expected(KlEstimator::kK1), ExactKl(kLogits), 1e-12);
  EXPECT_NEAR(expected(KlEstimator::kK3), ExactKl(kLogits), 1e-12);
  EXPECT_GT(std::abs(expected(KlEstimator::kK2) - ExactKl(kLogits)), 1e-3);
}

TEST(Kl, UnbiasedLossHasTheExactGradientOnAndOffPolicy) {
  for (KlEstimator estimator : {KlEstimator::kK2, KlEstimator::kK3}) {
    EXPECT_LT(Distance(ExpectedGradient(estimator, true, kLogits), ExactGradient()), 1e-8);
    EXPECT_LT(Distance(ExpectedGradient(estimator, true, kOldLogits), ExactGradient()), 1e-8);
  }
}

TEST(Kl, PlainK2IsExactOnPolicyOnlyAndPlainK3NotEvenThere) {
  EXPECT_LT(Distance(ExpectedGradient(KlEstimator::kK2, false, kLogits), ExactGradient()), 1e-8);
  EXPECT_GT(Distance(ExpectedGradient(KlEstimator::kK2, false, kOldLogits), ExactGradient()), 1e-2);
  EXPECT_GT(Distance(ExpectedGradient(KlEstimator::kK3, false, kLogits), ExactGradient()), 1e-2);
}

TEST(Kl, K1AsLossPullsNowhereAndIsRefused) {
  EXPECT_LT(Distance(ExpectedGradient(KlEstimator::kK1, false, kLogits), Row(kLogits.size(), 0.0)), 1e-12);
  KlConfig config;
  config.estimator = KlEstimator::kK1;
  config.place = KlPlace::kLoss;
  EXPECT_EQ(ValidateKl(config).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(ValidateKl(config).message().find("expected gradient of zero"), std::string::npos);
  config.place = KlPlace::kReward;
  EXPECT_TRUE(ValidateKl(config).ok());
}

TEST(Kl, AdaptiveCoefficientFollowsTheTarget) {
  EXPECT_DOUBLE_EQ(AdaptKlCoefficient(0.1, 0.2, 100, 0.1, 10000.0), 0.1 * (1 + 0.2 * 100 / 10000.0));
  EXPECT_DOUBLE_EQ(AdaptKlCoefficient(0.1, 0.11, 100, 0.1, 10000.0), 0.1 * (1 + (0.11 / 0.1 - 1) * 100 / 10000.0));
  EXPECT_DOUBLE_EQ(AdaptKlCoefficient(0.1, 0.0, 100, 0.1, 10000.0), 0.1 * (1 - 0.2 * 100 / 10000.0));
}

}  // namespace
}  // namespace moerl::rl
