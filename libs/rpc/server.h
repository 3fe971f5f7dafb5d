#ifndef MOERL_LIBS_RPC_SERVER_H_
#define MOERL_LIBS_RPC_SERVER_H_

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "libs/rpc/channel.h"
#include "libs/rpc/security.h"

namespace grpc {
class Server;
class Service;
}  // namespace grpc

namespace moerl::rpc {

class CallMonitor;
class Listener;

struct ServerOptions {
  std::string address = {};  // "0.0.0.0:7400", "[::]:7400"; port 0 takes a free one
  Security security = {};
  WireLimits limits = {};
  // A unary call without a deadline, or with a later one, is ended with DEADLINE_EXCEEDED after this.
  absl::Duration unary_deadline_max = absl::Seconds(120);
  // Connections at most; further ones are closed at once. Lower where the process may not open that many files.
  int connections_max = 16384;
  // Concurrent calls of one connection; further ones wait at the client.
  int streams_per_connection_max = 256;
  // Memory for transport buffers of all connections together; beyond it gRPC reads slower and refuses connections.
  int64_t buffer_bytes_max = int64_t{256} << 20;
  // A connection is asked to reconnect after this (and jitter), so that clients see new addresses; its calls go on.
  absl::Duration connection_age_max = absl::Minutes(10);
  // A connection without a call, or one that never finishes its handshake, is closed after this.
  absl::Duration connection_idle_max = absl::Minutes(5);
  absl::Duration handshake_timeout = absl::Seconds(10);
  // How long a refused caller is told to wait while this server drains.
  absl::Duration drain_retry_delay = absl::Seconds(1);
};

// A gRPC server: the services given, grpc.health.v1 ("" alive; "ready" accepts work, false at first), reflection,
// grpc_server_* metrics, an access log (info; debug for health and reflection), and the limits above.
// The port is not shared (SO_REUSEPORT off). Thread-safe.
//
// Drain, in order: BeginDrain() turns "ready" NOT_SERVING, then Admit() refuses, then the callbacks of
// OnDrain run; running calls go on. Shutdown(deadline) waits for them, ends what is left, and returns.
// Subscriptions (methods that have no end of their own: Watch…, Work, health watches) are not waited for.
class Server {
 public:
  // Starts to serve. `services` stay owned by the caller and must outlive the server; they are callback
  // services whose reactions never block. Errors: those of MakeServerCredentials; UNAVAILABLE when the
  // address cannot be bound, naming it.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options,
                                                       const std::vector<grpc::Service*>& services);
  // Shuts down at once if Shutdown was not called.
  ~Server();

  int port() const { return port_; }
  // The address with the port really bound, as a client on this machine would write it.
  const std::string& address() const { return address_; }

  // What the health service says of "ready". Ignored once draining.
  void SetReady(bool is_ready);

  // OK, or while draining UNAVAILABLE with RetryInfo. A method that takes new work starts with
  //   if (absl::Status refused = server.Admit(); !refused.ok()) …finish with it.
  absl::Status Admit() const;
  bool is_draining() const { return is_draining_.load(std::memory_order_acquire); }

  // `callback` runs once in BeginDrain (or now, when draining already): to end subscriptions, hand work back.
  void OnDrain(std::function<void()> callback);
  // Idempotent.
  void BeginDrain();

  // Drains, waits until every call that is not a subscription has ended or `deadline` has come, cancels the
  // rest, and stops. Returns the number of calls that were cancelled, subscriptions not counted. Idempotent.
  int Shutdown(absl::Time deadline);

 private:
  Server() = default;

  std::shared_ptr<CallMonitor> monitor_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Listener> listener_;
  std::string address_;
  int port_ = 0;
  absl::Duration drain_retry_delay_;
  std::atomic<bool> is_draining_ = false;
  absl::Mutex mutex_;
  std::vector<std::function<void()>> on_drain_ ABSL_GUARDED_BY(mutex_);
  bool is_shut_down_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace moerl::rpc

#endif  // MOERL_LIBS_RPC_SERVER_H_
