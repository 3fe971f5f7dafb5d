#include "libs/fabric/epoch_state.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <utility>

namespace moerl::fabric {

EpochState::EpochState(Membership membership)
    : membership_(std::move(membership)),
      ended_(std::make_shared<FileDescriptor>(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))),
      losses_(membership_.size()) {}

void EpochState::Lose(int rank, std::string reason) {
  absl::MutexLock lock(&mutex_);
  if (losses_[rank].empty()) losses_[rank] = std::move(reason);
  is_marked_ = true;
}

void EpochState::End(std::string reason) {
  {
    absl::MutexLock lock(&mutex_);
    if (!end_.empty()) return;
    end_ = std::move(reason);
    is_marked_ = true;
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(ended_->get(), &one, sizeof(one));
  Wake();
}

void EpochState::Wake() {
  absl::MutexLock lock(&mutex_);
  if (page_) page_->Ring();
}

void EpochState::set_page(std::shared_ptr<OwnPage> page) {
  absl::MutexLock lock(&mutex_);
  page_ = std::move(page);
}

PeerState EpochState::state(int rank, std::string* reason) const {
  if (detector_ && detector_->state(rank, reason) == PeerState::kLost) return PeerState::kLost;
  if (!is_marked_) return PeerState::kAlive;
  absl::MutexLock lock(&mutex_);
  if (losses_[rank].empty()) return PeerState::kAlive;
  if (reason != nullptr) *reason = losses_[rank];
  return PeerState::kLost;
}

bool EpochState::HasEnded(std::string* reason) const {
  if (!is_marked_) return false;
  absl::MutexLock lock(&mutex_);
  if (reason != nullptr) *reason = end_;
  return !end_.empty();
}

}  // namespace moerl::fabric
