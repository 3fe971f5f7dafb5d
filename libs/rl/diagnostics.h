#ifndef MOERL_LIBS_RL_DIAGNOSTICS_H_
#define MOERL_LIBS_RL_DIAGNOSTICS_H_

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "libs/rl/off_policy.h"

// What a step reports about itself. A micro-batch gives one `SampleReport` for each of its samples: plain data that can
// cross ranks as bytes. `Summarize` sorts the reports of an update by ordinal and adds them in that order, so that the
// numbers do not depend, to the bit, on micro-batches, packing or ranks.
namespace moerl::rl {

inline constexpr int kStalenessBuckets = 17;  // 0 … 15 steps, the last one holds all beyond

struct SampleReport {
  int64_t ordinal = 0;
  int64_t num_tokens = 0;  // trainable

  // Shares of the update's loss: summed over samples they are the loss.
  double policy_loss = 0.0;
  double kl_loss = 0.0;
  double value_loss = 0.0;
  double entropy_loss = 0.0;

  // Sums over trainable tokens.
  double sum_logp = 0.0;
  double sum_entropy = 0.0;  // 0 where the engine gave none
  double sum_ratio = 0.0;
  double max_ratio = 0.0;
  double min_ratio = 0.0;
  double sum_kl_old = 0.0;  // k3 of current against old policy
  double sum_kl_ref = 0.0;  // the recipe's estimator against the reference
  int64_t num_clipped_low = 0;
  int64_t num_clipped_high = 0;
  int64_t num_value_clipped = 0;
  CorrectionStats correction;

  // Tokens whose version is the one being trained, at the first update: the same weights on both sides.
  int64_t mismatch_tokens = 0;
  double sum_abs_mismatch = 0.0;  // |logp − rollout_logp|
  double max_abs_mismatch = 0.0;
  double sum_mismatch_kl = 0.0;                           // k3: e^x − 1 − x, x = logp − rollout_logp
  std::array<int64_t, kStalenessBuckets> staleness = {};  // tokens by steps behind
};

struct UpdateSummary {
  int64_t num_samples = 0;
  int64_t num_tokens = 0;
  int64_t num_empty_samples = 0;  // no trainable token
  double loss = 0.0;
  double policy_loss = 0.0;
  double kl_loss = 0.0;
  double value_loss = 0.0;
  double entropy_loss = 0.0;
  double mean_logp = 0.0;
  double mean_entropy = 0.0;
  double mean_ratio = 1.0;
  double max_ratio = 1.0;
  double min_ratio = 1.0;
  double kl_old = 0.0;
  double kl_ref = 0.0;
  double clip_fraction = 0.0;
  double clip_fraction_low = 0.0;
  double clip_fraction_high = 0.0;
  double value_clip_fraction = 0.0;
  double correction_truncated_fraction = 0.0;
  double correction_masked_fraction = 0.0;
  double effective_sample_fraction = 1.0;
  int64_t mismatch_tokens = 0;
  double mean_abs_mismatch = 0.0;
  double max_abs_mismatch = 0.0;
  double mismatch_kl = 0.0;
  std::array<int64_t, kStalenessBuckets> staleness = {};
};

// Takes the reports of one update in any order. Zeros for none; never NaN.
UpdateSummary Summarize(std::vector<SampleReport> reports);

// How evenly the tokens of a step fell on the experts of each layer.
struct ExpertLoad {
  double max_over_mean = 0.0;  // of the worst layer; 0 without tokens
  double mean_max_over_mean = 0.0;
  struct DeadExpert {
    int32_t layer = 0;
    int32_t expert = 0;
  };
  std::vector<DeadExpert> dead;  // layers that saw tokens, experts that saw none
};

// `counts` [layers, experts] tokens.
ExpertLoad DescribeExpertLoad(std::span<const int64_t> counts, int32_t num_layers, int32_t num_experts);

// Notices a run that cannot learn: no group whose rewards differ, for `patience` steps on end. Reports once, and again
// only after a step that had one.
class DeadStartWatch {
 public:
  explicit DeadStartWatch(int32_t patience) : patience_(patience) {}
  // True when the caller should warn "0 trainable groups in <patience> steps".
  bool AddStep(int64_t num_informative_groups);

 private:
  int32_t patience_;
  int32_t steps_without_ = 0;
};

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_DIAGNOSTICS_H_
