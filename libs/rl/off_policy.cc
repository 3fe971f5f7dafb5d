#include "libs/rl/off_policy.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/rl/loss.h"

namespace moerl::rl {
namespace {

constexpr std::array<std::pair<OffPolicyCorrection, std::string_view>, 5> kNames = {{
    {OffPolicyCorrection::kNone, "none"},
    {OffPolicyCorrection::kTis, "tis"},
    {OffPolicyCorrection::kIcepop, "icepop"},
    {OffPolicyCorrection::kSequence, "sequence"},
    {OffPolicyCorrection::kGeometric, "geometric"},
}};

double BoundedExp(double x) { return std::exp(std::clamp(x, -kMaxLogRatio, kMaxLogRatio)); }

// The weight of a whole sequence before its bounds: e^{Σ d} or e^{mean d} over its trainable tokens.
double SequenceWeight(bool is_mean, std::span<const double> old_logp, std::span<const double> rollout_logp,
                      std::span<const uint8_t> trainable) {
  double sum = 0.0;
  int64_t num_tokens = 0;
  for (size_t t = 0; t < trainable.size(); ++t) {
    if (trainable[t] == 0) continue;
    sum += old_logp[t] - rollout_logp[t];
    ++num_tokens;
  }
  if (num_tokens == 0) return 1.0;
  return BoundedExp(is_mean ? sum / static_cast<double>(num_tokens) : sum);
}

}  // namespace

absl::StatusOr<OffPolicyCorrection> ParseOffPolicyCorrection(std::string_view name) {
  for (const auto& [correction, known] : kNames) {
    if (known == name) return correction;
  }
  return absl::InvalidArgumentError(absl::StrCat("algorithm.off_policy: unknown \"", std::string(name),
                                                 "\"; use none, tis, icepop, sequence or geometric"));
}

std::string_view OffPolicyCorrectionName(OffPolicyCorrection correction) {
  return kNames[static_cast<size_t>(correction)].second;
}

absl::Status ValidateOffPolicy(const OffPolicyConfig& config) {
  if (!(config.cap >= 1.0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("algorithm.off_policy_cap: ", config.cap,
                     "; a cap below 1 would cut the weight of on-policy tokens, use 1 or more"));
  }
  if (!(config.low >= 0.0 && config.low <= 1.0)) {
    return absl::InvalidArgumentError(absl::StrCat("algorithm.off_policy_low: ", config.low,
                                                   "; a lower bound above 1 would mask on-policy tokens, use 0 to 1"));
  }
  return absl::OkStatus();
}

void CorrectionStats::Add(const CorrectionStats& other) {
  num_tokens += other.num_tokens;
  num_truncated += other.num_truncated;
  num_masked += other.num_masked;
  sum_weight += other.sum_weight;
  sum_weight_squared += other.sum_weight_squared;
}

double CorrectionStats::effective_fraction() const {
  if (num_tokens == 0 || sum_weight_squared == 0.0) return 1.0;
  return sum_weight * sum_weight / (static_cast<double>(num_tokens) * sum_weight_squared);
}

CorrectionStats CorrectionWeights(const OffPolicyConfig& config, std::span<const double> old_logp,
                                  std::span<const double> rollout_logp, std::span<const uint8_t> trainable,
                                  std::span<double> weights) {
  const bool is_off = config.correction == OffPolicyCorrection::kNone;
  const bool is_mean = config.correction == OffPolicyCorrection::kGeometric;
  const bool is_by_sequence = is_mean || config.correction == OffPolicyCorrection::kSequence;
  const bool masks = is_mean || config.correction == OffPolicyCorrection::kIcepop;
  const double of_sequence = is_by_sequence ? SequenceWeight(is_mean, old_logp, rollout_logp, trainable) : 0.0;

  CorrectionStats stats;
  for (size_t t = 0; t < trainable.size(); ++t) {
    weights[t] = 0.0;
    if (trainable[t] == 0) continue;
    const double w = is_by_sequence ? of_sequence : BoundedExp(old_logp[t] - rollout_logp[t]);
    ++stats.num_tokens;
    stats.sum_weight += w;
    stats.sum_weight_squared += w * w;
    if (is_off) {
      weights[t] = 1.0;
    } else if (masks) {
      const bool is_inside = w >= config.low && w <= config.cap;
      weights[t] = is_inside ? w : 0.0;
      stats.num_masked += !is_inside;
    } else {
      weights[t] = std::min(w, config.cap);
      stats.num_truncated += w > config.cap;
    }
  }
  return stats;
}

}  // namespace moerl::rl
