#ifndef MOERL_SERVICES_TRAINER_MICRO_BATCH_H_
#define MOERL_SERVICES_TRAINER_MICRO_BATCH_H_

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "libs/model/training.h"
#include "libs/rl/objective.h"
#include "services/trainer/step_batch.h"

namespace moerl::trainer {

// The first token at which trainer and rollout disagree on the log-probability of a token of the current version.
struct Mismatch {
  int64_t ordinal = 0;
  int64_t token = 0;  // in the completion
  double trainer_logprob = 0.0;
  double rollout_logprob = 0.0;
};

// What a rank says about its part of an update; plain data that crosses ranks as bytes.
struct UpdatePart {
  std::vector<rl::SampleReport> reports;
  std::vector<int64_t> expert_tokens;  // [MoE layers, experts]
  std::optional<Mismatch> mismatch;    // at the first update only
  std::string failure;                 // why the update must be skipped; empty when it need not

  std::string Encode() const;
  static UpdatePart Decode(const std::string& bytes);
};

// How much the router's losses weigh in one update.
struct RouterLossScale {
  float balance = 0.0f;  // coefficient / (sequences of the update * MoE layers)
  float z = 0.0f;        // coefficient / (tokens of the update * MoE layers)
};

// The critic's head at a token sees that token: it values the state after it. The objective wants the state before a
// token was chosen, which is the head at the token before; with the other one the baseline would know the action. A
// sequence's first token has none, 0. `offsets` are those of the packed sequences.
std::vector<float> ValuesBeforeTokens(const std::vector<float>& head, std::span<const int64_t> offsets);
// The same way back: gradients of the values before tokens as gradients of the head's outputs.
std::vector<float> GradientsOfHead(const std::vector<float>& gradients, std::span<const int64_t> offsets);

// Forward, loss and backward of some samples on policy and critic (null without one); adds to `part`.
// A loss that cannot be computed (a log-probability that is not finite) becomes `part.failure`, and backward still
// runs, with zeros: the other ranks are in it. Errors are the exchange's.
absl::Status RunMicroBatch(model::TrainerModel& policy, model::TrainerModel* critic, const StepJob& job,
                           const StepBatch& batch, const rl::PolicyObjective& objective, int32_t update,
                           std::span<const int64_t> ordinals, const RouterLossScale& scale, UpdatePart& part);

}  // namespace moerl::trainer

#endif  // MOERL_SERVICES_TRAINER_MICRO_BATCH_H_
