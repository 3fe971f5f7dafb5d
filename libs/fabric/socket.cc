#include "libs/fabric/socket.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "libs/base/status_macros.h"

namespace moerl::fabric {
namespace {

absl::Status ErrnoError(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", strerror(errno)));
}

struct Resolved {
  sockaddr_storage address = {};
  socklen_t size = 0;
};

absl::StatusOr<Resolved> Resolve(absl::string_view address) {
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos) {
    return absl::InvalidArgumentError(absl::StrCat("fabric: address \"", address, "\" is not host:port"));
  }
  std::string host(address.substr(0, colon));
  if (host.size() > 1 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  const std::string port(address.substr(colon + 1));
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found); error != 0) {
    return absl::UnavailableError(absl::StrCat("fabric: cannot resolve \"", address, "\": ", gai_strerror(error)));
  }
  Resolved resolved;
  memcpy(&resolved.address, found->ai_addr, found->ai_addrlen);
  resolved.size = found->ai_addrlen;
  freeaddrinfo(found);
  return resolved;
}

absl::Status WaitFor(int fd, short events, absl::Time deadline, int cancel_fd) {
  for (;;) {
    const int64_t left_ms = absl::ToInt64Milliseconds(deadline - absl::Now());
    if (left_ms <= 0) return absl::DeadlineExceededError("fabric: control connection: deadline passed");
    pollfd pollers[2] = {{.fd = fd, .events = events, .revents = 0}, {.fd = cancel_fd, .events = POLLIN, .revents = 0}};
    const int ready = poll(pollers, 2, static_cast<int>(std::min<int64_t>(left_ms, 1000)));
    // What has come counts even if its sender has gone since, as a rank does that closed before the others.
    if (ready > 0 && pollers[0].revents != 0) return absl::OkStatus();
    if (ready > 0) return absl::CancelledError("fabric: control connection: given up");
    if (ready < 0 && errno != EINTR) return ErrnoError("fabric: poll");
  }
}

void Configure(int fd) {
  const int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

absl::Status ReceiveBytes(int fd, char* into, size_t bytes, absl::Time deadline, int cancel_fd) {
  while (bytes > 0) {
    const ssize_t got = recv(fd, into, bytes, 0);
    if (got == 0) return absl::UnavailableError("fabric: control connection closed by the peer");
    if (got < 0) {
      if (errno != EAGAIN && errno != EINTR) return ErrnoError("fabric: control connection");
      MOERL_RETURN_IF_ERROR(WaitFor(fd, POLLIN, deadline, cancel_fd));
      continue;
    }
    into += got;
    bytes -= static_cast<size_t>(got);
  }
  return absl::OkStatus();
}

absl::StatusOr<FileDescriptor> ConnectOnce(const Resolved& to, absl::Time deadline, int cancel_fd) {
  FileDescriptor socket(::socket(to.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return ErrnoError("fabric: socket");
  Configure(socket.get());
  if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&to.address), to.size) != 0) {
    if (errno != EINPROGRESS) return ErrnoError("fabric: connect");
    MOERL_RETURN_IF_ERROR(WaitFor(socket.get(), POLLOUT, deadline, cancel_fd));
    int error = 0;
    socklen_t size = sizeof(error);
    getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) {
      errno = error;
      return ErrnoError("fabric: connect");
    }
  }
  return socket;
}

}  // namespace

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) close(fd_);
}

absl::StatusOr<FileDescriptor> Listen(absl::string_view address) {
  MOERL_ASSIGN_OR_RETURN(const Resolved at, Resolve(address));
  FileDescriptor socket(::socket(at.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return ErrnoError("fabric: socket");
  const int one = 1;
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  if (bind(socket.get(), reinterpret_cast<const sockaddr*>(&at.address), at.size) != 0 ||
      listen(socket.get(), SOMAXCONN) != 0) {
    return absl::UnavailableError(absl::StrCat("fabric: cannot listen at ", address, ": ", strerror(errno),
                                               "; set fabric.bootstrap_address to an address of this host"));
  }
  Configure(socket.get());
  return socket;
}

absl::StatusOr<FileDescriptor> Accept(const FileDescriptor& listener, absl::Time deadline, int cancel_fd) {
  for (;;) {
    const int fd = accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC);
    if (fd >= 0) {
      Configure(fd);
      return FileDescriptor(fd);
    }
    if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) return ErrnoError("fabric: accept");
    MOERL_RETURN_IF_ERROR(WaitFor(listener.get(), POLLIN, deadline, cancel_fd));
  }
}

