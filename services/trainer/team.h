#ifndef MOERL_SERVICES_TRAINER_TEAM_H_
#define MOERL_SERVICES_TRAINER_TEAM_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "libs/weights/publisher.h"
#include "services/trainer/learner.h"

namespace moerl::v1 {
class RankCommand;
class RestoreStateCommand;
}  // namespace moerl::v1

namespace moerl::trainer {

// All ranks' learners, seen from the leader: each call tells the other ranks what to do and does this rank's part.
// On one rank it is the learner. Blocking; owned by one thread. Errors are the learner's; after one the run must end.
class Team {
 public:
  // All must outlive it. `publisher` is this rank's; `environment` judges held-out answers.
  Team(const RunSettings& settings, RankGroup& ranks, Learner& learner, weights::Publisher& publisher,
       rl::Environment& environment)
      : settings_(settings), ranks_(ranks), learner_(learner), publisher_(publisher), environment_(environment) {}

  // ---- for the leader
  absl::StatusOr<double> SupervisedUpdate(uint64_t first_index, int64_t num_examples);
  absl::Status BeginReinforcement();
  absl::Status LoadReference(const std::string& directory);
  absl::StatusOr<StepReport> TrainStep(const StepJob& job);
  absl::StatusOr<double> PassRate(uint64_t first_index, int64_t num_prompts, bool is_greedy);
  absl::Status SaveState(const std::string& directory);
  absl::Status RestoreState(const std::string& directory, int num_ranks_saved, double kl_coefficient);
  absl::Status ExportPolicy(const std::string& directory);
  // Makes the current weights READY as version `number`; `before_commit` runs just before readers may see it.
  absl::StatusOr<VersionName> Publish(int64_t epoch, int64_t number, const std::function<void()>& before_commit);
  absl::Status Stop();

  // ---- for the others: obeys the leader until it says stop.
  absl::Status Follow();

 private:
  absl::Status Tell(const v1::RankCommand& command);
  absl::Status Obey(const v1::RankCommand& command);
  absl::StatusOr<double> DoSupervisedUpdate(uint64_t first_index, int64_t num_examples);
  absl::Status DoRestoreState(const v1::RestoreStateCommand& command);
  absl::StatusOr<std::vector<std::string>> PutShards(int64_t number);

  const RunSettings& settings_;
  RankGroup& ranks_;
  Learner& learner_;
  weights::Publisher& publisher_;
  rl::Environment& environment_;
};

}  // namespace moerl::trainer

#endif  // MOERL_SERVICES_TRAINER_TEAM_H_
