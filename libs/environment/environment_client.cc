#include "libs/environment/environment_client.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/status_macros.h"
#include "libs/rpc/channel.h"
#include "libs/rpc/status.h"
#include "moerl/v1/environment.grpc.pb.h"

namespace moerl {
namespace {

void ToProto(const rl::Task& task, v1::Task* to) {
  to->set_name(task.name);
  to->set_payload(task.payload);
}

void ToProto(const rl::Turn& turn, v1::Turn* to) {
  to->mutable_token_ids()->Add(turn.token_ids.begin(), turn.token_ids.end());
  to->set_is_action(turn.is_action);
  if (turn.is_action) to->set_finish_reason(turn.is_truncated ? v1::FINISH_REASON_LENGTH : v1::FINISH_REASON_STOP);
}

// A server that has no room for another call says RESOURCE_EXHAUSTED; so does gRPC of a message beyond its limit, which
// will not get shorter.
bool IsBusy(const grpc::Status& status) {
  return status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED &&
         status.error_message().find("larger than max") == std::string::npos;
}

// A server that ends does so to the calls that it still runs; nobody cancels here.
bool IsEnding(const grpc::Status& status) { return status.error_code() == grpc::StatusCode::CANCELLED; }

// UNAVAILABLE for what another attempt may get past, OK for all else.
absl::Status CheckAvailable(const grpc::Status& status, absl::string_view call) {
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
    return rpc::FromGrpc(status, absl::StrCat("environment: ", call));
  }
  if (!IsBusy(status) && !IsEnding(status)) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("environment: ", call, IsBusy(status) ? ": busy: " : ": ended: ", status.error_message()));
}

class Client final : public rl::Environment {
 public:
  Client(std::shared_ptr<grpc::Channel> channel, absl::Duration timeout)
      : stub_(v1::EnvironmentService::NewStub(std::move(channel))), timeout_(timeout) {}

  absl::StatusOr<rl::Episode> Reset(const rl::Task& task, std::string_view text) override {
    v1::ResetRequest request;
    ToProto(task, request.mutable_task());
    request.set_text(std::string(text));
    v1::ResetResponse response;
    const grpc::Status status = stub_->Reset(Context().get(), request, &response);
    MOERL_RETURN_IF_ERROR(CheckAvailable(status, "Reset"));
    if (!status.ok()) return rpc::FromGrpc(status, "environment: Reset");
    return rl::Episode{response.episode_id(),
                       {response.observation_token_ids().begin(), response.observation_token_ids().end()}};
  }

  absl::StatusOr<rl::StepOutcome> Step(std::string_view episode_id, const rl::Task& task, uint32_t turn_index,
                                       std::span<const rl::Turn> transcript) override {
    v1::StepRequest request;
    request.set_episode_id(std::string(episode_id));
    ToProto(task, request.mutable_task());
    request.set_turn_index(turn_index);
    for (const rl::Turn& turn : transcript) ToProto(turn, request.add_transcript());
    v1::StepResponse response;
    const grpc::Status status = stub_->Step(Context().get(), request, &response);
    if (status.ok()) {
      return rl::Judgement{{response.observation_token_ids().begin(), response.observation_token_ids().end()},
                           response.reward(),
                           response.is_done()};
    }
    MOERL_RETURN_IF_ERROR(CheckAvailable(status, "Step"));
    const bool is_late = status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
    return rl::Failure{is_late ? rl::FailureReason::kVerifierTimeout : rl::FailureReason::kVerifierError,
                       status.error_message()};
  }

 private:
  // Not waiting for ready: a server that is down is UNAVAILABLE at once, and the caller decides how long to try.
  std::unique_ptr<grpc::ClientContext> Context() const {
    auto context = rpc::CallContext(timeout_);
    context->set_wait_for_ready(false);
    return context;
  }

  const std::unique_ptr<v1::EnvironmentService::Stub> stub_;
  const absl::Duration timeout_;
};

}  // namespace

std::unique_ptr<rl::Environment> MakeEnvironmentClient(std::shared_ptr<grpc::Channel> channel, absl::Duration timeout) {
  return std::make_unique<Client>(std::move(channel), timeout);
}

}  // namespace moerl
