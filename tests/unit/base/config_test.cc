#include "libs/base/config.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <ctime>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "libs/base/env.h"
#include "moerl/v1/config.pb.h"

namespace moerl {
namespace {

using testing::ElementsAre;
using testing::StartsWith;

constexpr char kMinimal[] = "name: run\ntask: {name: reverse}\n";

std::string ErrorOf(absl::string_view text, const std::vector<std::string>& overrides = {}) {
  v1::Config config;
  return std::string(ParseConfig(text, "f.yaml", overrides, config).message());
}

v1::Config Parse(absl::string_view text, const std::vector<std::string>& overrides = {}) {
  v1::Config config;
  const absl::Status status = ParseConfig(text, "f.yaml", overrides, config);
  EXPECT_TRUE(status.ok()) << status;
  return config;
}

TEST(Config, ReadsEveryKindOfField) {
  const v1::Config config = Parse(R"(
name: a.run
model:
  compute: fp32
  init: {num_experts: 16, tie_word_embeddings: true}
task: {name: reverse, seed: 18446744073709551615}
algorithm: {clip_low: 0.25, aggregation: seq_mean_token_sum}
rollout:
  sampling:
    max_new_tokens: 8
    stop_token_ids: [3, 5]
    stop_sequences:
      - token_ids: [7, 8]
)");
  EXPECT_EQ(config.name(), "a.run");
  EXPECT_EQ(config.model().compute(), v1::COMPUTE_FP32);
  EXPECT_EQ(config.model().init().num_experts(), 16u);
  EXPECT_TRUE(config.model().init().tie_word_embeddings());
  EXPECT_EQ(config.task().seed(), ~uint64_t{0});
  EXPECT_EQ(config.algorithm().clip_low(), 0.25);
  EXPECT_EQ(config.algorithm().aggregation(), v1::AGGREGATION_SEQ_MEAN_TOKEN_SUM);
  EXPECT_THAT(config.rollout().sampling().stop_token_ids(), ElementsAre(3, 5));
  EXPECT_THAT(config.rollout().sampling().stop_sequences(0).token_ids(), ElementsAre(7, 8));
}

TEST(Config, FillsDefaultsInTopSectionsAndInThoseGiven) {
  const v1::Config config = Parse(kMinimal);
  EXPECT_EQ(config.trainer().num_steps(), 100u);
  EXPECT_EQ(config.weight_sync().address(), "127.0.0.1:7200");
  EXPECT_EQ(config.model().compute(), v1::COMPUTE_BF16);
  EXPECT_TRUE(config.trainer().require_equal_numerics());
  EXPECT_FALSE(config.model().has_init());
  EXPECT_FALSE(config.server().has_tls());
  EXPECT_EQ(Parse(absl::StrCat(kMinimal, "model: {init: {}}")).model().init().hidden_size(), 64u);
}

TEST(Config, AGivenZeroIsNotReplacedByTheDefault) {
  EXPECT_EQ(Parse(kMinimal).task().pass_reward(), 1.0);
  EXPECT_EQ(Parse("name: run\ntask: {name: reverse, pass_reward: 0}").task().pass_reward(), 0.0);
}

TEST(Config, OverridesWinInOrderAndMakeSections) {
  const v1::Config config = Parse(absl::StrCat(kMinimal, "trainer: {num_ranks: 1}"),
                                  {"trainer.num_ranks=2", "trainer.num_ranks=3", "rollout.sampling.max_new_tokens=9",
                                   "rollout.sampling.stop_token_ids=[1, 2]", "name=other=x"});
  EXPECT_EQ(config.trainer().num_ranks(), 3u);
  EXPECT_EQ(config.rollout().sampling().max_new_tokens(), 9u);
  EXPECT_EQ(config.rollout().sampling().stop_token_ids_size(), 2);
  EXPECT_EQ(config.name(), "other=x");
}

TEST(Config, AnOverrideIsNamedInItsError) {
  EXPECT_EQ(ErrorOf(kMinimal, {"trainer.num_ranks=many"}),
            "config: --set trainer.num_ranks=many: trainer.num_ranks: expected an integer from 1 to 4096, found many");
  EXPECT_EQ(ErrorOf(kMinimal, {"trainer"}),
            "config: --set trainer: expected section.field=value, found no field or no '='");
  EXPECT_THAT(ErrorOf(kMinimal, {"trainer.rang=1"}),
              StartsWith("config: --set trainer.rang=1: trainer.rang: unknown field, did you mean rank? legal: "));
  EXPECT_EQ(ErrorOf(kMinimal, {"name.x=1"}),
            "config: --set name.x=1: expected a section before .x, found a single value at f.yaml:1");
  EXPECT_THAT(ErrorOf(kMinimal, {"trainer.num_ranks=[1"}), StartsWith("config: --set trainer.num_ranks=[1: "));
}

TEST(Config, TakesTheEnvironmentWhereTheSchemaAllows) {
  setenv("MOERL_TEST_IP", "10.0.0.7", 1);
  setenv("MOERL_TEST_RANK", "3", 1);
  const v1::Config config =
      Parse(absl::StrCat(kMinimal, "trainer: {address: '${MOERL_TEST_IP}:7100', rank: '${MOERL_TEST_RANK}'}"));
  EXPECT_EQ(config.trainer().address(), "10.0.0.7:7100");
  EXPECT_EQ(config.trainer().rank(), 3u);
}

TEST(Config, WhatFormatConfigWritesReadsBackEqual) {
  v1::Config config = Parse(kMinimal, {"rollout.sampling={max_new_tokens: 8, stop_sequences: [{token_ids: [1, 2]}]}",
                                       "task.pass_reward=0", "trainer.learning_rate=1.25e-5", "server.tls={}"});
  config.mutable_task()->set_prompt_file("a \"b\"\\\n\tc: #d");
  config.mutable_trainer()->set_epsilon(1.0 / 3);
  const std::string text = FormatConfig(config);
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(config, Parse(text))) << text;
}

// Each file under config/ starts with the line it must give, or the start of it.
TEST(Config, EveryBrokenFileGivesItsOneLine) {
  const std::string dir = absl::StrCat(MOERL_SOURCE_DIR, "/tests/unit/base/config");
  const auto names = PosixEnv()->List(dir).value();
  EXPECT_GE(names.size(), 20u);
  for (const std::string& name : names) {
    const std::string path = JoinPath(dir, name);
    const std::string text = PosixEnv()->ReadFile(path).value();
    absl::string_view expected = absl::string_view(text).substr(0, text.find('\n'));
    ASSERT_TRUE(absl::ConsumePrefix(&expected, "# expect: ")) << name;
    v1::Config config;
    const absl::Status status = LoadConfig(path, {}, config);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_THAT(std::string(status.message()), StartsWith(absl::StrReplaceAll(expected, {{"{file}", path}})));
    EXPECT_FALSE(absl::StrContains(status.message(), '\n')) << name;
  }
}

TEST(Config, AMissingFileIsNamed) {
  v1::Config config;
  const absl::Status status = LoadConfig("/nowhere/run.yaml", {}, config);
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), StartsWith("config: open /nowhere/run.yaml"));
}

