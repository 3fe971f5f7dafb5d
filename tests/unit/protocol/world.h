#ifndef MOERL_TESTS_UNIT_PROTOCOL_WORLD_H_
#define MOERL_TESTS_UNIT_PROTOCOL_WORLD_H_

// A simulated world around the training protocol's state machines: one trainer, weight_sync, some rollout
// servers, a network with delays and breaks, and something that kills, pauses, drains and replaces them. The
// state machines are the programs' own (Experience, LedgerState, Resume, Worker); weights and tokens are
// hashes, so that "bit for bit" is equality of integers:
//
//   token   = H(run seed, group, sample, position, weights, prefix)
//   weights = H(weights before, ordered batch contents, number of ranks)
//
// Invariants: I1 exactly once, I2 staleness, I3 versions of trained tokens, I4 undisturbed weights at eta 0,
// I5 replay and immutable versions, I6 acknowledgement, I7 fencing, I8 liveness, I10 leases end only for cause.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "services/rollout/worker.h"
#include "services/trainer/experience.h"
#include "services/trainer/ledger.h"

namespace moerl::protocol_test {

// Groups a batch, samples a group, steps, steps between checkpoints, leases a server, READY versions and
// checkpoints kept, ranks.
inline constexpr int64_t kBatch = 2, kSamples = 2, kSteps = 6, kCheckpointEvery = 2, kLeases = 2, kKeep = 2, kRanks = 2;
inline constexpr double kLeaseSeconds = 40.0;

struct Violation {
  std::string invariant;
  std::string text;
};

enum class Faults { kNone, kKill, kAll };  // kKill: all but a change of ranks
enum class Storage { kMemory, kSqlite };

struct RunResult {
  std::vector<Violation> violations;
  std::map<std::string, int64_t> counts;  // of faults and refusals
};

// One run, a function of its arguments. `directory` is for SQLite's files.
RunResult RunWorld(uint64_t seed, int64_t eta, Faults faults, Storage storage, const std::string& directory);

// The deliberate mistakes the simulation can make; set moerl::protocol_test::mutant to one of them.
extern const std::vector<std::string> kMutants;

// ---------------------------------------------------------------------------------------------- inside

uint64_t Hash(std::initializer_list<uint64_t> parts);

class World;

// One incarnation of a process. Events for a dead one vanish, for a paused one wait.
class Process {
 public:
  Process(World& world, std::string name);
  virtual ~Process() = default;
  virtual void Kill();
  void ResumeFromPause();
  double ClockSeconds() const;  // clocks drift
  int64_t ClockMs() const { return static_cast<int64_t>(ClockSeconds() * 1000.0); }

  World& world;
  const std::string name;
  bool alive = true;
  bool paused = false;
  std::vector<std::function<void()>> waiting;
  double rate;
};

class TrainerProcess;
class RolloutProcess;

// A Work stream, ordered both ways. After a break the trainer may still read a prefix of what was under way.
class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(World& world, RolloutProcess* rollout, TrainerProcess* trainer, uint64_t id)
      : world_(world), rollout(rollout), trainer(trainer), id(id) {}
  void ToTrainer(WorkerMessage message);
  void ToRollout(TrainerMessage message);
  void Cut();

 private:
  void Send(bool to_trainer, Process* to, std::function<void()> deliver);
  World& world_;

 public:
  RolloutProcess* const rollout;
  TrainerProcess* const trainer;
  const uint64_t id;
  bool open = true;

 private:
  int64_t limit_ = 0;  // messages the trainer may read after a break
  int64_t sent_[2] = {0, 0}, read_[2] = {0, 0};
  double last_[2] = {0.0, 0.0};
};

// A tiny weight_sync: a catalogue of (epoch of the first commit, number) with a root each.
class VersionStore {
 public:
  explicit VersionStore(World& world) : world_(world) {}
  enum class State { kStaging, kReady, kAged, kRetired };
  enum class CommitAnswer { kOk, kFenced, kDiverged, kNotBegun };
  struct Listing {
    std::optional<VersionName> latest;
    uint64_t root = 0;
    std::vector<Fork> forks;
  };
  int64_t Acquire(uint64_t request_id);
  bool RecordForks(int64_t epoch, const std::vector<Fork>& forks);  // false: fenced
  bool Begin(int64_t epoch, int64_t number);
  CommitAnswer Commit(int64_t epoch, int64_t number, uint64_t root);
  Listing Latest() const;

 private:
  struct Row {
    State state = State::kStaging;
    uint64_t root = 0;
  };
  bool IsFenced(int64_t epoch);
  World& world_;
  int64_t epoch_ = 0;
  std::map<VersionName, Row> rows_;
  std::vector<Fork> forks_;
  std::map<uint64_t, int64_t> answers_;
};

// The durable ledger, with a copy for the observer of what is durable.
class DurableLedger : public trainer::Ledger {
 public:
  DurableLedger(World& world, std::unique_ptr<trainer::SqliteLedger> file);
  absl::StatusOr<trainer::LedgerState> Open(int64_t epoch) override;
  absl::Status Commit(int64_t epoch, std::span<const trainer::LedgerWrite> writes) override;
  const trainer::LedgerState& state() const { return state_; }
  void CheckFile();

 private:
  World& world_;
  trainer::LedgerState state_;
  std::unique_ptr<trainer::SqliteLedger> file_;
};

struct Checkpoint {  // a directory
  int64_t step = 0;
  uint64_t weights = 0;
  trainer::LedgerState::TrainedHash trained;
  int64_t cursor = 0;
};

