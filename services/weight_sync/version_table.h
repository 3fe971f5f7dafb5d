#ifndef MOERL_SERVICES_WEIGHT_SYNC_VERSION_TABLE_H_
#define MOERL_SERVICES_WEIGHT_SYNC_VERSION_TABLE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "libs/base/lineage.h"
#include "libs/weights/manifest.h"

// The state machine of versions: what publishers may do, and what becomes of versions then. Pure: no
// clock, no thread, no disk. A decision is a const function that answers with a VersionChange; the
// catalogue makes the change durable in one transaction and only then applies it here.
//
//              begin                 commit                       newer commits, by count or bytes
//   (nothing) ───────▶ STAGING ─────────────────▶ READY ─────────────────────────▶ RETIRED (count)
//                         │ a newer publisher,      │  ▲      the same root again, put anew   │
//                         ▼ another number          │  └──────────────────────────────────────┘
//                     (nothing)                     │ a fork                  │ a fork
//                                                   └──────▶ RETIRED (lineage) ◀┘   for ever
namespace moerl {

enum class VersionState {
  kStaging,
  kReady,
  kRetiredByCount,    // its bytes were given up for newer ones; its tokens stay good
  kRetiredByLineage,  // a fork left it behind; its tokens are of no use
};

struct VersionRow {
  int64_t id = 0;  // never used twice; what the catalogue hangs the manifest and chunk references on
  VersionName name;
  VersionState state = VersionState::kStaging;
  uint32_t num_shards = 0;    // as announced by BeginVersion
  weights::Digest root = {};  // unset while STAGING
  uint64_t bytes = 0;         // of all its chunks; while STAGING what BeginVersion announced

  friend bool operator==(const VersionRow&, const VersionRow&) = default;
};

// What one decision changes, in one transaction. Empty: nothing.
struct VersionChange {
  std::optional<std::string> run_id;
  std::optional<int64_t> epoch;
  std::optional<std::vector<Fork>> forks;
  std::vector<VersionRow> put;  // inserted, or replacing the row of the same id
  std::vector<int64_t> erase;   // ids, with their shards and references; taken away before `put`

  bool empty() const { return !run_id && !epoch && !forks && put.empty() && erase.empty(); }
};

// How many READY versions stay. The newest always does; an older one only while there are at most
// `versions_max` and the sum of their bytes is at most `bytes_max` less two versions of the largest's size (one
// that is being put, one that leased readers still hold).
struct Retention {
  int versions_max = 2;
  uint64_t bytes_max = 0;
};

// Thread-compatible.
class VersionTable {
 public:
  // A new publisher: its epoch is one above every earlier one, which it fences; their STAGING versions
  // are gone. The first one gives the store to its run.
  //
  // Errors: FAILED_PRECONDITION when the store belongs to another run.
  absl::StatusOr<VersionChange> Acquire(const std::string& run_id) const;

  // The publisher's ledger says which forks there were, all of them at every start. Versions they leave
  // behind are RETIRED by lineage. Repeating it changes nothing.
  //
  // Errors: FAILED_PRECONDITION from a fenced publisher, or when a fork known here is missing from the
  // list (the ledger is older than this store). INVALID_ARGUMENT for a fork of an epoch to come.
  absl::StatusOr<VersionChange> DeclareForks(int64_t epoch, const std::vector<Fork>& forks) const;

  // Opens version `number` for shards. A version that is READY may be put again: commit decides what
  // that means. STAGING versions of other numbers are given up: one publisher publishes one at a time.
  //
  // Errors: FAILED_PRECONDITION from a fenced publisher.
  absl::StatusOr<VersionChange> Begin(int64_t epoch, int64_t number, uint32_t num_shards, uint64_t bytes) const;

  // What a commit came to. `name` is the one under which the version is READY now.
  struct Committed {
    VersionName name;
    bool was_ready = false;
    VersionChange change = {};
  };

  // Makes the STAGING version `number` visible, with the root and size of what was put. Let there be a
  // version of this number that no fork left behind:
  //   READY with this root      nothing changes, what was put again is dropped
  //   RETIRED with this root    (by count, then) it is READY again, with the bytes just put
  //   any with another root     FAILED_PRECONDITION: no version ever changes a byte
  // Otherwise it becomes READY as (epoch, number), also where a retired lineage had the same root. Older
  // READY versions are then RETIRED by count as `retention` says.
  //
  // Errors: FAILED_PRECONDITION from a fenced publisher, and when `number` was not begun and is not READY.
  absl::StatusOr<Committed> Commit(int64_t epoch, int64_t number, const weights::Digest& root, uint64_t bytes,
                                   const Retention& retention) const;

  // Errors: FAILED_PRECONDITION, saying so, unless `epoch` is the newest publisher's.
  absl::Status CheckEpoch(int64_t epoch) const;

  // The STAGING version of this number, null when there is none. Until the next Apply.
  const VersionRow* Staging(int64_t number) const;
  // The row that a name means to a reader: not the STAGING one. Null when unknown. Until the next Apply.
  const VersionRow* Find(const VersionName& name) const;
  // The READY version of the highest number: what a reader should run. Null when there is none.
  const VersionRow* Head() const;
  const std::map<int64_t, VersionRow>& rows() const { return rows_; }
  const std::vector<Fork>& forks() const { return forks_; }
  int64_t epoch() const { return epoch_; }
  const std::string& run_id() const { return run_id_; }
  // The largest READY version's bytes; 0 when there is none.
  uint64_t LargestReadyBytes() const;
  // The sum of all READY versions' bytes.
  uint64_t ReadyBytes() const;

  void Apply(const VersionChange& change);

 private:
  const VersionRow* InLineage(int64_t number) const;
  void RetireByCount(const Retention& retention, const VersionRow& newest, VersionChange& change) const;

  std::string run_id_;
  int64_t epoch_ = 0;
  int64_t next_id_ = 1;
  std::vector<Fork> forks_;  // in ascending order of epoch
  std::map<int64_t, VersionRow> rows_;
};

}  // namespace moerl

#endif  // MOERL_SERVICES_WEIGHT_SYNC_VERSION_TABLE_H_
