#ifndef MOERL_LIBS_BASE_FAILPOINT_H_
#define MOERL_LIBS_BASE_FAILPOINT_H_

#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

// Places where a test makes a process fail.
//
//   MOERL_RETURN_IF_ERROR(MOERL_FAILPOINT("weight_sync.before_commit"));
//
// MOERL_FAILPOINT(name) is an absl::Status: OK unless a test has armed `name`. Where the enclosing
// function returns no status, write (void)MOERL_FAILPOINT(name): it can crash or sleep there.
// In builds without MOERL_FAILPOINTS it is absl::OkStatus() and the name is not in the binary; with
// it, an unarmed failpoint costs one relaxed load.
#ifdef MOERL_FAILPOINTS
#define MOERL_FAILPOINT(name)                                                   \
  (::moerl::internal::num_armed_failpoints.load(std::memory_order_relaxed) == 0 \
       ? ::absl::OkStatus()                                                     \
       : ::moerl::internal::HitFailpoint(name))
#else
#define MOERL_FAILPOINT(name) ::absl::OkStatus()
#endif

namespace moerl {

// Arms the failpoints of `spec` in addition to those armed already. Thread-safe.
//
//   spec   = point *(";" point)
//   point  = name "=" action ["@" N]         the Nth hit only (from 1); without it every hit
//   action = "crash"                         SIGKILL to this process: nothing is flushed
//          | "error"                         the macro yields UNAVAILABLE naming the failpoint
//          | "sleep(" duration ")"           as in sleep(50ms), then OK
//
// A program arms what its configuration says in server.failpoints. Errors: INVALID_ARGUMENT naming the
// bad point, nothing of `spec` is armed then; FAILED_PRECONDITION in a build without failpoints.
absl::Status ArmFailpoints(absl::string_view spec);

// Disarms all and forgets their hits.
void DisarmFailpoints();

// How often `name` was hit since it was armed; 0 when it is not armed.
int64_t FailpointHits(absl::string_view name);

namespace internal {
extern std::atomic<int> num_armed_failpoints;
absl::Status HitFailpoint(absl::string_view name);
}  // namespace internal

}  // namespace moerl

#endif  // MOERL_LIBS_BASE_FAILPOINT_H_
