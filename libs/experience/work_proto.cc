#include "libs/experience/work_proto.h"

#include "absl/strings/str_cat.h"
#include "libs/base/status_macros.h"

namespace moerl {
namespace {

LeaseId IdFromProto(const v1::LeaseId& from) {
  return {static_cast<int64_t>(from.epoch()), static_cast<int64_t>(from.counter())};
}

void IdToProto(LeaseId from, v1::LeaseId* to) {
  to->set_epoch(static_cast<uint64_t>(from.epoch));
  to->set_counter(static_cast<uint64_t>(from.counter));
}

absl::Status Length(const char* field, int64_t found, int64_t expected) {
  return absl::InvalidArgumentError(
      absl::StrCat("trajectory: ", field, " describes ", found, " tokens, token_ids has ", expected));
}

absl::Status VersionsFromProto(const v1::TokenSpan& from, rl::TokenRun& to) {
  for (const v1::VersionRun& run : from.versions()) {
    if (static_cast<int64_t>(to.versions.size()) + run.num_tokens() > from.token_ids_size()) break;
    to.versions.insert(to.versions.end(), run.num_tokens(), VersionFromProto(run.version()));
  }
  const auto found = static_cast<int64_t>(to.versions.size());
  return found == from.token_ids_size() ? absl::OkStatus() : Length("versions", found, from.token_ids_size());
}

template <typename From>
void CopyAll(const From& from, std::vector<int32_t>& to) {
  to.assign(from.begin(), from.end());
}

// ---- worker's messages
v1::WorkRequest HelloToProto(const Hello& hello) {
  v1::WorkRequest request;
  v1::WorkHello& to = *request.mutable_hello();
  to.set_worker(hello.worker);
  to.set_incarnation(static_cast<uint64_t>(hello.incarnation));
  to.set_hello_number(static_cast<uint64_t>(hello.hello_number));
  to.set_num_slots(static_cast<uint32_t>(hello.num_slots));
  *to.mutable_weight_version() = VersionToProto(hello.version);
  to.set_numerics_fingerprint(hello.numerics_fingerprint);
  for (LeaseId id : hello.leases_held) IdToProto(id, to.add_leases_held());
  for (const SampleOfLease& sample : hello.unacknowledged) {
    v1::SampleOfLease* entry = to.add_unacknowledged();
    IdToProto(sample.lease_id, entry->mutable_lease_id());
    entry->set_sample_index(static_cast<uint32_t>(sample.sample));
  }
  return request;
}

v1::WorkRequest FinishToProto(const Finish& finish, int route_bytes) {
  v1::WorkRequest request;
  v1::WorkFinish& to = *request.mutable_finish();
  IdToProto(finish.lease_id, to.mutable_lease_id());
  to.set_sample_index(static_cast<uint32_t>(finish.sample));
  to.set_num_tokens(static_cast<uint32_t>(finish.num_tokens));
  to.set_digest(finish.digest);
  to.set_finish_reason(static_cast<v1::FinishReason>(finish.reason));
  to.set_offset(static_cast<uint32_t>(finish.offset));
  if (!finish.tokens.empty()) TokensToProto(finish.tokens, route_bytes, to.mutable_tokens());
  if (const auto* reward = std::get_if<double>(&finish.outcome)) {
    to.set_reward(static_cast<float>(*reward));
  } else {
    const Failure& failure = std::get<Failure>(finish.outcome);
    to.mutable_failure()->set_reason(static_cast<v1::FailureReason>(failure.reason));
    to.mutable_failure()->set_detail(failure.detail);
  }
  return request;
}

struct WorkerMessageToProto {
  int route_bytes;
  v1::WorkRequest operator()(const Hello& from) const { return HelloToProto(from); }
  v1::WorkRequest operator()(const Demand& from) const {
    v1::WorkRequest request;
    request.mutable_demand()->set_num_samples(static_cast<uint32_t>(from.num_samples));
    *request.mutable_demand()->mutable_weight_version() = VersionToProto(from.version);
    return request;
  }
  v1::WorkRequest operator()(const Progress& from) const {
    v1::WorkRequest request;
    v1::WorkProgress& to = *request.mutable_progress();
    IdToProto(from.lease_id, to.mutable_lease_id());
    to.set_sample_index(static_cast<uint32_t>(from.sample));
    to.set_offset(static_cast<uint32_t>(from.offset));
    TokensToProto(from.tokens, route_bytes, to.mutable_tokens());
    return request;
  }
  v1::WorkRequest operator()(const Finish& from) const { return FinishToProto(from, route_bytes); }
  v1::WorkRequest operator()(const HandBack& from) const {
    v1::WorkRequest request;
    IdToProto(from.lease_id, request.mutable_hand_back()->mutable_lease_id());
    return request;
  }
  v1::WorkRequest operator()(const Renewal& from) const {
    v1::WorkRequest request;
    v1::WorkRenewal& to = *request.mutable_renewal();
    for (LeaseId id : from.lease_ids) IdToProto(id, to.add_lease_ids());
    return request;
  }
};

absl::StatusOr<WorkerMessage> HelloFromProto(const v1::WorkHello& from) {
  if (from.worker().empty() || from.worker().size() > 253) {
    return absl::InvalidArgumentError("hello.worker: expected 1 to 253 bytes");
  }
  Hello hello;
  hello.worker = from.worker();
  hello.incarnation = static_cast<int64_t>(from.incarnation());
  hello.hello_number = static_cast<int64_t>(from.hello_number());
  hello.num_slots = from.num_slots();
  hello.version = VersionFromProto(from.weight_version());
  hello.numerics_fingerprint = from.numerics_fingerprint();
  for (const auto& id : from.leases_held()) hello.leases_held.push_back(IdFromProto(id));
  for (const auto& sample : from.unacknowledged()) {
    hello.unacknowledged.push_back({IdFromProto(sample.lease_id()), sample.sample_index()});
  }
  return hello;
}

absl::StatusOr<WorkerMessage> FinishFromProto(const v1::WorkFinish& from) {
  Finish finish;
  finish.lease_id = IdFromProto(from.lease_id());
  finish.sample = from.sample_index();
  finish.num_tokens = from.num_tokens();
  finish.digest = from.digest();
  finish.offset = from.offset();
  switch (from.finish_reason()) {
    case v1::FINISH_REASON_STOP:
    case v1::FINISH_REASON_LENGTH:
    case v1::FINISH_REASON_ABORT:
      finish.reason = static_cast<FinishReason>(from.finish_reason());
      break;
    default:
      return absl::InvalidArgumentError("finish.finish_reason: expected stop, length or abort");
  }
  switch (from.outcome_case()) {
    case v1::WorkFinish::kReward:
      finish.outcome = static_cast<double>(from.reward());
      break;
    case v1::WorkFinish::kFailure:
      finish.outcome = Failure{static_cast<FailureReason>(from.failure().reason()), from.failure().detail()};
      break;
    default:
      return absl::InvalidArgumentError("finish.outcome: a reward or a failure is needed");
  }
  MOERL_ASSIGN_OR_RETURN(finish.tokens, TokensFromProto(from.tokens()));
  return finish;
}

// ---- trainer's messages
struct TrainerMessageToProto {
  int route_bytes;
  v1::WorkResponse operator()(const Welcome& from) const {
    v1::WorkResponse response;
    v1::WorkWelcome& to = *response.mutable_welcome();
    to.set_run_id(from.run_id);
    to.set_epoch(static_cast<uint64_t>(from.epoch));
    to.set_hello_number(static_cast<uint64_t>(from.hello_number));
    ForksToProto(from.forks, to.mutable_forks());
    for (const LeaseDecision& decision : from.decisions) {
      v1::LeaseDecision* entry = to.add_decisions();
      IdToProto(decision.lease_id, entry->mutable_lease_id());
      entry->set_is_adopted(decision.is_adopted);
      entry->set_duration_ms(static_cast<uint64_t>(decision.duration_ms));
      for (int64_t length : decision.lengths) entry->add_lengths(static_cast<uint32_t>(length));
      for (bool is_final : decision.are_final) entry->add_are_final(is_final);
    }
    return response;
  }
  v1::WorkResponse operator()(const Grant& from) const {
    v1::WorkResponse response;
    v1::Lease& to = *response.mutable_lease();
    IdToProto(from.lease_id, to.mutable_lease_id());
    to.set_group_id(static_cast<uint64_t>(from.group));
    to.set_duration_ms(static_cast<uint64_t>(from.duration_ms));
    to.set_min_version_number(static_cast<uint64_t>(from.min_version));
    for (size_t i = 0; i < from.samples.size(); ++i) {
      v1::LeasedSample* sample = to.add_samples();
      sample->set_sample_index(static_cast<uint32_t>(i));
      sample->set_is_final(from.samples[i].is_final);
      if (from.samples[i].prefix) TokensToProto(*from.samples[i].prefix, route_bytes, sample->mutable_prefix());
    }
    return response;
  }
  v1::WorkResponse operator()(const Ack& from) const {
    v1::WorkResponse response;
    v1::WorkAck& to = *response.mutable_ack();
    IdToProto(from.lease_id, to.mutable_lease_id());
    to.set_sample_index(static_cast<uint32_t>(from.sample));
    to.set_verdict(static_cast<v1::AckVerdict>(from.verdict));
    to.set_reason(from.reason);
    return response;
  }
  v1::WorkResponse operator()(const Revocation& from) const {
    v1::WorkResponse response;
    IdToProto(from.lease_id, response.mutable_revocation()->mutable_lease_id());
    response.mutable_revocation()->set_reason(from.reason);
    return response;
  }
};

Welcome WelcomeFromProto(const v1::WorkWelcome& from) {
  Welcome welcome;
  welcome.run_id = from.run_id();
  welcome.epoch = static_cast<int64_t>(from.epoch());
  welcome.forks = ForksFromProto(from.forks());
  welcome.hello_number = static_cast<int64_t>(from.hello_number());
  for (const v1::LeaseDecision& entry : from.decisions()) {
    LeaseDecision decision;
    decision.lease_id = IdFromProto(entry.lease_id());
    decision.is_adopted = entry.is_adopted();
    decision.duration_ms = static_cast<int64_t>(entry.duration_ms());
    decision.lengths.assign(entry.lengths().begin(), entry.lengths().end());
    decision.are_final.assign(entry.are_final().begin(), entry.are_final().end());
    welcome.decisions.push_back(std::move(decision));
  }
  return welcome;
}

absl::StatusOr<TrainerMessage> GrantFromProto(const v1::Lease& from) {
  Grant grant;
  grant.lease_id = IdFromProto(from.lease_id());
  grant.group = static_cast<int64_t>(from.group_id());
  grant.duration_ms = static_cast<int64_t>(from.duration_ms());
  grant.min_version = static_cast<int64_t>(from.min_version_number());
  for (const v1::LeasedSample& entry : from.samples()) {
    if (entry.sample_index() != grant.samples.size()) {
      return absl::InvalidArgumentError("lease.samples: expected every sample of the group in order");
    }
    LeasedSample sample{entry.is_final(), nullptr};
    if (entry.prefix().token_ids_size() > 0) {
      MOERL_ASSIGN_OR_RETURN(rl::TokenRun prefix, TokensFromProto(entry.prefix()));
      sample.prefix = std::make_shared<const rl::TokenRun>(std::move(prefix));
    }
    grant.samples.push_back(std::move(sample));
  }
  return grant;
}

}  // namespace

VersionName VersionFromProto(const v1::VersionName& from) {
  return {static_cast<int64_t>(from.epoch()), static_cast<int64_t>(from.number())};
}

v1::VersionName VersionToProto(VersionName from) {
  v1::VersionName to;
  to.set_epoch(static_cast<uint64_t>(from.epoch));
  to.set_number(static_cast<uint64_t>(from.number));
  return to;
}

std::vector<Fork> ForksFromProto(const google::protobuf::RepeatedPtrField<v1::Fork>& from) {
  std::vector<Fork> forks;
  for (const v1::Fork& fork : from) {
    forks.push_back({static_cast<int64_t>(fork.epoch()), static_cast<int64_t>(fork.step())});
  }
  return forks;
}

void ForksToProto(const std::vector<Fork>& from, google::protobuf::RepeatedPtrField<v1::Fork>* to) {
  for (const Fork& fork : from) {
    v1::Fork* entry = to->Add();
    entry->set_epoch(static_cast<uint64_t>(fork.epoch));
    entry->set_step(static_cast<uint64_t>(fork.step));
  }
}

absl::StatusOr<rl::TokenRun> TokensFromProto(const v1::TokenSpan& from) {
  rl::TokenRun to;
  const int num_tokens = from.token_ids_size();
  if (from.logprobs_size() != num_tokens) return Length("logprobs", from.logprobs_size(), num_tokens);
  CopyAll(from.token_ids(), to.ids);
  to.logprobs.assign(from.logprobs().begin(), from.logprobs().end());
  MOERL_RETURN_IF_ERROR(VersionsFromProto(from, to));
  if (from.trainable().empty()) {
    to.trainable.assign(static_cast<size_t>(num_tokens), 1);
  } else {
    to.trainable.assign(from.trainable().begin(), from.trainable().end());
  }
  if (static_cast<int>(to.trainable.size()) != num_tokens) {
    return Length("trainable", static_cast<int64_t>(to.trainable.size()), num_tokens);
  }
  to.routes = from.routes();
  CopyAll(from.kept_counts(), to.kept_counts);
  CopyAll(from.kept_ids(), to.kept_ids);
  return to;
}

void TokensToProto(const rl::TokenRun& from, int route_bytes, v1::TokenSpan* to) {
  to->mutable_token_ids()->Add(from.ids.begin(), from.ids.end());
  to->mutable_logprobs()->Add(from.logprobs.begin(), from.logprobs.end());
  v1::VersionRun* run = nullptr;
  for (size_t i = 0; i < from.versions.size(); ++i) {
    if (i == 0 || from.versions[i] != from.versions[i - 1]) {
      run = to->add_versions();
      *run->mutable_version() = VersionToProto(from.versions[i]);
    }
    run->set_num_tokens(run->num_tokens() + 1);
  }
  for (uint8_t flag : from.trainable) {
    if (flag == 1) continue;
    to->set_trainable(std::string(from.trainable.begin(), from.trainable.end()));
    break;
  }
  to->set_routes(from.routes);
  to->set_route_bytes(from.routes.empty() ? 0 : static_cast<uint32_t>(route_bytes));
  to->mutable_kept_counts()->Add(from.kept_counts.begin(), from.kept_counts.end());
  to->mutable_kept_ids()->Add(from.kept_ids.begin(), from.kept_ids.end());
}

v1::WorkRequest ToProto(const WorkerMessage& message, int route_bytes) {
  return std::visit(WorkerMessageToProto{route_bytes}, message);
}

v1::WorkResponse ToProto(const TrainerMessage& message, int route_bytes) {
  return std::visit(TrainerMessageToProto{route_bytes}, message);
}

absl::StatusOr<WorkerMessage> FromProto(const v1::WorkRequest& request) {
  switch (request.event_case()) {
    case v1::WorkRequest::kHello:
      return HelloFromProto(request.hello());
    case v1::WorkRequest::kDemand:
      return Demand{request.demand().num_samples(), VersionFromProto(request.demand().weight_version())};
    case v1::WorkRequest::kProgress: {
      const v1::WorkProgress& from = request.progress();
      MOERL_ASSIGN_OR_RETURN(rl::TokenRun tokens, TokensFromProto(from.tokens()));
      return Progress{IdFromProto(from.lease_id()), from.sample_index(), from.offset(), std::move(tokens)};
    }
    case v1::WorkRequest::kFinish:
      return FinishFromProto(request.finish());
    case v1::WorkRequest::kHandBack:
      return HandBack{IdFromProto(request.hand_back().lease_id())};
    case v1::WorkRequest::kRenewal: {
      Renewal renewal;
      for (const auto& id : request.renewal().lease_ids()) renewal.lease_ids.push_back(IdFromProto(id));
      return renewal;
    }
    case v1::WorkRequest::kTraceReport:
      return absl::UnimplementedError("work request: not a message of the protocol's state machine");
    case v1::WorkRequest::EVENT_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("work request: no event is set");
}

absl::StatusOr<TrainerMessage> FromProto(const v1::WorkResponse& response) {
  switch (response.event_case()) {
    case v1::WorkResponse::kWelcome:
      return WelcomeFromProto(response.welcome());
    case v1::WorkResponse::kLease:
      return GrantFromProto(response.lease());
    case v1::WorkResponse::kAck: {
      const v1::WorkAck& from = response.ack();
      return Ack{IdFromProto(from.lease_id()), from.sample_index(), static_cast<Verdict>(from.verdict()),
                 from.reason()};
    }
    case v1::WorkResponse::kRevocation:
      return Revocation{IdFromProto(response.revocation().lease_id()), response.revocation().reason()};
    default:
      return absl::UnimplementedError("work response: not a message of the protocol's state machine");
  }
}

}  // namespace moerl
