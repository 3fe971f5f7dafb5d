#ifndef MOERL_SERVICES_TRAINER_EXPERIENCE_H_
#define MOERL_SERVICES_TRAINER_EXPERIENCE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "libs/experience/work.h"
#include "libs/rl/dynamic_sampling.h"
#include "libs/rl/routing_replay.h"
#include "services/trainer/lease_table.h"
#include "services/trainer/ledger_state.h"

namespace moerl::trainer {

// A Work stream, numbered by the service.
using ConnectionId = uint64_t;

// Close the stream: a newer one of the same worker has replaced it.
struct CloseStream {};
struct Outgoing {
  ConnectionId connection = 0;
  std::variant<Welcome, Grant, Ack, Revocation, CloseStream> message;
};

struct ExperienceOptions {
  std::string run_id;
  int64_t epoch = 0;
  int64_t ranks = 1;              // that compute steps from now on
  int64_t batch_groups = 1;       // groups a step
  int64_t num_steps = 1;          // in the run
  int64_t staleness = 0;          // bound for groups admitted from now on
  int64_t group_slots_max = 0;    // open groups at most; 0 leaves it to the workers' slots
  int64_t lease_duration_ms = 1;  // see LeaseTable
  int64_t checkpoints_kept = 1;
  int64_t max_new_tokens = 1;
  int64_t vocab_size = 1;
  rl::RouteShape token_routes = {};  // of one token; without bytes routes are not recorded
  rl::DynamicSamplingConfig dynamic_sampling = {};
};

struct ExperienceCounters {
  int64_t recorded = 0;
  int64_t superseded = 0;
  int64_t failed = 0;
  std::map<std::string, int64_t> refused;  // by the rule that was broken; of the 65th rule on, as "other"
  int64_t leases_expired = 0;
  std::map<DropReason, int64_t> dropped;  // groups, those of earlier processes included
};

struct WorkerView {
  bool is_connected = false;
  int64_t num_slots = 0;
  int64_t num_leases = 0;
  VersionName version;
};

// The trainer's end of the training protocol: admits groups, leases them to workers, judges what comes back,
// composes batches. A pure state machine: events in, ledger writes and messages out.
//
// After any events the caller takes the writes and the messages, makes the writes durable in one transaction
// that checks the epoch, and only then sends the messages. If the process dies in between, nothing has left
// it; if the transaction finds a newer epoch, the process must exit and send nothing. Steps must not be
// computed, nor checkpoints used, before the writes that record and name them are durable.
//
// Thread-compatible; times are the caller's monotonic milliseconds.
class Experience {
 public:
  // Continues from what the ledger holds after Resume(). `ready` is the last READY version, `newest` the highest
  // version sent to CommitVersion or listed READY since this trainer became the publisher.
  Experience(ExperienceOptions options, LedgerState state, int64_t ready, int64_t newest, int64_t now_ms);

  // ---- events from workers
  // Messages that a broken stream had delivered are still events; OnBreak comes after them.
  void OnHello(ConnectionId connection, const Hello& hello, int64_t now_ms);
  void OnBreak(ConnectionId connection);
  void OnDemand(ConnectionId connection, const Demand& demand);
  void OnProgress(ConnectionId connection, const Progress& progress, int64_t now_ms);
  void OnFinish(ConnectionId connection, const Finish& finish, int64_t now_ms);
  // A progress or finish message whose tokens do not even parse: refused like any other bad trajectory.
  void OnMalformed(ConnectionId connection, LeaseId lease_id, int64_t sample, const absl::Status& why);
  void OnHandBack(ConnectionId connection, const HandBack& hand_back);
  void OnRenewal(ConnectionId connection, const Renewal& renewal, int64_t now_ms);

