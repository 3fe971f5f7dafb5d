#ifndef MOERL_SERVICES_ROLLOUT_SCHEDULER_H_
#define MOERL_SERVICES_ROLLOUT_SCHEDULER_H_

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "libs/base/mailbox.h"
#include "libs/model/config.h"
#include "services/rollout/engine.h"
#include "services/rollout/generate_call.h"
#include "services/rollout/judge.h"
#include "services/rollout/lease_runner.h"
#include "services/rollout/weight_follower.h"

namespace moerl::rollout {

struct SchedulerOptions {
  EngineOptions engine;
  LeaseRunnerOptions leases;
  // Makes the stub of the trainer's ExperienceService; empty: this server takes no leases.
  std::function<std::unique_ptr<v1::ExperienceService::Stub>()> work_stub;
  uint32_t generate_queue_max = 0;
};

// What others may know of the scheduler.
struct Snapshot {
  bool has_weights = false;
  std::shared_ptr<const model::ModelConfig> config;  // set with the first weights
  std::string fingerprint;
  VersionName version;
  model::GeneratorLoad load;
  double tokens_per_second = 0;
  uint32_t num_calls = 0;
};

// The one thread that samples: Generate calls and leases share its batch. It sleeps when there is nothing to do,
// changes weights between two steps, and owns the engine, the lease runner and the table of calls. Public methods are
// thread-safe.
class Scheduler {
 public:
  // `judge` outlives the scheduler; it may be null when no leases are taken. `on_fatal` runs once, when the engine
  // fails.
  Scheduler(SchedulerOptions options, Judge* judge, std::function<void(absl::Status)> on_fatal);
  // Stop()s.
  ~Scheduler();

  // `on_ready` runs once, on the scheduler's thread, when the first weights are in place. Set it before OnWeights.
  void set_on_ready(std::function<void()> on_ready) { on_ready_ = std::move(on_ready); }
  void OnWeights(WeightUpdate update);

  // A place in the queue, released when the call has its first token or ends. RESOURCE_EXHAUSTED with RetryInfo: it is
  // full.
  absl::StatusOr<std::shared_ptr<void>> TakeQueuePlace();
  // Runs the request for `call` until `deadline` or CancelCall. Errors end the call.
  void AddCall(std::shared_ptr<GenerateCall> call, model::Request request, absl::Time deadline);
  // Drops a call whose client has gone.
  void CancelCall(const std::string& request_id);
  // Ends the samples of a call with FINISH_REASON_ABORT; `done` gets how many, or NOT_FOUND.
  void AbortCall(const std::string& request_id, absl::AnyInvocable<void(absl::StatusOr<uint32_t>)> done);

  Snapshot snapshot() const;

  // Hands leases back and takes no more; Generate calls that run go on.
  void BeginDrain();
  // Waits until every result is acknowledged and every lease handed back.
  void WaitDrained(absl::Time deadline);
  // Ends the thread. Idempotent.
  void Stop();

 private:
  struct Call {
    std::shared_ptr<GenerateCall> call;
    uint64_t engine_id = 0;
    absl::Time deadline;
  };

  void Run();
  absl::Duration IdleTime(absl::Duration now) const;
  bool MayStep() const;
  void Flip();
  void ForgetEndedCalls();
  void ExpireCalls();
  void Publish(int64_t num_new_tokens);

  const SchedulerOptions options_;
  Judge* const judge_;
  const std::function<void(absl::Status)> on_fatal_;
  std::function<void()> on_ready_;
  const std::shared_ptr<Mailbox> mailbox_ = std::make_shared<Mailbox>();
  const std::shared_ptr<std::atomic<uint32_t>> num_waiting_ = std::make_shared<std::atomic<uint32_t>>(0);

  // Of the thread.
  Engine engine_;
  std::unique_ptr<LeaseRunner> leases_;  // from the first weights on
  std::optional<WeightUpdate> staged_;
  std::vector<Fork> forks_;
  std::map<std::string, Call> calls_;
  bool is_stopping_ = false;
  bool is_draining_ = false;
  int64_t tokens_reported_ = 0;
  absl::Duration rate_since_ = absl::ZeroDuration();

  mutable absl::Mutex mutex_;
  Snapshot snapshot_ ABSL_GUARDED_BY(mutex_);
  bool is_drained_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace moerl::rollout

#endif  // MOERL_SERVICES_ROLLOUT_SCHEDULER_H_
