#include "libs/environment/environment_service.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libs/rpc/status.h"
#include "libs/rpc/stream.h"
#include "moerl/v1/environment.grpc.pb.h"

namespace moerl {
namespace {

absl::Status ToStatus(const rl::Failure& failure) {
  const std::string message = absl::StrCat(std::string(rl::FailureReasonName(failure.reason)), ": ", failure.detail);
  if (failure.reason == rl::FailureReason::kVerifierTimeout) return absl::DeadlineExceededError(message);
  return absl::InvalidArgumentError(message);
}

class Service final : public v1::EnvironmentService::CallbackService {
 public:
  explicit Service(std::shared_ptr<rl::Environment> environment) : environment_(std::move(environment)) {}

  grpc::ServerUnaryReactor* Reset(grpc::CallbackServerContext* context, const v1::ResetRequest* request,
                                  v1::ResetResponse* response) override {
    const rl::Task task{request->task().name(), request->task().payload()};
    absl::StatusOr<rl::Episode> episode = environment_->Reset(task, request->text());
    if (!episode.ok()) return rpc::Reply(context, episode.status());
    response->set_episode_id(episode->id);
    response->mutable_observation_token_ids()->Add(episode->prompt.begin(), episode->prompt.end());
    return rpc::Reply(context, absl::OkStatus());
  }

  grpc::ServerUnaryReactor* Step(grpc::CallbackServerContext* context, const v1::StepRequest* request,
                                 v1::StepResponse* response) override {
    if (request->transcript().empty()) {
      return rpc::Reply(context, rpc::InvalidField("transcript", "empty; expected the prompt and what followed"));
    }
    const rl::Task task{request->task().name(), request->task().payload()};
    std::vector<rl::Turn> transcript;
    for (const v1::Turn& turn : request->transcript()) {
      transcript.push_back({{turn.token_ids().begin(), turn.token_ids().end()},
                            turn.is_action(),
                            turn.finish_reason() == v1::FINISH_REASON_LENGTH});
    }
    absl::StatusOr<rl::StepOutcome> outcome =
        environment_->Step(request->episode_id(), task, request->turn_index(), transcript);
    if (!outcome.ok()) return rpc::Reply(context, outcome.status());
    if (const auto* failure = std::get_if<rl::Failure>(&*outcome)) return rpc::Reply(context, ToStatus(*failure));
    const auto& judgement = std::get<rl::Judgement>(*outcome);
    response->mutable_observation_token_ids()->Add(judgement.observation.begin(), judgement.observation.end());
    response->set_reward(judgement.reward);
    response->set_is_done(judgement.is_done);
    return rpc::Reply(context, absl::OkStatus());
  }

 private:
  const std::shared_ptr<rl::Environment> environment_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeEnvironmentService(std::shared_ptr<rl::Environment> environment) {
  return std::make_unique<Service>(std::move(environment));
}

}  // namespace moerl
