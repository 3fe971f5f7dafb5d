#ifndef MOERL_SERVICES_ROLLOUT_LEASE_RUNNER_H_
#define MOERL_SERVICES_ROLLOUT_LEASE_RUNNER_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "libs/base/lineage.h"
#include "libs/base/mailbox.h"
#include "libs/experience/work.h"
#include "services/rollout/engine.h"
#include "services/rollout/judge.h"
#include "services/rollout/leased_group.h"
#include "services/rollout/work_stream.h"
#include "services/rollout/worker.h"

namespace moerl::rollout {

struct LeaseRunnerOptions {
  WorkerOptions worker;
  uint32_t turns_max = 1;
  double reward_min = -1;
  double reward_max = 1;
};

// Works for the trainer: carries the worker's messages over a Work stream, its commands to the engine, and finished
// turns to the environment. Everything runs on the scheduler's thread; `mailbox` brings it what happens elsewhere.
//
// A sample is waiting (for weights it may sample from, for room in the queue, for its next turn), running, or judged.
class LeaseRunner {
 public:
  // All pointers outlive this object. `judge` may answer late: its answers carry a ticket.
  LeaseRunner(LeaseRunnerOptions options, std::unique_ptr<v1::ExperienceService::Stub> stub, Engine* engine,
              Judge* judge, std::shared_ptr<Mailbox> mailbox);
  ~LeaseRunner();

  // Does what can be done at `now` (of a monotonic clock): (re)connects, starts samples, sends messages.
  void Advance(absl::Duration now);
  // When Advance must be called again though nothing has happened.
  absl::Duration next_wakeup() const { return next_wakeup_; }

  // The forks that weight_sync tells; more may be known from the trainer.
  void OnForks(const std::vector<Fork>& forks);
  // The engine has changed to the highest READY version.
  void OnVersionChanged(VersionName version);

  // Hands everything back and takes no more; results are still delivered. Then IsDrained.
  void Drain() { worker_.Drain(); }
  bool IsDrained() const { return worker_.IsDrained() && outbox_.empty(); }
  // Closes the stream and returns when it is over.
  void Close();

 private:
  struct Sample {
    enum class State { kWaiting, kRunning, kJudged };
    State state = State::kWaiting;
    uint64_t request_id = 0;  // while running
    uint64_t ticket = 0;      // while judged
    uint32_t turns_judged = 0;
    double reward = 0;  // of those turns
    model::FinishReason finish = model::FinishReason::kNone;
  };

  // A lease: the sink of its requests.
  struct Lease final : SampleSink {
    Lease(LeaseRunner* owner, LeaseId id, LeasedGroup group) : owner(owner), id(id), group(std::move(group)) {}
    void OnSample(const model::SampleOutput& output) override { owner->OnSample(*this, output); }
    void OnPrompt(const model::PromptOutput&) override {}

    LeaseRunner* const owner;
    const LeaseId id;
    const LeasedGroup group;
    std::map<int64_t, Sample> samples;
    std::vector<uint64_t> requests;  // all that were ever added for it
  };

  void Connect(absl::Duration now);
  void OnResponse(uint64_t stream_number, const v1::WorkResponse& response);
  void OnStreamOver(uint64_t stream_number, const absl::Status& status);
  absl::Status Apply(const v1::WorkResponse& response);

  void AnswerTrace(const v1::WorkTrace& trace);

  void ObeyCommands();
  void Stop(const StopSample& command);
  void StartWaiting();
  void StartWaiting(Lease& lease);
  void OnSample(Lease& lease, const model::SampleOutput& output);
  void SendToJudge(Lease& lease, int64_t index);
  void OnJudged(LeaseId lease_id, int64_t index, uint64_t ticket, const JudgeResult& result);
  void TakeJudgement(Lease& lease, int64_t index, const rl::Judgement& judgement);
  void Fail(Lease& lease, int64_t index, FailureReason reason, const std::string& detail);
  void End(Lease& lease, int64_t index, std::variant<double, Failure> outcome);
  void ForgetEnded();
  void SendMessages(absl::Duration now);
  void Measure() const;
  bool Flush();
  int RouteBytes() const { return routes_ ? routes_->bytes_per_id : 0; }

  const LeaseRunnerOptions options_;
  const std::unique_ptr<v1::ExperienceService::Stub> stub_;
  Engine* const engine_;
  Judge* const judge_;
  const std::shared_ptr<Mailbox> mailbox_;
  Worker worker_;
  std::map<LeaseId, std::unique_ptr<Lease>> leases_;
  uint64_t last_ticket_ = 0;

  std::shared_ptr<WorkStream> stream_;  // null while there is none
  uint64_t stream_number_ = 0;          // messages of earlier streams are dropped
  std::deque<v1::WorkRequest> outbox_;  // what the worker said and the stream has not taken yet
  uint64_t credit_bytes_ = 0;
  // What the trainer wants with every token.
  std::optional<RouteFormat> routes_;
  bool with_kept_ids_ = false;
  absl::Duration connect_at_ = absl::ZeroDuration();
  absl::Duration connect_delay_;
  absl::Duration next_wakeup_ = absl::ZeroDuration();
  std::optional<VersionName> latest_;
};

}  // namespace moerl::rollout

#endif  // MOERL_SERVICES_ROLLOUT_LEASE_RUNNER_H_
