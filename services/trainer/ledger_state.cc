#include "services/trainer/ledger_state.h"

#include <xxhash.h>

#include <algorithm>
#include <tuple>

#include "libs/base/check.h"
#include "libs/experience/mutant.h"

namespace moerl::trainer {
namespace {

template <typename T>
bool EqualByValue(const std::vector<std::shared_ptr<const T>>& a, const std::vector<std::shared_ptr<const T>>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& one, const auto& other) {
    return one == other || (one && other && *one == *other);
  });
}

struct Applier {
  LedgerState& s;

  Group& GroupAt(int64_t number) {
    MOERL_CHECK(number >= 0 && number < static_cast<int64_t>(s.groups.size()));
    return s.groups[static_cast<size_t>(number)];
  }

  // Leases matter only while their group is open.
  void ForgetLeasesOf(Group& group) {
    if (!group.last_lease) return;
    std::erase_if(s.leases, [&](const auto& entry) { return entry.second.group == group.number; });
    group.lease.reset();
    group.last_lease.reset();
  }

  void operator()(const AdmitGroup& write) {
    Group group;
    group.number = static_cast<int64_t>(s.groups.size());
    group.prompt_index = s.cursor++;
    group.staleness = write.staleness;
    group.finished.assign(static_cast<size_t>(s.group_size), false);
    group.samples.resize(static_cast<size_t>(s.group_size));
    s.groups.push_back(std::move(group));
  }

  void operator()(const PutLease& write) {
    Group& group = GroupAt(write.lease.group);
    group.lease = group.last_lease = write.lease.id;
    s.leases[write.lease.id] = write.lease;
  }

  void operator()(const EndLease& write) {
    const auto it = s.leases.find(write.id);
    if (it == s.leases.end()) return;
    Group& group = GroupAt(it->second.group);
    if (group.lease == write.id) group.lease.reset();
  }

  void operator()(const PutOutcome& write) {
    Group& group = GroupAt(write.group);
    group.finished[static_cast<size_t>(write.sample)] = true;
    group.samples[static_cast<size_t>(write.sample)] = write.trajectory;
    if (group.state != GroupState::kOpen) return;
    if (!std::all_of(group.finished.begin(), group.finished.end(), [](bool done) { return done; })) return;
    group.state = GroupState::kFinished;
    ForgetLeasesOf(group);
  }

  void operator()(const DropGroup& write) {
    Group& group = GroupAt(write.group);
    MOERL_CHECK(group.state != GroupState::kDropped);
    group.state = GroupState::kDropped;
    group.reason = write.reason;
    group.detail = write.detail;
    group.step = -1;
    group.samples.assign(group.samples.size(), nullptr);
    ForgetLeasesOf(group);
    s.dropped.insert(std::upper_bound(s.dropped.begin(), s.dropped.end(), group.number), group.number);
  }

  void operator()(const RecordBatch& write) { s.batches[write.step] = write.batch; }
  void operator()(const VoidBatch& write) { s.batches.erase(write.step); }

  void operator()(const MarkTrained& write) {
    const auto it = s.batches.find(write.step);
    MOERL_CHECK(it != s.batches.end());
    for (int64_t number : it->second.groups) {
      Group& group = GroupAt(number);
      group.state = GroupState::kTrained;
      group.step = write.step;
    }
  }

  void operator()(const NameCheckpoint& write) {
    std::erase_if(s.checkpoints, [&](CheckpointName name) { return name.step == write.name.step; });
    s.checkpoints.push_back(write.name);
    std::sort(s.checkpoints.begin(), s.checkpoints.end());
    const auto extra = static_cast<int64_t>(s.checkpoints.size()) - write.keep;
    if (extra > 0) s.checkpoints.erase(s.checkpoints.begin(), s.checkpoints.begin() + extra);
  }

  void operator()(const ForgetPayloads& write) {
    // Downwards until a step whose payloads are gone: the cost is that of what is forgotten.
    for (auto it = s.batches.upper_bound(write.through_step); it != s.batches.begin();) {
      --it;
      bool had_payload = false;
      for (int64_t number : it->second.groups) {
        for (TrajectoryPtr& sample : GroupAt(number).samples) {
          had_payload = had_payload || sample != nullptr;
          sample.reset();
        }
      }
      if (!had_payload) return;
    }
  }

  void operator()(const AddFork& write) {
    s.forks.push_back(write.fork);
    std::erase_if(s.checkpoints, [&](CheckpointName name) { return name.step > write.fork.step; });
    for (auto& [id, lease] : s.leases) GroupAt(lease.group).lease.reset();
  }

  void operator()(const RewindTo& write) {
    for (const auto& [step, batch] : s.batches) {
      for (int64_t number : batch.groups) {
        Group& group = GroupAt(number);
        if (MOERL_MUTANT(hole_only_back) && group.state != GroupState::kTrained) continue;
        group.state = step <= write.step ? GroupState::kTrained : GroupState::kFinished;
        group.step = step <= write.step ? step : -1;
      }
    }
    for (Group& group : s.groups) {  // of a batch that a fork voided
      if (group.state != GroupState::kTrained || group.step <= write.step) continue;
      group.state = GroupState::kFinished;
      group.step = -1;
    }
  }
};

}  // namespace

bool Group::operator==(const Group& other) const {
  const auto facts = [](const Group& g) {
    return std::tie(g.number, g.prompt_index, g.staleness, g.state, g.reason, g.detail, g.step, g.finished, g.lease,
                    g.last_lease);
  };
  return facts(*this) == facts(other) && EqualByValue(samples, other.samples);
}

bool Lease::operator==(const Lease& other) const {
  const auto facts = [](const Lease& l) { return std::tie(l.id, l.group, l.worker, l.incarnation); };
  return facts(*this) == facts(other) && EqualByValue(prefixes, other.prefixes);
}

void LedgerState::Apply(const LedgerWrite& write) { std::visit(Applier{*this}, write); }

int64_t LedgerState::PositionOf(int64_t number) const {
  return number - (std::lower_bound(dropped.begin(), dropped.end(), number) - dropped.begin());
}

int64_t LedgerState::NumberAt(int64_t position) const {
  if (position < 0 || position >= NumUndropped()) return -1;
  // dropped[i] - i undropped groups come before dropped[i]: skip the dropped ones that come first.
  int64_t low = 0;
  int64_t high = static_cast<int64_t>(dropped.size());
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (dropped[static_cast<size_t>(middle)] - middle <= position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return position + low;
}

LedgerState::TrainedHash LedgerState::HashOfTrained(int64_t step) const {
  std::vector<int64_t> ids;
  for (const auto& [k, batch] : batches) {
    if (k > step) break;
    ids.insert(ids.end(), batch.groups.begin(), batch.groups.end());
  }
  return {static_cast<int64_t>(ids.size()), XXH3_64bits(ids.data(), ids.size() * sizeof(int64_t))};
}

}  // namespace moerl::trainer
