#include "libs/rpc/listener.h"

#include <grpcpp/server_builder.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "libs/base/log.h"
#include "libs/base/metrics.h"
#include "libs/base/status_macros.h"

namespace moerl::rpc {
namespace {

constexpr int kBacklog = 4096;
// Descriptors that are not connections: files, shared memory, epoll, libraries.
constexpr int kOtherDescriptors = 512;
constexpr absl::Duration kNoDescriptorDelay = absl::Milliseconds(100);

struct HostPort {
  std::string host;
  std::string port;
};

absl::StatusOr<HostPort> Split(const std::string& address) {
  const size_t colon = address.rfind(':');
  int port = 0;
  const absl::Status bad = absl::InvalidArgumentError(
      absl::StrCat("server.listen_address: expected host:port or [v6]:port, found \"", address, "\""));
  if (colon == std::string::npos || !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 0 || port > 65535) {
    return bad;
  }
  absl::string_view host = absl::string_view(address).substr(0, colon);
  const bool is_v6 = absl::ConsumePrefix(&host, "[") && absl::ConsumeSuffix(&host, "]");
  if (host.empty() || (!is_v6 && absl::StrContains(host, ":"))) return bad;
  return HostPort{std::string(host), std::to_string(port)};
}

int PortOf(int socket) {
  sockaddr_storage bound = {};
  socklen_t size = sizeof(bound);
  getsockname(socket, reinterpret_cast<sockaddr*>(&bound), &size);
  if (bound.ss_family == AF_INET6) return ntohs(reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port);
  return ntohs(reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
}

void SetOption(int socket, int level, int name, int value) { setsockopt(socket, level, name, &value, sizeof(value)); }

// Connections inherit no-delay. Re-use of the address is about connections of an earlier process that still linger.
bool Listen(int socket, const addrinfo& address) {
  SetOption(socket, SOL_SOCKET, SO_REUSEADDR, 1);
  SetOption(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  if (address.ai_family == AF_INET6) SetOption(socket, IPPROTO_IPV6, IPV6_V6ONLY, 0);
  return bind(socket, address.ai_addr, address.ai_addrlen) == 0 && listen(socket, kBacklog) == 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Listener>> Listener::Bind(const std::string& address) {
  MOERL_ASSIGN_OR_RETURN(const HostPort at, Split(address));
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(at.host.c_str(), at.port.c_str(), &hints, &found); error != 0) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address, ": ", gai_strerror(error)));
  }
  auto listener = std::unique_ptr<Listener>(new Listener());
  listener->socket_ = socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const bool is_listening = listener->socket_ >= 0 && Listen(listener->socket_, *found);
  const int error = errno;
  freeaddrinfo(found);
  if (!is_listening) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address, ": ", std::strerror(error)));
  }
  listener->port_ = PortOf(listener->socket_);
  listener->stop_event_ = eventfd(0, EFD_CLOEXEC);
  return listener;
}

Listener::~Listener() {
  if (accept_thread_.joinable()) {
    eventfd_write(stop_event_, 1);
    accept_thread_.join();
    {
      absl::MutexLock lock(&mutex_);
      is_stopping_ = true;
    }
    hand_over_thread_.join();
  }
  if (socket_ >= 0) close(socket_);
  if (stop_event_ >= 0) close(stop_event_);
}

void Listener::Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor, int descriptor_max) {
  acceptor_ = std::move(acceptor);
  descriptor_max_ = descriptor_max;
  accept_thread_ = std::thread([this] { Accept(); });
  hand_over_thread_ = std::thread([this] { HandOver(); });
}

void Listener::Accept() {
  pollfd events[] = {{.fd = socket_, .events = POLLIN, .revents = 0},
                     {.fd = stop_event_, .events = POLLIN, .revents = 0}};
  while (true) {
    if (poll(events, 2, -1) < 0 && errno != EINTR) return;
    if (events[1].revents != 0) return;
    if (events[0].revents != 0) AcceptOne();
  }
}

void Listener::AcceptOne() {
  static Counter& refused =
      GetCounter("moerl_connections_refused_total", "Connections closed at once, beyond server.connections_max.");
  sockaddr_storage peer = {};
  socklen_t size = sizeof(peer);
  const int descriptor = accept4(socket_, reinterpret_cast<sockaddr*>(&peer), &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (descriptor < 0) {
    if (errno == EMFILE || errno == ENFILE) absl::SleepFor(kNoDescriptorDelay);  // the connection waits in the backlog
    return;
  }
  if (descriptor >= descriptor_max_) {
    close(descriptor);
    refused.Add();
    return;
  }
  absl::MutexLock lock(&mutex_);
  waiting_.Add(PeerOf(peer), descriptor);
}

void Listener::HandOver() {
  const auto has_work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return is_stopping_ || !waiting_.empty(); };
  while (true) {
    std::optional<int> descriptor;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&has_work));
      descriptor = waiting_.TakeNext();
    }
    if (!descriptor.has_value()) return;  // stopping, and nobody waits
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
    connection.fd = *descriptor;
    acceptor_->HandleNewConnection(&connection);
  }
}

int DescriptorMax(int connections_max) {
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  const int open_max = static_cast<int>(std::min<rlim_t>(limit.rlim_cur, 1 << 30));
  // Half of the reserve lies above: what the process opens when all connections are taken.
  return std::min(connections_max + kOtherDescriptors, open_max - kOtherDescriptors / 2);
}

}  // namespace moerl::rpc
