#ifndef MOERL_LIBS_FABRIC_SOCKET_H_
#define MOERL_LIBS_FABRIC_SOCKET_H_

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace moerl::fabric {

// A file descriptor that closes itself.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor();
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Blocking-with-deadline TCP for the control path. Addresses are "host:port". Every call ends at its deadline with
// DEADLINE_EXCEEDED, and with CANCELLED soon after `cancel_fd` (-1: none) becomes readable; a closed or reset
// connection is UNAVAILABLE. Thread-compatible.
absl::StatusOr<FileDescriptor> Listen(absl::string_view address);
absl::StatusOr<FileDescriptor> Accept(const FileDescriptor& listener, absl::Time deadline, int cancel_fd = -1);
// Tries again until the deadline while nobody listens: ranks start in any order.
absl::StatusOr<FileDescriptor> Connect(absl::string_view address, absl::Time deadline, int cancel_fd = -1);

// One message: 4 bytes of length, then the bytes. Longer ones than `kFrameBytesMax` are refused on both sides
// (INVALID_ARGUMENT where sent, DATA_LOSS where announced).
inline constexpr size_t kFrameBytesMax = 64u << 20;
absl::Status SendFrame(const FileDescriptor& socket, absl::string_view bytes, absl::Time deadline, int cancel_fd = -1);
absl::StatusOr<std::string> ReceiveFrame(const FileDescriptor& socket, absl::Time deadline,
                                         size_t bytes_max = kFrameBytesMax, int cancel_fd = -1);

// The local address, without port, from which `address` is reached.
absl::StatusOr<std::string> LocalAddressTowards(absl::string_view address);
// The port a listener is bound to.
absl::StatusOr<int> BoundPort(const FileDescriptor& listener);

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_SOCKET_H_
