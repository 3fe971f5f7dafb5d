#ifndef MOERL_TOOLS_MOERL_TRAINER_WATCH_H_
#define MOERL_TOOLS_MOERL_TRAINER_WATCH_H_

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "libs/rpc/channel.h"
#include "moerl/v1/trainer.grpc.pb.h"

namespace moerl {

// Follows a trainer: its status, asked once a second, and the rows of its metrics as they come. Goes on when the
// trainer is away and comes back; rows that a resume cut off are replaced. Thread-safe.
class TrainerWatch {
 public:
  // Rows of steps above `after_step` are collected.
  TrainerWatch(std::shared_ptr<grpc::Channel> channel, uint64_t after_step);
  ~TrainerWatch();

  // The last status known; absent while the trainer has not answered yet or is away.
  std::optional<v1::GetStatusResponse> Status() const;

  // The latest rows, up to 4,096, in the order of their steps.
  std::vector<v1::StepMetrics> Rows() const;

 private:
  void FollowRows();
  void FollowStatus();
  void AddRow(const v1::StepMetrics& row);
  bool IsStopping() const;
  void SleepUnlessStopping();

  const std::unique_ptr<v1::TrainerService::Stub> stub_;
  mutable absl::Mutex mutex_;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::ClientContext* stream_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::optional<v1::GetStatusResponse> status_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::StepMetrics> rows_ ABSL_GUARDED_BY(mutex_);
  const uint64_t after_step_;
  std::thread row_thread_;
  std::thread status_thread_;
};

}  // namespace moerl

#endif  // MOERL_TOOLS_MOERL_TRAINER_WATCH_H_
