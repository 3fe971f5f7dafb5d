#ifndef MOERL_SERVICES_TRAINER_LEADER_H_
#define MOERL_SERVICES_TRAINER_LEADER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "libs/base/clock.h"
#include "libs/base/env.h"
#include "libs/base/mailbox.h"
#include "libs/rl/diagnostics.h"
#include "moerl/v1/trainer.pb.h"
#include "services/trainer/checkpoint.h"
#include "services/trainer/experience.h"
#include "services/trainer/ledger.h"
#include "services/trainer/metrics_log.h"
#include "services/trainer/mismatch_inquiry.h"
#include "services/trainer/prompt_book.h"
#include "services/trainer/run_metrics.h"
#include "services/trainer/team.h"
#include "services/trainer/work_stream.h"

namespace moerl::trainer {

// The trainer's leader: drives the run from start or resume to its last step.
//
// Two threads. The control thread owns the protocol's state, the ledger and the streams: it takes what has come,
// lets the state machine act, commits once, and only then sends. The learner thread owns the models: it runs one job
// at a time (a step with its publishing, a checkpoint, the start) and posts what came of it.
//
// Whatever goes wrong beyond repair (a newer trainer, a lost rank, a full disk) ends the process at once: everything
// that anybody was told is on disk, and the next start goes on from there.
class Leader final : public WorkReceiver {
 public:
  static constexpr int kExitFailed = 1;
  static constexpr int kExitLostRank = 75;

  // All must outlive the leader. `on_done(exit_code)` is called when the run is over.
  Leader(const RunSettings& settings, RankGroup& ranks, Team& team, Learner& learner, weights::Publisher& publisher,
         rl::Environment& environment, std::function<void(int)> on_done);
  ~Leader() override;

  void Start();
  // Checkpoints at the next step boundary if that comes before `deadline`, then stops the run; calls are still
  // answered.
  void Stop(absl::Time deadline);

  // ---- for the services; any thread
  Mailbox& mailbox() override { return mailbox_; }
  const RunSettings& settings() const { return settings_; }
  bool is_serving() const { return is_serving_.load(); }
  void set_on_serving(std::function<void()> on_serving) { on_serving_ = std::move(on_serving); }

  // ---- on the control thread
  void OnWorkMessage(const std::shared_ptr<WorkStream>& stream, WorkerMessage message) override;
  void OnMalformedWork(const std::shared_ptr<WorkStream>& stream, LeaseId lease, int64_t sample,
                       const absl::Status& why) override;
  void OnTraceReport(ConnectionId connection, const v1::WorkTraceReport& report) override;
  void OnWorkOver(ConnectionId connection) override;
  v1::GetStatusResponse Status() const;
  // Calls `watcher` with every row after `after_step`, those to come included, until it returns false.
  void WatchRows(uint64_t after_step, std::function<bool(const v1::StepMetrics&)> watcher);
  // `on_durable` gets the step and the directory once a checkpoint of all steps done counts.
  void RequestCheckpoint(std::function<void(int64_t, const std::string&)> on_durable);
  void SetPaused(bool is_paused) { is_paused_ = is_paused; }
  void SetStaleness(int64_t staleness);

 private:
  struct StepDone {
    StepJob job;
    StepReport report;
    VersionName version;
    double train_seconds = 0.0;
    double publish_seconds = 0.0;
    std::optional<double> eval_pass_rate;
  };

  // ---- learner thread (leader_start.cc, leader_steps.cc)
  absl::Status StartRun();
  absl::Status WarmStart();
  absl::Status CheckpointAtStart(LedgerState& state, CheckpointName name);
  absl::StatusOr<CheckpointInfo> RestoreNewest(const LedgerState& state);
  absl::StatusOr<VersionName> PublishVersion(int64_t number);
  absl::StatusOr<std::shared_ptr<const rl::Prompt>> AwaitPrompt(int64_t index);  // prompt thread too
  void AddPrompts(const std::vector<int64_t>& prompts, StepJob& job);
  void RunStep(StepJob job);
  void InquireAfterMismatch(VersionName version, const MismatchTrace& trace);
  absl::Status WriteJournal(const StepJob& job, const StepReport& report);
  void RunCheckpoint(CheckpointInfo info);
  void FinishRun();
  void SetPhase(v1::TrainerPhase phase);
  v1::TrainerPhase Phase() const;  // control thread

