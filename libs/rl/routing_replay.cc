#include "libs/rl/routing_replay.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/base/status_macros.h"

namespace moerl::rl {
namespace {

int32_t ExpertAt(std::string_view payload, int64_t index, int32_t bytes_per_id) {
  const auto byte = [&](int64_t at) {
    return static_cast<int32_t>(static_cast<uint8_t>(payload[static_cast<size_t>(at)]));
  };
  if (bytes_per_id == 1) return byte(index);
  return byte(2 * index) | byte(2 * index + 1) << 8;
}

// One token in one layer: known experts, each once.
absl::Status CheckChoice(const RouteShape& shape, std::string_view payload, int64_t token, int64_t layer) {
  const int64_t first = (token * shape.num_layers + layer) * shape.top_k;
  for (int32_t k = 0; k < shape.top_k; ++k) {
    const int32_t expert = ExpertAt(payload, first + k, shape.bytes_per_id());
    bool repeats = false;
    for (int32_t j = 0; j < k; ++j) repeats |= ExpertAt(payload, first + j, shape.bytes_per_id()) == expert;
    if (expert < shape.num_experts && !repeats) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("routes: token ", token, " layer ", layer, " names expert ", expert,
                     repeats ? " twice" : absl::StrCat(", there are ", shape.num_experts)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckRoutes(const RouteShape& shape, std::string_view payload) {
  MOERL_CHECK(shape.num_tokens >= 0 && shape.num_layers >= 0 && shape.top_k > 0 && shape.num_experts <= 65536);
  if (static_cast<int64_t>(payload.size()) != shape.num_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat("routes: ", payload.size(), " bytes, expected ", shape.num_bytes(),
                                                   " (", shape.num_tokens, " tokens x ", shape.num_layers, " layers x ",
                                                   shape.top_k, " experts x ", shape.bytes_per_id(), " bytes)"));
  }
  for (int64_t token = 0; token < shape.num_tokens; ++token) {
    for (int64_t layer = 0; layer < shape.num_layers; ++layer) {
      MOERL_RETURN_IF_ERROR(CheckChoice(shape, payload, token, layer));
    }
  }
  return absl::OkStatus();
}

absl::Status ReplaceRoutes(const RouteShape& shape, std::string_view full, std::string& kept) {
  MOERL_RETURN_IF_ERROR(CheckRoutes(shape, full));
  if (full.substr(0, kept.size()) != kept) {
    return absl::InvalidArgumentError(
        absl::StrCat("routes: the ", full.size(), " bytes of the whole sequence do not begin with the ", kept.size(),
                     " bytes kept before; they are of another sequence, or only of its new tokens"));
  }
  kept = full;
  return absl::OkStatus();
}

void ReplayWeights(std::span<const double> logits, std::span<const int32_t> selected, std::span<double> weights) {
  MOERL_CHECK(!selected.empty() && selected.size() == weights.size());
  double most = logits[static_cast<size_t>(selected[0])];
  for (int32_t expert : selected) most = std::max(most, logits[static_cast<size_t>(expert)]);
  double sum = 0.0;
  for (size_t i = 0; i < selected.size(); ++i) {
    weights[i] = std::exp(logits[static_cast<size_t>(selected[i])] - most);
    sum += weights[i];
  }
  for (double& weight : weights) weight /= sum;
}

void ReplayWeightsBackward(std::span<const double> weights, std::span<const int32_t> selected,
                           std::span<const double> grad_weights, std::span<double> grad_logits) {
  MOERL_CHECK(weights.size() == selected.size() && weights.size() == grad_weights.size());
  double mean = 0.0;
  for (size_t i = 0; i < weights.size(); ++i) mean += weights[i] * grad_weights[i];
  for (size_t i = 0; i < weights.size(); ++i) {
    grad_logits[static_cast<size_t>(selected[i])] += weights[i] * (grad_weights[i] - mean);
  }
}

}  // namespace moerl::rl
