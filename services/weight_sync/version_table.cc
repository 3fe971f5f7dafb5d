#include "services/weight_sync/version_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/base/status_macros.h"

namespace moerl {

using weights::Digest;
using weights::ToString;

absl::StatusOr<VersionChange> VersionTable::Acquire(const std::string& run_id) const {
  if (!run_id_.empty() && run_id != run_id_) {
    return absl::FailedPreconditionError(absl::StrCat("run_id: this store holds the versions of run '", run_id_,
                                                      "', not of '", run_id,
                                                      "'; give each run its own store directory"));
  }
  VersionChange change;
  change.run_id = run_id;
  change.epoch = epoch_ + 1;
  for (const auto& [id, row] : rows_) {
    if (row.state == VersionState::kStaging) change.erase.push_back(id);
  }
  return change;
}

absl::Status VersionTable::CheckEpoch(int64_t epoch) const {
  if (epoch == epoch_) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "publisher_epoch: ", epoch, " is not the publisher's, which is ", epoch_,
      epoch < epoch_ ? "; a newer trainer has taken over, this one must stop" : "; call AcquirePublisher first"));
}

absl::StatusOr<VersionChange> VersionTable::DeclareForks(int64_t epoch, const std::vector<Fork>& declared) const {
  MOERL_RETURN_IF_ERROR(CheckEpoch(epoch));
  std::vector<Fork> forks = declared;
  std::sort(forks.begin(), forks.end());
  forks.erase(std::unique(forks.begin(), forks.end()), forks.end());
  for (const Fork& known : forks_) {
    if (std::binary_search(forks.begin(), forks.end(), known)) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("forks: (epoch ", known.epoch, ", step ", known.step,
                     ") is known here but missing from the list; the trainer's ledger is older than this store"));
  }
  if (!forks.empty() && forks.back().epoch > epoch) {
    return absl::InvalidArgumentError(absl::StrCat("forks: epoch ", forks.back().epoch,
                                                   " is above the publisher's own, ", epoch,
                                                   "; a fork carries the epoch that made it"));
  }
  VersionChange change;
  if (forks == forks_) return change;
  for (const auto& [id, row] : rows_) {
    if (row.state == VersionState::kStaging || row.state == VersionState::kRetiredByLineage) continue;
    if (!IsRetired(row.name, forks)) continue;
    change.put.push_back(row);
    change.put.back().state = VersionState::kRetiredByLineage;
  }
  change.forks = std::move(forks);
  return change;
}

absl::StatusOr<VersionChange> VersionTable::Begin(int64_t epoch, int64_t number, uint32_t num_shards,
                                                  uint64_t bytes) const {
  MOERL_RETURN_IF_ERROR(CheckEpoch(epoch));
  VersionChange change;
  VersionRow staging{.id = next_id_, .name = {epoch, number}, .num_shards = num_shards, .bytes = bytes};
  for (const auto& [id, row] : rows_) {
    if (row.state != VersionState::kStaging) continue;
    if (row.name == staging.name) {
      staging.id = id;
      if (row == staging) return VersionChange();
    } else {
      change.erase.push_back(id);
    }
  }
  change.put.push_back(staging);
  return change;
}

absl::StatusOr<VersionTable::Committed> VersionTable::Commit(int64_t epoch, int64_t number, const Digest& root,
                                                             uint64_t bytes, const Retention& retention) const {
  MOERL_RETURN_IF_ERROR(CheckEpoch(epoch));
  const VersionRow* staging = Staging(number);
  const VersionRow* old = InLineage(number);
  if (old != nullptr && old->root != root) {
    return absl::FailedPreconditionError(absl::StrCat(
        "version ", ToString(old->name), " was committed with root ", old->root.Short(), ", not ", root.Short(),
        "; no version changes a byte: a run that goes on differently declares a fork first"));
  }
  Committed committed{.name = old != nullptr ? old->name : VersionName{epoch, number}};
  if (old != nullptr && old->state == VersionState::kReady) {
    committed.was_ready = true;
    if (staging != nullptr) committed.change.erase.push_back(staging->id);
    return committed;
  }
  if (staging == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("version number ", number,
                                                      " was not begun by this publisher, or was given up when it began "
                                                      "another; call BeginVersion and put its shards"));
  }
  if (old != nullptr) committed.change.erase.push_back(old->id);
  VersionRow ready = *staging;
  ready.name = committed.name;
  ready.state = VersionState::kReady;
  ready.root = root;
  ready.bytes = bytes;
  committed.change.put.push_back(ready);
  RetireByCount(retention, ready, committed.change);
  return committed;
}

