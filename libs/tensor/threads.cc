#include "libs/tensor/threads.h"

#include <chrono>

#include "libs/base/check.h"

namespace moerl::tensor {
namespace {

constexpr int kTaskBits = 20;
constexpr uint64_t kTaskMask = (uint64_t{1} << kTaskBits) - 1;
constexpr std::chrono::microseconds kSpin{20};  // between the kernels of one layer; longer waits sleep

uint64_t NextTask(uint64_t ticket) { return ticket & kTaskMask; }
uint64_t NumTasks(uint64_t ticket) { return (ticket >> kTaskBits) & kTaskMask; }
bool IsExhausted(uint64_t ticket) { return NextTask(ticket) >= NumTasks(ticket); }

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Whether `ready` became true within kSpin.
template <typename Ready>
bool SpinUntil(Ready ready) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      Pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  MOERL_CHECK(num_threads >= 1);
  for (int thread = 1; thread < num_threads; ++thread) workers_.emplace_back([this, thread] { Work(thread); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::Run(int64_t num_tasks, absl::FunctionRef<void(int64_t, int)> task) {
  MOERL_CHECK(num_tasks <= kMaxTasks);
  if (workers_.empty() || num_tasks <= 1) {
    for (int64_t i = 0; i < num_tasks; ++i) task(i, 0);
    return;
  }
  task_ = &task;
  done_ = 0;
  const uint64_t round = (ticket_.load() >> (2 * kTaskBits)) + 1;
  ticket_ = round << (2 * kTaskBits) | static_cast<uint64_t>(num_tasks) << kTaskBits;
  if (sleepers_ > 0) {
    std::lock_guard lock(mutex_);
    wake_.notify_all();
  }
  while (TakeAndRun(0)) {
  }
  const auto all_done = [&] { return done_.load(std::memory_order_acquire) == num_tasks; };
  while (!SpinUntil(all_done)) std::this_thread::yield();
}

bool ThreadPool::TakeAndRun(int thread) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  do {
    if (IsExhausted(ticket)) return false;
  } while (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel));
  (*task_)(static_cast<int64_t>(NextTask(ticket)), thread);
  done_.fetch_add(1, std::memory_order_release);
  return true;
}

void ThreadPool::Work(int thread) {
  const auto has_work = [this] { return stop_ || !IsExhausted(ticket_); };
  while (!stop_) {
    if (TakeAndRun(thread) || SpinUntil(has_work)) continue;
    std::unique_lock lock(mutex_);
    ++sleepers_;  // before the last look, so that Run either sees a sleeper or is seen
    wake_.wait(lock, has_work);
    --sleepers_;
  }
}

}  // namespace moerl::tensor
