#include "libs/rl/aggregation.h"

#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"

namespace moerl::rl {
namespace {

constexpr std::array<std::pair<Aggregation, std::string_view>, 4> kNames = {{
    {Aggregation::kTokenMean, "token_mean"},
    {Aggregation::kSeqMeanTokenMean, "seq_mean_token_mean"},
    {Aggregation::kSeqMeanTokenSum, "seq_mean_token_sum"},
    {Aggregation::kSeqMeanTokenSumNorm, "seq_mean_token_sum_norm"},
}};

}  // namespace

absl::StatusOr<Aggregation> ParseAggregation(std::string_view name) {
  for (const auto& [aggregation, known] : kNames) {
    if (known == name) return aggregation;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("algorithm.aggregation: unknown mode \"", std::string(name),
                   "\"; use token_mean, seq_mean_token_mean, seq_mean_token_sum or seq_mean_token_sum_norm"));
}

std::string_view AggregationName(Aggregation aggregation) { return kNames[static_cast<size_t>(aggregation)].second; }

UpdateCounts CountUpdate(std::span<const int64_t> trainable_tokens) {
  UpdateCounts counts;
  for (int64_t tokens : trainable_tokens) {
    counts.num_tokens += tokens;
    counts.num_sequences += tokens > 0 ? 1 : 0;
  }
  return counts;
}

double TokenWeight(Aggregation aggregation, const UpdateCounts& counts, int64_t num_tokens, double length_norm) {
  if (num_tokens == 0) return 0.0;
  MOERL_CHECK(num_tokens <= counts.num_tokens);
  const double sequences = static_cast<double>(counts.num_sequences);
  switch (aggregation) {
    case Aggregation::kTokenMean:
      return 1.0 / static_cast<double>(counts.num_tokens);
    case Aggregation::kSeqMeanTokenMean:
      return 1.0 / (sequences * static_cast<double>(num_tokens));
    case Aggregation::kSeqMeanTokenSum:
      return 1.0 / sequences;
    case Aggregation::kSeqMeanTokenSumNorm:
      MOERL_CHECK(length_norm > 0.0);
      return 1.0 / (sequences * length_norm);
  }
  MOERL_CHECK(false);
  return 0.0;
}

}  // namespace moerl::rl
