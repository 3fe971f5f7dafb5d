#include "libs/rl/advantage_gae.h"

namespace moerl::rl {

void GaeAdvantages(double gamma, double lambda, std::span<const double> rewards, std::span<const double> values,
                   std::span<const uint8_t> trainable, std::span<double> advantages, std::span<double> returns) {
  double next_value = 0.0;
  double next_advantage = 0.0;
  for (size_t t = trainable.size(); t-- > 0;) {
    advantages[t] = returns[t] = 0.0;
    if (trainable[t] == 0) continue;
    const double delta = rewards[t] + gamma * next_value - values[t];
    advantages[t] = delta + gamma * lambda * next_advantage;
    returns[t] = advantages[t] + values[t];
    next_value = values[t];
    next_advantage = advantages[t];
  }
}

}  // namespace moerl::rl
