#ifndef MOERL_LIBS_FABRIC_BOOTSTRAP_H_
#define MOERL_LIBS_FABRIC_BOOTSTRAP_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "libs/fabric/endpoint.h"
#include "libs/fabric/socket.h"

namespace moerl::fabric {

struct BootstrapOptions {
  std::string address;  // "host:port" where rank 0 listens
  int rank = 0;
  int num_ranks = 1;
  // Both keep strangers out: peers of another run have another id, peers without the token cannot prove that they have
  // it.
  std::string cluster_id;
  std::string token;
  absl::Duration timeout = absl::Seconds(60);
  // Rank 0 accepts here instead of listening at `address`; outlives Join. Null: it listens.
  const FileDescriptor* listener = nullptr;
  // Every wait ends with CANCELLED once this is readable. Null: never.
  std::shared_ptr<FileDescriptor> cancel = nullptr;
};

// Connects every rank with rank 0 over TCP and keeps the connections for set-up data. Each side proves to the other
// that it has the token (HMAC-SHA-256 over both sides' nonces), without sending it. A stranger's connection is closed
// and does not disturb the others.
//
// Errors: DEADLINE_EXCEEDED names the ranks that did not come; PERMISSION_DENIED another token or cluster;
// ALREADY_EXISTS a rank that came twice; INVALID_ARGUMENT another number of ranks. Thread-compatible.
class Bootstrap : public Exchange {
 public:
  static absl::StatusOr<std::unique_ptr<Bootstrap>> Join(const BootstrapOptions& options);

  absl::StatusOr<std::vector<std::string>> AllGather(std::string_view name, std::string mine,
                                                     absl::Duration timeout) override;
  void set_cancel(std::shared_ptr<FileDescriptor> cancel) { options_.cancel = std::move(cancel); }

 private:
  explicit Bootstrap(const BootstrapOptions& options) : options_(options) {}
  absl::Status AcceptAll(absl::Time deadline);
  absl::Status Greet(FileDescriptor socket, absl::Time deadline);
  absl::Status ConnectToRoot(absl::Time deadline);

  int cancel_fd() const { return options_.cancel ? options_.cancel->get() : -1; }

  BootstrapOptions options_;
  // Rank 0: by rank, [0] unused. Others: [0] only.
  std::vector<FileDescriptor> connections_;
};

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_BOOTSTRAP_H_
