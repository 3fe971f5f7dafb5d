#include "libs/rl/kl.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/rl/ratio.h"

namespace moerl::rl {
namespace {

constexpr double kMaxLogDifference = 20.0;
constexpr double kMaxEstimate = 10.0;

}  // namespace

absl::StatusOr<KlEstimator> ParseKlEstimator(std::string_view name) {
  if (name == "none") return KlEstimator::kNone;
  if (name == "k1") return KlEstimator::kK1;
  if (name == "k2") return KlEstimator::kK2;
  if (name == "k3") return KlEstimator::kK3;
  return absl::InvalidArgumentError(
      absl::StrCat("algorithm.kl_estimator: unknown \"", std::string(name), "\"; use k1, k2 or k3"));
}

std::string_view KlEstimatorName(KlEstimator estimator) {
  switch (estimator) {
    case KlEstimator::kNone:
      return "none";
    case KlEstimator::kK1:
      return "k1";
    case KlEstimator::kK2:
      return "k2";
    case KlEstimator::kK3:
      return "k3";
  }
  return "?";
}

absl::Status ValidateKl(const KlConfig& config) {
  if (!(config.coefficient >= 0.0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("algorithm.kl_coefficient: ", config.coefficient, "; use 0 (off) or more"));
  }
  if (config.estimator == KlEstimator::kK1 && config.place == KlPlace::kLoss) {
    return absl::InvalidArgumentError(
        "algorithm.kl_estimator: k1 in the loss has an expected gradient of zero: it would pull nowhere and add noise; "
        "use k2 or k3, or kl_place: reward");
  }
  if (!(config.target >= 0.0) || !(config.horizon > 0.0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("algorithm.kl_target: ", config.target, "; use 0 (fixed coefficient) or more"));
  }
  return absl::OkStatus();
}

KlTerm KlEstimate(KlEstimator estimator, double logp, double ref_logp) {
  const double difference = logp - ref_logp;
  const double d = std::clamp(difference, -kMaxLogDifference, kMaxLogDifference);
  KlTerm term;
  switch (estimator) {
    case KlEstimator::kNone:
      return term;
    case KlEstimator::kK1:
      term = {d, 1.0};
      break;
    case KlEstimator::kK2:
      term = {0.5 * d * d, d};
      break;
    case KlEstimator::kK3:
      term = {std::expm1(-d) + d, -std::expm1(-d)};
      break;
  }
  if (d != difference || std::abs(term.value) > kMaxEstimate) term.grad = 0.0;
  term.value = std::clamp(term.value, -kMaxEstimate, kMaxEstimate);
  return term;
}

KlTerm KlLoss(KlEstimator estimator, bool unbiased, double logp, double old_logp, double ref_logp) {
  KlTerm term = KlEstimate(estimator, logp, ref_logp);
  if (!unbiased || estimator == KlEstimator::kNone) return term;
  const Ratio ratio = TokenRatio(logp, old_logp);
  if (estimator == KlEstimator::kK3) return {ratio.r * term.value, ratio.grad * term.value + ratio.r * term.grad};
  return {ratio.r * term.value, ratio.r * term.grad};
}

double AdaptKlCoefficient(double coefficient, double kl, int64_t num_samples, double target, double horizon) {
  MOERL_CHECK(target > 0.0 && horizon > 0.0);
  const double error = std::clamp(kl / target - 1.0, -0.2, 0.2);
  return coefficient * (1.0 + error * static_cast<double>(num_samples) / horizon);
}

}  // namespace moerl::rl
