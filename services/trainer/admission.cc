#include "services/trainer/admission.h"

#include <algorithm>

#include "libs/experience/mutant.h"

namespace moerl::trainer {

int64_t NumAdmissible(const LedgerState& state, int64_t free_slots, int64_t eta, int64_t ready, int64_t num_steps,
                      int64_t batch_groups) {
  const int64_t steps = MOERL_MUTANT(hole_no_end_cap) ? eta + ready + 1 : std::min(eta + ready + 1, num_steps);
  const int64_t admitted =
      MOERL_MUTANT(bug_admission_ignores_drops) ? static_cast<int64_t>(state.groups.size()) : state.NumUndropped();
  return std::max<int64_t>(0, std::min(free_slots, steps * batch_groups - admitted));
}

int64_t MinimumVersion(const LedgerState& state, const Group& group, int64_t batch_groups) {
  return std::max<int64_t>(0, state.PositionOf(group.number) / batch_groups - group.staleness);
}

std::vector<int64_t> NextBatch(const LedgerState& state, int64_t step, int64_t batch_groups) {
  std::vector<int64_t> batch;
  for (int64_t i = 0; i < batch_groups; ++i) {
    const int64_t number = state.NumberAt((step - 1) * batch_groups + i);
    if (number < 0 || state.groups[static_cast<size_t>(number)].state != GroupState::kFinished) return {};
    batch.push_back(number);
  }
  return batch;
}

}  // namespace moerl::trainer
