#ifndef MOERL_LIBS_WEIGHTS_RETRY_H_
#define MOERL_LIBS_WEIGHTS_RETRY_H_

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace moerl::weights {

// The pauses between attempts: from 50 ms, doubling to 2 s, each stretched by up to a half so that a fleet does not
// come back as one. Thread-compatible.
class Backoff {
 public:
  absl::Duration Next();
  void Reset() { next_ = kFirst; }

 private:
  static constexpr absl::Duration kFirst = absl::Milliseconds(50);
  static constexpr absl::Duration kLast = absl::Seconds(2);
  absl::Duration next_ = kFirst;
};

// Whether the same request may succeed later: the server is away, busy, or full.
bool IsWorthRetrying(const absl::Status& status);

// Runs `attempt` until it succeeds, fails for good, or `patience` is over; returns its last status.
absl::Status Retry(absl::Duration patience, const std::function<absl::Status()>& attempt);

// 32 random hexadecimal digits, for request_id.
std::string NewRequestId();

}  // namespace moerl::weights

#endif  // MOERL_LIBS_WEIGHTS_RETRY_H_
