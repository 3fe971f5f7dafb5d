#include "services/trainer/services.h"

#include "absl/strings/str_cat.h"
#include "libs/rpc/server.h"
#include "libs/rpc/status.h"

namespace moerl::trainer {
namespace {

constexpr size_t kRowsMax = 65536;  // waiting for a slow watcher
constexpr uint32_t kStalenessMax = 64;

class MetricsStream final : public rpc::ServerStream<v1::WatchMetricsResponse> {
 public:
  MetricsStream() : ServerStream(kRowsMax) {}
};

}  // namespace

grpc::ServerBidiReactor<v1::WorkRequest, v1::WorkResponse>* ExperienceService::Work(grpc::CallbackServerContext*) {
  using Request = v1::WorkRequest;
  using Response = v1::WorkResponse;
  if (!leader_.is_serving()) {
    return rpc::RefuseBidi<Request, Response>(absl::UnavailableError("the trainer is starting; try again"));
  }
  if (const rpc::Server* server = server_) {
    if (absl::Status refused = server->Admit(); !refused.ok()) return rpc::RefuseBidi<Request, Response>(refused);
  }
  const RunSettings& settings = leader_.settings();
  return rpc::Start(std::make_shared<WorkStream>(++last_connection_, leader_, settings.numerics_fingerprint,
                                                 settings.config.trainer().require_equal_numerics()));
}

grpc::ServerUnaryReactor* TrainerService::GetStatus(grpc::CallbackServerContext* context, const v1::GetStatusRequest*,
                                                    v1::GetStatusResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  leader_.mailbox().Post([this, reactor, response] {
    *response = leader_.Status();
    reactor->Finish(grpc::Status::OK);
  });
  return reactor;
}

grpc::ServerWriteReactor<v1::WatchMetricsResponse>* TrainerService::WatchMetrics(
    grpc::CallbackServerContext*, const v1::WatchMetricsRequest* request) {
  auto stream = std::make_shared<MetricsStream>();
  leader_.mailbox().Post([this, stream, after = request->after_step()] {
    leader_.WatchRows(after, [stream](const v1::StepMetrics& row) {
      v1::WatchMetricsResponse response;
      *response.mutable_row() = row;
      return stream->Send(std::move(response));
    });
  });
  return rpc::Start(std::move(stream));
}

grpc::ServerUnaryReactor* TrainerService::SaveCheckpoint(grpc::CallbackServerContext* context,
                                                         const v1::SaveCheckpointRequest*,
                                                         v1::SaveCheckpointResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  leader_.mailbox().Post([this, reactor, response] {
    leader_.RequestCheckpoint([reactor, response](int64_t step, const std::string& directory) {
      response->set_step(static_cast<uint64_t>(step));
      response->set_directory(directory);
      reactor->Finish(grpc::Status::OK);
    });
  });
  return reactor;
}

grpc::ServerUnaryReactor* TrainerService::Pause(grpc::CallbackServerContext* context, const v1::PauseRequest*,
                                                v1::PauseResponse*) {
  leader_.mailbox().Post([this] { leader_.SetPaused(true); });
  return rpc::Reply(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* TrainerService::Resume(grpc::CallbackServerContext* context, const v1::ResumeRequest*,
                                                 v1::ResumeResponse*) {
  leader_.mailbox().Post([this] { leader_.SetPaused(false); });
  return rpc::Reply(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* TrainerService::SetStaleness(grpc::CallbackServerContext* context,
                                                       const v1::SetStalenessRequest* request,
                                                       v1::SetStalenessResponse*) {
  if (request->staleness() > kStalenessMax) {
    return rpc::Reply(context, absl::InvalidArgumentError(absl::StrCat("staleness: expected 0 to ", kStalenessMax,
                                                                       ", found ", request->staleness())));
  }
  leader_.mailbox().Post([this, staleness = request->staleness()] { leader_.SetStaleness(staleness); });
  return rpc::Reply(context, absl::OkStatus());
}

}  // namespace moerl::trainer
