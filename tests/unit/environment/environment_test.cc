#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "absl/time/clock.h"
#include "libs/environment/environment_client.h"
#include "libs/environment/environment_service.h"
#include "libs/environment/task.h"
#include "libs/rl/char_tokenizer.h"
#include "libs/rpc/server.h"

namespace moerl {
namespace {

// Answers as the task's name says.
class ScriptedEnvironment final : public rl::Environment {
 public:
  absl::StatusOr<rl::Episode> Reset(const rl::Task& task, std::string_view text) override {
    if (task.name == "busy") return absl::ResourceExhaustedError("Concurrent RPC limit exceeded!");
    if (task.name == "ends") return absl::CancelledError("CANCELLED");
    return rl::Episode{task.name + "/" + std::string(text), {1, 2, 3}};
  }

  absl::StatusOr<rl::StepOutcome> Step(std::string_view episode_id, const rl::Task& task, uint32_t turn_index,
                                       std::span<const rl::Turn> transcript) override {
    if (task.name == "hangs") absl::SleepFor(absl::Seconds(1));
    if (task.name == "restarts") return absl::UnavailableError("restarting");
    if (task.name == "busy") return absl::ResourceExhaustedError("Concurrent RPC limit exceeded!");
    if (task.name == "ends") return absl::CancelledError("CANCELLED");
    if (task.name == "long") return absl::ResourceExhaustedError("Received message larger than max (9 vs. 8)");
    if (task.name == "fails") return rl::Failure{rl::FailureReason::kVerifierError, "division by zero"};
    seen_episode = episode_id;
    seen = {transcript.begin(), transcript.end()};
    return rl::Judgement{{7, 8}, 0.25, turn_index == 1};
  }

  std::string seen_episode;
  std::vector<rl::Turn> seen;
};

class EnvironmentTest : public testing::Test {
 protected:
  void SetUp() override {
    service_ = MakeEnvironmentService(scripted_);
    server_ = rpc::Server::Start({.address = "127.0.0.1:0"}, {service_.get()}).value();
    client_ = MakeEnvironmentClient(rpc::MakeChannel(server_->address(), {.attempts_max = 1}).value(),
                                    absl::Milliseconds(300));
  }

  rl::StepOutcome Step(const std::string& task, uint32_t turn_index = 0) {
    const std::vector<rl::Turn> transcript = {{{1, 2}, false, false}, {{3}, true, true}};
    return client_->Step("episode", {task, "payload"}, turn_index, transcript).value();
  }

  std::shared_ptr<ScriptedEnvironment> scripted_ = std::make_shared<ScriptedEnvironment>();
  std::unique_ptr<grpc::Service> service_;
  std::unique_ptr<rpc::Server> server_;
  std::unique_ptr<rl::Environment> client_;
};

TEST_F(EnvironmentTest, CarriesPromptTranscriptAndJudgement) {
  const auto episode = client_->Reset({"name", ""}, "text");
  ASSERT_TRUE(episode.ok()) << episode.status();
  EXPECT_EQ(episode->id, "name/text");
  EXPECT_EQ(episode->prompt, (std::vector<int32_t>{1, 2, 3}));

  const rl::StepOutcome outcome = Step("name", 1);
  const auto& judgement = std::get<rl::Judgement>(outcome);
  EXPECT_EQ(judgement.observation, (std::vector<int32_t>{7, 8}));
  EXPECT_EQ(judgement.reward, 0.25);
  EXPECT_TRUE(judgement.is_done);
  ASSERT_EQ(scripted_->seen.size(), 2u);
  EXPECT_EQ(scripted_->seen_episode, "episode");
  EXPECT_FALSE(scripted_->seen[0].is_action);
  EXPECT_TRUE(scripted_->seen[1].is_action);
  EXPECT_TRUE(scripted_->seen[1].is_truncated);
  EXPECT_EQ(scripted_->seen[1].token_ids, (std::vector<int32_t>{3}));
}

TEST_F(EnvironmentTest, MakesAVerifierThatHangsATypedFailure) {
  const rl::StepOutcome outcome = Step("hangs");
  EXPECT_EQ(std::get<rl::Failure>(outcome).reason, rl::FailureReason::kVerifierTimeout);
}

TEST_F(EnvironmentTest, MakesAVerifierThatFailsATypedFailureWithItsMessage) {
  const rl::StepOutcome outcome = Step("fails");
  EXPECT_EQ(std::get<rl::Failure>(outcome).reason, rl::FailureReason::kVerifierError);
  EXPECT_NE(std::get<rl::Failure>(outcome).detail.find("division by zero"), std::string::npos);
}

TEST_F(EnvironmentTest, SaysThatAnEnvironmentWhichIsDownMayBeAskedAgain) {
  const std::vector<rl::Turn> transcript = {{{1}, false, false}};
  EXPECT_TRUE(absl::IsUnavailable(client_->Step("e", {"restarts", ""}, 0, transcript).status()));
  server_->Shutdown(absl::Now());
  EXPECT_TRUE(absl::IsUnavailable(client_->Step("e", {"name", ""}, 0, transcript).status()));
}

TEST_F(EnvironmentTest, ABusyServerIsAskedAgainAndDropsNoGroup) {
  const std::vector<rl::Turn> transcript = {{{1}, false, false}};
  EXPECT_TRUE(absl::IsUnavailable(client_->Step("e", {"busy", ""}, 0, transcript).status()));
  EXPECT_TRUE(absl::IsUnavailable(client_->Reset({"busy", ""}, "text").status()));
  EXPECT_EQ(std::get<rl::Failure>(Step("long")).reason, rl::FailureReason::kVerifierError);
}

TEST_F(EnvironmentTest, ACallThatAnEndingServerCancelsIsAskedAgainAndDropsNoGroup) {
  const std::vector<rl::Turn> transcript = {{{1}, false, false}};
  EXPECT_TRUE(absl::IsUnavailable(client_->Step("e", {"ends", ""}, 0, transcript).status()));
  EXPECT_TRUE(absl::IsUnavailable(client_->Reset({"ends", ""}, "text").status()));
}

TEST(Task, JudgesABuiltinTaskInProcess) {
  v1::Config config;
  config.mutable_task()->set_name("reverse");
  const auto environment = MakeEnvironment(config, {});
  ASSERT_TRUE(environment.ok()) << environment.status();
  const rl::CharTokenizer codec;
  std::vector<int32_t> answer = codec.Encode("cba").value();
  answer.push_back(rl::CharTokenizer::kEndOfSequence);
  const std::vector<rl::Turn> transcript = {{codec.Encode("abc=").value(), false, false}, {answer, true, false}};
  const rl::StepOutcome outcome = (*environment)->Step("e", {"reverse", "cba"}, 0, transcript).value();
  EXPECT_EQ(std::get<rl::Judgement>(outcome).reward, 1.0);
}

}  // namespace
}  // namespace moerl
