#ifndef MOERL_SERVICES_TRAINER_SERVICES_H_
#define MOERL_SERVICES_TRAINER_SERVICES_H_

#include <atomic>

#include "moerl/v1/experience.grpc.pb.h"
#include "moerl/v1/trainer.grpc.pb.h"
#include "services/trainer/leader.h"

namespace moerl::rpc {
class Server;
}

namespace moerl::trainer {

// Proto in, proto out: every call becomes a message to the leader's control thread, which answers.
class ExperienceService final : public v1::ExperienceService::CallbackService {
 public:
  explicit ExperienceService(Leader& leader) : leader_(leader) {}
  // Refuses new streams while the server drains; set before the first call matters.
  void set_server(const rpc::Server* server) { server_ = server; }

  grpc::ServerBidiReactor<v1::WorkRequest, v1::WorkResponse>* Work(grpc::CallbackServerContext* context) override;

 private:
  Leader& leader_;
  std::atomic<const rpc::Server*> server_ = nullptr;
  std::atomic<ConnectionId> last_connection_ = 0;
};

class TrainerService final : public v1::TrainerService::CallbackService {
 public:
  explicit TrainerService(Leader& leader) : leader_(leader) {}

  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* context, const v1::GetStatusRequest* request,
                                      v1::GetStatusResponse* response) override;
  grpc::ServerWriteReactor<v1::WatchMetricsResponse>* WatchMetrics(grpc::CallbackServerContext* context,
                                                                   const v1::WatchMetricsRequest* request) override;
  grpc::ServerUnaryReactor* SaveCheckpoint(grpc::CallbackServerContext* context,
                                           const v1::SaveCheckpointRequest* request,
                                           v1::SaveCheckpointResponse* response) override;
  grpc::ServerUnaryReactor* Pause(grpc::CallbackServerContext* context, const v1::PauseRequest* request,
                                  v1::PauseResponse* response) override;
  grpc::ServerUnaryReactor* Resume(grpc::CallbackServerContext* context, const v1::ResumeRequest* request,
                                   v1::ResumeResponse* response) override;
  grpc::ServerUnaryReactor* SetStaleness(grpc::CallbackServerContext* context, const v1::SetStalenessRequest* request,
                                         v1::SetStalenessResponse* response) override;

 private:
  Leader& leader_;
};

}  // namespace moerl::trainer

#endif  // MOERL_SERVICES_TRAINER_SERVICES_H_
