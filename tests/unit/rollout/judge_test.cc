#include "services/rollout/judge.h"

#include <gtest/gtest.h>

#include <atomic>
#include <limits>

#include "absl/synchronization/notification.h"

namespace moerl::rollout {
namespace {

// Rewards turn t with 10^-t; "busy" is UNAVAILABLE twice; "odd" has a reward that is no number.
class CountingEnvironment final : public rl::Environment {
 public:
  absl::StatusOr<rl::Episode> Reset(const rl::Task&, std::string_view) override { return rl::Episode{}; }
  absl::StatusOr<rl::StepOutcome> Step(std::string_view, const rl::Task& task, uint32_t turn,
                                       std::span<const rl::Turn> transcript) override {
    ++num_calls;
    if (task.name == "down" || (task.name == "busy" && num_calls <= 2)) return absl::UnavailableError("busy");
    if (task.name == "odd") return rl::Judgement{{}, std::numeric_limits<double>::quiet_NaN(), true};
    if (task.name == "far") return rl::Judgement{{99}, 0, false};
    last_transcript_size = transcript.size();
    return rl::Judgement{{5}, turn == 0 ? 1.0 : 0.1, turn == 1};
  }
  std::atomic<int> num_calls = 0;
  std::atomic<size_t> last_transcript_size = 0;
};

class JudgeTest : public testing::Test {
 protected:
  JudgeResult Ask(const std::string& task, uint32_t first_turn = 0) {
    JudgeJob job;
    job.task.name = task;
    job.transcript = {{{1}, false, false}, {{2}, true, false}, {{3}, false, false}, {{4}, true, true}};
    job.first_turn = first_turn;
    job.limits = {0, 2, 10};
    JudgeResult result;
    absl::Notification done;
    judge_.Submit(std::move(job), [&](JudgeResult answer) {
      result = std::move(answer);
      done.Notify();
    });
    done.WaitForNotification();
    return result;
  }
  std::shared_ptr<CountingEnvironment> environment_ = std::make_shared<CountingEnvironment>();
  Judge judge_{environment_, 1};
};

TEST_F(JudgeTest, AddsUpTheRewardsOfTheTurnsAskedAbout) {
  EXPECT_DOUBLE_EQ(std::get<rl::Judgement>(Ask("two turns")).reward, 1.1);
  EXPECT_EQ(environment_->num_calls, 2);
  EXPECT_DOUBLE_EQ(std::get<rl::Judgement>(Ask("two turns", 1)).reward, 0.1);
  EXPECT_EQ(environment_->num_calls, 3);
  EXPECT_EQ(environment_->last_transcript_size, 4u);
}

TEST_F(JudgeTest, AsksAnUnavailableEnvironmentAgain) {
  EXPECT_DOUBLE_EQ(std::get<rl::Judgement>(Ask("busy")).reward, 1.1);
  EXPECT_EQ(environment_->num_calls, 4);
}

TEST_F(JudgeTest, NeverInventsARewardForABadAnswer) {
  EXPECT_EQ(std::get<rl::Failure>(Ask("odd")).reason, rl::FailureReason::kRewardOutOfRange);
  EXPECT_EQ(std::get<rl::Failure>(Ask("far")).reason, rl::FailureReason::kBadObservation);
}

TEST_F(JudgeTest, EndsWhileAnEnvironmentIsDown) {
  JudgeJob job;
  job.task.name = "down";
  job.transcript = {{{1}, false, false}, {{2}, true, false}};
  auto judge = std::make_unique<Judge>(environment_, 2);
  judge->Submit(std::move(job), [](JudgeResult) { FAIL() << "there is no answer"; });
  absl::SleepFor(absl::Milliseconds(50));
  const absl::Time start = absl::Now();
  judge.reset();
  EXPECT_LT(absl::Now() - start, absl::Seconds(1));
}

}  // namespace
}  // namespace moerl::rollout
