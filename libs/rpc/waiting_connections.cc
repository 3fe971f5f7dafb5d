#include "libs/rpc/waiting_connections.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <utility>

namespace moerl::rpc {
namespace {

constexpr size_t kHostNetworkBytes = 8;
constexpr size_t kMappedPrefixBytes = 12;

}  // namespace

void WaitingConnections::Add(const std::string& peer, int descriptor) {
  std::deque<int>& line = lines_[peer];
  if (line.empty()) turns_.push_back(peer);
  line.push_back(descriptor);
}

std::optional<int> WaitingConnections::TakeNext() {
  if (turns_.empty()) return std::nullopt;
  std::string peer = std::move(turns_.front());
  turns_.pop_front();
  const auto line = lines_.find(peer);
  const int descriptor = line->second.front();
  line->second.pop_front();
  if (line->second.empty()) {
    lines_.erase(line);
  } else {
    turns_.push_back(std::move(peer));
  }
  return descriptor;
}

std::string PeerOf(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) {
    const in_addr& v4 = reinterpret_cast<const sockaddr_in&>(address).sin_addr;
    return std::string(reinterpret_cast<const char*>(&v4), sizeof(v4));
  }
  const in6_addr& v6 = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  const char* bytes = reinterpret_cast<const char*>(v6.s6_addr);
  if (IN6_IS_ADDR_V4MAPPED(&v6)) return std::string(bytes + kMappedPrefixBytes, sizeof(in_addr));
  return std::string(bytes, kHostNetworkBytes);
}

}  // namespace moerl::rpc