class World {
 public:
  World(uint64_t seed, int64_t eta, Faults faults, std::unique_ptr<trainer::SqliteLedger> file);
  void Run();

  void After(double seconds, Process* process, std::function<void()> event);
  double Lag();
  double Uniform(double low, double high);
  int64_t UniformInt(int64_t low, int64_t high);  // both ends included
  bool Chance(double probability) { return Uniform(0.0, 1.0) < probability; }
  bool Expect(bool holds, const std::string& invariant, const std::string& text);
  void StartTrainer();
  void Join(const std::string& name);
  bool IsFinished() const;

  // The task: lengths, rewards and tokens are functions of the run's seed.
  int64_t LengthOf(int64_t group, int64_t sample) const;
  bool RewardFails(int64_t group, int64_t sample) const;
  int32_t TokenOf(int64_t group, int64_t sample, std::span<const int32_t> prefix, uint64_t root) const;
  uint64_t WeightsAtStart() const { return Hash({seed, 77}); }
  static uint64_t Train(uint64_t weights, const std::vector<uint64_t>& digests, int64_t ranks);
  static uint64_t DigestOf(int64_t group, const std::vector<std::vector<int32_t>>& samples);
  uint64_t DigestOf(const trainer::Group& group) const;

  // Observer's checks.
  void OnTrains(int64_t step, const std::vector<int64_t>& batch, int64_t epoch);
  void CheckEnd();
  uint64_t Undisturbed() const;

  const uint64_t seed;
  const int64_t eta;
  const bool faulty;
  double now = 0.0;
  std::mt19937_64 rng;
  RunResult result;
  VersionStore store;
  DurableLedger ledger;
  std::map<trainer::CheckpointName, Checkpoint> directories;
  std::unique_ptr<Process> weight_sync;
  std::vector<std::unique_ptr<TrainerProcess>> trainers;
  std::vector<std::unique_ptr<RolloutProcess>> all_rollouts;
  std::map<std::string, RolloutProcess*> rollouts;  // current incarnation
  std::vector<std::shared_ptr<Stream>> streams;
  int64_t ranks = kRanks, rank_changes = 0, incarnations = 0, num_streams = 0;
  std::map<int64_t, std::pair<uint64_t, int64_t>> trained;  // step -> root, ranks
  std::map<int64_t, uint64_t> digests;                      // of groups with all outcomes
  std::map<VersionName, uint64_t> roots;                    // of versions that were READY
  std::map<LeaseId, int64_t> group_of_lease;
  std::map<SampleOfLease, std::vector<VersionName>> reported;  // versions of finished samples
  std::set<SampleOfLease> corrupted;                           // announced with a wrong digest

 private:
  struct Event {
    double time;
    int64_t order;
    bool for_weight_sync;
    Process* process;
    std::function<void()> run;
    bool operator>(const Event& other) const { return std::tie(time, order) > std::tie(other.time, other.order); }
  };
  void Fault();
  void Tick();
  void PauseTrainer(TrainerProcess* trainer, bool replace);
  std::vector<Event> heap_;
  int64_t num_events_ = 0;
  bool change_ranks_;
  double last_fault_ = 0.0;
};

class TrainerProcess : public Process {
 public:
  TrainerProcess(World& world, int64_t ranks);
  void OnMessage(const std::shared_ptr<Stream>& stream, const WorkerMessage& message);
  void OnBreak(const std::shared_ptr<Stream>& stream);

 private:
  void OpenLedger();
  void ResumeRun(trainer::LedgerState state);
  void Publish(int64_t number, uint64_t root, std::function<void()> next);
  void Serve(int64_t ready);
  void Tick();
  void TryStep();
  void TakeStep(const std::vector<int64_t>& batch);
  void EndStep();
  void ReceiveEffects(const std::map<LeaseId, int64_t>& deadlines_before);
  bool Flush();  // commit, then send; false: fenced, the process is dead
  bool CommitNow(std::span<const trainer::LedgerWrite> writes);
  void SendAll(std::vector<trainer::Outgoing> messages);
  void CheckLeaseEnd(LeaseId id, bool refused, const std::map<LeaseId, int64_t>& deadlines_before);
  void CheckRefusal(const Ack& ack);

  const uint64_t request_id_;
  const int64_t ranks_;
  int64_t epoch_ = 0, step_ = 0, newest_ = 0;
  uint64_t weights_ = 0;
  std::unique_ptr<trainer::Experience> experience_;
  std::map<uint64_t, std::shared_ptr<Stream>> streams_;
  std::vector<trainer::LedgerWrite> writes_;
  std::vector<trainer::Outgoing> messages_;
  bool flush_due_ = false;
};

class RolloutProcess : public Process {
 public:
  RolloutProcess(World& world, const std::string& name);
  void Kill() override;
  void OnMessage(const std::shared_ptr<Stream>& stream, const TrainerMessage& message);
  bool WorksOn(LeaseId id) const;

  const int64_t incarnation;
  bool draining = false;

 private:
  void Loop();
  void Connect();
  void Decode();
  void Watch();

  rollout::Worker worker_;
  std::shared_ptr<Stream> stream_;
  uint64_t root_ = 0;
  struct HeldLease {
    int64_t group = 0;
    int64_t min_version = 0;
  };
  std::map<LeaseId, HeldLease> held_;
};

}  // namespace moerl::protocol_test

#endif  // MOERL_TESTS_UNIT_PROTOCOL_WORLD_H_
