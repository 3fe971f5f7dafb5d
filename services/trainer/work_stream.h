#ifndef MOERL_SERVICES_TRAINER_WORK_STREAM_H_
#define MOERL_SERVICES_TRAINER_WORK_STREAM_H_

#include <atomic>
#include <memory>
#include <string>

#include "libs/base/mailbox.h"
#include "libs/experience/work_proto.h"
#include "libs/rpc/stream.h"
#include "moerl/v1/experience.grpc.pb.h"
#include "services/trainer/experience.h"

namespace moerl::trainer {

class WorkStream;

// Who owns the streams' state; its methods run on the thread that takes from `mailbox()`.
class WorkReceiver {
 public:
  virtual ~WorkReceiver() = default;
  virtual Mailbox& mailbox() = 0;
  virtual void OnWorkMessage(const std::shared_ptr<WorkStream>& stream, WorkerMessage message) = 0;
  // Tokens that do not parse, of a sample that can be named.
  virtual void OnMalformedWork(const std::shared_ptr<WorkStream>& stream, LeaseId lease, int64_t sample,
                               const absl::Status& why) = 0;
  virtual void OnTraceReport(ConnectionId connection, const v1::WorkTraceReport& report) = 0;
  virtual void OnWorkOver(ConnectionId connection) = 0;
};

// One worker's Work call. Parses on gRPC's threads and posts to the receiver. Progress and Finish bytes that the
// receiver has not dealt with are bounded by the credit it gave; more ends the stream with RESOURCE_EXHAUSTED.
// Thread-safe.
class WorkStream final : public rpc::ServerBidiStream<v1::WorkRequest, v1::WorkResponse>,
                         public std::enable_shared_from_this<WorkStream> {
 public:
  static constexpr int64_t kCreditBytes = 8 << 20;
  static constexpr int64_t kCreditStepBytes = kCreditBytes / 4;  // credit is given back in steps of this
  static constexpr size_t kResponsesMax = 4096;                  // waiting for a slow worker

  // A worker whose fingerprint differs is refused where `require_equal_numerics`.
  WorkStream(ConnectionId id, WorkReceiver& receiver, std::string numerics_fingerprint, bool require_equal_numerics)
      : ServerBidiStream(kResponsesMax),
        id_(id),
        receiver_(receiver),
        numerics_fingerprint_(std::move(numerics_fingerprint)),
        require_equal_numerics_(require_equal_numerics) {}

  ConnectionId id() const { return id_; }
  // Sends, or ends the stream of a worker too slow to read.
  void Deliver(v1::WorkResponse response);
  // The receiver has dealt with this many bytes of progress and finish.
  void GiveBack(int64_t bytes);

 protected:
  bool OnMessage(v1::WorkRequest& request) override;
  void OnOver() override;

 private:
  absl::Status Accept(const v1::WorkRequest& request);
  absl::Status CheckHello(const v1::WorkHello& hello) const;

  const ConnectionId id_;
  WorkReceiver& receiver_;
  const std::string numerics_fingerprint_;
  const bool require_equal_numerics_;
  bool has_hello_ = false;  // touched by OnMessage only
  std::atomic<int64_t> unread_bytes_ = 0;
  std::atomic<int64_t> owed_bytes_ = 0;
};

}  // namespace moerl::trainer

#endif  // MOERL_SERVICES_TRAINER_WORK_STREAM_H_
