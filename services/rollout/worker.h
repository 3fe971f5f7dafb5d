#ifndef MOERL_SERVICES_ROLLOUT_WORKER_H_
#define MOERL_SERVICES_ROLLOUT_WORKER_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "libs/base/lineage.h"
#include "libs/experience/work.h"

namespace moerl::rollout {

struct WorkerOptions {
  std::string name;         // of the pod or host
  int64_t incarnation = 0;  // start time in nanoseconds: ordered for one name
  int64_t num_slots = 1;    // samples it runs at once
  std::string numerics_fingerprint;
  int64_t progress_every_tokens = 256;    // new tokens of a sample between two reports
  int64_t tokens_per_message_max = 2048;  // a longer run is reported in several messages
};

// For the engine that samples. A sample is known by its lease and index.
struct StartSample {
  LeaseId lease_id;
  int64_t sample = 0;
  std::shared_ptr<const rl::TokenRun> prefix;  // tokens so far; null for none
};
struct StopSample {
  LeaseId lease_id;
  int64_t sample = 0;
};
using EngineCommand = std::variant<StartSample, StopSample>;

// The rollout server's end of the training protocol: what it holds, what the trainer knows of it, which
// weights it may sample from. A pure state machine: events in, messages and engine commands out.
//
// Finished samples are kept until they are acknowledged, across broken streams and restarts of the trainer. A
// broken stream stops nothing: sampling goes on, and the next Hello says what is held.
//
// Thread-compatible; times are the caller's monotonic milliseconds. Events of a stream that has been replaced
// must not be delivered.
class Worker {
 public:
  explicit Worker(WorkerOptions options) : options_(std::move(options)) {}

  // ---- the stream
  // A new stream is open: the Hello to send first.
  Hello OnStreamOpened();
  void OnStreamBroken();
  // FAILED_PRECONDITION: this is an older trainer than one seen before; close the stream and try again.
  absl::Status OnWelcome(const Welcome& welcome, int64_t now_ms);
  void OnGrant(const Grant& grant, int64_t now_ms);
  void OnAck(const Ack& ack);
  void OnRevocation(const Revocation& revocation);

  // ---- the engine
  // New tokens of a running sample; ignored for one that was stopped.
  void OnTokens(LeaseId lease_id, int64_t sample, const rl::TokenRun& tokens);
  // The sample has ended with a reward, or with the reason why there is none.
  void OnOutcome(LeaseId lease_id, int64_t sample, FinishReason reason, std::variant<double, Failure> outcome);

  // ---- the weights
  // What weight_sync lists: the highest READY version, if any, and the forks.
  void OnListing(std::optional<VersionName> latest, const std::vector<Fork>& forks);
  // The version to change to, if it is not the running one: the highest READY, also downwards from a retired one.
  std::optional<VersionName> VersionToChangeTo() const;
  // The weights were changed, whole, between two tokens.
  void OnVersionChanged(VersionName version) { running_ = version; }
  // Whether the running weights may sample for this lease: not retired, and not below its lowest version.
  bool MaySample(LeaseId lease_id) const;

  // Gives all leases back and takes no more; results are still delivered.
  void Drain() { is_draining_ = true; }
  bool IsDrained() const { return is_draining_ && leases_.empty() && results_.empty(); }

  // ---- effects
  // What to send now, in order; empty while no trainer has welcomed this stream. Call it after events and at
  // least every RenewalInterval.
  std::vector<WorkerMessage> TakeMessages(int64_t now_ms);
  std::vector<EngineCommand> TakeCommands() { return std::exchange(commands_, {}); }
  // A third of the shortest lease duration.
  int64_t RenewalIntervalMs() const;

  // ---- views
  bool is_welcomed() const { return is_welcomed_; }
  int64_t num_running() const;
  size_t num_leases() const { return leases_.size(); }
  size_t num_unacknowledged() const { return results_.size(); }
  bool IsRunning(LeaseId lease_id, int64_t sample) const;
  // Tokens of a running sample, the prefix included.
  const rl::TokenRun& TokensOf(LeaseId lease_id, int64_t sample) const;
  const std::optional<VersionName>& running_version() const { return running_; }
  const std::vector<Fork>& forks() const { return forks_; }

 private:
  struct Sample {
    rl::TokenRun tokens;  // the prefix included
    int64_t base = 0;     // length of the prefix
    int64_t sent = 0;     // tokens the trainer has, or will have when it reads this stream
  };
  struct Result {
    Sample sample;
    FinishReason reason = FinishReason::kStop;
    std::variant<double, Failure> outcome;
    bool is_sent = false;  // on this stream
  };
  struct Held {
    int64_t duration_ms = 0;
    int64_t min_version = 0;
    std::map<int64_t, Sample> running;
  };

  void Forget(LeaseId lease_id);
  void ForgetIfDone(LeaseId lease_id);
  void MergeForks(const std::vector<Fork>& forks);
  void SendResults(std::vector<WorkerMessage>& out);
  void SendProgress(LeaseId lease_id, int64_t index, Sample& sample, std::vector<WorkerMessage>& out);
  void SendHandBacks(std::vector<WorkerMessage>& out);
  void SendDemand(std::vector<WorkerMessage>& out);
  void SendRenewal(int64_t now_ms, std::vector<WorkerMessage>& out);

  WorkerOptions options_;
  int64_t hello_number_ = 0;
  int64_t trainer_epoch_ = 0;
  bool is_welcomed_ = false;
  bool is_draining_ = false;
  std::optional<int64_t> demand_said_;
  int64_t renewed_ms_ = 0;
  std::optional<VersionName> running_;
  std::optional<VersionName> latest_;
  std::vector<Fork> forks_;
  std::map<LeaseId, Held> leases_;
  std::map<SampleOfLease, Result> results_;
  std::vector<EngineCommand> commands_;
};

}  // namespace moerl::rollout

#endif  // MOERL_SERVICES_ROLLOUT_WORKER_H_