  // ---- control thread (leader.cc)
  void Control();
  void Dispatch();
  StepJob MakeJob(const std::vector<int64_t>& groups) const;
  void Flush();
  void Deliver(const Outgoing& outgoing);
  void DeliverGrant(ConnectionId connection, const Grant& grant);
  void FetchPrompt(ConnectionId connection, const Grant& grant);
  void OnStepDone(const StepDone& done);
  void OnCheckpointDone(const CheckpointInfo& info);
  void AnswerCheckpointRequests();
  v1::StepMetrics MakeRow(const StepDone& done) const;
  void BeginInquiry(VersionName version, const MismatchTrace& trace, std::shared_ptr<absl::Notification> is_answered);
  void EndInquiryIfDone();
  void ReportStep(const StepDone& done, const v1::StepMetrics& row);
  CheckpointInfo DescribeCheckpoint() const;
  int64_t NowMs() const { return absl::ToInt64Milliseconds(SystemClock()->Now()); }
  [[noreturn]] void Die(const absl::Status& why) const;

  const RunSettings& settings_;
  RankGroup& ranks_;
  Team& team_;
  Learner& learner_;
  weights::Publisher& publisher_;
  const std::function<void(int)> on_done_;
  std::function<void()> on_serving_;
  Mailbox mailbox_;  // of the control thread
  Mailbox learner_mailbox_;
  Mailbox prompt_mailbox_;  // of the thread that asks the environment for prompts
  PromptBook prompts_;
  std::atomic<bool> is_stopping_ = false;  // no step, no lease any more
  std::atomic<bool> is_over_ = false;      // no call any more
  std::atomic<bool> is_serving_ = false;
  std::thread control_thread_, learner_thread_, prompt_thread_;

  // Set while the run starts, read by both threads afterwards.
  std::unique_ptr<FileLock> lock_;
  std::unique_ptr<SqliteLedger> ledger_;
  int64_t epoch_ = 0;

  // Learner thread.
  std::unique_ptr<WritableFile> journal_;
  bool is_run_over_ = false;  // the other ranks have been told to stop

  // Control thread.
  std::unique_ptr<Experience> experience_;  // null until the run has started
  std::unique_ptr<MetricsLog> metrics_;
  std::map<ConnectionId, std::shared_ptr<WorkStream>> streams_;
  std::unique_ptr<MismatchInquiry> inquiry_;  // of the last step with a mismatch; null before one
  std::shared_ptr<absl::Notification> inquiry_is_answered_;
  v1::TrainerPhase phase_ = v1::TRAINER_PHASE_STARTING;
  int64_t warm_start_step_ = 0;
  double warm_start_pass_rate_ = 0.0;
  int64_t step_ = 0;           // done
  VersionName version_;        // of those steps' weights
  CheckpointName checkpoint_;  // the last one that this start read or wrote
  bool is_learner_busy_ = true;
  bool is_paused_ = false;
  bool is_finished_ = false;
  int64_t staleness_ = 0;
  absl::Duration step_began_ = absl::ZeroDuration();
  absl::Duration batch_ready_ = absl::ZeroDuration();
  double checkpoint_seconds_ = 0.0;
  std::vector<std::function<void(int64_t, const std::string&)>> checkpoint_requests_;
  std::vector<std::function<bool(const v1::StepMetrics&)>> watchers_;
  rl::DeadStartWatch dead_start_;
  RunMetrics run_metrics_;
};

}  // namespace moerl::trainer

#endif  // MOERL_SERVICES_TRAINER_LEADER_H_
