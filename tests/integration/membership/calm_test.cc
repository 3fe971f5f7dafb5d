// Slow is not dead: no false alarm while every core is busy with other programs, nor while a rank computes; and ranks
// that wait cost next to nothing. --seeds=N: busy seconds.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "absl/time/clock.h"
#include "tests/integration/membership/ranks.h"
#include "tests/time_scale.h"
#include "tests/unit/ep/seeds.h"

namespace moerl {
namespace {

void ExpectUndisturbed(Ranks& ranks, int num_ranks, int64_t epoch) {
  for (int rank = 0; rank < num_ranks; ++rank) {
    EXPECT_EQ(ranks[rank].epoch, epoch) << ranks[rank].error;
    EXPECT_TRUE(ranks[rank].state == RankState::kRunning) << ranks[rank].error;
  }
}

TEST(Calm, NoFalseAlarmWhileEveryCoreIsBusy) {
  const int busy_s = static_cast<int>(ep::Seeds(20).last);
  Ranks ranks({"net", {0, 0, 1}, {}});
  ASSERT_TRUE(ranks.AwaitRunning({0, 1, 2}, 3, absl::Seconds(30)));
  const int64_t epoch = ranks[0].epoch;
  std::vector<pid_t> burners;
  for (unsigned i = 0; i < 2 * std::thread::hardware_concurrency(); ++i) {
    const pid_t pid = fork();
    if (pid == 0) {
      for (std::atomic<uint64_t> spin = 0;; spin.fetch_add(1, std::memory_order_relaxed)) {
      }
    }
    burners.push_back(pid);
  }
  const absl::Time end = absl::Now() + absl::Seconds(busy_s);
  while (absl::Now() < end && ranks[0].epoch == epoch) absl::SleepFor(absl::Milliseconds(100));
  ExpectUndisturbed(ranks, 3, epoch);
  for (const pid_t pid : burners) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  EXPECT_EQ(ranks.Finish(), 0);
}

TEST(Calm, NoFalseAlarmWhileOneRankComputes) {
  Ranks ranks({"net", {0, 0, 1}, {}});
  ASSERT_TRUE(ranks.AwaitRunning({0, 1, 2}, 3, absl::Seconds(30)));
  const int64_t epoch = ranks[0].epoch;
  ASSERT_TRUE(ranks.Halt(2, {0, 1, 2}, Phase::kDispatch));  // spins
  absl::SleepFor(absl::Seconds(5));
  ExpectUndisturbed(ranks, 3, epoch);
  const int64_t before = ranks[0].num_operations;
  ranks[2].may_go = true;
  EXPECT_TRUE(ranks.Await([&] { return ranks[0].num_operations > before + 1; }, absl::Seconds(5)));
  ExpectUndisturbed(ranks, 3, epoch);
  EXPECT_EQ(ranks.Finish(), 0);
}

// In the cheapest of six seconds, since what other programs do to the caches is charged to us.
TEST(Calm, WaitingCostsLessThanAPercentOfACore) {
  Ranks ranks({"net", {0, 0, 1}, {}});
  ASSERT_TRUE(ranks.AwaitRunning({0, 1, 2}, 3, absl::Seconds(30)));
  ranks.board().is_idle = true;
  absl::SleepFor(absl::Seconds(1));
  double percent[3] = {100, 100, 100};
  for (int second = 0; second < 6; ++second) {
    int64_t before[3];
    for (int rank = 0; rank < 3; ++rank) before[rank] = ranks[rank].cpu_ns;
    absl::SleepFor(absl::Seconds(1));
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_GT(before[rank], 0);
      percent[rank] = std::min(percent[rank], static_cast<double>(ranks[rank].cpu_ns - before[rank]) * 1e-7);
    }
  }
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_LT(percent[rank], 1.0 * TimeScale()) << "rank " << rank;
    std::printf("{\"bench\":\"membership\",\"rank\":%d,\"idle_cpu_percent\":%.2f}\n", rank, percent[rank]);
  }
  EXPECT_EQ(ranks.Finish(), 0);
}

}  // namespace
}  // namespace moerl
