#ifndef MOERL_SERVICES_ROLLOUT_JUDGE_H_
#define MOERL_SERVICES_ROLLOUT_JUDGE_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "libs/rl/environment.h"

namespace moerl::rollout {

// What to ask an environment about one sample: the turns from `first_turn` to the last action of the transcript.
// Earlier turns are asked again when a sample is continued that another server began: Step is idempotent.
struct JudgeJob {
  std::string episode_id;
  rl::Task task;
  std::vector<rl::Turn> transcript;  // prompt, then actions and observations alternating; an action at the end
  uint32_t first_turn = 0;
  rl::OutcomeLimits limits;
};

// The judgement of the last turn with the rewards of all turns asked about added up, or the first failure.
using JudgeResult = std::variant<rl::Judgement, rl::Failure>;

// Threads that call the environment, so that nothing else waits for it. An environment that is UNAVAILABLE is asked
// again, as long as it takes, with a line in the log. Thread-safe.
class Judge {
 public:
  using Done = absl::AnyInvocable<void(JudgeResult)>;

  Judge(std::shared_ptr<rl::Environment> environment, int num_threads);
  // Waits for calls in flight, drops what is queued.
  ~Judge();

  // `done` runs on a thread of this object, unless the judge is destroyed first. The queue is bounded by the samples
  // that run: each has one job at a time.
  void Submit(JudgeJob job, Done done);

 private:
  struct Entry {
    JudgeJob job;
    Done done;
    absl::Duration submitted;  // of the monotonic clock
  };

  void Work();
  // Nothing when the judge is being destroyed.
  std::optional<JudgeResult> Ask(const JudgeJob& job);
  std::optional<rl::StepOutcome> AskTurn(const JudgeJob& job, uint32_t turn, std::span<const rl::Turn> transcript);
  bool SleepUnlessStopping(absl::Duration duration);

  const std::shared_ptr<rl::Environment> environment_;
  absl::Mutex mutex_;
  std::deque<Entry> queue_ ABSL_GUARDED_BY(mutex_);
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace moerl::rollout

#endif  // MOERL_SERVICES_ROLLOUT_JUDGE_H_
