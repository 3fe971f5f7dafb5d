#include "services/trainer/resume.h"

#include <algorithm>

#include "libs/experience/mutant.h"

namespace moerl::trainer {
namespace {

bool HoldsRetiredToken(const Group& group, std::span<const Fork> forks) {
  for (const TrajectoryPtr& sample : group.samples) {
    if (!sample) continue;
    const auto& versions = sample->tokens.versions;
    if (std::any_of(versions.begin(), versions.end(), [&](VersionName v) { return IsRetired(v, forks); })) return true;
  }
  return false;
}

class Resumer {
 public:
  Resumer(LedgerState& state, ResumePlan& plan) : state_(state), plan_(plan) {}

  void Write(LedgerWrite write) {
    state_.Apply(write);
    plan_.writes.push_back(std::move(write));
  }

  void ForkAt(int64_t epoch, int64_t step, int64_t ranks) {
    plan_.forked = true;
    Write(AddFork{{epoch, step}});
    for (size_t i = 0; i < state_.groups.size(); ++i) {
      const Group& group = state_.groups[i];
      if (group.state == GroupState::kDropped || !HoldsRetiredToken(group, state_.forks)) continue;
      if (IsTrainedBy(step, group.number)) continue;
      Write(DropGroup{group.number, DropReason::kLineage, "a fork retired a version it was sampled from"});
      ++plan_.dropped_groups;
    }
    VoidDamagedBatches(step, ranks);
  }

 private:
  bool IsTrainedBy(int64_t step, int64_t number) const {
    for (const auto& [k, batch] : state_.batches) {
      if (k > step) return false;
      if (std::find(batch.groups.begin(), batch.groups.end(), number) != batch.groups.end()) return true;
    }
    return false;
  }

  // A damaged batch voids itself and all later ones: what follows it is composed anew.
  void VoidDamagedBatches(int64_t step, int64_t ranks) {
    std::vector<std::pair<int64_t, Batch>> later(state_.batches.upper_bound(step), state_.batches.end());
    bool damaged = false;
    for (auto& [k, batch] : later) {
      damaged = damaged || std::any_of(batch.groups.begin(), batch.groups.end(), [&](int64_t number) {
                  return state_.groups[static_cast<size_t>(number)].state == GroupState::kDropped;
                });
      if (damaged && !MOERL_MUTANT(hole_batches_kept)) {
        Write(VoidBatch{k});
        ++plan_.voided_batches;
      } else {
        batch.ranks = ranks;
        Write(RecordBatch{k, std::move(batch)});
      }
    }
  }

  LedgerState& state_;
  ResumePlan& plan_;
};

}  // namespace

ResumePlan Resume(LedgerState& state, int64_t epoch, int64_t step, int64_t ranks, bool is_reconfigured) {
  ResumePlan plan;
  Resumer resumer(state, plan);
  const bool other_bytes = std::any_of(state.batches.upper_bound(step), state.batches.end(), [&](const auto& entry) {
    return is_reconfigured || entry.second.ranks != ranks;
  });
  if (other_bytes && !MOERL_MUTANT(bug_no_fork)) resumer.ForkAt(epoch, step, ranks);
  if (!MOERL_MUTANT(bug_no_ledger_position)) resumer.Write(RewindTo{step});
  return plan;
}

}  // namespace moerl::trainer
