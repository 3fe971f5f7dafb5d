#include "libs/environment/task.h"

#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "libs/rl/char_tokenizer.h"

namespace moerl {
namespace {

using ::testing::HasSubstr;

v1::Config ConfigOf(const std::string& task) {
  v1::Config config;
  config.mutable_task()->set_name(task);
  config.mutable_task()->set_seed(1);
  return config;
}

TEST(Task, SyntheticTaskBringsPromptsTokensAndJudge) {
  const v1::Config config = ConfigOf("reverse");
  const absl::StatusOr<TaskPrompts> prompts = LoadPrompts(config.task());
  ASSERT_TRUE(prompts.ok()) << prompts.status();
  const rl::Prompt prompt = *prompts->train->Get(0);
  EXPECT_FALSE(prompt.token_ids.empty());
  EXPECT_NE(prompts->held_out->Get(0)->token_ids, prompt.token_ids);
  EXPECT_THAT(StopTokens(config, {}), ::testing::ElementsAre(rl::CharTokenizer::kEndOfSequence));

  const absl::StatusOr<std::shared_ptr<rl::Environment>> environment = MakeEnvironment(config, {});
  ASSERT_TRUE(environment.ok()) << environment.status();
  std::vector<int32_t> answer = *(*LoadCodec(config.task()))->Encode(prompt.solution);
  answer.push_back(rl::CharTokenizer::kEndOfSequence);
  const std::vector<rl::Turn> transcript = {{.token_ids = prompt.token_ids}, {.token_ids = answer, .is_action = true}};
  const absl::StatusOr<rl::StepOutcome> outcome = (*environment)->Step("e", prompt.task, 0, transcript);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(1.0, std::get<rl::Judgement>(*outcome).reward);
}

TEST(Task, ModelEndsItsCompletionsWhereTheConfigurationNamesNoStop) {
  const std::vector<int64_t> ends = {2, 9};
  v1::Config config = ConfigOf("mine");
  EXPECT_THAT(StopTokens(config, ends), ::testing::ElementsAre(2, 9));
  config.mutable_rollout()->mutable_sampling()->add_stop_sequences()->add_token_ids(5);
  EXPECT_THAT(StopTokens(config, ends), ::testing::IsEmpty());
  config.mutable_rollout()->mutable_sampling()->add_stop_token_ids(7);
  EXPECT_THAT(StopTokens(config, ends), ::testing::ElementsAre(7));
}

TEST(Task, FileWithoutNameIsRefusedNamingTheField) {
  EXPECT_THAT(std::string(LoadPrompts(ConfigOf("mine").task()).status().message()), HasSubstr("task.prompt_file"));
}

TEST(Task, BadLineOfAPromptFileIsNamed) {
  v1::Config config = ConfigOf("gsm8k");
  const std::string path = ::testing::TempDir() + "prompts.jsonl";
  std::ofstream(path) << "{\"token_ids\": [1, 2], \"answer\": \"3\"}\n{\"token_ids\": 7}\n";
  config.mutable_task()->set_prompt_file(path);
  const std::string message(LoadPrompts(config.task()).status().message());
  EXPECT_THAT(message, HasSubstr(path));
  EXPECT_THAT(message, HasSubstr("2"));
}

TEST(Task, UnknownTaskWithoutAServedEnvironmentIsRefused) {
  const absl::Status status = MakeEnvironment(ConfigOf("mine"), {}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("environment.address"));
}

TEST(Task, CheckerOfTextNeedsATokenizer) {
  v1::Config config = ConfigOf("gsm8k");
  EXPECT_THAT(std::string(MakeEnvironment(config, {}).status().message()), HasSubstr("task.tokenizer_file"));
}

}  // namespace
}  // namespace moerl
