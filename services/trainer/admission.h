#ifndef MOERL_SERVICES_TRAINER_ADMISSION_H_
#define MOERL_SERVICES_TRAINER_ADMISSION_H_

// How many groups may be admitted, which versions they may be sampled from, which make the next batch.
// Pure functions of the ledger. B is groups a batch, S steps in the run, eta the staleness bound.

#include <cstdint>
#include <vector>

#include "services/trainer/ledger_state.h"

namespace moerl::trainer {

// Groups that may be admitted now: min(free_slots, min(eta + ready + 1, S) * B - admitted), at least 0, where
// `ready` is the last READY version and `admitted` counts groups ever admitted and not dropped.
int64_t NumAdmissible(const LedgerState& state, int64_t free_slots, int64_t eta, int64_t ready, int64_t num_steps,
                      int64_t batch_groups);

// The lowest version whose tokens a group may hold: max(0, floor(i / B) - eta), i the undropped groups before it
// and eta as at its admission. Later drops only lower it.
int64_t MinimumVersion(const LedgerState& state, const Group& group, int64_t batch_groups);

// The groups of step k (from 1): the undropped ones at positions [(k-1)B, kB), once all of them are FINISHED;
// empty before that.
std::vector<int64_t> NextBatch(const LedgerState& state, int64_t step, int64_t batch_groups);

}  // namespace moerl::trainer

#endif  // MOERL_SERVICES_TRAINER_ADMISSION_H_
