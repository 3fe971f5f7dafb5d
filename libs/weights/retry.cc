#include "libs/weights/retry.h"

#include <algorithm>
#include <random>

#include "absl/strings/str_format.h"
#include "libs/base/clock.h"

namespace moerl::weights {
namespace {

uint64_t Random64() {
  thread_local std::mt19937_64 random{(uint64_t{std::random_device{}()} << 32) | std::random_device{}()};
  return random();
}

}  // namespace

absl::Duration Backoff::Next() {
  const absl::Duration pause = next_ * (1.0 + 0.5 * static_cast<double>(Random64() % 1024) / 1024);
  next_ = std::min(2 * next_, kLast);
  return pause;
}

bool IsWorthRetrying(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) || absl::IsResourceExhausted(status) ||
         absl::IsDataLoss(status) || absl::IsCancelled(status);
}

absl::Status Retry(absl::Duration patience, const std::function<absl::Status()>& attempt) {
  Clock* const clock = SystemClock();
  const absl::Duration give_up_at = clock->Now() + patience;
  Backoff backoff;
  while (true) {
    absl::Status status = attempt();
    if (status.ok() || !IsWorthRetrying(status)) return status;
    const absl::Duration pause = backoff.Next();
    if (clock->Now() + pause >= give_up_at) return status;
    clock->SleepFor(pause);
  }
}

std::string NewRequestId() { return absl::StrFormat("%016x%016x", Random64(), Random64()); }

}  // namespace moerl::weights
