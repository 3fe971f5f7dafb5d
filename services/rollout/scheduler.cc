#include "services/rollout/scheduler.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/clock.h"
#include "libs/base/log.h"
#include "libs/rpc/status.h"
#include "services/rollout/rollout_metrics.h"

namespace moerl::rollout {
namespace {

constexpr absl::Duration kQueueRetryDelay = absl::Seconds(1);
// Samples that miss the deadline of their call end this long before it, so that their last tokens still arrive.
constexpr absl::Duration kDeadlineMargin = absl::Milliseconds(50);
constexpr absl::Duration kRateWindow = absl::Seconds(1);

}  // namespace

Scheduler::Scheduler(SchedulerOptions options, Judge* judge, std::function<void(absl::Status)> on_fatal)
    : options_(std::move(options)), judge_(judge), on_fatal_(std::move(on_fatal)), engine_(options_.engine) {
  thread_ = std::thread([this] { Run(); });
}

Scheduler::~Scheduler() { Stop(); }

// ---------------------------------------------------------------------------------------------- other threads

void Scheduler::OnWeights(WeightUpdate update) {
  mailbox_->Post([this, update = std::move(update)]() mutable {
    forks_ = update.forks;
    if (leases_ != nullptr) leases_->OnForks(forks_);
    if (update.weights != nullptr) staged_ = std::move(update);
  });
}

absl::StatusOr<std::shared_ptr<void>> Scheduler::TakeQueuePlace() {
  if (num_waiting_->fetch_add(1) >= options_.generate_queue_max) {
    num_waiting_->fetch_sub(1);
    return rpc::WithRetryDelay(absl::ResourceExhaustedError(absl::StrCat(
                                   options_.generate_queue_max, " calls wait already (rollout.queue_max); call later")),
                               kQueueRetryDelay);
  }
  return std::shared_ptr<void>(nullptr, [counter = num_waiting_](void*) { counter->fetch_sub(1); });
}

void Scheduler::AddCall(std::shared_ptr<GenerateCall> call, model::Request request, absl::Time deadline) {
  mailbox_->Post([this, call = std::move(call), request = std::move(request), deadline]() mutable {
    const std::string id = call->request_id();
    if (calls_.contains(id)) return call->End(rpc::InvalidField("request_id", absl::StrCat(id, " is being generated")));
    absl::StatusOr<uint64_t> engine_id = engine_.Add(std::move(request), call.get());
    if (!engine_id.ok()) return call->End(engine_id.status());
    calls_[id] = {std::move(call), *engine_id, deadline};
  });
}

void Scheduler::CancelCall(const std::string& request_id) {
  mailbox_->Post([this, request_id] {
    const auto call = calls_.find(request_id);
    // A later call may have taken the name of one that was refused for it.
    if (call == calls_.end() || !call->second.call->is_over()) return;
    engine_.Abort(call->second.engine_id, /*tell_sink=*/false);
    calls_.erase(call);
  });
}

void Scheduler::AbortCall(const std::string& request_id, absl::AnyInvocable<void(absl::StatusOr<uint32_t>)> done) {
  mailbox_->Post([this, request_id, done = std::move(done)]() mutable {
    const auto call = calls_.find(request_id);
    if (call == calls_.end()) {
      return done(absl::NotFoundError(absl::StrCat("no call ", request_id, " is being generated here")));
    }
    const uint32_t num_samples = call->second.call->num_unfinished();
    engine_.Abort(call->second.engine_id, /*tell_sink=*/true);
    done(num_samples);
  });
}

Snapshot Scheduler::snapshot() const {
  absl::MutexLock lock(&mutex_);
  return snapshot_;
}

void Scheduler::BeginDrain() {
  mailbox_->Post([this] {
    is_draining_ = true;
    if (leases_ != nullptr) leases_->Drain();
  });
}

void Scheduler::WaitDrained(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithDeadline(absl::Condition(&is_drained_), deadline);
  if (!is_drained_)
    LogWarning("not everything was acknowledged before the drain's deadline; the trainer leases it again");
}

void Scheduler::Stop() {
  if (!thread_.joinable()) return;
  mailbox_->Post([this] { is_stopping_ = true; });
  thread_.join();
}

// ---------------------------------------------------------------------------------------------- the thread

void Scheduler::Run() {
  Publish(0);  // a scrape finds every metric from the start
  while (!is_stopping_) {
    const absl::Duration wait = MayStep() ? absl::ZeroDuration() : IdleTime(SystemClock()->Now());
    for (Mailbox::Mail& mail : mailbox_->Take(wait)) mail();
    Flip();
    if (leases_ != nullptr) leases_->Advance(SystemClock()->Now());
    ExpireCalls();
    const int64_t tokens_before = engine_.tokens_total();
    if (MayStep()) {
      if (absl::Status status = engine_.Step(); !status.ok()) {
        LogError("the engine failed", {{"reason", std::string(status.message())}});
        on_fatal_(status);
        break;
      }
    }
    ForgetEndedCalls();
    Publish(engine_.tokens_total() - tokens_before);
  }
  for (auto& [id, call] : calls_) call.call->End(absl::UnavailableError("this server has stopped"));
  calls_.clear();
  if (leases_ != nullptr) leases_->Close();
  absl::MutexLock lock(&mutex_);
  is_drained_ = true;  // nobody works any more: a drain after a failed engine has nothing to wait for
}

// A version that a fork retired samples nothing; its successor is on its way.
bool Scheduler::MayStep() const {
  return engine_.has_weights() && !engine_.idle() && !IsRetired(engine_.version(), forks_);
}

absl::Duration Scheduler::IdleTime(absl::Duration now) const {
  absl::Duration wait = absl::InfiniteDuration();
  if (leases_ != nullptr) wait = std::min(wait, leases_->next_wakeup() - now);
  for (const auto& [id, call] : calls_) wait = std::min(wait, call.deadline - kDeadlineMargin - absl::Now());
  return std::max(wait, absl::ZeroDuration());
}

void Scheduler::Flip() {
  if (!staged_) return;
  WeightUpdate update = *std::exchange(staged_, std::nullopt);
  const bool is_first = !engine_.has_weights();
  const absl::Duration start = SystemClock()->Now();
  if (absl::Status status = engine_.SetWeights(update.weights, update.version); !status.ok()) {
    LogError("cannot change weights", {{"number", update.version.number}, {"reason", std::string(status.message())}});
    if (is_first) on_fatal_(status);
    return;
  }
  const model::ModelConfig& config = update.weights->config();
  const std::string fingerprint = model::NumericsFingerprint(config, update.weights->options().compute);
  if (is_first && options_.work_stub) {
    LeaseRunnerOptions leases = options_.leases;
    leases.worker.numerics_fingerprint = fingerprint;
    leases_ = std::make_unique<LeaseRunner>(leases, options_.work_stub(), &engine_, judge_, mailbox_);
    leases_->OnForks(forks_);
    if (is_draining_) leases_->Drain();
  }
  if (leases_ != nullptr) leases_->OnVersionChanged(update.version);
  LogInfo("weights changed", {{"epoch", update.version.epoch}, {"number", update.version.number}});
  Metrics().flip_seconds.Observe(absl::ToDoubleSeconds(SystemClock()->Now() - start));
  Metrics().weight_version.Set(static_cast<double>(update.version.number));
  {
    absl::MutexLock lock(&mutex_);
    snapshot_.has_weights = true;
    snapshot_.config = std::make_shared<model::ModelConfig>(config);
    snapshot_.fingerprint = fingerprint;
  }
  if (is_first && on_ready_) on_ready_();
}

void Scheduler::ExpireCalls() {
  const absl::Time now = absl::Now();
  for (auto& [id, call] : calls_) {
    if (call.deadline - kDeadlineMargin > now) continue;
    engine_.Abort(call.engine_id, /*tell_sink=*/true);
    call.deadline = absl::InfiniteFuture();
  }
}

void Scheduler::ForgetEndedCalls() {
  std::erase_if(calls_, [this](const auto& entry) {
    const Call& call = entry.second;
    if (call.call->num_unfinished() > 0 && !call.call->is_over()) return false;
    engine_.Abort(call.engine_id, /*tell_sink=*/false);
    return true;
  });
}

void Scheduler::Publish(int64_t num_new_tokens) {
  const model::GeneratorLoad load = engine_.load();
  Metrics().Report(load, num_new_tokens);
  const absl::Duration now = SystemClock()->Now();
  absl::MutexLock lock(&mutex_);
  snapshot_.load = load;
  snapshot_.num_calls = static_cast<uint32_t>(calls_.size());
  if (engine_.has_weights()) snapshot_.version = engine_.version();
  if (now - rate_since_ >= kRateWindow || engine_.idle()) {
    const double seconds = absl::ToDoubleSeconds(now - rate_since_);
    const bool is_idle = engine_.idle() && num_new_tokens == 0;
    snapshot_.tokens_per_second =
        is_idle ? 0 : static_cast<double>(engine_.tokens_total() - tokens_reported_) / std::max(seconds, 1e-3);
    tokens_reported_ = engine_.tokens_total();
    rate_since_ = now;
  }
  is_drained_ = is_draining_ && (leases_ == nullptr || leases_->IsDrained());
}

}  // namespace moerl::rollout
