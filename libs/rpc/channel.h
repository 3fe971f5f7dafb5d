#ifndef MOERL_LIBS_RPC_CHANNEL_H_
#define MOERL_LIBS_RPC_CHANNEL_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "libs/rpc/security.h"

namespace grpc {
class Channel;
class ClientContext;
}  // namespace grpc

namespace moerl::rpc {

// The limits that both ends of a connection must agree on; servers and channels take them from here.
// A server answers a peer that pings more often than it allows with GOAWAY "too_many_pings", so what a
// channel sends and what a server permits come from the same numbers.
struct WireLimits {
  // A connection that carried nothing for this long is pinged, also when it has no call.
  absl::Duration keepalive_time = absl::Seconds(20);
  // One that does not answer within this is dead; its calls end with UNAVAILABLE.
  absl::Duration keepalive_timeout = absl::Seconds(10);
  // Both ways: a 1 MiB chunk and its overhead, and room for one group of trajectories.
  int message_bytes_max = 4 << 20;
  int metadata_bytes_max = 16 << 10;
};

struct ChannelOptions {
  Security security = {};
  WireLimits limits = {};
  // Unary calls that end with UNAVAILABLE are tried this often in all (2 to 5; 1 = never). Streams never are.
  int attempts_max = 4;
};

// A channel to `target` ("host:port", "dns:///name:port", "unix:/path"). It connects when first used, spreads
// calls over all addresses of the name, reconnects by itself (back-off 0.1 s to 3 s), and retries as said
// above; mutations may be retried because they carry a request_id. Thread-safe. Errors: those of
// MakeChannelCredentials.
absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const std::string& target, const ChannelOptions& options);

// A context for one call that ends after `timeout` and until then waits for the server to come up. Both kinds carry
// the trace id of this thread (libs/base/log.h), which the server logs with the call.
std::unique_ptr<grpc::ClientContext> CallContext(absl::Duration timeout);

// A context for a stream without a deadline (Work, Watch…): keepalive ends it when the server is gone.
std::unique_ptr<grpc::ClientContext> StreamContext();

// Waits until the channel is connected. Errors: DEADLINE_EXCEEDED naming the target.
absl::Status WaitConnected(grpc::Channel& channel, const std::string& target, absl::Duration timeout);

}  // namespace moerl::rpc

#endif  // MOERL_LIBS_RPC_CHANNEL_H_
