#ifndef MOERL_SERVICES_TRAINER_LEARNER_H_
#define MOERL_SERVICES_TRAINER_LEARNER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "libs/model/training.h"
#include "libs/rl/diagnostics.h"
#include "libs/rl/objective.h"
#include "libs/rl/packing.h"
#include "services/trainer/micro_batch.h"
#include "services/trainer/mismatch_inquiry.h"
#include "services/trainer/rank_group.h"
#include "services/trainer/run_settings.h"
#include "services/trainer/step_batch.h"

namespace moerl::trainer {

// What the code that computed a step's gradients says about one group it trained on.
struct TrainedGroup {
  uint64_t group = 0;
  int64_t num_samples = 0;  // evaluated
  int64_t num_tokens = 0;   // trainable tokens that got a gradient
  uint64_t digest = 0;      // of the ids and rewards
};

struct StepReport {
  rl::UpdateSummary first;  // of the step's first update
  rl::UpdateSummary last;
  rl::StepStats stats;
  rl::ExpertLoad expert_load;
  double grad_norm = 0.0;
  double learning_rate = 0.0;
  double explained_variance = 0.0;  // of the critic
  bool is_skipped = false;          // an update met a non-finite gradient or had nothing to learn from
  std::string skipped_because;
  std::vector<TrainedGroup> trained;  // in batch order
  std::optional<Mismatch> mismatch;
  MismatchTrace mismatch_trace;  // of the weights that the step started from; empty without a mismatch
};

// One rank's part of the model and of every step: policy, critic and reference, forward and backward, optimizer.
//
// Every call is collective over the group's ranks, with equal arguments, and blocks until all have done their part.
// Owned by one thread. Errors: UNAVAILABLE names a lost rank; others name what is wrong with the input.
class Learner {
 public:
  // Parameters from model.path, or random ones from model.init.seed. `settings` and `ranks` must outlive it.
  static absl::StatusOr<std::unique_ptr<Learner>> Create(const RunSettings& settings, RankGroup& ranks);

  // One supervised update over `examples`; returns the mean loss a token.
  absl::StatusOr<double> SupervisedUpdate(const std::vector<rl::SupervisedExample>& examples);
  // Ends the warm start: a critic and a reference that start from the policy. The policy's moments stay: with fresh
  // ones Adam's first steps move every weight by the whole learning rate, and the few groups that have something to
  // teach at the start undo what the warm start taught (reverse: sampled pass rate 0.04 before one such step, 0.00
  // after).
  absl::Status BeginReinforcement();
  // The reference policy of a resumed run, from a Hugging Face directory.
  absl::Status LoadReference(const std::string& directory);

  absl::StatusOr<StepReport> TrainStep(const StepJob& job);

  // The sampled (temperature as configured) or greedy pass rate on `num_prompts` of `source`, from `first_index` on; on
  // each of them once where `source` has fewer.
  absl::StatusOr<double> PassRate(const rl::PromptSource& source, rl::Environment& environment, uint64_t first_index,
                                  int64_t num_prompts, bool is_greedy);

  // This rank's files of a checkpoint, inside `directory`, synced. Reads what any number of ranks wrote.
  absl::Status SaveState(const std::string& directory) const;
  absl::Status RestoreState(const std::string& directory, int num_ranks_saved);
  // The whole policy as a Hugging Face directory, written by rank 0, with the tokenizer that came with model.path.
  absl::Status ExportPolicy(const std::string& directory) const;

  const model::TrainerModel& policy() const { return *policy_; }
  double kl_coefficient() const { return kl_coefficient_; }
  void set_kl_coefficient(double value) { kl_coefficient_ = value; }

 private:
  Learner(const RunSettings& settings, RankGroup& ranks) : settings_(settings), ranks_(ranks) {}
  model::TrainerModelOptions ModelOptions(bool value_head) const;
  absl::StatusOr<std::unique_ptr<model::TrainerModel>> CopyOfPolicy(bool value_head) const;
  absl::StatusOr<rl::Packing> PackFor(std::span<const int64_t> ordinals, std::span<const int64_t> lengths) const;
  absl::StatusOr<std::vector<rl::SampleScores>> ComputeScores(const StepBatch& batch);
  absl::Status ScoreMicroBatch(const StepBatch& batch, std::span<const int64_t> ordinals, std::string& out);
  absl::Status RunUpdate(const StepJob& job, const StepBatch& batch, const rl::PolicyObjective& objective,
                         int32_t update, StepReport& report);

  absl::Status WritePolicy(const std::string& directory) const;
  absl::StatusOr<MismatchTrace> TraceMismatch(const StepBatch& batch, const Mismatch& mismatch);
  absl::Status Reduce(model::TrainerModel& model);
  absl::StatusOr<model::StepResult> OptimizerStep(model::TrainerModel& model, double learning_rate,
                                                  const model::RouterBiasUpdate& bias = {});

  const RunSettings& settings_;
  RankGroup& ranks_;
  std::unique_ptr<model::TrainerModel> policy_;
  std::unique_ptr<model::TrainerModel> critic_;      // null without one
  std::shared_ptr<const model::Weights> reference_;  // null without one
  double kl_coefficient_ = 0.0;
  std::vector<int64_t> expert_tokens_;  // of the step, [MoE layers, experts]
};

}  // namespace moerl::trainer

#endif  // MOERL_SERVICES_TRAINER_LEARNER_H_
