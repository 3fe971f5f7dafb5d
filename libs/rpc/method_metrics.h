#ifndef MOERL_LIBS_RPC_METHOD_METRICS_H_
#define MOERL_LIBS_RPC_METHOD_METRICS_H_

#include <grpcpp/support/status.h>

#include <array>
#include <atomic>
#include <string>

#include "absl/strings/string_view.h"
#include "libs/base/metrics.h"

namespace moerl::rpc {

// The metrics of one served method, under go-grpc-prometheus's names: grpc_server_started_total,
// grpc_server_handled_total{grpc_code}, grpc_server_msg_received_total, grpc_server_msg_sent_total,
// grpc_server_handling_seconds. Thread-safe.
class MethodMetrics {
 public:
  // Those of `method` ("/package.Service/Method"); lives as long as the process. `type` is unary, client_stream,
  // server_stream or bidi_stream. Methods the frame does not know share one entry, so that a stranger cannot make new
  // ones.
  static MethodMetrics& Of(absl::string_view method, absl::string_view type);

  Counter& started;
  Counter& received;
  Counter& sent;
  Histogram& handling_seconds;
  Counter& handled(grpc::StatusCode code);

 private:
  MethodMetrics(std::string service, std::string method, std::string type);

  static constexpr size_t kNumCodes = 17;
  const std::string service_, method_, type_;
  std::array<std::atomic<Counter*>, kNumCodes> handled_ = {};  // found when first needed
};

// "OK", "NotFound", …
absl::string_view CodeName(grpc::StatusCode code);

}  // namespace moerl::rpc

#endif  // MOERL_LIBS_RPC_METHOD_METRICS_H_
