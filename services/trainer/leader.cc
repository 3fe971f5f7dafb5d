#include "services/trainer/leader.h"

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "libs/base/log.h"
#include "libs/base/status_macros.h"
#include "libs/experience/work_proto.h"

namespace moerl::trainer {
namespace {

constexpr absl::Duration kTick = absl::Seconds(1);  // an idle leader looks at its epoch and leases this often
constexpr absl::Duration kThreadWait = absl::Seconds(3600);
constexpr int32_t kDeadStartSteps = 5;

}  // namespace

Leader::Leader(const RunSettings& settings, RankGroup& ranks, Team& team, Learner& learner,
               weights::Publisher& publisher, rl::Environment& environment, std::function<void(int)> on_done)
    : settings_(settings),
      ranks_(ranks),
      team_(team),
      learner_(learner),
      publisher_(publisher),
      on_done_(std::move(on_done)),
      prompts_(*settings.prompts, &environment),
      staleness_(settings.config.trainer().staleness()),
      dead_start_(kDeadStartSteps) {}

Leader::~Leader() {
  if (!control_thread_.joinable()) return;
  Stop(absl::Now());
  is_over_ = true;
  mailbox_.Post([] {});
  control_thread_.join();
}

void Leader::Start() {
  control_thread_ = std::thread([this] { Control(); });
  const auto serve = [this](Mailbox& mailbox) {
    while (!is_stopping_) {
      for (Mailbox::Mail& mail : mailbox.Take(kThreadWait)) {
        if (!is_stopping_) mail();
      }
    }
  };
  learner_thread_ = std::thread([serve, this] { serve(learner_mailbox_); });
  prompt_thread_ = std::thread([serve, this] { serve(prompt_mailbox_); });
  learner_mailbox_.Post([this] {
    const absl::Status status = StartRun();
    if (!status.ok()) Die(status);
  });
}

void Leader::Stop(absl::Time deadline) {
  if (is_stopping_) return;
  mailbox_.Post([this] {
    if (!experience_) {
      LogInfo("stopped before the run had started");
      std::_Exit(0);  // the learner waits for weight_sync or warms up: nothing is lost that a checkpoint would keep
    }
    // Said by the control thread, so that it cannot begin another step after the checkpoint.
    RequestCheckpoint([this](int64_t, const std::string&) { is_stopping_ = true; });
  });
  while (!is_stopping_ && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(20));
  if (!is_stopping_) {
    LogWarning("stopped before the next step boundary; the run resumes from its last checkpoint");
    std::_Exit(0);  // the learner is inside a step: everything anybody was told is on disk
  }
  for (Mailbox* mailbox : {&learner_mailbox_, &prompt_mailbox_}) mailbox->Post([] {});
  learner_thread_.join();
  prompt_thread_.join();
  if (!is_run_over_) team_.Stop().IgnoreError();
}

void Leader::Die(const absl::Status& why) const {
  LogError("the trainer ends", {{"why", why.ToString()}});
  std::_Exit(ranks_.size() > 1 && absl::IsUnavailable(why) ? kExitLostRank : kExitFailed);
}

void Leader::SetPhase(v1::TrainerPhase phase) {
  mailbox_.Post([this, phase] { phase_ = phase; });
}

v1::TrainerPhase Leader::Phase() const {
  return is_paused_ && phase_ == v1::TRAINER_PHASE_WAITING ? v1::TRAINER_PHASE_PAUSED : phase_;
}

void Leader::Control() {
  while (!is_over_) {
    for (Mailbox::Mail& mail : mailbox_.Take(kTick)) mail();
    run_metrics_.ObservePhase(Phase(), SystemClock()->Now());
    if (!experience_ || is_stopping_) continue;  // once stopping it only answers calls
    experience_->SetAdmission(!is_paused_);
    experience_->Advance(NowMs());
    Flush();
    Dispatch();
    run_metrics_.ObservePhase(Phase(), SystemClock()->Now());  // a step may have begun
    run_metrics_.Observe(*experience_, step_);
  }
}

// ---------------------------------------------------------------------------------------------- workers

void Leader::OnWorkMessage(const std::shared_ptr<WorkStream>& stream, WorkerMessage message) {
  if (!experience_) return stream->End(absl::UnavailableError("the trainer is starting; try again"));
  const ConnectionId id = stream->id();
  streams_.try_emplace(id, stream);
  if (const auto* hello = std::get_if<Hello>(&message)) experience_->OnHello(id, *hello, NowMs());
  if (const auto* demand = std::get_if<Demand>(&message)) experience_->OnDemand(id, *demand);
  if (const auto* progress = std::get_if<Progress>(&message)) experience_->OnProgress(id, *progress, NowMs());
  if (const auto* finish = std::get_if<Finish>(&message)) experience_->OnFinish(id, *finish, NowMs());
  if (const auto* hand_back = std::get_if<HandBack>(&message)) experience_->OnHandBack(id, *hand_back);
  if (const auto* renewal = std::get_if<Renewal>(&message)) experience_->OnRenewal(id, *renewal, NowMs());
}

void Leader::OnMalformedWork(const std::shared_ptr<WorkStream>& stream, LeaseId lease, int64_t sample,
                             const absl::Status& why) {
  if (experience_) experience_->OnMalformed(stream->id(), lease, sample, why);
}

void Leader::OnWorkOver(ConnectionId connection) {
  if (experience_) experience_->OnBreak(connection);
  streams_.erase(connection);
  if (!inquiry_) return;
  inquiry_->OnBreak(connection);
  EndInquiryIfDone();
}

// ---------------------------------------------------------------------------------------------- mismatch inquiry

void Leader::BeginInquiry(VersionName version, const MismatchTrace& trace,
                          std::shared_ptr<absl::Notification> is_answered) {
  const uint64_t id = inquiry_ ? inquiry_->id() + 1 : 1;
  inquiry_ = std::make_unique<MismatchInquiry>(id, version, trace.stage_digests, settings_.model,
                                               experience_->ConnectedWorkers());
  inquiry_is_answered_ = std::move(is_answered);
  v1::WorkResponse response;
  response.mutable_trace()->set_trace_id(id);
  *response.mutable_trace()->mutable_weight_version() = VersionToProto(version);
  response.mutable_trace()->mutable_token_ids()->Add(trace.tokens.begin(), trace.tokens.end());
  for (const auto& [connection, worker] : inquiry_->asked()) {
    const auto stream = streams_.find(connection);
    if (stream != streams_.end()) stream->second->Deliver(response);
  }
  EndInquiryIfDone();
}

void Leader::OnTraceReport(ConnectionId connection, const v1::WorkTraceReport& report) {
  if (!inquiry_) return;
  inquiry_->OnReport(connection, report.trace_id(), VersionFromProto(report.weight_version()),
                     {report.stage_digests().begin(), report.stage_digests().end()});
  EndInquiryIfDone();
}

void Leader::EndInquiryIfDone() {
  if (inquiry_->is_done() && !inquiry_is_answered_->HasBeenNotified()) inquiry_is_answered_->Notify();
}

// One transaction for all that has happened since the last one; a message goes out only after it.
void Leader::Flush() {
  const std::vector<LedgerWrite> writes = experience_->TakeWrites();
  const std::vector<Outgoing> messages = experience_->TakeMessages();
  const absl::Status status = ledger_->Commit(epoch_, writes);
  if (!status.ok()) Die(status);
  for (const Outgoing& outgoing : messages) Deliver(outgoing);
}

void Leader::Deliver(const Outgoing& outgoing) {
  const auto it = streams_.find(outgoing.connection);
  if (it == streams_.end()) return;
  WorkStream& stream = *it->second;
  if (std::holds_alternative<CloseStream>(outgoing.message)) {
    return stream.End(absl::AbortedError("a newer stream of this worker has replaced this one"));
  }
  const int route_bytes = settings_.model.num_experts <= 256 ? 1 : 2;
  if (const auto* grant = std::get_if<Grant>(&outgoing.message)) return DeliverGrant(outgoing.connection, *grant);
  if (const auto* ack = std::get_if<Ack>(&outgoing.message)) {
    if (ack->verdict == Verdict::kRefused) {
      LogWarning("trajectory refused", {{"lease_epoch", ack->lease_id.epoch},
                                        {"lease", ack->lease_id.counter},
                                        {"sample", ack->sample},
                                        {"why", ack->reason}});
    }
    return stream.Deliver(ToProto(*ack, route_bytes));
  }
  if (const auto* revocation = std::get_if<Revocation>(&outgoing.message)) {
    return stream.Deliver(ToProto(*revocation, route_bytes));
  }
  v1::WorkResponse response = ToProto(std::get<Welcome>(outgoing.message), route_bytes);
  response.mutable_welcome()->set_with_routes(settings_.token_routes.num_bytes() > 0);
  response.mutable_welcome()->set_with_kept_ids(settings_.sampling.cuts_distribution());
  stream.Deliver(std::move(response));
  v1::WorkResponse credit;
  credit.mutable_credit()->set_num_bytes(WorkStream::kCreditBytes);
  stream.Deliver(std::move(credit));
}

void Leader::DeliverGrant(ConnectionId connection, const Grant& grant) {
  const auto it = streams_.find(connection);
  if (it == streams_.end()) return;
  const auto prompt = prompts_.Find(grant.prompt_index);
  if (!prompt) return FetchPrompt(connection, grant);
  v1::WorkResponse response = ToProto(grant, settings_.model.num_experts <= 256 ? 1 : 2);
  v1::Lease& lease = *response.mutable_lease();
  lease.mutable_prompt_token_ids()->Add(prompt->token_ids.begin(), prompt->token_ids.end());
  lease.mutable_task()->set_name(prompt->task.name);
  lease.mutable_task()->set_payload(prompt->task.payload);
  *lease.mutable_sampling() = settings_.lease_sampling;
  lease.set_run_seed(settings_.config.trainer().seed());
  it->second->Deliver(std::move(response));
}

// A built-in task's prompts are made at once; those of an environment are asked for elsewhere and sent when there.
void Leader::FetchPrompt(ConnectionId connection, const Grant& grant) {
  if (settings_.config.environment().address().empty()) {
    const auto prompt = prompts_.Fetch(grant.prompt_index);
    if (prompt.ok()) return DeliverGrant(connection, grant);
  }
  prompt_mailbox_.Post([this, connection, grant] {
    const auto prompt = AwaitPrompt(grant.prompt_index);
    mailbox_.Post([this, connection, grant, status = prompt.status()] {
      if (status.ok()) return DeliverGrant(connection, grant);
      if (absl::IsUnavailable(status)) return;  // the process stops: the prompt may be a good one
      Finish finish;
      finish.lease_id = grant.lease_id;
      for (size_t i = 0; i < grant.samples.size(); ++i) {
        if (!grant.samples[i].is_final) finish.sample = static_cast<int64_t>(i);
      }
      finish.outcome = Failure{FailureReason::kBadPrompt, std::string(status.message())};
      experience_->OnFinish(connection, finish, NowMs());
    });
  });
}

// ---------------------------------------------------------------------------------------------- operators

void Leader::SetStaleness(int64_t staleness) {
  staleness_ = staleness;
  if (experience_) experience_->SetStaleness(staleness);
}

void Leader::WatchRows(uint64_t after_step, std::function<bool(const v1::StepMetrics&)> watcher) {
  if (metrics_) {
    for (const v1::StepMetrics& row : metrics_->rows()) {
      if (row.step() > after_step && !watcher(row)) return;
    }
  }
  watchers_.push_back(std::move(watcher));
}

void Leader::RequestCheckpoint(std::function<void(int64_t, const std::string&)> on_durable) {
  checkpoint_requests_.push_back(std::move(on_durable));
  if (is_finished_ || is_stopping_) AnswerCheckpointRequests();  // no step will follow
}

v1::GetStatusResponse Leader::Status() const {
  v1::GetStatusResponse status;
  status.set_run_id(settings_.config.name());
  status.set_epoch(static_cast<uint64_t>(epoch_));
  status.set_phase(Phase());
  status.set_step(static_cast<uint64_t>(step_));
  status.set_num_steps(settings_.config.trainer().num_steps());
  *status.mutable_weight_version() = VersionToProto(version_);
  status.set_num_ranks(static_cast<uint32_t>(ranks_.size()));
  status.set_staleness(static_cast<uint32_t>(staleness_));
  status.set_warm_start_step(static_cast<uint64_t>(warm_start_step_));
  status.set_warm_start_pass_rate(warm_start_pass_rate_);
  if (!experience_) {
    status.set_waiting_for(phase_ == v1::TRAINER_PHASE_WARM_START ? "the warm start" : "the start");
    return status;
  }
  const LedgerState& state = experience_->state();
  const auto batch = static_cast<int64_t>(settings_.config.trainer().prompts_per_step());
  const auto open = static_cast<int64_t>(experience_->open_groups().size());
  const int64_t trained = step_ * batch;
  status.set_num_groups_admitted(state.groups.size());
  status.set_num_groups_open(static_cast<uint64_t>(open));
  status.set_num_groups_trained(static_cast<uint64_t>(trained));
  status.set_num_groups_dropped(state.dropped.size());
  status.set_num_groups_finished(static_cast<uint64_t>(std::max<int64_t>(0, state.NumUndropped() - open - trained)));
  int64_t connected = 0;
  for (const auto& [name, view] : experience_->Workers()) {
    v1::WorkerStatus* worker = status.add_workers();
    worker->set_worker(name);
    worker->set_is_connected(view.is_connected);
    worker->set_num_leases(static_cast<uint32_t>(view.num_leases));
    worker->set_num_slots(static_cast<uint32_t>(view.num_slots));
    *worker->mutable_weight_version() = VersionToProto(view.version);
    connected += view.is_connected ? 1 : 0;
  }
  ForksToProto(state.forks, status.mutable_forks());
  if (!state.checkpoints.empty()) {
    status.set_checkpoint_step(static_cast<uint64_t>(state.checkpoints.back().step));
  }
  if (phase_ == v1::TRAINER_PHASE_WAITING) {
    status.set_waiting_for(connected == 0 ? std::string("a rollout server")
                                          : absl::StrCat(open, " open groups of step ", step_ + 1));
  }
  return status;
}

}  // namespace moerl::trainer
