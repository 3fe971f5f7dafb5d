#ifndef MOERL_LIBS_RPC_CALL_MONITOR_H_
#define MOERL_LIBS_RPC_CALL_MONITOR_H_

#include <grpcpp/support/server_interceptor.h>

#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace moerl::rpc {

// Sees every call of a server: counts it for metrics and for the drain, logs its end, and caps the deadline of unary
// calls. Thread-safe; lives until the last call is gone.
class CallMonitor : public std::enable_shared_from_this<CallMonitor> {
 public:
  explicit CallMonitor(absl::Duration unary_deadline_max) : unary_deadline_max_(unary_deadline_max) {}

  // To be given to grpc::ServerBuilder.
  std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> MakeFactory();

  // Waits until no call but subscriptions runs, at most until `deadline`. Returns how many still run.
  int WaitIdle(absl::Time deadline);

  absl::Duration unary_deadline_max() const { return unary_deadline_max_; }
  void AddRunning(int difference);

 private:
  const absl::Duration unary_deadline_max_;
  absl::Mutex mutex_;
  int num_running_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace moerl::rpc

#endif  // MOERL_LIBS_RPC_CALL_MONITOR_H_
