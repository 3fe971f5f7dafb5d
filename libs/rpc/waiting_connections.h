#ifndef MOERL_LIBS_RPC_WAITING_CONNECTIONS_H_
#define MOERL_LIBS_RPC_WAITING_CONNECTIONS_H_

#include <cstddef>
#include <deque>
#include <map>
#include <optional>
#include <string>

struct sockaddr_storage;

namespace moerl::rpc {

// Accepted connections that gRPC has not been given yet: a line for each peer, and the lines take turns, so that a peer
// that opens ten thousand at once makes its own connections wait, and those of others by one turn only. Not
// thread-safe.
class WaitingConnections {
 public:
  // `peer` as PeerOf gives it. The descriptor stays the caller's.
  void Add(const std::string& peer, int descriptor);
  // The first of the line whose turn it is; nothing when no connection waits.
  std::optional<int> TakeNext();
  bool empty() const { return turns_.empty(); }

 private:
  std::map<std::string, std::deque<int>> lines_;  // none is empty
  std::deque<std::string> turns_;                 // the keys of lines_, next first
};

// Who a connection is from: the IPv4 address, or the /64 network of an IPv6 address, which is what one host has.
std::string PeerOf(const sockaddr_storage& address);

}  // namespace moerl::rpc

#endif  // MOERL_LIBS_RPC_WAITING_CONNECTIONS_H_
