#ifndef MOERL_LIBS_RPC_STATUS_H_
#define MOERL_LIBS_RPC_STATUS_H_

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace grpc {
class Status;
}

// absl::Status inside, gRPC status with google.rpc details on the wire. The details of a status travel
// as its absl payloads, keyed by type URL, and survive both conversions. All functions are pure.
namespace moerl::rpc {

// One bad field of a request: its path ("sampling.temperature", "prompts[3].tokens[7]") and what is legal.
struct FieldViolation {
  std::string field;
  std::string description;
};

// Why, in words a program can switch on (google.rpc.ErrorInfo, domain "moerl.v1").
struct ErrorReason {
  std::string reason;  // UPPER_SNAKE_CASE, as "STALE_EPOCH"
  std::map<std::string, std::string> metadata;
};

// INVALID_ARGUMENT whose message names every violation and which carries google.rpc.BadRequest.
absl::Status InvalidFields(std::vector<FieldViolation> violations);
absl::Status InvalidField(absl::string_view field, absl::string_view description);

// `status` with google.rpc.RetryInfo: try again not before `delay`.
absl::Status WithRetryDelay(absl::Status status, absl::Duration delay);
absl::Status WithReason(absl::Status status, const ErrorReason& reason);

// The details a status carries; empty when it carries none.
std::vector<FieldViolation> FieldViolations(const absl::Status& status);
std::optional<absl::Duration> RetryDelay(const absl::Status& status);
std::optional<ErrorReason> Reason(const absl::Status& status);

// Codes map one to one. A message is cut at 1,024 bytes and details that exceed 6 KiB together are left
// out, because gRPC refuses more than 8 KiB of metadata.
grpc::Status ToGrpc(const absl::Status& status);

// `what` ("weight_sync at 127.0.0.1:7200: CommitVersion") goes before the message when given. gRPC itself sends none
// with UNIMPLEMENTED: the code's name is the message then.
absl::Status FromGrpc(const grpc::Status& status, absl::string_view what = {});

}  // namespace moerl::rpc

#endif  // MOERL_LIBS_RPC_STATUS_H_
