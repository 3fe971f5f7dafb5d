#ifndef MOERL_SERVICES_ROLLOUT_SERVICE_H_
#define MOERL_SERVICES_ROLLOUT_SERVICE_H_

#include <atomic>

#include "moerl/v1/rollout.grpc.pb.h"
#include "services/rollout/scheduler.h"

namespace moerl::rpc {
class Server;
}

namespace moerl::rollout {

// RolloutService: proto in, scheduler, proto out. Nothing here blocks.
class Service final : public v1::RolloutService::CallbackService {
 public:
  explicit Service(Scheduler* scheduler) : scheduler_(scheduler) {}

  // Before the first call can come: what says whether this server drains.
  void SetServer(rpc::Server* server) { server_.store(server, std::memory_order_release); }

  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(grpc::CallbackServerContext* context,
                                                           const v1::GenerateRequest* request) override;
  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context, const v1::AbortRequest* request,
                                  v1::AbortResponse* response) override;
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context, const v1::DrainRequest* request,
                                  v1::DrainResponse* response) override;
  grpc::ServerUnaryReactor* GetLoad(grpc::CallbackServerContext* context, const v1::GetLoadRequest* request,
                                    v1::GetLoadResponse* response) override;
  grpc::ServerUnaryReactor* GetModelInfo(grpc::CallbackServerContext* context, const v1::GetModelInfoRequest* request,
                                         v1::GetModelInfoResponse* response) override;

 private:
  absl::Status Admit(const Snapshot& snapshot) const;
  absl::StatusOr<std::shared_ptr<GenerateCall>> Accept(const v1::GenerateRequest& request, absl::Time deadline);

  Scheduler* const scheduler_;
  std::atomic<rpc::Server*> server_ = nullptr;
  std::atomic<uint64_t> num_named_ = 0;  // calls that came without a request_id
};

}  // namespace moerl::rollout

#endif  // MOERL_SERVICES_ROLLOUT_SERVICE_H_
