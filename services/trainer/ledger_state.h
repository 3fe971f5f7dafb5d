#ifndef MOERL_SERVICES_TRAINER_LEDGER_STATE_H_
#define MOERL_SERVICES_TRAINER_LEDGER_STATE_H_

// What the trainer knows durably, as plain data, and the changes it can undergo.
//
// A change is a LedgerWrite. The state machines apply it to a LedgerState in memory at once and hand it to a
// Ledger (ledger.h) that makes it durable; nothing leaves the process before that. Loading a ledger gives
// the state that the committed writes had made.
//
// A *group* is the samples of one prompt, a *step* one batch of groups and one new version. Groups are
// numbered from 0 in the order of admission, which is prompt order. Thread-compatible; no clock, no I/O.

#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "libs/base/lineage.h"
#include "libs/experience/work.h"
#include "libs/rl/trajectory.h"

namespace moerl::trainer {

enum class GroupState { kOpen = 0, kFinished = 1, kTrained = 2, kDropped = 3 };
// kNoSignal: its rewards are all equal, and another prompt takes its place (dynamic sampling).
enum class DropReason { kNone = 0, kVerifier = 1, kLineage = 2, kNoSignal = 3 };

// A finished sample: the tokens after the prompt, which the prompt source knows by its index.
struct Trajectory {
  rl::TokenRun tokens;
  double reward = 0.0;
  FinishReason finish_reason = FinishReason::kStop;
  bool operator==(const Trajectory&) const = default;
};
using TrajectoryPtr = std::shared_ptr<const Trajectory>;
using TokenRunPtr = std::shared_ptr<const rl::TokenRun>;

struct Group {
  int64_t number = 0;
  int64_t prompt_index = 0;
  int64_t staleness = 0;  // the bound in force at admission
  GroupState state = GroupState::kOpen;
  DropReason reason = DropReason::kNone;
  std::string detail;                  // of a drop, for people
  int64_t step = -1;                   // that trained it
  std::vector<bool> finished;          // per sample: has its outcome
  std::vector<TrajectoryPtr> samples;  // null until finished, and again once every kept checkpoint covers the step
  std::optional<LeaseId> lease;        // the live one
  std::optional<LeaseId> last_lease;   // the newest, live or not
  bool operator==(const Group& other) const;  // payloads by value
};

struct Lease {
  LeaseId id;
  int64_t group = 0;
  std::string worker;
  int64_t incarnation = 0;                    // of the worker
  std::vector<TokenRunPtr> prefixes;          // per sample: the tokens it continues; null where the sample was finished
  bool operator==(const Lease& other) const;  // prefixes by value
};

struct Batch {
  std::vector<int64_t> groups;
  int64_t ranks = 0;  // that compute it
  bool operator==(const Batch&) const = default;
};

struct CheckpointName {
  int64_t step = 0;
  int64_t epoch = 0;
  auto operator<=>(const CheckpointName&) const = default;
};

// ---- changes
struct AdmitGroup {  // the next group, with the next prompt; moves the cursor
  int64_t staleness = 0;
};
struct PutLease {
  Lease lease;
};
struct EndLease {
  LeaseId id;
};
struct PutOutcome {  // finishes the group when it is the last
  int64_t group = 0;
  int64_t sample = 0;
  TrajectoryPtr trajectory;
};
struct DropGroup {
  int64_t group = 0;
  DropReason reason = DropReason::kNone;
  std::string detail;
};
struct RecordBatch {  // or records the new number of ranks of a batch that is there
  int64_t step = 0;
  Batch batch;
};
struct VoidBatch {
  int64_t step = 0;
};
struct MarkTrained {
  int64_t step = 0;
};
struct NameCheckpoint {  // counts from now on; only the `keep` newest stay named
  CheckpointName name;
  int64_t keep = 1;
};
struct ForgetPayloads {  // of groups trained at steps <= `through_step`
  int64_t through_step = 0;
};
struct AddFork {  // ends every lease and un-names the checkpoints after the fork's step
  Fork fork;
};
struct RewindTo {  // groups of batches up to `step` are TRAINED, those of later ones FINISHED
  int64_t step = 0;
};
using LedgerWrite = std::variant<AdmitGroup, PutLease, EndLease, PutOutcome, DropGroup, RecordBatch, VoidBatch,
                                 MarkTrained, NameCheckpoint, ForgetPayloads, AddFork, RewindTo>;

struct LedgerState {
  int64_t group_size = 0;  // samples a group
  int64_t epoch = 0;
  int64_t cursor = 0;  // index of the next prompt
  std::deque<Group> groups;
  std::map<LeaseId, Lease> leases;  // of groups that are OPEN
  std::map<int64_t, Batch> batches;
  std::vector<Fork> forks;
  std::vector<CheckpointName> checkpoints;  // ascending by step
  std::vector<int64_t> dropped;             // numbers, ascending

  bool operator==(const LedgerState&) const = default;

  void Apply(const LedgerWrite& write);

  // Groups ever admitted and not dropped.
  int64_t NumUndropped() const { return static_cast<int64_t>(groups.size() - dropped.size()); }
  // How many undropped groups come before group `number`.
  int64_t PositionOf(int64_t number) const;
  // The undropped group at `position`, or -1 if there are not so many.
  int64_t NumberAt(int64_t position) const;
  // Count and XXH3-64 hash of the group ids trained up to `step`, in order; a checkpoint holds a copy.
  struct TrainedHash {
    int64_t count = 0;
    uint64_t hash = 0;
    bool operator==(const TrainedHash&) const = default;
  };
  TrainedHash HashOfTrained(int64_t step) const;
};

}  // namespace moerl::trainer

#endif  // MOERL_SERVICES_TRAINER_LEDGER_STATE_H_
