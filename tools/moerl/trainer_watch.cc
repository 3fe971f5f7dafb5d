#include "tools/moerl/trainer_watch.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <algorithm>

namespace moerl {
namespace {

constexpr absl::Duration kInterval = absl::Seconds(1);
constexpr absl::Duration kStatusTimeout = absl::Seconds(5);
// What a panel or a line of progress can show.
constexpr size_t kRowsMax = 4096;

}  // namespace

TrainerWatch::TrainerWatch(std::shared_ptr<grpc::Channel> channel, uint64_t after_step)
    : stub_(v1::TrainerService::NewStub(std::move(channel))), after_step_(after_step) {
  row_thread_ = std::thread([this] { FollowRows(); });
  status_thread_ = std::thread([this] { FollowStatus(); });
}

TrainerWatch::~TrainerWatch() {
  {
    absl::MutexLock lock(&mutex_);
    is_stopping_ = true;
    if (stream_ != nullptr) stream_->TryCancel();
  }
  row_thread_.join();
  status_thread_.join();
}

std::optional<v1::GetStatusResponse> TrainerWatch::Status() const {
  absl::MutexLock lock(&mutex_);
  return status_;
}

std::vector<v1::StepMetrics> TrainerWatch::Rows() const {
  absl::MutexLock lock(&mutex_);
  return rows_;
}

bool TrainerWatch::IsStopping() const {
  absl::MutexLock lock(&mutex_);
  return is_stopping_;
}

void TrainerWatch::SleepUnlessStopping() {
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithTimeout(absl::Condition(&is_stopping_), kInterval);
}

// A trainer that resumed sends the steps after its checkpoint again.
void TrainerWatch::AddRow(const v1::StepMetrics& row) {
  absl::MutexLock lock(&mutex_);
  while (!rows_.empty() && rows_.back().step() >= row.step()) rows_.pop_back();
  if (rows_.size() == kRowsMax) rows_.erase(rows_.begin(), rows_.begin() + kRowsMax / 2);
  rows_.push_back(row);
}

void TrainerWatch::FollowRows() {
  while (!IsStopping()) {
    grpc::ClientContext context;
    v1::WatchMetricsRequest request;
    {
      absl::MutexLock lock(&mutex_);
      if (is_stopping_) return;
      stream_ = &context;
      request.set_after_step(rows_.empty() ? after_step_ : rows_.back().step());
    }
    const auto reader = stub_->WatchMetrics(&context, request);
    v1::WatchMetricsResponse response;
    while (reader->Read(&response)) AddRow(response.row());
    reader->Finish();
    {
      absl::MutexLock lock(&mutex_);
      stream_ = nullptr;
    }
    SleepUnlessStopping();
  }
}

void TrainerWatch::FollowStatus() {
  while (!IsStopping()) {
    const std::unique_ptr<grpc::ClientContext> context = rpc::CallContext(kStatusTimeout);
    context->set_wait_for_ready(false);
    v1::GetStatusResponse response;
    const bool is_there = stub_->GetStatus(context.get(), {}, &response).ok();
    {
      absl::MutexLock lock(&mutex_);
      status_.reset();
      if (is_there) status_ = std::move(response);
    }
    SleepUnlessStopping();
  }
}

}  // namespace moerl
