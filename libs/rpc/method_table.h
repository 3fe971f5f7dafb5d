#ifndef MOERL_LIBS_RPC_METHOD_TABLE_H_
#define MOERL_LIBS_RPC_METHOD_TABLE_H_

#include <initializer_list>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "libs/rpc/security.h"

namespace moerl::rpc {

enum class MethodKind {
  kUnary,         // one answer: it has a deadline, and may be tried again
  kStream,        // either side streams; who calls it resumes it
  kSubscription,  // a stream without an end of its own, which a drain does not wait for
};

// What the frame knows of one method: who may call it, and of which kind it is.
struct MethodRule {
  absl::string_view method;  // "/moerl.v1.RolloutService/Generate"
  unsigned roles;            // bit 1 << Role for each role that may call it
  MethodKind kind;
};

// The one table, sorted by method. A method of moerl.v1 that is missing in it fails a test.
absl::Span<const MethodRule> MethodTable();

// The row of `method`, or nullptr.
const MethodRule* FindMethod(absl::string_view method);

// grpc.health.v1 and server reflection: open to every role, not counted as work, logged at debug.
bool IsFrameMethod(absl::string_view method);

}  // namespace moerl::rpc

#endif  // MOERL_LIBS_RPC_METHOD_TABLE_H_
