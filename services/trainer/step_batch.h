#ifndef MOERL_SERVICES_TRAINER_STEP_BATCH_H_
#define MOERL_SERVICES_TRAINER_STEP_BATCH_H_

#include <cstdint>
#include <span>
#include <vector>

#include "libs/model/batch.h"
#include "libs/rl/batch.h"

namespace moerl::trainer {

// What a step trains on: the groups of one recorded batch, in order, with prompts.
struct StepJob {
  int64_t step = 0;  // from 1; makes version `step`
  int64_t epoch = 0;
  VersionName version;  // of the weights it starts from
  std::vector<rl::Group> groups;
};

// The samples of a step by ordinal: their place in group order and then in the group's own order.
class StepBatch {
 public:
  // `job` must outlive this object. `with_routes`: the rollout's expert choices are replayed.
  StepBatch(const StepJob& job, const model::ModelConfig& config, bool with_routes);

  int64_t num_samples() const { return static_cast<int64_t>(samples_.size()); }
  const rl::Sample& sample(int64_t ordinal) const { return *samples_[static_cast<size_t>(ordinal)]; }
  const rl::Group& group(int64_t ordinal) const { return *groups_[static_cast<size_t>(ordinal)]; }
  // Tokens of a sample, prompt included.
  int64_t length(int64_t ordinal) const;
  std::vector<int64_t> Lengths(std::span<const int64_t> ordinals) const;

  // The samples one after another; log-probabilities are wanted where the loss counts a token, at the temperature and
  // over the kept ids they were sampled with.
  model::PackedBatch Pack(std::span<const int64_t> ordinals) const;

 private:
  void AppendKept(const rl::Sample& sample, size_t num_prompt_tokens, model::PackedBatch& batch) const;
  void AppendRoutes(const rl::Sample& sample, size_t num_prompt_tokens, model::PackedBatch& batch) const;

  const model::ModelConfig& config_;
  const bool with_routes_;
  bool has_kept_ = false;
  std::vector<const rl::Sample*> samples_;
  std::vector<const rl::Group*> groups_;
};

}  // namespace moerl::trainer

#endif  // MOERL_SERVICES_TRAINER_STEP_BATCH_H_
