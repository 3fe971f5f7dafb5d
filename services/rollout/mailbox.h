#ifndef MOERL_SERVICES_ROLLOUT_MAILBOX_H_
#define MOERL_SERVICES_ROLLOUT_MAILBOX_H_

#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace moerl::rollout {

// How other threads speak to the scheduler: they post, it takes all that has come. Thread-safe.
//
// Bounded by its senders: Generate calls are admitted against rollout.queue_max, a Work stream has one message
// unread at a time, a sample has one verifier call, a weight follower one version.
class Mailbox {
 public:
  using Mail = absl::AnyInvocable<void()>;

  void Post(Mail mail) {
    absl::MutexLock lock(&mutex_);
    mail_.push_back(std::move(mail));
  }

  // What has come, oldest first. With nothing there waits until something comes, at most for `timeout`.
  std::vector<Mail> Take(absl::Duration timeout) {
    absl::MutexLock lock(&mutex_);
    const auto has_mail = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !mail_.empty(); };
    mutex_.AwaitWithTimeout(absl::Condition(&has_mail), timeout);
    return std::exchange(mail_, {});
  }

 private:
  absl::Mutex mutex_;
  std::vector<Mail> mail_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace moerl::rollout

#endif  // MOERL_SERVICES_ROLLOUT_MAILBOX_H_
