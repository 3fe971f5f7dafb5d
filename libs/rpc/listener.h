#ifndef MOERL_LIBS_RPC_LISTENER_H_
#define MOERL_LIBS_RPC_LISTENER_H_

#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "libs/rpc/waiting_connections.h"

namespace grpc::experimental {
class ExternalConnectionAcceptor;
}

namespace moerl::rpc {

// Accepts connections for a gRPC server and refuses those beyond a bound. gRPC 1.51 has no such bound of its own, and
// its own listener never accepts again once the process has run out of file descriptors.
//
// To accept is a matter of microseconds, to start a connection in gRPC one of a tenth of a millisecond. Two threads do
// them, so that the kernel's backlog stays short in a burst (what does not fit there comes again after a second), and
// peers take turns at the slow part.
//
// The bound needs no count of what is open: the kernel gives the lowest free descriptor, so a connection whose
// descriptor is at or above the bound is one too many, and is closed at once.
class Listener {
 public:
  // Listens on "host:port" or "[v6]:port"; port 0 takes a free one. The port is not shared. Errors: INVALID_ARGUMENT
  // for what is no such address; UNAVAILABLE naming the address and the system's reason.
  static absl::StatusOr<std::unique_ptr<Listener>> Bind(const std::string& address);
  // Stops accepting.
  ~Listener();

  int port() const { return port_; }

  // Hands connections to `acceptor`, whose server has started, from threads of its own. Descriptors from
  // `descriptor_max` on are refused. At most once.
  void Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor, int descriptor_max);

 private:
  Listener() = default;
  void Accept();
  void AcceptOne();
  void HandOver();

  int socket_ = -1;
  int stop_event_ = -1;
  int port_ = 0;
  int descriptor_max_ = 0;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  absl::Mutex mutex_;
  WaitingConnections waiting_ ABSL_GUARDED_BY(mutex_);
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread accept_thread_;
  std::thread hand_over_thread_;
};

// The bound that `connections_max` and the process's limit of open files allow, with room for other files.
int DescriptorMax(int connections_max);

}  // namespace moerl::rpc

#endif  // MOERL_LIBS_RPC_LISTENER_H_
