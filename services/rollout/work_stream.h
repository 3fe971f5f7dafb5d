#ifndef MOERL_SERVICES_ROLLOUT_WORK_STREAM_H_
#define MOERL_SERVICES_ROLLOUT_WORK_STREAM_H_

#include <atomic>
#include <memory>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "libs/rpc/channel.h"
#include "libs/rpc/stream.h"
#include "moerl/v1/experience.grpc.pb.h"

namespace moerl::rollout {

// One Work stream to the trainer. Hooks run on gRPC's threads.
class WorkStream final : public rpc::ClientBidiStream<v1::WorkRequest, v1::WorkResponse> {
 public:
  // Messages that wait for the connection; the lease runner keeps what does not fit.
  static constexpr size_t kQueueMax = 64;
  static constexpr absl::Duration kCloseWait = absl::Seconds(1);

  struct Hooks {
    // The next message is read after ReadNext().
    absl::AnyInvocable<void(v1::WorkResponse)> on_message;
    absl::AnyInvocable<void()> on_drained;
    absl::AnyInvocable<void(absl::Status)> on_over;
  };

  // Opens a stream; it waits for the trainer to come up.
  static std::shared_ptr<WorkStream> Open(v1::ExperienceService::Stub& stub, Hooks hooks) {
    auto stream = std::make_shared<WorkStream>(std::move(hooks));
    stream->context().set_wait_for_ready(true);
    stub.async()->Work(&stream->context(), stream.get());
    rpc::StartClient(stream);
    return stream;
  }

  // Ends the call and returns after its last hook. What was sent before arrives, the last hand-backs among it, unless
  // the trainer takes longer than kCloseWait to read it.
  void CloseAndWait() {
    is_closing_ = true;
    CloseSending();
    ReadNext();
    if (over_.WaitForNotificationWithTimeout(kCloseWait)) return;
    Cancel();
    over_.WaitForNotification();
  }

  explicit WorkStream(Hooks hooks) : ClientBidiStream(kQueueMax, rpc::StreamContext()), hooks_(std::move(hooks)) {}

 private:
  bool OnMessage(v1::WorkResponse& response) override {
    if (is_closing_) return true;
    hooks_.on_message(std::move(response));
    return false;
  }
  void OnDrained() override { hooks_.on_drained(); }
  void OnOver(const absl::Status& status) override {
    hooks_.on_over(status);
    over_.Notify();
  }

  Hooks hooks_;
  std::atomic<bool> is_closing_ = false;
  absl::Notification over_;
};

}  // namespace moerl::rollout

#endif  // MOERL_SERVICES_ROLLOUT_WORK_STREAM_H_
