#ifndef MOERL_LIBS_RPC_LISTENER_H_
#define MOERL_LIBS_RPC_LISTENER_H_

#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"

namespace grpc::experimental {
class ExternalConnectionAcceptor;
}

namespace moerl::rpc {

// Accepts connections for a gRPC server and refuses those beyond a bound. gRPC 1.51 has no such bound of its own, and
// its own listener never accepts again once the process has run out of file descriptors.
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

  // Hands connections to `acceptor`, whose server has started, from a thread of its own. Descriptors from
  // `descriptor_max` on are refused.
  void Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor, int descriptor_max);

 private:
  Listener() = default;
  void Accept();
  void AcceptOne();

  int socket_ = -1;
  int stop_event_ = -1;
  int port_ = 0;
  int descriptor_max_ = 0;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  std::thread thread_;
};

// The bound that `connections_max` and the process's limit of open files allow, with room for other files.
int DescriptorMax(int connections_max);

}  // namespace moerl::rpc

#endif  // MOERL_LIBS_RPC_LISTENER_H_
