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
#include "libs/rl/targets.h"

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
  // The trainer divides logits by this; must equal every sample's, with 0 (greedy) taken as 1.
  double trainer_temperature = 1.0;
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
  // Without tokens there is nothing to learn: skip the optimizer, whose momentum would move the weights.
  const UpdateCounts& update_counts(int32_t update) const;

  // Loss and gradients of some samples of an update. INVALID_ARGUMENT: shapes that do not fit, ordinals of another
  // update, a non-finite log-probability, value or entropy of a trainable token (the message names the sample: skip the
  // update, keep the weights).
  absl::StatusOr<MicroBatchResult> Evaluate(int32_t update, const MicroBatch& batch) const;

  const StepStats& stats() const { return targets_.stats; }
  // Per-token advantages and returns of a sample, [C]; 0 where not trainable. Returns are empty without a critic.
  std::span<const double> advantages(int64_t ordinal) const {
    return targets_.samples[static_cast<size_t>(ordinal)].advantages;
  }
  std::span<const double> returns(int64_t ordinal) const {
    return targets_.samples[static_cast<size_t>(ordinal)].returns;
  }

 private:
  // One sample of a micro-batch.
  struct SampleView {
    const Sample& sample;
    size_t num_prompt_tokens;
    size_t begin;  // of the sequence in the micro-batch
    size_t length;
    const SampleScores& scores;
    const SampleTargets& targets;
    double weight;  // of each token (aggregation.h)

    size_t first() const { return begin + num_prompt_tokens; }  // of the completion in the micro-batch
    std::span<const float> Of(std::span<const float> numbers) const { return numbers.subspan(begin, length); }
  };
  // Its per-token numbers in double, [C].
  struct Numbers {
    std::vector<double> logp;
    std::vector<double> old_logp;
    std::vector<double> rollout_logp;
    std::vector<double> grad;  // dL/dlogp so far
  };

  PolicyObjective() = default;
  absl::Status CheckMicroBatch(int32_t update, const MicroBatch& batch) const;
  absl::Status EvaluateSample(int32_t update, const MicroBatch& batch, size_t position, MicroBatchResult& result) const;
  Numbers Gather(const SampleView& view, const MicroBatch& batch) const;
  void AddPolicyLoss(const SampleView& view, Numbers& numbers, SampleReport& report) const;
  void AddKlLoss(const SampleView& view, Numbers& numbers, SampleReport& report) const;
  absl::Status AddValueLoss(const SampleView& view, const MicroBatch& batch, SampleReport& report,
                            MicroBatchResult& result) const;
  absl::Status AddEntropyLoss(const SampleView& view, const MicroBatch& batch, SampleReport& report,
                              MicroBatchResult& result) const;

  Recipe recipe_;
  StepContext context_;
  std::vector<const Sample*> samples_;      // by ordinal
  std::vector<int64_t> num_prompt_tokens_;  // by ordinal
  std::vector<int32_t> mini_batch_;         // by ordinal
  std::vector<UpdateCounts> counts_;        // by mini-batch
  std::span<const SampleScores> scores_;
  StepTargets targets_;
};

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_OBJECTIVE_H_
