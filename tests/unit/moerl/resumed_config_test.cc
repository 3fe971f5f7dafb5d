#include "tools/moerl/resumed_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "libs/base/config.h"

namespace moerl {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr char kFile[] = "name: sort\ntask: {name: sort}\nmodel: {init: {}}\n";
constexpr char kDirectory[] = "/runs/sort";

ResumeRequest Given(const std::string& file, const std::vector<std::string>& overrides) {
  ResumeRequest request = {.file = "sort.yaml", .overrides = overrides, .config = {}};
  const absl::Status status = ParseConfig(file, request.file, overrides, request.config);
  EXPECT_TRUE(status.ok()) << status;
  request.config.mutable_trainer()->set_run_directory(kDirectory);
  return request;
}

// config.yaml as `moerl run` leaves it at the start with these overrides.
std::string Started(const std::vector<std::string>& overrides) {
  v1::Config config = Given(kFile, overrides).config;
  config.mutable_fabric()->set_token_file(TokenFile(config.trainer().run_directory()));
  return FormatConfig(config);
}

TEST(ResumedConfig, IsTheOneTheRunWasStartedWith) {
  const auto resumed = ResumeConfig(Started({"algorithm.name=ppo", "trainer.num_steps=10"}), Given(kFile, {}));
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_EQ(resumed->config.algorithm().name(), "ppo");
  EXPECT_EQ(resumed->config.trainer().num_steps(), 10u);
  EXPECT_THAT(resumed->notices, ElementsAre("sort.yaml has algorithm.name: \"grpo\"; the run goes on with \"ppo\"",
                                            "sort.yaml has trainer.num_steps: 100; the run goes on with 10 "
                                            "(--set 'trainer.num_steps=100' changes it)"));
}

TEST(ResumedConfig, SaysNothingWhereNothingDiffers) {
  const std::vector<std::string> overrides = {"algorithm.name=ppo", "trainer.num_ranks=2"};
  const auto resumed = ResumeConfig(Started(overrides), Given(kFile, overrides));
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_THAT(resumed->notices, IsEmpty());
  EXPECT_THAT(CompareConfigs(resumed->config, Given(kFile, overrides).config), IsEmpty());
}

TEST(ResumedConfig, TakesAHarmlessOverrideAloud) {
  const auto resumed = ResumeConfig(
      Started({}), Given(kFile, {"trainer.num_steps=300", "trainer.num_ranks=2", "trainer.learning_rate=0.01"}));
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_EQ(resumed->config.trainer().num_steps(), 300u);
  EXPECT_THAT(resumed->notices, ElementsAre("trainer.num_ranks: was 1, now 2", "trainer.num_steps: was 100, now 300",
                                            "trainer.learning_rate: was 1e-06, now 0.01"));
}

TEST(ResumedConfig, RefusesOverridesThatMakeItOtherTraining) {
  const std::string stored = Started({"algorithm.name=ppo"});
  const auto resumed = ResumeConfig(stored, Given(kFile, {"algorithm.name=grpo", "trainer.prompts_per_step=8"}));
  EXPECT_EQ(resumed.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(resumed.status().message()),
              AllOf(HasSubstr("algorithm.name was \"ppo\", now \"grpo\"; trainer.prompts_per_step was 32, now 8"),
                    HasSubstr("leave that --set out to continue"), HasSubstr("--set name=NAME, without --resume")));
  for (const char* other :
       {"model.compute=fp32", "model.init.num_experts=4", "task.seed=2", "algorithm.kl_coefficient=0.1",
        "trainer.samples_per_prompt=2", "trainer.seed=2", "rollout.sampling.max_new_tokens=5", "name=other"}) {
    EXPECT_FALSE(ResumeConfig(stored, Given(kFile, {other})).ok()) << other;
  }
}

TEST(ResumedConfig, TakesAModelAndPromptsThatWereMoved) {
  const std::vector<std::string> moved = {"model.path=/b/model", "task.prompt_file=/b/prompts.jsonl"};
  const auto resumed = ResumeConfig(Started({}), Given(kFile, moved));
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_EQ(resumed->config.task().prompt_file(), "/b/prompts.jsonl");
  EXPECT_EQ(resumed->notices.size(), 2u);
}

TEST(ResumedConfig, OffersOnlyWhatCanBeTyped) {
  const auto resumed = ResumeConfig(Started({"server.tls.ca_file=/ca"}), Given(kFile, {}));
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_THAT(resumed->notices, ElementsAre("sort.yaml has server.tls: not given; the run goes on with given"));
}

TEST(ResumedConfig, FollowsADirectoryThatWasMoved) {
  ResumeRequest request = Given(kFile, {});
  request.config.mutable_trainer()->set_run_directory("/elsewhere");
  const auto resumed = ResumeConfig(Started({}), request);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_EQ(resumed->config.trainer().run_directory(), "/elsewhere");
  EXPECT_EQ(resumed->config.fabric().token_file(), "");
  EXPECT_THAT(resumed->notices, IsEmpty());
}

TEST(ResumedConfig, ThatWasSpoiledIsRefusedWithItsLine) {
  const auto resumed = ResumeConfig("name: sort\ntask: {name: sort}\nmodle: {}\n", Given(kFile, {}));
  EXPECT_THAT(std::string(resumed.status().message()), HasSubstr("/runs/sort/config.yaml:3: modle: unknown field"));
}

}  // namespace
}  // namespace moerl
