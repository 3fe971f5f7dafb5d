// How a run starts and resumes (docs/protocol.md, rules 12 to 17): fence, open the ledger, restore, undo or fork,
// tell weight_sync, publish the resumed version before anything else, then serve.

#include "absl/strings/str_cat.h"
#include "libs/base/config.h"
#include "libs/base/log.h"
#include "libs/base/status_macros.h"
#include "services/trainer/leader.h"
#include "services/trainer/resume.h"

namespace moerl::trainer {
namespace {

// Every rank reads it: on the checkpoints' disk, which ranks on several machines share.
std::string ReferencePath(const RunSettings& settings) { return settings.RunPath("checkpoints/reference"); }

}  // namespace

absl::Status Leader::StartRun() {
  Env& env = *PosixEnv();
  MOERL_RETURN_IF_ERROR(env.CreateDirs(settings_.RunPath("checkpoints")));
  MOERL_ASSIGN_OR_RETURN(lock_, env.Lock(settings_.RunPath("trainer.lock")));
  const auto group_size = static_cast<int64_t>(settings_.config.trainer().samples_per_prompt());
  MOERL_ASSIGN_OR_RETURN(
      ledger_, SqliteLedger::OpenFile(settings_.RunPath("ledger.sqlite"),
                                      {settings_.config.name(), group_size, settings_.prompts->fingerprint()}));
  MOERL_ASSIGN_OR_RETURN(const int64_t epoch, publisher_.Acquire(settings_.config.name()));
  MOERL_ASSIGN_OR_RETURN(LedgerState state, ledger_->Open(epoch));
  mailbox_.Post([this, epoch] { epoch_ = epoch; });
  if (state.checkpoints.empty()) {
    MOERL_RETURN_IF_ERROR(WarmStart());
    MOERL_RETURN_IF_ERROR(CheckpointAtStart(state, {0, epoch}));
  }
  MOERL_ASSIGN_OR_RETURN(const CheckpointInfo info, RestoreNewest(state));
  const int64_t step = info.name.step;
  const std::vector<ConfigChange> changes = CompareConfigs(ReplayConfig(info.config), ReplayConfig(settings_.config));
  const ResumePlan plan = Resume(state, epoch, step, ranks_.size(), !changes.empty());
  MOERL_RETURN_IF_ERROR(ledger_->Commit(epoch, plan.writes));
  if (info.trained != state.HashOfTrained(step)) {
    return absl::DataLossError(absl::StrCat("checkpoint of step ", step, " and ledger disagree on the groups trained: ",
                                            info.trained.count, " against ", state.HashOfTrained(step).count));
  }
  LogInfo(step == 0 && state.groups.empty() ? "run starts" : "run resumes", {{"epoch", epoch}, {"step", step}});
  if (plan.forked) {
    LogWarning("recorded batches were computed by another number of ranks or other settings: the run forks",
               {{"step", step}, {"groups_dropped", plan.dropped_groups}, {"batches_voided", plan.voided_batches}});
  }
  for (const ConfigChange& change : changes) {
    LogWarning("a setting has changed since the checkpoint",
               {{"setting", change.path}, {"was", change.was}, {"now", change.now}});
  }
  // From here on batches are recorded under these settings: the next resume replays them.
  if (!changes.empty()) MOERL_RETURN_IF_ERROR(CheckpointAtStart(state, {step, epoch}));
  MOERL_RETURN_IF_ERROR(publisher_.RecordForks(state.forks));
  MOERL_ASSIGN_OR_RETURN(const VersionName version, team_.Publish(epoch, step, nullptr));
  MOERL_ASSIGN_OR_RETURN(const VersionName latest, publisher_.LatestReady());
  const int64_t newest = std::max(step, latest.number);
  MOERL_RETURN_IF_ERROR(RemoveOtherCheckpoints(settings_.config.trainer().run_directory(), state));
  MOERL_ASSIGN_OR_RETURN(auto metrics, MetricsLog::Open(settings_.RunPath("metrics.jsonl"), step));
  if (!settings_.config.trainer().journal_file().empty()) {
    MOERL_ASSIGN_OR_RETURN(journal_, env.OpenForWrite(settings_.config.trainer().journal_file(), WriteMode::kAppend));
  }
  const CheckpointName start = changes.empty() ? info.name : CheckpointName{step, epoch};
  mailbox_.Post([this, state = std::move(state), metrics = std::move(metrics), version, newest, start]() mutable {
    const v1::TrainerConfig& config = settings_.config.trainer();
    ExperienceOptions options;
    options.run_id = settings_.config.name();
    options.epoch = epoch_;
    options.ranks = ranks_.size();
    options.batch_groups = config.prompts_per_step();
    options.num_steps = config.num_steps();
    options.staleness = staleness_;
    options.group_slots_max = config.num_group_slots();
    options.lease_duration_ms = config.lease_duration_ms();
    options.checkpoints_kept = config.checkpoints_kept();
    options.max_new_tokens = settings_.lease_sampling.max_new_tokens();
    options.vocab_size = settings_.model.vocab_size;
    options.token_routes = settings_.token_routes;
    options.dynamic_sampling = settings_.recipe.dynamic_sampling;
    experience_ = std::make_unique<Experience>(options, std::move(state), newest, newest, NowMs());
    metrics_ = std::move(metrics);
    step_ = start.step;
    version_ = version;
    checkpoint_ = start;
    step_began_ = SystemClock()->Now();
    phase_ = v1::TRAINER_PHASE_WAITING;
    is_learner_busy_ = false;
    is_serving_ = true;
    if (on_serving_) on_serving_();
  });
  return absl::OkStatus();
}

// Writes and names a checkpoint of what the team holds, before any step of this start.
absl::Status Leader::CheckpointAtStart(LedgerState& state, CheckpointName name) {
  CheckpointInfo info;
  info.name = name;
  info.trained = state.HashOfTrained(name.step);
  info.cursor = state.cursor;
  info.prompt_fingerprint = settings_.prompts->fingerprint();
  info.config = settings_.config;
  info.num_ranks = ranks_.size();
  info.kl_coefficient = learner_.kl_coefficient();
  MOERL_RETURN_IF_ERROR(WriteCheckpoint(team_, settings_.config.trainer().run_directory(), info));
  const LedgerWrite write = NameCheckpoint{name, settings_.config.trainer().checkpoints_kept()};
  state.Apply(write);
  return ledger_->Commit(name.epoch, {&write, 1});
}

absl::Status Leader::WarmStart() {
  const rl::WarmStartConfig& warm = settings_.warm_start;
  const v1::WarmStartConfig& config = settings_.config.trainer().warm_start();
  if (warm.max_steps > 0) SetPhase(v1::TRAINER_PHASE_WARM_START);
  for (int64_t step = 0; warm.max_steps > 0; ++step) {
    if (rl::ShouldMeasure(warm, step)) {
      MOERL_ASSIGN_OR_RETURN(const double pass_rate, team_.PassRate(0, config.num_prompts(), false));
      mailbox_.Post([this, step, pass_rate] {
        warm_start_step_ = step;
        warm_start_pass_rate_ = pass_rate;
      });
      const rl::WarmStartVerdict verdict = rl::JudgeWarmStart(warm, step, pass_rate);
      LogInfo("warm start", {{"step", step}, {"pass_rate", pass_rate}});
      if (verdict != rl::WarmStartVerdict::kContinue) {
        LogInfo(rl::DescribeVerdict(warm, verdict, step, pass_rate));
        break;
      }
    }
    const uint64_t first = static_cast<uint64_t>(step) * config.batch_size();
    MOERL_RETURN_IF_ERROR(team_.SupervisedUpdate(first, config.batch_size()).status());
  }
  MOERL_RETURN_IF_ERROR(team_.BeginReinforcement());
  if (!settings_.recipe.needs_ref_logp()) return absl::OkStatus();
  MOERL_RETURN_IF_ERROR(PosixEnv()->RemoveTree(ReferencePath(settings_)));
  return team_.ExportPolicy(ReferencePath(settings_));
}

// The newest checkpoint that can be read; an older one replays more, to the same weights.
absl::StatusOr<CheckpointInfo> Leader::RestoreNewest(const LedgerState& state) {
  const std::string& run_directory = settings_.config.trainer().run_directory();
  absl::Status status = absl::NotFoundError("no checkpoint is named");
  for (auto name = state.checkpoints.rbegin(); name != state.checkpoints.rend(); ++name) {
    const absl::StatusOr<CheckpointInfo> info = ReadCheckpointInfo(run_directory, *name);
    status = info.status();
    if (status.ok() && info->prompt_fingerprint != settings_.prompts->fingerprint()) {
      return absl::FailedPreconditionError("the checkpoint was made with other prompts than the configuration has");
    }
    if (status.ok()) {
      if (const absl::Status same = CheckFixedFields(info->config, settings_.config); !same.ok()) {
        return absl::FailedPreconditionError(absl::StrCat(
            "the configuration is that of other training than the checkpoint's: ", std::string(same.message()),
            "; put it back, or give another trainer.run_directory"));
      }
    }
    if (status.ok()) {
      const auto num_ranks = static_cast<int>(info->num_ranks);
      status = team_.RestoreState(CheckpointDirectory(run_directory, *name), num_ranks, info->kl_coefficient);
    }
    if (status.ok() && settings_.recipe.needs_ref_logp()) status = team_.LoadReference(ReferencePath(settings_));
    if (status.ok()) return *info;
    LogWarning("a checkpoint cannot be read; trying the one before",
               {{"step", name->step}, {"why", status.ToString()}});
  }
  return status;
}

}  // namespace moerl::trainer
