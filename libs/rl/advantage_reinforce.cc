#include "libs/rl/advantage_reinforce.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "libs/rl/advantage_group.h"

namespace moerl::rl {
namespace {

constexpr double kWhitenEpsilon = 1e-8;  // beside the variance

template <typename F>
void ForEachTrainable(std::span<const MaskedSequence> sequences, F&& visit) {
  for (const MaskedSequence& sequence : sequences) {
    for (size_t t = 0; t < sequence.trainable.size(); ++t) {
      if (sequence.trainable[t] != 0) visit(sequence.numbers[t]);
    }
  }
}

}  // namespace

void DiscountedReturns(double gamma, std::span<const double> rewards, std::span<const uint8_t> trainable,
                       std::span<double> returns) {
  double next = 0.0;
  for (size_t t = trainable.size(); t-- > 0;) {
    returns[t] = 0.0;
    if (trainable[t] == 0) continue;
    next = rewards[t] + gamma * next;
    returns[t] = next;
  }
}

bool Whiten(std::span<const MaskedSequence> sequences) {
  double sum = 0.0;
  double least = std::numeric_limits<double>::infinity();
  double most = -std::numeric_limits<double>::infinity();
  int64_t count = 0;
  ForEachTrainable(sequences, [&](double x) {
    sum += x;
    least = std::min(least, x);
    most = std::max(most, x);
    ++count;
  });
  const double scale = std::max({1.0, std::abs(least), std::abs(most)});
  if (count < 2 || most - least <= kConstantTolerance * scale) {
    ForEachTrainable(sequences, [](double& x) { x = 0.0; });
    return false;
  }
  const double mean = sum / static_cast<double>(count);
  double squares = 0.0;
  ForEachTrainable(sequences, [&](double x) { squares += (x - mean) * (x - mean); });
  const double factor = 1.0 / std::sqrt(squares / static_cast<double>(count - 1) + kWhitenEpsilon);
  ForEachTrainable(sequences, [&](double& x) { x = (x - mean) * factor; });
  return true;
}

}  // namespace moerl::rl
