#ifndef MOERL_SERVICES_WEIGHT_SYNC_DISK_POOL_H_
#define MOERL_SERVICES_WEIGHT_SYNC_DISK_POOL_H_

#include <deque>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace moerl {

// A few threads that wait for the disk so that reactors need not. Tasks start in the order given. Thread-safe.
class DiskPool {
 public:
  DiskPool(int num_threads, size_t queue_max) : queue_max_(queue_max) {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { Work(); });
  }

  // Runs what is queued, then ends.
  ~DiskPool() {
    {
      absl::MutexLock lock(&mutex_);
      is_ending_ = true;
    }
    for (std::thread& thread : threads_) thread.join();
  }

  // False, and nothing queued, when `queue_max` tasks wait already.
  bool Submit(std::function<void()> task) {
    absl::MutexLock lock(&mutex_);
    if (queue_.size() >= queue_max_) return false;
    queue_.push_back(std::move(task));
    return true;
  }

 private:
  void Work() {
    while (true) {
      std::function<void()> task;
      {
        absl::MutexLock lock(&mutex_);
        mutex_.Await(absl::Condition(this, &DiskPool::HasNews));
        if (queue_.empty()) return;
        task = std::move(queue_.front());
        queue_.pop_front();
      }
      task();
    }
  }

  bool HasNews() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !queue_.empty() || is_ending_; }

  const size_t queue_max_;
  absl::Mutex mutex_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mutex_);
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;  // last: they use the above
};

}  // namespace moerl

#endif  // MOERL_SERVICES_WEIGHT_SYNC_DISK_POOL_H_
