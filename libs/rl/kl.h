#ifndef MOERL_LIBS_RL_KL_H_
#define MOERL_LIBS_RL_KL_H_

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Estimators of KL(π ‖ π_ref) from the sampled token alone, with d = logp − ref_logp (joschu.net/blog/kl-approx):
//   k1 = d      k2 = d²/2      k3 = e^{−d} − 1 + d
// d is clamped to ±20 and the estimate to ±10; a clamped estimate has derivative zero.
//
// As a *loss* an estimator is judged by its gradient, not its value (2510.01555, 2512.21852). The gradient of KL is
// E[d·∇logp]. k1's is E[∇logp] = 0: refused. k2's is d, right on-policy; k3's is 1 − e^{−d}, biased. The unbiased form
// multiplies by the ratio r = π/π_old (2512.02556): sg[r]·k2, and r·k3 with the gradient through r, both give r·d.
namespace moerl::rl {

enum class KlEstimator { kNone, kK1, kK2, kK3 };
enum class KlPlace { kLoss, kReward };

struct KlConfig {
  KlEstimator estimator = KlEstimator::kNone;
  KlPlace place = KlPlace::kLoss;
  double coefficient = 0.001;
  bool unbiased = true;  // in the loss: multiply by the ratio, as above
  // A group whose rewards are all equal teaches nothing; with this its KL loss does not pull either.
  bool skip_constant_groups = true;
  double target = 0.0;       // > 0: the coefficient follows the measured KL (AdaptKlCoefficient)
  double horizon = 10000.0;  // of the adaptive coefficient, in samples
};

absl::StatusOr<KlEstimator> ParseKlEstimator(std::string_view name);
std::string_view KlEstimatorName(KlEstimator estimator);

// INVALID_ARGUMENT for k1 in the loss (its gradient is zero in expectation), a negative coefficient, a horizon ≤ 0.
absl::Status ValidateKl(const KlConfig& config);

struct KlTerm {
  double value = 0.0;
  double grad = 0.0;  // d value / d logp
};

// The estimate of one token and its derivative.
KlTerm KlEstimate(KlEstimator estimator, double logp, double ref_logp);

// The loss of one token before the coefficient; unbiased multiplies by r = exp(logp − old_logp).
KlTerm KlLoss(KlEstimator estimator, bool unbiased, double logp, double old_logp, double ref_logp);

// The coefficient after `num_samples` more samples with mean KL `kl` (1909.08593):
//   coefficient · (1 + clip(kl/target − 1, ±0.2) · num_samples / horizon)
double AdaptKlCoefficient(double coefficient, double kl, int64_t num_samples, double target, double horizon);

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_KL_H_