absl::StatusOr<FileDescriptor> Connect(absl::string_view address, absl::Time deadline, int cancel_fd) {
  for (;;) {
    absl::StatusOr<FileDescriptor> socket = absl::UnknownError("");
    if (absl::StatusOr<Resolved> to = Resolve(address); to.ok()) {
      socket = ConnectOnce(*to, deadline, cancel_fd);
    } else {
      if (absl::IsInvalidArgument(to.status())) return to.status();
      socket = to.status();
    }
    if (socket.ok() || absl::IsCancelled(socket.status())) return socket;
    if (absl::Now() + absl::Milliseconds(50) >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat("fabric: nobody answers at ", address, " (",
                                                      socket.status().message(), "); is rank 0 running?"));
    }
    absl::SleepFor(absl::Milliseconds(50));
  }
}

absl::Status SendFrame(const FileDescriptor& socket, absl::string_view bytes, absl::Time deadline, int cancel_fd) {
  if (bytes.size() > kFrameBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("fabric: control message of ", bytes.size(), " bytes, at most ", kFrameBytesMax));
  }
  const uint32_t length = static_cast<uint32_t>(bytes.size());
  std::string frame(reinterpret_cast<const char*>(&length), sizeof(length));
  frame.append(bytes.data(), bytes.size());
  for (absl::string_view left = frame; !left.empty();) {
    const ssize_t sent = send(socket.get(), left.data(), left.size(), MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno != EAGAIN && errno != EINTR) return ErrnoError("fabric: control connection");
      MOERL_RETURN_IF_ERROR(WaitFor(socket.get(), POLLOUT, deadline, cancel_fd));
      continue;
    }
    left.remove_prefix(static_cast<size_t>(sent));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReceiveFrame(const FileDescriptor& socket, absl::Time deadline, size_t bytes_max,
                                         int cancel_fd) {
  uint32_t length = 0;
  MOERL_RETURN_IF_ERROR(
      ReceiveBytes(socket.get(), reinterpret_cast<char*>(&length), sizeof(length), deadline, cancel_fd));
  if (length > bytes_max) {
    return absl::DataLossError(absl::StrCat("fabric: control message of ", length, " bytes announced, at most ",
                                            bytes_max, "; not a moerl peer?"));
  }
  std::string bytes(length, '\0');
  MOERL_RETURN_IF_ERROR(ReceiveBytes(socket.get(), bytes.data(), bytes.size(), deadline, cancel_fd));
  return bytes;
}

absl::StatusOr<std::string> LocalAddressTowards(absl::string_view address) {
  MOERL_ASSIGN_OR_RETURN(const Resolved to, Resolve(address));
  // Connecting a datagram socket sends nothing; it only chooses the route.
  FileDescriptor socket(::socket(to.address.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage local = {};
  socklen_t size = sizeof(local);
  if (!socket.valid() || connect(socket.get(), reinterpret_cast<const sockaddr*>(&to.address), to.size) != 0 ||
      getsockname(socket.get(), reinterpret_cast<sockaddr*>(&local), &size) != 0) {
    return ErrnoError(absl::StrCat("fabric: no route to ", address));
  }
  char host[NI_MAXHOST];
  if (getnameinfo(reinterpret_cast<sockaddr*>(&local), size, host, sizeof(host), nullptr, 0, NI_NUMERICHOST) != 0) {
    return absl::InternalError("fabric: local address cannot be printed");
  }
  return std::string(host);
}

absl::StatusOr<int> BoundPort(const FileDescriptor& listener) {
  sockaddr_storage local = {};
  socklen_t size = sizeof(local);
  if (getsockname(listener.get(), reinterpret_cast<sockaddr*>(&local), &size) != 0)
    return ErrnoError("fabric: getsockname");
  return ntohs(local.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&local)->sin6_port
                                           : reinterpret_cast<sockaddr_in*>(&local)->sin_port);
}

}  // namespace moerl::fabric
