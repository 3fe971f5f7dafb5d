#ifndef MOERL_SERVICES_TRAINER_RESUME_H_
#define MOERL_SERVICES_TRAINER_RESUME_H_

// What a starting trainer does to the ledger: go back to a checkpoint, so that the recorded batches after it
// are replayed in order; or fork, where a replay could not give the same bytes.

#include <cstdint>
#include <vector>

#include "services/trainer/ledger_state.h"

namespace moerl::trainer {

struct ResumePlan {
  std::vector<LedgerWrite> writes;  // applied to the state already; make them durable in one commit
  bool forked = false;
  int64_t dropped_groups = 0;  // by the fork, for their lineage
  int64_t voided_batches = 0;
};

// Resumes from the checkpoint of `step`, with `ranks` trainer ranks, under `epoch`.
//
// States follow from the recorded batches and `step`, not from history. If a batch after `step` was recorded
// under another number of ranks, or under a configuration that computes otherwise (`is_reconfigured`), its replay
// would give other bytes: the run forks. Then every lease ends, groups with a finished sample that holds a retired
// token are dropped (LINEAGE), and the first batch with a dropped group and all later ones are voided; the others are
// recorded anew under `ranks`.
ResumePlan Resume(LedgerState& state, int64_t epoch, int64_t step, int64_t ranks, bool is_reconfigured);

}  // namespace moerl::trainer

#endif  // MOERL_SERVICES_TRAINER_RESUME_H_