  // ---- events from the driving loop
  // Ends expired leases, admits groups and grants them. Call it after other events and at least every second.
  void Advance(int64_t now_ms);
  // The groups of `step` in order, recorded before with the ranks that compute them, or recorded now; empty while
  // samples are missing. With dynamic sampling first drops finished groups that have nothing to teach.
  std::vector<int64_t> ComposeBatch(int64_t step);
  void OnStepTrained(int64_t step);
  // Its directory is complete and synced.
  void OnCheckpointWritten(int64_t step);
  // About to be sent to CommitVersion: from here workers may sample it, answered or not.
  void OnVersionSent(int64_t number);
  void OnVersionReady(int64_t number);
  void SetStaleness(int64_t staleness) { options_.staleness = staleness; }
  void SetAdmission(bool is_open) { admission_open_ = is_open; }

  // ---- effects since the last call
  std::vector<LedgerWrite> TakeWrites() { return std::exchange(writes_, {}); }
  std::vector<Outgoing> TakeMessages() { return std::exchange(messages_, {}); }

  // ---- views
  const LedgerState& state() const { return state_; }
  const LeaseTable& leases() const { return table_; }
  const ExperienceCounters& counters() const { return counters_; }
  const ExperienceOptions& options() const { return options_; }
  const std::set<int64_t>& open_groups() const { return open_; }
  std::map<std::string, WorkerView> Workers() const;
  std::map<ConnectionId, std::string> ConnectedWorkers() const;
  int64_t ready() const { return ready_; }

 private:
  struct Connection {
    ConnectionId id = 0;
    int64_t num_slots = 0;
    int64_t demand = 0;
    VersionName version;
  };
  // Parts reported under a lease, after its durable prefix. Volatile.
  using PartKey = std::pair<LeaseId, int64_t>;

  void Write(LedgerWrite write);
  void Send(ConnectionId connection, std::variant<Welcome, Grant, Ack, Revocation, CloseStream> message);
  const Group& GroupAt(int64_t number) const { return state_.groups[static_cast<size_t>(number)]; }
  const Connection* ConnectionOf(LeaseId id) const;

  LeaseDecision Decide(LeaseId id, bool is_adopted) const;
  int64_t LengthSoFar(LeaseId id, int64_t sample) const;
  rl::TokenRun SoFar(LeaseId id, int64_t sample) const;

  absl::Status CheckTokens(const rl::TokenRun& tokens) const;
  absl::Status AddPart(LeaseId id, int64_t sample, int64_t offset, const rl::TokenRun& tokens);
  absl::Status Judge(const Finish& finish, const Group& group, const rl::TokenRun& tokens) const;
  void Acknowledge(ConnectionId connection, const Finish& finish, Verdict verdict, std::string reason = "");
  void Refuse(ConnectionId connection, LeaseId id, int64_t sample, const absl::Status& why);
  void CountRefused(const std::string& rule);
  void AnswerUnknownLease(ConnectionId connection, const Finish& finish);
  void Fail(ConnectionId connection, const Finish& finish, const Failure& failure);
  void Finished(ConnectionId connection, const Finish& finish, rl::TokenRun tokens);
  void RecordOutcome(ConnectionId connection, const Finish& finish, LedgerWrite outcome);

  void End(LeaseId id, const std::string& reason_to_say);
  void Admit();
  void GrantAll(int64_t now_ms);
  void GrantTo(const std::string& worker, Connection& connection, int64_t group_number, int64_t now_ms);
  int64_t MinVersion(const Group& group) const;
  void DropGroupsWithoutSignal(int64_t step);

  ExperienceOptions options_;
  LedgerState state_;
  LeaseTable table_;
  int64_t ready_;
  int64_t newest_;
  bool admission_open_ = true;
  int64_t lease_counter_ = 0;
  std::set<int64_t> open_;  // numbers of OPEN groups
  std::map<PartKey, rl::TokenRun> parts_;
  std::map<std::string, std::pair<int64_t, int64_t>> hellos_;  // last (incarnation, number) by worker
  std::map<std::string, Connection> connections_;              // current one by worker
  ExperienceCounters counters_;
  std::vector<LedgerWrite> writes_;
  std::vector<Outgoing> messages_;
};

}  // namespace moerl::trainer

#endif  // MOERL_SERVICES_TRAINER_EXPERIENCE_H_
