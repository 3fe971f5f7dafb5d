// That absl::Mutex protects, as ThreadSanitizer sees it (see tsan_mutex.cc): with it these tests must not report a
// race, and without the lock they must.
#include "absl/synchronization/mutex.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace moerl {
namespace {

TEST(Mutex, OrdersWhatItsHoldersDo) {
  absl::Mutex mutex;
  std::vector<int> values;
  const auto add = [&] {
    for (int i = 0; i < 1000; ++i) {
      absl::MutexLock lock(&mutex);
      values.push_back(i);
    }
  };
  std::thread first(add), second(add);
  first.join();
  second.join();
  EXPECT_EQ(values.size(), 2000u);
}

TEST(Mutex, ConditionsAreEvaluatedUnderIt) {
  absl::Mutex mutex;
  std::vector<int> values;
  int num_taken = 0;
  std::thread consumer([&] {
    while (num_taken < 1000) {
      absl::MutexLock lock(&mutex);
      const auto has_values = [&] { return !values.empty(); };
      mutex.Await(absl::Condition(&has_values));
      num_taken += static_cast<int>(values.size());
      values.clear();
    }
  });
  for (int i = 0; i < 1000; ++i) {
    absl::MutexLock lock(&mutex);
    values.push_back(i);
  }
  consumer.join();
  EXPECT_EQ(num_taken, 1000);
}

TEST(Mutex, CondVarsWakeWithIt) {
  absl::Mutex mutex;
  absl::CondVar changed;
  int turn = 0;
  const auto play = [&](int me) {
    for (int i = 0; i < 100; ++i) {
      absl::MutexLock lock(&mutex);
      while (turn % 2 != me) changed.Wait(&mutex);
      ++turn;
      changed.SignalAll();
    }
  };
  std::thread first(play, 0), second(play, 1);
  first.join();
  second.join();
  EXPECT_EQ(turn, 200);
}

}  // namespace
}  // namespace moerl
