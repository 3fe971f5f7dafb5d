#include "libs/rl/loss_value.h"

#include <algorithm>

namespace moerl::rl {

int64_t ValueLoss(double clip, std::span<const double> values, std::span<const double> old_values,
                  std::span<const double> returns, std::span<const uint8_t> trainable, std::span<double> loss,
                  std::span<double> grad) {
  int64_t num_clipped = 0;
  for (size_t t = 0; t < trainable.size(); ++t) {
    loss[t] = grad[t] = 0.0;
    if (trainable[t] == 0) continue;
    const double error = values[t] - returns[t];
    loss[t] = 0.5 * error * error;
    grad[t] = error;
    if (clip <= 0.0) continue;
    const double held = std::clamp(values[t], old_values[t] - clip, old_values[t] + clip) - returns[t];
    if (held * held <= error * error) continue;
    loss[t] = 0.5 * held * held;
    grad[t] = 0.0;  // the clip holds the value: only there can the clipped branch be the larger one
    ++num_clipped;
  }
  return num_clipped;
}

}  // namespace moerl::rl
