#include "services/rollout/lease_runner.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/clock.h"
#include "libs/base/log.h"
#include "libs/base/status_macros.h"
#include "libs/experience/work_proto.h"
#include "services/rollout/rollout_metrics.h"

namespace moerl::rollout {
namespace {

constexpr absl::Duration kConnectDelayFirst = absl::Milliseconds(100);
constexpr absl::Duration kConnectDelayMax = absl::Seconds(2);

int64_t NowMs() { return absl::ToInt64Milliseconds(SystemClock()->Now()); }

moerl::FinishReason ToWork(model::FinishReason reason) {
  return reason == model::FinishReason::kLength ? moerl::FinishReason::kLength : moerl::FinishReason::kStop;
}

// Both enums have trajectory.proto's order; that one starts at 1.
FailureReason ToWork(rl::FailureReason reason) { return static_cast<FailureReason>(static_cast<int>(reason) + 1); }

// At most `bytes_max` of the bytes, no character of UTF-8 cut: protobuf refuses a string with half a one.
std::string Head(const std::string& text, size_t bytes_max) {
  size_t end = std::min(text.size(), bytes_max);
  while (end > 0 && end < text.size() && (static_cast<uint8_t>(text[end]) & 0xc0) == 0x80) --end;
  return text.substr(0, end);
}

bool NeedsCredit(const v1::WorkRequest& request) { return request.has_progress() || request.has_finish(); }

}  // namespace

LeaseRunner::LeaseRunner(LeaseRunnerOptions options, std::unique_ptr<v1::ExperienceService::Stub> stub, Engine* engine,
                         Judge* judge, std::shared_ptr<Mailbox> mailbox)
    : options_(std::move(options)),
      stub_(std::move(stub)),
      engine_(engine),
      judge_(judge),
      mailbox_(std::move(mailbox)),
      worker_(options_.worker),
      connect_delay_(kConnectDelayFirst) {
  Metrics().num_slots.Set(static_cast<double>(options_.worker.num_slots));
}

LeaseRunner::~LeaseRunner() = default;

void LeaseRunner::Advance(absl::Duration now) {
  next_wakeup_ = absl::InfiniteDuration();
  if (engine_->has_weights()) Connect(now);
  ObeyCommands();
  StartWaiting();
  SendMessages(now);
  ObeyCommands();  // of leases just handed back
  ForgetEnded();
  Measure();
}

void LeaseRunner::Measure() const {
  int64_t waiting = 0, running = 0, judged = 0;
  for (const auto& [id, lease] : leases_) {
    for (const auto& [index, sample] : lease->samples) {
      ++(sample.state == Sample::State::kWaiting   ? waiting
         : sample.state == Sample::State::kRunning ? running
                                                   : judged);
    }
  }
  RolloutMetrics& metrics = Metrics();
  metrics.leases.Set(static_cast<double>(leases_.size()));
  metrics.samples_waiting.Set(static_cast<double>(waiting));
  metrics.samples_running.Set(static_cast<double>(running));
  metrics.samples_judged.Set(static_cast<double>(judged));
  metrics.trainer_connected.Set(worker_.is_welcomed() ? 1 : 0);
}

void LeaseRunner::OnForks(const std::vector<Fork>& forks) { worker_.OnListing(latest_, forks); }

void LeaseRunner::OnVersionChanged(VersionName version) {
  latest_ = version;
  worker_.OnListing(latest_, worker_.forks());
  worker_.OnVersionChanged(version);
}

// ---------------------------------------------------------------------------------------------- stream

void LeaseRunner::Connect(absl::Duration now) {
  if (stream_ != nullptr) return;
  if (now < connect_at_) {
    next_wakeup_ = connect_at_;
    return;
  }
  const uint64_t number = ++stream_number_;
  WorkStream::Hooks hooks;
  hooks.on_message = [this, number, mailbox = mailbox_](v1::WorkResponse response) {
    mailbox->Post([this, number, response = std::move(response)] { OnResponse(number, response); });
  };
  hooks.on_drained = [mailbox = mailbox_] { mailbox->Post([] {}); };
  hooks.on_over = [this, number, mailbox = mailbox_](absl::Status status) {
    mailbox->Post([this, number, status = std::move(status)] { OnStreamOver(number, status); });
  };
  outbox_.clear();
  credit_bytes_ = 0;
  stream_ = WorkStream::Open(*stub_, std::move(hooks));
  outbox_.push_back(ToProto(WorkerMessage(worker_.OnStreamOpened()), RouteBytes()));
}

void LeaseRunner::OnStreamOver(uint64_t stream_number, const absl::Status& status) {
  if (stream_number != stream_number_ || stream_ == nullptr) return;
  LogWarning("work stream ended, connecting again",
             {{"reason", std::string(status.message())}, {"seconds", absl::ToDoubleSeconds(connect_delay_)}});
  stream_ = nullptr;
  outbox_.clear();
  worker_.OnStreamBroken();
  connect_at_ = SystemClock()->Now() + connect_delay_;
  connect_delay_ = std::min(2 * connect_delay_, kConnectDelayMax);
}

void LeaseRunner::OnResponse(uint64_t stream_number, const v1::WorkResponse& response) {
  if (stream_number != stream_number_ || stream_ == nullptr) return;
  if (absl::Status status = Apply(response); !status.ok()) {
    LogWarning("work stream refused", {{"reason", std::string(status.message())}});
    stream_->Cancel();  // its end comes by OnStreamOver
  }
  stream_->ReadNext();
}

absl::Status LeaseRunner::Apply(const v1::WorkResponse& response) {
  if (response.has_credit()) {
    credit_bytes_ += response.credit().num_bytes();
    return absl::OkStatus();
  }
  if (response.has_forks()) {
    OnForks(ForksFromProto(response.forks().forks()));
    return absl::OkStatus();
  }
  if (response.has_trace()) {
    AnswerTrace(response.trace());
    return absl::OkStatus();
  }
  MOERL_ASSIGN_OR_RETURN(const TrainerMessage message, FromProto(response));
  const int64_t now_ms = NowMs();
  if (const auto* welcome = std::get_if<Welcome>(&message)) {
    MOERL_RETURN_IF_ERROR(worker_.OnWelcome(*welcome, now_ms));
    connect_delay_ = kConnectDelayFirst;
    with_kept_ids_ = response.welcome().with_kept_ids();
    routes_.reset();
    if (response.welcome().with_routes()) routes_ = RouteFormatOf(engine_->model_config());
    LogInfo("welcomed by the trainer", {{"run_id", welcome->run_id}, {"epoch", welcome->epoch}});
  } else if (const auto* grant = std::get_if<Grant>(&message)) {
    leases_[grant->lease_id] = std::make_unique<Lease>(this, grant->lease_id, GroupFromProto(response.lease()));
    worker_.OnGrant(*grant, now_ms);
  } else if (const auto* ack = std::get_if<Ack>(&message)) {
    if (ack->verdict == Verdict::kRefused) {
      LogWarning("trajectory refused",
                 {{"lease", ack->lease_id.counter}, {"sample", ack->sample}, {"reason", ack->reason}});
    }
    worker_.OnAck(*ack);
  } else if (const auto* revocation = std::get_if<Revocation>(&message)) {
    worker_.OnRevocation(*revocation);
  }
  return absl::OkStatus();
}

// The trainer got other log-probabilities than some rollout server: it looks for the first stage that differs.
void LeaseRunner::AnswerTrace(const v1::WorkTrace& trace) {
  v1::WorkRequest request;
  v1::WorkTraceReport& report = *request.mutable_trace_report();
  report.set_trace_id(trace.trace_id());
  *report.mutable_weight_version() = VersionToProto(engine_->version());
  if (engine_->version() == VersionFromProto(trace.weight_version())) {
    const auto digests = engine_->StageDigests({trace.token_ids().begin(), trace.token_ids().end()});
    if (digests.ok()) report.mutable_stage_digests()->Add(digests->begin(), digests->end());
    if (!digests.ok()) LogWarning("cannot trace a sequence", {{"reason", std::string(digests.status().message())}});
  }
  outbox_.push_back(std::move(request));
}

void LeaseRunner::SendMessages(absl::Duration now) {
  if (stream_ == nullptr) return;
  while (Flush()) {
    for (const WorkerMessage& message : worker_.TakeMessages(absl::ToInt64Milliseconds(now))) {
      outbox_.push_back(ToProto(message, RouteBytes()));
    }
    if (outbox_.empty()) break;
  }
  if (worker_.is_welcomed() && worker_.num_leases() > 0) {
    next_wakeup_ = std::min(next_wakeup_, now + absl::Milliseconds(worker_.RenewalIntervalMs()));
  }
}

// Sends what credit and queue allow; true when nothing is left.
bool LeaseRunner::Flush() {
  while (!outbox_.empty()) {
    const v1::WorkRequest& next = outbox_.front();
    const uint64_t bytes = NeedsCredit(next) ? next.ByteSizeLong() : 0;
    if (bytes > credit_bytes_ || !stream_->Send(next)) return false;
    credit_bytes_ -= bytes;
    outbox_.pop_front();
  }
  return true;
}

void LeaseRunner::Close() {
  if (stream_ == nullptr) return;
  ++stream_number_;
  std::exchange(stream_, nullptr)->CloseAndWait();
}

// ---------------------------------------------------------------------------------------------- samples

void LeaseRunner::ObeyCommands() {
  for (const EngineCommand& command : worker_.TakeCommands()) {
    if (const auto* start = std::get_if<StartSample>(&command)) {
      const auto lease = leases_.find(start->lease_id);
      if (lease != leases_.end()) lease->second->samples[start->sample] = Sample{};
    } else {
      Stop(std::get<StopSample>(command));
    }
  }
}

// The engine aborts whole requests; a sample that stops alone runs on unheard until its lease is over.
void LeaseRunner::Stop(const StopSample& command) {
  const auto lease = leases_.find(command.lease_id);
  if (lease != leases_.end()) lease->second->samples.erase(command.sample);
}

void LeaseRunner::ForgetEnded() {
  for (auto lease = leases_.begin(); lease != leases_.end();) {
    if (!lease->second->samples.empty()) {
      ++lease;
      continue;
    }
    for (const uint64_t request_id : lease->second->requests) engine_->Abort(request_id, /*tell_sink=*/false);
    lease = leases_.erase(lease);
  }
}

void LeaseRunner::StartWaiting() {
  if (!engine_->has_weights()) return;
  for (auto& [id, lease] : leases_) {
    if (worker_.MaySample(id)) StartWaiting(*lease);
  }
}

// The waiting samples of a lease go to the engine as one request, so that they share the prompt's prefill.
void LeaseRunner::StartWaiting(Lease& lease) {
  model::Request request;
  std::vector<int64_t> indices;
  for (auto& [index, sample] : lease.samples) {
    if (sample.state != Sample::State::kWaiting) continue;
    const rl::TokenRun& tokens = worker_.TokensOf(lease.id, index);
    const auto end =
        EndOf(tokens, lease.group.prompt.size(), lease.group.sampling, engine_->model_config().max_position);
    if (end.has_value() && !tokens.empty()) {
      sample.finish = *end;
      SendToJudge(lease, index);
      continue;
    }
    request.samples.push_back({static_cast<uint32_t>(index), tokens.ids});
    indices.push_back(index);
  }
  if (indices.empty()) return;
  request.prompt = lease.group.prompt;
  request.sampling = lease.group.sampling;
  request.run_seed = lease.group.run_seed;
  request.group_id = lease.group.group_id;
  request.want_routes = routes_.has_value();
  request.want_kept = with_kept_ids_;
  const bool was_idle = engine_->idle();
  const absl::StatusOr<uint64_t> id = engine_->Add(std::move(request), &lease);
  // A queue that is full will empty; what does not fit an idle engine never will.
  if (absl::IsResourceExhausted(id.status()) && !was_idle) return;
  if (id.ok()) lease.requests.push_back(*id);
  for (const int64_t index : indices) {
    if (!id.ok()) {
      Fail(lease, index, FailureReason::kBadPrompt, std::string(id.status().message()));
      continue;
    }
    lease.samples[index].state = Sample::State::kRunning;
    lease.samples[index].request_id = *id;
  }
}

void LeaseRunner::OnSample(Lease& lease, const model::SampleOutput& output) {
  const int64_t index = output.sample_index;
  const auto found = lease.samples.find(index);
  if (found == lease.samples.end() || found->second.state != Sample::State::kRunning ||
      found->second.request_id != output.request_id) {
    return;  // stopped meanwhile
  }
  Sample& sample = found->second;
  if (!output.tokens.empty())
    worker_.OnTokens(lease.id, index,
                     RunOf(output, static_cast<int64_t>(lease.group.prompt.size()), routes_ ? &*routes_ : nullptr));
  if (output.finish == model::FinishReason::kNone) return;
  sample.finish = output.finish;
  if (output.finish == model::FinishReason::kAbort) {
    sample.state = Sample::State::kWaiting;
  } else {
    SendToJudge(lease, index);
  }
}

void LeaseRunner::SendToJudge(Lease& lease, int64_t index) {
  Sample& sample = lease.samples[index];
  sample.state = Sample::State::kJudged;
  sample.ticket = ++last_ticket_;
  JudgeJob job;
  job.episode_id = absl::StrCat(lease.group.group_id, "/", index);
  job.task = lease.group.task;
  job.transcript = TranscriptOf(lease.group.prompt, worker_.TokensOf(lease.id, index),
                                sample.finish == model::FinishReason::kLength);
  job.first_turn = sample.turns_judged;
  job.limits = {options_.reward_min, options_.reward_max, engine_->model_config().vocab_size};
  judge_->Submit(
      std::move(job), [this, mailbox = mailbox_, id = lease.id, index, ticket = sample.ticket](JudgeResult result) {
        mailbox->Post([this, id, index, ticket, result = std::move(result)] { OnJudged(id, index, ticket, result); });
      });
}

void LeaseRunner::OnJudged(LeaseId lease_id, int64_t index, uint64_t ticket, const JudgeResult& result) {
  const auto found = leases_.find(lease_id);
  if (found == leases_.end()) return;
  Lease& lease = *found->second;
  const auto sample = lease.samples.find(index);
  if (sample == lease.samples.end() || sample->second.state != Sample::State::kJudged ||
      sample->second.ticket != ticket) {
    return;
  }
  if (const auto* failure = std::get_if<rl::Failure>(&result)) {
    Fail(lease, index, ToWork(failure->reason), failure->detail);
  } else {
    TakeJudgement(lease, index, std::get<rl::Judgement>(result));
  }
}

void LeaseRunner::TakeJudgement(Lease& lease, int64_t index, const rl::Judgement& judgement) {
  Sample& sample = lease.samples[index];
  const rl::TokenRun& tokens = worker_.TokensOf(lease.id, index);
  sample.reward += judgement.reward;
  const std::vector<rl::Turn> turns = TranscriptOf(lease.group.prompt, tokens, false);
  sample.turns_judged = static_cast<uint32_t>(std::ranges::count_if(turns, &rl::Turn::is_action));
  const bool has_room =
      static_cast<int64_t>(tokens.size() + judgement.observation.size()) < lease.group.sampling.max_new_tokens;
  if (judgement.is_done || sample.turns_judged >= options_.turns_max || !has_room) {
    if (sample.reward < options_.reward_min || sample.reward > options_.reward_max) {
      return Fail(lease, index, FailureReason::kRewardOutOfRange,
                  absl::StrCat("the rewards of ", sample.turns_judged, " turns add up to ", sample.reward));
    }
    return End(lease, index, sample.reward);
  }
  if (judgement.observation.empty()) {
    return Fail(lease, index, FailureReason::kBadObservation, "a turn that is not the last one has no observation");
  }
  rl::TokenRun observation;
  observation.ids = judgement.observation;
  observation.logprobs.assign(observation.ids.size(), 0.0f);
  observation.versions.assign(observation.ids.size(), engine_->version());
  observation.trainable.assign(observation.ids.size(), 0);
  if (!tokens.kept_counts.empty()) observation.kept_counts.assign(observation.ids.size(), 0);
  if (routes_) {
    return Fail(lease, index, FailureReason::kVerifierError,
                "routes cannot be replayed over several turns; set turns_max: 1");
  }
  worker_.OnTokens(lease.id, index, observation);
  sample.state = Sample::State::kWaiting;
}

void LeaseRunner::Fail(Lease& lease, int64_t index, FailureReason reason, const std::string& detail) {
  constexpr size_t kDetailBytesMax = 1024;
  LogWarning("sample failed", {{"group", lease.group.group_id}, {"sample", index}, {"reason", detail}});
  End(lease, index, Failure{reason, Head(detail, kDetailBytesMax)});
}

void LeaseRunner::End(Lease& lease, int64_t index, std::variant<double, Failure> outcome) {
  worker_.OnOutcome(lease.id, index, ToWork(lease.samples[index].finish), std::move(outcome));
  lease.samples.erase(index);
}

}  // namespace moerl::rollout
