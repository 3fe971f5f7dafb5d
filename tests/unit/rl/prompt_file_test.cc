#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "libs/rl/prompt_source.h"

namespace moerl::rl {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(PromptFile, ReadsTokenIdsOrTextWithAnswerAndTask) {
  const auto source = ParsePromptFile(
      "{\"task\": \"gsm8k\", \"answer\": \"72\", \"token_ids\": [5, 0, 151935]}\n"
      "\n"
      "{\"answer\": {\"lines\": [1]}, \"text\": \"How many?\", \"solution\": \"#### 72\"}\r\n",
      "countdown", 1);
  ASSERT_TRUE(source.ok()) << source.status();
  ASSERT_EQ((*source)->size(), 2u);
  Prompt first = *(*source)->Get(0), second = *(*source)->Get(1);
  if (first.token_ids.empty()) std::swap(first, second);
  EXPECT_EQ(first.task.name, "gsm8k");
  EXPECT_EQ(first.task.payload, "72");
  EXPECT_THAT(first.token_ids, ElementsAre(5, 0, 151935));
  EXPECT_EQ(second.task.name, "countdown");
  EXPECT_EQ(second.task.payload, "{\"lines\":[1]}");
  EXPECT_EQ(second.text, "How many?");
  EXPECT_EQ(second.solution, "#### 72");
}

std::string Rows(int count) {
  std::string content;
  for (int i = 0; i < count; ++i) absl::StrAppend(&content, "{\"answer\":\"", i, "\",\"token_ids\":[", i, "]}\n");
  return content;
}

TEST(PromptFile, EveryPassHasEveryPromptOnceInItsOwnOrder) {
  for (int count : {1, 2, 3, 7, 64, 100}) {
    const auto source = *ParsePromptFile(Rows(count), "gsm8k", 5);
    std::vector<std::vector<int32_t>> passes;
    for (uint64_t pass = 0; pass < 3; ++pass) {
      std::vector<int32_t> order;
      for (uint64_t i = 0; i < source->size(); ++i)
        order.push_back(source->Get(pass * source->size() + i)->token_ids[0]);
      EXPECT_EQ(std::set<int32_t>(order.begin(), order.end()).size(), static_cast<size_t>(count));
      passes.push_back(order);
    }
    if (count >= 7) {
      EXPECT_NE(passes[0], passes[1]);
      EXPECT_NE(passes[1], passes[2]);
      EXPECT_FALSE(std::is_sorted(passes[0].begin(), passes[0].end()));
    }
  }
}

TEST(PromptFile, AChangedFileIsNoticedOnResume) {
  const auto source = *ParsePromptFile(Rows(10), "gsm8k", 5);
  const std::string fingerprint = source->fingerprint();
  EXPECT_EQ(fingerprint.size(), 32u);
  EXPECT_TRUE(CheckFingerprint(*source, fingerprint).ok());
  EXPECT_TRUE(CheckFingerprint(**ParsePromptFile(Rows(10), "gsm8k", 5), fingerprint).ok());
  std::string changed = Rows(10);
  changed[changed.find("3")] = '4';
  for (const auto& other : {*ParsePromptFile(changed, "gsm8k", 5), *ParsePromptFile(Rows(11), "gsm8k", 5),
                            *ParsePromptFile(Rows(10), "gsm8k", 6), *ParsePromptFile(Rows(10), "countdown", 5)}) {
    const absl::Status status = CheckFingerprint(*other, fingerprint);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("the checkpoint was made with"));
  }
}

TEST(PromptFile, NamesTheLineAndTheFieldOfAnError) {
  const std::string good = "{\"answer\":\"1\",\"token_ids\":[1]}\n";
  const std::pair<const char*, const char*> cases[] = {
      {"nonsense", "line 2: not a JSON object"},
      {"[1]", "line 2: not a JSON object"},
      {"{\"answer\":\"1\",\"token_ids\":[1]", "line 2: not a JSON object"},
      {"{\"token_ids\":[1]}", "line 2: answer is missing"},
      {"{\"answer\":\"1\"}", "line 2: neither token_ids nor text"},
      {"{\"answer\":\"1\",\"token_ids\":[]}", "line 2: token_ids is not a list"},
      {"{\"answer\":\"1\",\"token_ids\":\"1\"}", "line 2: token_ids is not a list"},
      {"{\"answer\":\"1\",\"token_ids\":[1,-1]}", "line 2: token_ids has -1"},
      {"{\"answer\":\"1\",\"token_ids\":[1.5]}", "line 2: token_ids has 1.5"},
      {"{\"answer\":\"1\",\"token_ids\":[99999999999999999999]}", "line 2: token_ids has "},
      {"{\"answer\":\"1\",\"text\":1}", "line 2: text is not a string"},
      {"{\"answer\":\"1\",\"token_ids\":[1],\"anwser\":2}", "line 2: unknown field \"anwser\""},
  };
  for (const auto& [row, words] : cases) {
    const absl::Status status = ParsePromptFile(good + row + "\n" + good, "gsm8k", 1).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << row;
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
  }
  EXPECT_THAT(std::string(ParsePromptFile(good, "", 1).status().message()), HasSubstr("line 1: task is missing"));
  EXPECT_THAT(std::string(ParsePromptFile(" \n\n", "gsm8k", 1).status().message()), HasSubstr("no prompts"));
}

}  // namespace
}  // namespace moerl::rl
