#ifndef MOERL_SERVICES_TRAINER_CHECKPOINT_H_
#define MOERL_SERVICES_TRAINER_CHECKPOINT_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "moerl/v1/config.pb.h"
#include "services/trainer/ledger_state.h"
#include "services/trainer/team.h"

namespace moerl::trainer {

// What checkpoint.json and config.yaml say of their directory (docs/checkpoints.md).
struct CheckpointInfo {
  CheckpointName name;
  LedgerState::TrainedHash trained;  // group ids trained up to its step
  int64_t cursor = 0;                // of the prompts; the ledger's own counts
  std::string prompt_fingerprint;
  v1::Config config;
  int64_t num_ranks = 1;
  double kl_coefficient = 0.0;
};

// checkpoints/step_00000020_epoch_3: step and epoch are in the name, so that a fenced trainer that wakes up cannot
// overwrite a checkpoint that counts.
std::string CheckpointDirectory(const std::string& run_directory, CheckpointName name);

// Writes the team's state and the policy as a Hugging Face directory beside the others, syncs it all, and renames it
// into place. It counts once the ledger names it.
absl::Status WriteCheckpoint(Team& team, const std::string& run_directory, const CheckpointInfo& info);

// NOT_FOUND or DATA_LOSS: try an older one.
absl::StatusOr<CheckpointInfo> ReadCheckpointInfo(const std::string& run_directory, CheckpointName name);

// Removes the directories that `state` does not name.
absl::Status RemoveOtherCheckpoints(const std::string& run_directory, const LedgerState& state);

}  // namespace moerl::trainer

#endif  // MOERL_SERVICES_TRAINER_CHECKPOINT_H_
