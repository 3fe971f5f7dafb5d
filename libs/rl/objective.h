#ifndef MOERL_LIBS_RL_OBJECTIVE_H_
#define MOERL_LIBS_RL_OBJECTIVE_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "libs/rl/aggregation.h"
#include "libs/rl/batch.h"
#include "libs/rl/diagnostics.h"
#include "libs/rl/recipe.h"

// The objective of one training step: everything between "these groups came back" and "this is dL/dlogp".
//
//   auto step = PolicyObjective::Create(recipe, groups, scores, context);   // once, on every rank, the same input
//   for (int update = 0; update < step->num_updates(); ++update)
//     for (micro-batch of my part of step->UpdateOrdinals(update))
//       forward; auto out = step->Evaluate(update, micro_batch); backward with out->grad_logp
//     add gradients over ranks; gather out->reports; Summarize(reports); optimizer
//
// A sample's *ordinal* is its place among the samples of all groups, in group order and then in the group's own order.
//
// Gradients are already divided by counts over the whole update: they are *added* over micro-batches and ranks, never
// averaged. A token's gradient is the same to the bit in every micro-batch, packing and rank.
namespace moerl::rl {

struct StepContext {
  VersionName version;          // the weights this step starts from
  double kl_coefficient = 0.0;  // in force (AdaptKlCoefficient); recipe.kl.coefficient where it does not adapt
  double trainer_temperature =
      1.0;  // the trainer divides logits by this; must equal every sample's (0 and 1 are equal)
  // The trainer renormalises over the kept ids that came with the samples. Without it, samples cut by top-p or top-k
  // are refused: their log-probabilities mean another distribution.
  bool renormalises_kept_ids = false;
};

// Some samples of one update, packed one behind the other, all T tokens of each.
struct MicroBatch {
  std::span<const int64_t> ordinals;  // [S] which samples
  std::span<const int64_t> offsets;   // [S + 1] tokens of sample s are [offsets[s], offsets[s+1])
  std::span<const float> logp;        // [N] current policy; read only where trainable
  std::span<const float> values;      // [N] current critic, or empty
  std::span<const float> entropy;     // [N] of the distribution each token came from, or empty
};

struct MicroBatchResult {
  std::vector<float> grad_logp;       // [N] dL/dlogp, 0 where not trainable
  std::vector<float> grad_values;     // [N] or empty
  std::vector<float> grad_entropy;    // [N] or empty
  std::vector<SampleReport> reports;  // [S]
  double loss = 0.0;                  // this micro-batch's share
};

// About the rewards and advantages of the step; the same on every rank.
struct StepStats {
  int64_t num_groups = 0;
  int64_t num_samples = 0;
  int64_t num_tokens = 0;              // trainable
  int64_t num_informative_groups = 0;  // rewards differ
  int64_t num_constant_groups = 0;     // all equal, among them those of a single sample
  int64_t num_single_sample_groups = 0;
  int64_t num_empty_samples = 0;  // no trainable token: no gradient, not in any denominator
  int64_t num_truncated_samples = 0;
  bool is_whitening_degenerate = false;  // whitened advantages were all equal and became zeros
  double reward_mean = 0.0;              // as the environment gave it
  double reward_std = 0.0;
  double reward_min = 0.0;
  double reward_max = 0.0;
  double overlong_penalty_mean = 0.0;
  double kl_penalty_mean = 0.0;  // taken from the reward, by sample
  double advantage_mean = 0.0;   // over trainable tokens
  double advantage_std = 0.0;
  double completion_tokens_mean = 0.0;
};

// Immutable after Create; Evaluate may be called from several threads.
class PolicyObjective {
 public:
  // `groups` in training order, and `scores` one for each sample by ordinal (or empty if the recipe needs none).
  // Both must outlive the objective.
  //
  // INVALID_ARGUMENT, naming group and sample: what CheckGroup refuses; missing or non-finite scores; a temperature
  // that is not the trainer's; a negative reward under MaxRL; versions newer than the context's.
  static absl::StatusOr<PolicyObjective> Create(const Recipe& recipe, std::span<const Group> groups,
                                                std::span<const SampleScores> scores, const StepContext& context);

  int32_t num_updates() const { return recipe_.num_updates(); }
  // Samples of an update, ascending: whole groups, num_mini_batches parts in group order, every epoch the same parts.
  std::vector<int64_t> UpdateOrdinals(int32_t update) const;
  const UpdateCounts& update_counts(int32_t update) const;

  // Loss and gradients of some samples of an update. INVALID_ARGUMENT: shapes that do not fit, ordinals of another
  // update, a non-finite log-probability, value or entropy of a trainable token (the message names the sample: skip the
  // update, keep the weights).
  absl::StatusOr<MicroBatchResult> Evaluate(int32_t update, const MicroBatch& batch) const;

  const StepStats& stats() const { return stats_; }
  // Per-token advantages and returns of a sample, [C]; 0 where not trainable. Returns are empty without a critic.
  std::span<const double> advantages(int64_t ordinal) const { return targets_[ordinal].advantages; }
  std::span<const double> returns(int64_t ordinal) const { return targets_[ordinal].returns; }

 private:
  struct Targets {
    std::vector<double> advantages;
    std::vector<double> returns;
    int64_t num_tokens = 0;  // trainable
    bool is_group_constant = false;
    int32_t mini_batch = 0;
  };

  PolicyObjective(const Recipe& recipe, std::vector<const Sample*> samples, std::span<const SampleScores> scores,
                  const StepContext& context)
      : recipe_(recipe), samples_(std::move(samples)), scores_(scores), context_(context) {}

  absl::Status CheckInput(std::span<const Group> groups) const;
  absl::Status ComputeTargets(std::span<const Group> groups);
  void DescribeTargets();

  Recipe recipe_;
  std::vector<const Sample*> samples_;
  std::span<const SampleScores> scores_;
  StepContext context_;
  std::vector<Targets> targets_;            // by ordinal
  std::vector<UpdateCounts> mini_batches_;  // by mini-batch
  StepStats stats_;
};

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_OBJECTIVE_H_