TEST(Config, AFileTooLargeIsRefusedUnread) {
  const std::string path = absl::StrCat(testing::TempDir(), "/config_test.", getpid(), ".yaml");
  ASSERT_TRUE(PosixEnv()->WriteFileDurably(path, std::string(10 << 20, '[')).ok());
  v1::Config config;
  EXPECT_EQ(LoadConfig(path, {}, config), absl::InvalidArgumentError(absl::StrCat(
                                              "config: ", path, ": at most 1048576 bytes expected, found 10485760")));
  EXPECT_TRUE(PosixEnv()->Remove(path).ok());
}

std::string Repeat(absl::string_view unit, size_t bytes) {
  std::string out;
  while (out.size() < bytes) absl::StrAppend(&out, unit);
  return out;
}

// Of this thread: the machine may be busy with something else.
absl::Duration CpuTime() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return absl::DurationFromTimespec(now);
}

TEST(Config, HugeFilesAreRefusedWithinASecond) {
  // Sanitizers make it some twenty times slower.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  const size_t within = 32 << 10;
#else
  const size_t within = 1000 << 10;
#endif
  const std::vector<std::string> texts = {
      Repeat("[", 10 << 20),
      Repeat("[", within),
      Repeat("{a: ", within),
      Repeat("- ", within),
      Repeat("? ", within),
      Repeat("x", within),
      Repeat("\"", within),
      Repeat("a: b\n", within),
      Repeat("- a\n", within),
      "a: " + Repeat("&a ", within),
      "a: " + Repeat("!t ", within),
      "a: [" + Repeat("1, ", within),
      "a: {" + Repeat("{}: ", within),
      "a: |\n" + Repeat(" \n", within),
      Repeat("#\n", within),
      Repeat("\n", within),
      Repeat("--- \n", within),
      Repeat("%YAML 1.2\n", within),
      "a: \"" + Repeat("\\x41", within),
      "a: " + Repeat("b c\n ", within),
  };
  for (const std::string& text : texts) {
    const absl::Duration start = CpuTime();
    const std::string error = ErrorOf(text);
    EXPECT_THAT(error, StartsWith("config: f.yaml")) << text.substr(0, 20);
    EXPECT_FALSE(absl::StrContains(error, '\n')) << error;
    EXPECT_LT(error.size(), 1000u) << error;
    EXPECT_LT(CpuTime() - start, absl::Seconds(1)) << text.substr(0, 20);
  }
}

