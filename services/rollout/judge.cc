#include "services/rollout/judge.h"

#include <algorithm>
#include <utility>

#include "libs/base/clock.h"
#include "libs/base/log.h"
#include "services/rollout/rollout_metrics.h"

namespace moerl::rollout {
namespace {

constexpr absl::Duration kRetryFirst = absl::Milliseconds(100);
constexpr absl::Duration kRetryMax = absl::Seconds(5);

// Index one past the action of turn `turn`: what an environment sees when it judges that turn.
size_t EndOfTurn(std::span<const rl::Turn> transcript, uint32_t turn) {
  uint32_t actions = 0;
  for (size_t i = 0; i < transcript.size(); ++i) {
    if (transcript[i].is_action && actions++ == turn) return i + 1;
  }
  return transcript.size();
}

uint32_t NumActions(std::span<const rl::Turn> transcript) {
  return static_cast<uint32_t>(std::ranges::count_if(transcript, &rl::Turn::is_action));
}

}  // namespace

Judge::Judge(std::shared_ptr<rl::Environment> environment, int num_threads) : environment_(std::move(environment)) {
  for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { Work(); });
}

Judge::~Judge() {
  {
    absl::MutexLock lock(&mutex_);
    is_stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

void Judge::Submit(JudgeJob job, Done done) {
  absl::MutexLock lock(&mutex_);
  queue_.push_back({std::move(job), std::move(done), SystemClock()->Now()});
}

void Judge::Work() {
  while (true) {
    Entry entry;
    {
      absl::MutexLock lock(&mutex_);
      const auto has_work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return is_stopping_ || !queue_.empty(); };
      mutex_.Await(absl::Condition(&has_work));
      if (is_stopping_) return;
      entry = std::move(queue_.front());
      queue_.pop_front();
    }
    std::optional<JudgeResult> result = Ask(entry.job);
    if (!result) continue;  // stopping
    Metrics().judge_seconds.Observe(absl::ToDoubleSeconds(SystemClock()->Now() - entry.submitted));
    if (std::holds_alternative<rl::Failure>(*result)) Metrics().judge_failures_total.Add();
    entry.done(*std::move(result));
  }
}

std::optional<JudgeResult> Judge::Ask(const JudgeJob& job) {
  rl::Judgement last;
  double reward = 0;
  const uint32_t num_turns = NumActions(job.transcript);
  for (uint32_t turn = job.first_turn; turn < num_turns; ++turn) {
    const std::span<const rl::Turn> seen(job.transcript.data(), EndOfTurn(job.transcript, turn));
    std::optional<rl::StepOutcome> outcome = AskTurn(job, turn, seen);
    if (!outcome) return std::nullopt;
    rl::StepOutcome checked = rl::CheckOutcome(*std::move(outcome), job.limits);
    if (const auto* failure = std::get_if<rl::Failure>(&checked)) return *failure;
    last = std::get<rl::Judgement>(std::move(checked));
    reward += last.reward;
  }
  last.reward = reward;
  return last;
}

std::optional<rl::StepOutcome> Judge::AskTurn(const JudgeJob& job, uint32_t turn,
                                              std::span<const rl::Turn> transcript) {
  for (absl::Duration delay = kRetryFirst;; delay = std::min(2 * delay, kRetryMax)) {
    absl::StatusOr<rl::StepOutcome> outcome = environment_->Step(job.episode_id, job.task, turn, transcript);
    if (outcome.ok()) return *std::move(outcome);
    const std::string reason(outcome.status().message());
    if (!absl::IsUnavailable(outcome.status())) return rl::Failure{rl::FailureReason::kVerifierError, reason};
    LogWarning("environment unavailable, asking again", {{"episode", job.episode_id}, {"reason", reason}});
    if (!SleepUnlessStopping(delay)) return std::nullopt;
  }
}

bool Judge::SleepUnlessStopping(absl::Duration duration) {
  absl::MutexLock lock(&mutex_);
  return !mutex_.AwaitWithTimeout(absl::Condition(&is_stopping_), duration);
}

}  // namespace moerl::rollout
