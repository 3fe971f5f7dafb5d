#include "libs/base/clock.h"

#include <ctime>

#include "absl/time/clock.h"
#include "libs/base/check.h"

namespace moerl {
namespace {

class MonotonicClock final : public Clock {
 public:
  absl::Duration Now() const override {
    timespec now;
    MOERL_CHECK(clock_gettime(CLOCK_MONOTONIC, &now) == 0);
    return absl::DurationFromTimespec(now);
  }
  absl::Time WallNow() const override { return absl::Now(); }
  void SleepFor(absl::Duration duration) override { absl::SleepFor(duration); }
};

}  // namespace

Clock* SystemClock() {
  static Clock* clock = new MonotonicClock;
  return clock;
}

absl::Duration FakeClock::Now() const {
  absl::MutexLock lock(&mutex_);
  return now_;
}

absl::Time FakeClock::WallNow() const {
  absl::MutexLock lock(&mutex_);
  return absl::UnixEpoch() + now_ + wall_offset_;
}

void FakeClock::SleepFor(absl::Duration duration) {
  absl::MutexLock lock(&mutex_);
  const absl::Duration until = now_ + duration;
  const auto is_due = [this, until]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return now_ >= until; };
  mutex_.Await(absl::Condition(&is_due));
}

void FakeClock::Advance(absl::Duration duration) {
  MOERL_CHECK(duration >= absl::ZeroDuration());
  absl::MutexLock lock(&mutex_);
  now_ += duration;
}

void FakeClock::JumpWall(absl::Duration duration) {
  absl::MutexLock lock(&mutex_);
  wall_offset_ += duration;
}

}  // namespace moerl