// Walks the READY versions from the highest number down, `newest` among them.
void VersionTable::RetireByCount(const Retention& retention, const VersionRow& newest, VersionChange& change) const {
  std::vector<VersionRow> ready = {newest};
  for (const auto& [id, row] : rows_) {
    if (row.state == VersionState::kReady) ready.push_back(row);
  }
  std::sort(ready.begin(), ready.end(), [](const auto& a, const auto& b) { return a.name.number > b.name.number; });
  uint64_t largest = 0;
  for (const VersionRow& row : ready) largest = std::max(largest, row.bytes);

  const uint64_t bytes_max = retention.bytes_max - std::min(retention.bytes_max, 2 * largest);
  uint64_t kept_bytes = ready.front().bytes;
  int num_kept = 1;
  for (size_t i = 1; i < ready.size(); ++i) {
    if (num_kept < retention.versions_max && kept_bytes + ready[i].bytes <= bytes_max) {
      kept_bytes += ready[i].bytes;
      ++num_kept;
      continue;
    }
    ready[i].state = VersionState::kRetiredByCount;
    if (ready[i].id == newest.id) {
      change.put.front().state = VersionState::kRetiredByCount;
    } else {
      change.put.push_back(ready[i]);
    }
  }
}

const VersionRow* VersionTable::Staging(int64_t number) const {
  for (const auto& [id, row] : rows_) {
    if (row.state == VersionState::kStaging && row.name.number == number) return &row;
  }
  return nullptr;
}

const VersionRow* VersionTable::Find(const VersionName& name) const {
  for (const auto& [id, row] : rows_) {
    if (row.state != VersionState::kStaging && row.name == name) return &row;
  }
  return nullptr;
}

const VersionRow* VersionTable::Head() const {
  const VersionRow* head = nullptr;
  for (const auto& [id, row] : rows_) {
    if (row.state == VersionState::kReady && (head == nullptr || row.name.number > head->name.number)) head = &row;
  }
  return head;
}

const VersionRow* VersionTable::InLineage(int64_t number) const {
  for (const auto& [id, row] : rows_) {
    const bool is_committed = row.state == VersionState::kReady || row.state == VersionState::kRetiredByCount;
    if (is_committed && row.name.number == number) return &row;
  }
  return nullptr;
}

uint64_t VersionTable::LargestReadyBytes() const {
  uint64_t largest = 0;
  for (const auto& [id, row] : rows_) {
    if (row.state == VersionState::kReady) largest = std::max(largest, row.bytes);
  }
  return largest;
}

uint64_t VersionTable::ReadyBytes() const {
  uint64_t sum = 0;
  for (const auto& [id, row] : rows_) {
    if (row.state == VersionState::kReady) sum += row.bytes;
  }
  return sum;
}

void VersionTable::Apply(const VersionChange& change) {
  if (change.run_id) run_id_ = *change.run_id;
  if (change.epoch) {
    MOERL_CHECK(*change.epoch > epoch_);
    epoch_ = *change.epoch;
  }
  if (change.forks) forks_ = *change.forks;
  for (int64_t id : change.erase) rows_.erase(id);
  for (const VersionRow& row : change.put) {
    rows_[row.id] = row;
    next_id_ = std::max(next_id_, row.id + 1);
  }
}

}  // namespace moerl
