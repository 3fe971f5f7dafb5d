// The steps of a run: compose and record a batch, learn, publish, checkpoint, report.

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "libs/base/log.h"
#include "libs/base/status_macros.h"
#include "libs/experience/work_proto.h"
#include "services/trainer/leader.h"

namespace moerl::trainer {
namespace {

constexpr absl::Duration kPromptRetry = absl::Seconds(1);
constexpr absl::Duration kInquiryWait = absl::Seconds(5);  // for rollout servers to say where they differ
constexpr absl::Duration kFarewell = absl::Seconds(2);     // a finished trainer is asked for its status a last time

double SecondsSince(absl::Duration then) { return absl::ToDoubleSeconds(SystemClock()->Now() - then); }

}  // namespace

// ---------------------------------------------------------------------------------------------- control thread

void Leader::Dispatch() {
  if (is_learner_busy_ || is_finished_ || !experience_) return;
  if (step_ >= static_cast<int64_t>(settings_.config.trainer().num_steps())) {
    is_learner_busy_ = true;
    learner_mailbox_.Post([this] { FinishRun(); });
    return;
  }
  if (!checkpoint_requests_.empty() && checkpoint_.step != step_) {
    is_learner_busy_ = true;
    phase_ = v1::TRAINER_PHASE_CHECKPOINTING;
    learner_mailbox_.Post([this, info = DescribeCheckpoint()] { RunCheckpoint(info); });
    return;
  }
  AnswerCheckpointRequests();  // the checkpoint of this very step counts already
  if (is_paused_ || is_stopping_) return;
  const std::vector<int64_t> groups = experience_->ComposeBatch(step_ + 1);
  experience_->Advance(NowMs());  // groups dropped for lack of signal make room
  Flush();                        // the batch is recorded before the step
  if (groups.empty()) return;
  batch_ready_ = SystemClock()->Now();
  is_learner_busy_ = true;
  phase_ = v1::TRAINER_PHASE_TRAINING;
  std::vector<int64_t> prompts;
  prompts.reserve(groups.size());
  for (int64_t number : groups) {
    prompts.push_back(experience_->state().groups[static_cast<size_t>(number)].prompt_index);
  }
  learner_mailbox_.Post([this, job = MakeJob(groups), prompts = std::move(prompts)]() mutable {
    AddPrompts(prompts, job);
    RunStep(std::move(job));
  });
}

StepJob Leader::MakeJob(const std::vector<int64_t>& groups) const {
  StepJob job;
  job.step = step_ + 1;
  job.epoch = epoch_;
  job.version = version_;
  for (int64_t number : groups) {
    rl::Group& group = job.groups.emplace_back();
    group.group_id = static_cast<uint64_t>(number);
    group.sampling = settings_.sampling;
    for (const TrajectoryPtr& trajectory : experience_->state().groups[static_cast<size_t>(number)].samples) {
      if (!trajectory) Die(absl::DataLossError(absl::StrCat("the ledger has no tokens of group ", number)));
      rl::Sample& sample = group.samples.emplace_back();
      sample.group_id = group.group_id;
      sample.sample_index = static_cast<uint32_t>(group.samples.size() - 1);
      sample.run = trajectory->tokens;
      sample.reward = trajectory->reward;
      sample.is_truncated = trajectory->finish_reason == FinishReason::kLength;
    }
  }
  return job;
}

void Leader::OnStepDone(const StepDone& done) {
  experience_->OnStepTrained(done.job.step);
  experience_->OnVersionReady(done.job.step);
  experience_->Advance(NowMs());
  Flush();
  step_ = done.job.step;
  version_ = done.version;
  const v1::StepMetrics row = MakeRow(done);
  if (const absl::Status status = metrics_->Append(row); !status.ok()) Die(status);
  ReportStep(done, row);
  run_metrics_.ObserveStep(row);
  step_began_ = SystemClock()->Now();
  checkpoint_seconds_ = 0.0;
  const v1::TrainerConfig& config = settings_.config.trainer();
  const bool is_last = step_ == static_cast<int64_t>(config.num_steps());
  if (!is_last && step_ % config.checkpoint_every_steps() != 0) {
    is_learner_busy_ = false;
    phase_ = v1::TRAINER_PHASE_WAITING;
    return;
  }
  phase_ = v1::TRAINER_PHASE_CHECKPOINTING;
  learner_mailbox_.Post([this, info = DescribeCheckpoint()] { RunCheckpoint(info); });
}

CheckpointInfo Leader::DescribeCheckpoint() const {
  CheckpointInfo info;
  info.name = {step_, epoch_};
  info.trained = experience_->state().HashOfTrained(step_);
  info.cursor = experience_->state().cursor;
  info.prompt_fingerprint = settings_.prompts->fingerprint();
  info.config = settings_.config;
  info.num_ranks = ranks_.size();
  return info;
}

void Leader::OnCheckpointDone(const CheckpointInfo& info) {
  experience_->OnCheckpointWritten(info.name.step);
  Flush();
  const std::string& run_directory = settings_.config.trainer().run_directory();
  const absl::Status status = RemoveOtherCheckpoints(run_directory, experience_->state());
  if (!status.ok()) LogWarning("old checkpoints stay", {{"why", status.ToString()}});
  checkpoint_ = info.name;
  AnswerCheckpointRequests();
  is_learner_busy_ = false;
  phase_ = v1::TRAINER_PHASE_WAITING;
}

void Leader::AnswerCheckpointRequests() {
  const std::string directory = CheckpointDirectory(settings_.config.trainer().run_directory(), checkpoint_);
  for (const auto& on_durable : std::exchange(checkpoint_requests_, {})) on_durable(checkpoint_.step, directory);
}

v1::StepMetrics Leader::MakeRow(const StepDone& done) const {
  const StepReport& report = done.report;
  v1::StepMetrics row;
  row.set_step(static_cast<uint64_t>(done.job.step));
  row.set_epoch(static_cast<uint64_t>(epoch_));
  int64_t num_passed = 0;
  for (const rl::Group& group : done.job.groups) {
    for (const rl::Sample& sample : group.samples)
      num_passed += *sample.reward >= settings_.config.task().pass_reward();
  }
  row.set_pass_rate(static_cast<double>(num_passed) /
                    static_cast<double>(std::max<int64_t>(1, report.stats.num_samples)));
  row.set_reward_mean(report.stats.reward_mean);
  row.set_max_abs_mismatch(report.first.max_abs_mismatch);
  row.set_mismatch_tokens(static_cast<uint64_t>(report.first.mismatch_tokens));
  row.set_mismatch_kl(report.first.mismatch_kl);
  row.set_trained_tokens(static_cast<uint64_t>(report.stats.num_tokens));
  row.set_weight_version(static_cast<uint64_t>(done.version.number));
  row.set_step_seconds(SecondsSince(step_began_));
  row.set_tokens_per_second(static_cast<double>(report.stats.num_tokens) / std::max(1e-9, row.step_seconds()));
  row.set_wait_seconds(absl::ToDoubleSeconds(batch_ready_ - step_began_));
  row.set_train_seconds(done.train_seconds);
  row.set_publish_seconds(done.publish_seconds);
  row.set_checkpoint_seconds(checkpoint_seconds_);
  row.set_loss(report.first.loss);
  row.set_grad_norm(report.grad_norm);
  row.set_entropy(report.first.mean_entropy);
  row.set_learning_rate(report.learning_rate);
  row.set_clip_fraction(report.last.clip_fraction);
  row.set_kl_reference(report.first.kl_ref);
  row.set_response_length_mean(report.stats.completion_tokens_mean);
  for (int64_t tokens : report.first.staleness) row.add_staleness_histogram(static_cast<uint64_t>(tokens));
  row.set_num_zero_variance_groups(static_cast<uint64_t>(report.stats.num_constant_groups));
  row.set_num_groups_dropped(experience_->state().dropped.size());
  row.set_expert_load_max_over_mean(report.expert_load.max_over_mean);
  row.set_num_dead_experts(static_cast<uint32_t>(report.expert_load.dead.size()));
  row.set_value_loss(report.first.value_loss);
  row.set_explained_variance(report.explained_variance);
  row.set_effective_sample_size(report.first.effective_sample_fraction);
  row.set_is_skipped(report.is_skipped);
  if (done.eval_pass_rate) row.set_eval_pass_rate(*done.eval_pass_rate);
  return row;
}

void Leader::ReportStep(const StepDone& done, const v1::StepMetrics& row) {
  LogInfo("step", {{"step", row.step()},
                   {"pass_rate", row.pass_rate()},
                   {"reward", row.reward_mean()},
                   {"mismatch", row.max_abs_mismatch()},
                   {"mismatch_tokens", row.mismatch_tokens()},
                   {"grad_norm", row.grad_norm()},
                   {"seconds", row.step_seconds()},
                   {"tokens_per_s", row.tokens_per_second()}});
  if (done.report.is_skipped) LogWarning("the update was skipped", {{"why", done.report.skipped_because}});
  if (done.report.mismatch) {
    const Mismatch& first = *done.report.mismatch;
    const auto group = first.ordinal / static_cast<int64_t>(settings_.config.trainer().samples_per_prompt());
    LogError("trainer and rollout disagree on a token of the current version",
             {{"group", done.job.groups[static_cast<size_t>(group)].group_id},
              {"sample", first.ordinal % static_cast<int64_t>(settings_.config.trainer().samples_per_prompt())},
              {"token", first.token},
              {"trainer_logprob", first.trainer_logprob},
              {"rollout_logprob", first.rollout_logprob},
              {"first_difference", inquiry_->Verdict()}});
  }
  if (dead_start_.AddStep(done.report.stats.num_informative_groups)) {
    LogWarning(
        "0 trainable groups in 5 steps: every group's rewards are all equal; start from a model that sometimes "
        "succeeds (trainer.warm_start) or from easier prompts");
  }
  std::erase_if(watchers_, [&](auto& watcher) { return !watcher(row); });
}

// ---------------------------------------------------------------------------------------------- learner thread

// An environment that is away is asked again; UNAVAILABLE only when the process stops.
absl::StatusOr<std::shared_ptr<const rl::Prompt>> Leader::AwaitPrompt(int64_t index) {
  auto prompt = prompts_.Fetch(index);
  while (absl::IsUnavailable(prompt.status()) && !is_stopping_) {
    absl::SleepFor(kPromptRetry);
    prompt = prompts_.Fetch(index);
  }
  return prompt;
}

// Known since they were leased, but for a replay after a restart: then an environment may have to encode them anew.
void Leader::AddPrompts(const std::vector<int64_t>& prompts, StepJob& job) {
  for (size_t i = 0; i < prompts.size(); ++i) {
    const auto prompt = AwaitPrompt(prompts[i]);
    if (!prompt.ok()) Die(prompt.status());
    job.groups[i].prompt = (*prompt)->token_ids;
  }
}

void Leader::RunStep(StepJob job) {
  StepDone done;
  absl::Duration began = SystemClock()->Now();
  absl::StatusOr<StepReport> report = team_.TrainStep(job);
  if (!report.ok()) Die(report.status());
  if (const absl::Status status = WriteJournal(job, *report); !status.ok()) Die(status);
  if (report->mismatch) InquireAfterMismatch(job.version, report->mismatch_trace);
  done.train_seconds = SecondsSince(began);
  began = SystemClock()->Now();
  SetPhase(v1::TRAINER_PHASE_PUBLISHING);
  const absl::StatusOr<VersionName> version = PublishVersion(job.step);
  if (!version.ok()) Die(version.status());
  done.publish_seconds = SecondsSince(began);
  const v1::TrainerConfig& config = settings_.config.trainer();
  const bool is_due = (config.eval_every_steps() > 0 && job.step % config.eval_every_steps() == 0) ||
                      job.step == static_cast<int64_t>(config.num_steps());
  done.report = *std::move(report);
  done.version = *version;
  if (is_due && settings_.held_out) {
    SetPhase(v1::TRAINER_PHASE_EVALUATING);
    mailbox_.Post([this, number = job.step] { experience_->OnVersionReady(number); });  // rollouts need not wait
    const absl::StatusOr<double> pass_rate = team_.PassRate(0, settings_.config.task().num_held_out(), false);
    if (!pass_rate.ok()) Die(pass_rate.status());
    LogInfo("held-out pass rate", {{"step", job.step}, {"pass_rate", *pass_rate}});
    done.eval_pass_rate = *pass_rate;
  }
  done.job = std::move(job);
  mailbox_.Post([this, done = std::move(done)] { OnStepDone(done); });
}

// Before the next version is published: until then rollout servers run the weights in question.
void Leader::InquireAfterMismatch(VersionName version, const MismatchTrace& trace) {
  const auto is_answered = std::make_shared<absl::Notification>();
  mailbox_.Post([=, this] { BeginInquiry(version, trace, is_answered); });
  is_answered->WaitForNotificationWithTimeout(kInquiryWait);
}

absl::StatusOr<VersionName> Leader::PublishVersion(int64_t number) {
  // Posted before the commit is sent: no worker can report a token of this version earlier.
  const auto before_commit = [this, number] { mailbox_.Post([this, number] { experience_->OnVersionSent(number); }); };
  return team_.Publish(epoch_, number, before_commit);
}

// What the gradients were computed from, by the code that computed them; the ledger is not asked.
absl::Status Leader::WriteJournal(const StepJob& job, const StepReport& report) {
  if (!journal_) return absl::OkStatus();
  std::string lines;
  for (const TrainedGroup& group : report.trained) {
    absl::StrAppend(&lines, "{\"epoch\":", job.epoch, ",\"step\":", job.step, ",\"group\":", group.group,
                    ",\"samples\":", group.num_samples, ",\"tokens\":", group.num_tokens, ",\"digest\":\"",
                    absl::StrFormat("%016x", group.digest), "\",\"skipped\":", report.is_skipped ? "true" : "false",
                    "}\n");
  }
  return journal_->Append(lines);
}

void Leader::RunCheckpoint(CheckpointInfo info) {
  const absl::Duration began = SystemClock()->Now();
  info.kl_coefficient = learner_.kl_coefficient();
  const absl::Status status = WriteCheckpoint(team_, settings_.config.trainer().run_directory(), info);
  if (!status.ok()) Die(status);
  mailbox_.Post([this, info, seconds = SecondsSince(began)] {
    checkpoint_seconds_ = seconds;
    OnCheckpointDone(info);
  });
}

void Leader::FinishRun() {
  const std::string directory = settings_.RunPath("model");
  absl::Status status = PosixEnv()->RemoveTree(directory);
  if (status.ok()) status = team_.ExportPolicy(directory);
  if (status.ok()) status = team_.Stop();
  if (!status.ok()) Die(status);
  is_run_over_ = true;
  LogInfo("run is done", {{"model", directory}});
  mailbox_.Post([this] {
    phase_ = v1::TRAINER_PHASE_DONE;
    is_finished_ = true;
    AnswerCheckpointRequests();
  });
  if (!settings_.config.trainer().exit_when_done()) return;
  absl::SleepFor(kFarewell);
  on_done_(0);
}

}  // namespace moerl::trainer
