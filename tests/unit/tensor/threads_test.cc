#include "libs/tensor/threads.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace moerl::tensor {
namespace {

TEST(ThreadPool, RunsEveryTaskOnceInEveryRound) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 2000; ++round) {
      const int tasks = round % 17;
      std::vector<std::atomic<int>> runs(tasks);
      pool.Run(tasks, [&](int64_t task, int thread) {
        EXPECT_LT(thread, threads);
        ++runs[task];
      });
      for (const auto& count : runs) ASSERT_EQ(count, 1);
    }
  }
}

TEST(ThreadPool, WakesWorkersThatSleep) {
  ThreadPool pool(2);
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::atomic<int> inside{0};
    // Both tasks must be running at once for either to end.
    pool.Run(2, [&](int64_t, int) {
      ++inside;
      while (inside < 2) std::this_thread::yield();
    });
    EXPECT_EQ(inside, 2);
  }
}

}  // namespace
}  // namespace moerl::tensor
