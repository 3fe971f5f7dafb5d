#include "services/rollout/worker.h"

#include <algorithm>
#include <limits>
#include <set>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/experience/mutant.h"

namespace moerl::rollout {

// ---------------------------------------------------------------------------------------------- stream

Hello Worker::OnStreamOpened() {
  OnStreamBroken();
  Hello hello;
  hello.worker = options_.name;
  hello.incarnation = options_.incarnation;
  hello.hello_number = ++hello_number_;
  hello.num_slots = is_draining_ ? 0 : options_.num_slots;
  hello.version = running_.value_or(VersionName{});
  hello.numerics_fingerprint = options_.numerics_fingerprint;
  for (const auto& [id, held] : leases_) hello.leases_held.push_back(id);
  for (const auto& [key, result] : results_) hello.unacknowledged.push_back(key);
  return hello;
}

void Worker::OnStreamBroken() {
  is_welcomed_ = false;
  demand_said_.reset();
  for (auto& [key, result] : results_) result.is_sent = false;
}

absl::Status Worker::OnWelcome(const Welcome& welcome, int64_t now_ms) {
  if (welcome.hello_number != hello_number_) return absl::OkStatus();  // of an earlier stream
  if (welcome.epoch < trainer_epoch_) {
    return absl::FailedPreconditionError(absl::StrCat("trainer epoch ", welcome.epoch, " is over, epoch ",
                                                      trainer_epoch_, " has been seen; connect again"));
  }
  trainer_epoch_ = welcome.epoch;
  MergeForks(welcome.forks);
  std::set<LeaseId> adopted;
  for (auto& [key, result] : results_) result.sample.sent = result.sample.base;
  for (const LeaseDecision& decision : welcome.decisions) {
    const auto lease = leases_.find(decision.lease_id);
    if (!decision.is_adopted || lease == leases_.end()) continue;
    adopted.insert(decision.lease_id);
    lease->second.duration_ms = decision.duration_ms;
    for (auto& [index, sample] : lease->second.running) {
      if (MOERL_MUTANT(hole_no_offset)) continue;
      sample.sent = decision.lengths[static_cast<size_t>(index)];  // send from where the trainer's knowledge ends
    }
  }
  std::vector<LeaseId> over;
  for (const auto& [id, held] : leases_) {
    if (!adopted.contains(id)) over.push_back(id);
  }
  for (LeaseId id : over) Forget(id);
  for (const LeaseDecision& decision : welcome.decisions) {
    for (size_t i = 0; i < decision.are_final.size(); ++i) {
      if (!decision.are_final[i] || !IsRunning(decision.lease_id, static_cast<int64_t>(i))) continue;
      leases_[decision.lease_id].running.erase(static_cast<int64_t>(i));
      commands_.push_back(StopSample{decision.lease_id, static_cast<int64_t>(i)});
    }
    ForgetIfDone(decision.lease_id);
  }
  is_welcomed_ = true;
  renewed_ms_ = now_ms;
  return absl::OkStatus();
}

void Worker::OnGrant(const Grant& grant, int64_t now_ms) {
  if (leases_.empty()) renewed_ms_ = now_ms;
  demand_said_.reset();  // the trainer has counted this grant against it: say it anew
  Held& held = leases_[grant.lease_id];
  held.duration_ms = grant.duration_ms;
  held.min_version = grant.min_version;
  for (size_t i = 0; i < grant.samples.size(); ++i) {
    if (grant.samples[i].is_final) continue;
    const auto index = static_cast<int64_t>(i);
    Sample& sample = held.running[index];
    if (grant.samples[i].prefix) sample.tokens = *grant.samples[i].prefix;
    sample.base = sample.sent = static_cast<int64_t>(sample.tokens.size());
    if (!is_draining_) commands_.push_back(StartSample{grant.lease_id, index, grant.samples[i].prefix});
  }
}

void Worker::OnAck(const Ack& ack) {
  results_.erase({ack.lease_id, ack.sample});
  if (ack.verdict != Verdict::kRefused) return ForgetIfDone(ack.lease_id);
  if (!MOERL_MUTANT(hole_refused_keeps_lease)) Forget(ack.lease_id);
}

void Worker::OnRevocation(const Revocation& revocation) { Forget(revocation.lease_id); }

// Its running samples stop; finished ones stay until they are acknowledged.
void Worker::Forget(LeaseId lease_id) {
  const auto lease = leases_.find(lease_id);
  if (lease == leases_.end()) return;
  for (const auto& [index, sample] : lease->second.running) commands_.push_back(StopSample{lease_id, index});
  leases_.erase(lease);
}

void Worker::ForgetIfDone(LeaseId lease_id) {
  const auto lease = leases_.find(lease_id);
  if (lease == leases_.end() || !lease->second.running.empty()) return;
  const auto result = results_.lower_bound({lease_id, 0});
  if (result == results_.end() || result->first.lease_id != lease_id) leases_.erase(lease);
}

// ---------------------------------------------------------------------------------------------- engine, weights

void Worker::OnTokens(LeaseId lease_id, int64_t sample, const rl::TokenRun& tokens) {
  if (!IsRunning(lease_id, sample)) return;
  leases_[lease_id].running[sample].tokens.Append(tokens);
}

void Worker::OnOutcome(LeaseId lease_id, int64_t sample, FinishReason reason, std::variant<double, Failure> outcome) {
  if (!IsRunning(lease_id, sample)) return;
  auto& running = leases_[lease_id].running;
  results_[{lease_id, sample}] = {std::move(running[sample]), reason, std::move(outcome), false};
  running.erase(sample);
}

void Worker::MergeForks(const std::vector<Fork>& forks) {
  if (forks.size() > forks_.size()) forks_ = forks;  // forks are only ever added
}

void Worker::OnListing(std::optional<VersionName> latest, const std::vector<Fork>& forks) {
  MergeForks(forks);
  latest_ = latest;
}

std::optional<VersionName> Worker::VersionToChangeTo() const {
  if (!latest_ || IsRetired(*latest_, forks_)) return std::nullopt;
  if (!running_ || latest_->number > running_->number) return latest_;
  if (IsRetired(*running_, forks_) && !MOERL_MUTANT(hole_never_down)) return latest_;
  return std::nullopt;
}

bool Worker::MaySample(LeaseId lease_id) const {
  const auto lease = leases_.find(lease_id);
  if (lease == leases_.end() || !running_ || is_draining_) return false;
  if (IsRetired(*running_, forks_) && !MOERL_MUTANT(hole_version_number_only)) return false;
  return running_->number >= lease->second.min_version || MOERL_MUTANT(bug_no_min_version);
}

// ---------------------------------------------------------------------------------------------- messages

std::vector<WorkerMessage> Worker::TakeMessages(int64_t now_ms) {
  std::vector<WorkerMessage> out;
  if (!is_welcomed_) return out;
  SendResults(out);
  for (auto& [id, held] : leases_) {
    for (auto& [index, sample] : held.running) {
      const int64_t unsent = static_cast<int64_t>(sample.tokens.size()) - sample.sent;
      if (unsent >= options_.progress_every_tokens || (is_draining_ && unsent > 0))
        SendProgress(id, index, sample, out);
    }
  }
  if (is_draining_) SendHandBacks(out);
  SendDemand(out);
  SendRenewal(now_ms, out);
  return out;
}

void Worker::SendProgress(LeaseId lease_id, int64_t index, Sample& sample, std::vector<WorkerMessage>& out) {
  const auto end = static_cast<int64_t>(sample.tokens.size());
  while (sample.sent < end) {
    const int64_t next = std::min(end, sample.sent + options_.tokens_per_message_max);
    out.push_back(Progress{lease_id, index, sample.sent,
                           sample.tokens.Slice(static_cast<size_t>(sample.sent), static_cast<size_t>(next))});
    sample.sent = next;
  }
}

void Worker::SendResults(std::vector<WorkerMessage>& out) {
  for (auto& [key, result] : results_) {
    if (result.is_sent) continue;
    result.is_sent = true;
    Sample& sample = result.sample;
    const auto num_tokens = static_cast<int64_t>(sample.tokens.size());
    if (num_tokens - sample.sent > options_.tokens_per_message_max) {
      SendProgress(key.lease_id, key.sample, sample, out);
    }
    Finish finish{key.lease_id,  key.sample,     num_tokens,  sample.tokens.IdsDigest(),
                  result.reason, result.outcome, sample.sent, {}};
    finish.tokens =
        sample.tokens.Slice(static_cast<size_t>(std::min(sample.sent, num_tokens)), static_cast<size_t>(num_tokens));
    sample.sent = num_tokens;
    out.push_back(std::move(finish));
  }
}

void Worker::SendHandBacks(std::vector<WorkerMessage>& out) {
  std::vector<LeaseId> all;
  for (const auto& [id, held] : leases_) all.push_back(id);
  for (LeaseId id : all) {
    out.push_back(HandBack{id});
    Forget(id);
  }
}

void Worker::SendDemand(std::vector<WorkerMessage>& out) {
  const int64_t demand = is_draining_ ? 0 : std::max<int64_t>(0, options_.num_slots - num_running());
  if (demand_said_ == demand) return;
  demand_said_ = demand;
  out.push_back(Demand{demand, running_.value_or(VersionName{})});
}

void Worker::SendRenewal(int64_t now_ms, std::vector<WorkerMessage>& out) {
  if (leases_.empty() || now_ms - renewed_ms_ < RenewalIntervalMs()) return;
  renewed_ms_ = now_ms;
  Renewal renewal;
  for (const auto& [id, held] : leases_) renewal.lease_ids.push_back(id);
  out.push_back(std::move(renewal));
}

int64_t Worker::RenewalIntervalMs() const {
  int64_t shortest = std::numeric_limits<int64_t>::max();
  for (const auto& [id, held] : leases_) shortest = std::min(shortest, held.duration_ms);
  return shortest / 3;
}

int64_t Worker::num_running() const {
  int64_t count = 0;
  for (const auto& [id, held] : leases_) count += static_cast<int64_t>(held.running.size());
  return count;
}

bool Worker::IsRunning(LeaseId lease_id, int64_t sample) const {
  const auto lease = leases_.find(lease_id);
  return lease != leases_.end() && lease->second.running.contains(sample);
}

const rl::TokenRun& Worker::TokensOf(LeaseId lease_id, int64_t sample) const {
  MOERL_CHECK(IsRunning(lease_id, sample));
  return leases_.at(lease_id).running.at(sample).tokens;
}

}  // namespace moerl::rollout