// Reads every default of the schema: a bad one stops the program (see ReadAbsent).
void ReadDefaults(const google::protobuf::Descriptor& descriptor, const std::string& path) {
  for (int i = 0; i < descriptor.field_count(); ++i) {
    const auto& field = *descriptor.field(i);
    if (field.is_repeated() || field.message_type() == nullptr) continue;
    const std::string child = path.empty() ? field.name() : absl::StrCat(path, ".", field.name());
    const std::string error = ErrorOf(kMinimal, {absl::StrCat(child, "={}"), "task.name=x"});
    EXPECT_TRUE(error.empty() || absl::StrContains(error, "must be given")) << error;
    ReadDefaults(*field.message_type(), child);
  }
}

TEST(Config, EveryDefaultOfTheSchemaIsLegal) { ReadDefaults(*v1::Config::descriptor(), ""); }

TEST(Config, ComparisonNamesWhatDiffersAndWhatIsFixed) {
  const v1::Config was =
      Parse("name: r\ntask: {name: sort}\nrollout: {sampling: {max_new_tokens: 8, stop_token_ids: [3]}}\n");
  const v1::Config now = Parse(
      "name: r\ntask: {name: reverse}\nmodel: {init: {}}\nalgorithm: {kl_coefficient: 0.5}\n"
      "trainer: {num_steps: 7}\nrollout: {sampling: {max_new_tokens: 8, stop_token_ids: [3, 5]}}\n");
  std::vector<std::string> lines;
  for (const ConfigChange& change : CompareConfigs(was, now)) {
    lines.push_back(absl::StrCat(change.path, ": ", change.was, " / ", change.now, change.is_fixed ? " fixed" : ""));
  }
  EXPECT_THAT(lines, ElementsAre("model.init: not given / given fixed", "task.name: \"sort\" / \"reverse\" fixed",
                                 "algorithm.kl_coefficient: not given / 0.5 fixed", "trainer.num_steps: 100 / 7",
                                 "rollout.sampling.stop_token_ids: [3] / [3, 5] fixed"));
  EXPECT_TRUE(CompareConfigs(was, was).empty());
}

}  // namespace
}  // namespace moerl
