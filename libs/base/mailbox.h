#ifndef MOERL_LIBS_BASE_MAILBOX_H_
#define MOERL_LIBS_BASE_MAILBOX_H_

#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace moerl {

// How other threads speak to the one that owns some state: they post what is to be done, it takes all that has
// come and does it, in the order of posting. Bounded by its senders, each of which states its own bound (one
// unread message a stream, credits, admitted calls). Thread-safe.
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

}  // namespace moerl

#endif  // MOERL_LIBS_BASE_MAILBOX_H_
