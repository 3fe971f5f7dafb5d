#ifndef MOERL_LIBS_TENSOR_THREADS_H_
#define MOERL_LIBS_TENSOR_THREADS_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"

namespace moerl::tensor {

// A fixed number of threads that share out numbered tasks. Which thread runs a task is not determined, so a
// task may depend on its number only: results then never depend on the number of threads.
class ThreadPool {
 public:
  // The calling thread is one of `num_threads`.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  static constexpr int64_t kMaxTasks = (1 << 20) - 1;

  // Runs task(i, thread) for i in [0, num_tasks), num_tasks <= kMaxTasks, 0 <= thread < num_threads(), and returns when
  // all are done. One caller at a time; tasks must not call Run.
  void Run(int64_t num_tasks, absl::FunctionRef<void(int64_t task, int thread)> task);

 private:
  void Work(int thread);
  bool TakeAndRun(int thread);

  std::vector<std::thread> workers_;
  // The current round as one word: round number (24 bits), number of tasks (20), next task (20). A thread owns
  // a task once it has advanced `next` in the word it read, so a late thread can never touch another round.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> done_{0};
  const absl::FunctionRef<void(int64_t, int)>* task_ = nullptr;  // stable while a task of its round is unfinished
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;  // only for sleeping
  std::condition_variable wake_;
};

}  // namespace moerl::tensor

#endif  // MOERL_LIBS_TENSOR_THREADS_H_
