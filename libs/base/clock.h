#ifndef MOERL_LIBS_BASE_CLOCK_H_
#define MOERL_LIBS_BASE_CLOCK_H_

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace moerl {

// The time a component acts by. Injected, so that a test can move it. Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;

  // Time since an arbitrary start that is fixed for the life of the process. Never goes back and is
  // untouched by changes of the wall clock: every lease, deadline and back-off is judged by it.
  virtual absl::Duration Now() const = 0;

  // The wall clock, for people and file names only. Jumps.
  virtual absl::Time WallNow() const = 0;

  // Returns after `duration`, at once when it is zero or negative.
  virtual void SleepFor(absl::Duration duration) = 0;
};

// CLOCK_MONOTONIC and the system's wall clock. Never destroyed.
Clock* SystemClock();

// A clock that moves only when told to. Starts at zero; its wall clock at the Unix epoch.
class FakeClock : public Clock {
 public:
  absl::Duration Now() const override;
  absl::Time WallNow() const override;

  // Blocks until others have advanced the clock by `duration`.
  void SleepFor(absl::Duration duration) override;

  // Moves both clocks by `duration` (not negative) and wakes the sleepers whose time has come.
  void Advance(absl::Duration duration);

  // Moves the wall clock alone, either way: nothing may depend on it.
  void JumpWall(absl::Duration duration);

 private:
  mutable absl::Mutex mutex_;
  absl::Duration now_ ABSL_GUARDED_BY(mutex_) = absl::ZeroDuration();
  absl::Duration wall_offset_ ABSL_GUARDED_BY(mutex_) = absl::ZeroDuration();
};

}  // namespace moerl

#endif  // MOERL_LIBS_BASE_CLOCK_H_
