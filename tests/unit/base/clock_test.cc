#include "libs/base/clock.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace moerl {
namespace {

TEST(Clock, SystemClockMovesForward) {
  const absl::Duration before = SystemClock()->Now();
  SystemClock()->SleepFor(absl::Milliseconds(2));
  EXPECT_GE(SystemClock()->Now() - before, absl::Milliseconds(2));
}

TEST(FakeClock, MovesOnlyWhenTold) {
  FakeClock clock;
  EXPECT_EQ(clock.Now(), absl::ZeroDuration());
  clock.Advance(absl::Seconds(3));
  EXPECT_EQ(clock.Now(), absl::Seconds(3));
  EXPECT_EQ(clock.WallNow(), absl::UnixEpoch() + absl::Seconds(3));
}

TEST(FakeClock, WallJumpsLeaveTheMonotonicTimeAlone) {
  FakeClock clock;
  clock.Advance(absl::Seconds(10));
  clock.JumpWall(-absl::Hours(1));
  EXPECT_EQ(clock.Now(), absl::Seconds(10));
  EXPECT_EQ(clock.WallNow(), absl::UnixEpoch() + absl::Seconds(10) - absl::Hours(1));
}

TEST(FakeClock, WakesASleeperOnlyWhenItsTimeHasCome) {
  FakeClock clock;
  std::atomic<bool> has_woken{false};
  absl::Duration slept;
  std::thread sleeper([&] {
    const absl::Duration before = clock.Now();
    clock.SleepFor(absl::Seconds(5));
    slept = clock.Now() - before;
    has_woken = true;
  });
  // The sleeper may start late: it counts from then.
  while (!has_woken) {
    clock.Advance(absl::Seconds(1));
    std::this_thread::yield();
  }
  sleeper.join();
  EXPECT_GE(slept, absl::Seconds(5));
}

}  // namespace
}  // namespace moerl
