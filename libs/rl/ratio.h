#ifndef MOERL_LIBS_RL_RATIO_H_
#define MOERL_LIBS_RL_RATIO_H_

#include <algorithm>
#include <cmath>

#include "libs/rl/loss.h"

// Internal to the library: the importance ratio every loss shares.
namespace moerl::rl {

struct Ratio {
  double r = 1.0;     // exp(clamp(logp − old_logp, ±kMaxLogRatio))
  double grad = 1.0;  // dr/dlogp: r, or 0 where the clamp holds
};

inline Ratio TokenRatio(double logp, double old_logp) {
  const double log_ratio = logp - old_logp;
  const double r = std::exp(std::clamp(log_ratio, -kMaxLogRatio, kMaxLogRatio));
  return {r, std::abs(log_ratio) <= kMaxLogRatio ? r : 0.0};
}

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_RATIO_H_
