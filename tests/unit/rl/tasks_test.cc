#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "libs/rl/char_tokenizer.h"
#include "libs/rl/checker.h"
#include "libs/rl/environment.h"
#include "libs/rl/prompt_source.h"

namespace moerl::rl {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

double Reward(std::string_view task, std::string_view payload, std::string_view completion, bool is_ended = true) {
  const absl::StatusOr<double> reward = (*FindChecker(task))->check(payload, completion, is_ended);
  EXPECT_TRUE(reward.ok()) << reward.status();
  return reward.value_or(-1.0);
}

std::unique_ptr<PromptSource> Source(std::string_view task, uint64_t seed, Split split) {
  return *MakeSyntheticSource(task, seed, split);
}

TEST(Tasks, MakeTheSamePromptsForTheSameSeedAndIndexEverywhere) {
  // Written down once: a change of these changes every run's data.
  EXPECT_EQ(Source("reverse", 1, Split::kTrain)->Get(0)->text, "gjnehafi=");
  EXPECT_EQ(Source("sort", 1, Split::kTrain)->Get(0)->text, "569521=");
  EXPECT_EQ(Source("countdown", 1, Split::kTrain)->Get(0)->text, "6,2,7:5=");
  for (const char* task : {"reverse", "sort", "countdown"}) {
    const auto a = Source(task, 7, Split::kTrain), b = Source(task, 7, Split::kTrain),
               c = Source(task, 8, Split::kTrain);
    int different = 0;
    for (uint64_t index : {0u, 1u, 5u, 1000u, 999u}) {
      EXPECT_EQ(a->Get(index)->text, b->Get(index)->text);
      different += a->Get(index)->text != c->Get(index)->text;
    }
    EXPECT_GE(different, 4) << task;
    EXPECT_EQ(a->fingerprint(), b->fingerprint());
    EXPECT_NE(a->fingerprint(), c->fingerprint());
    EXPECT_NE(a->fingerprint(), Source(task, 7, Split::kHeldOut)->fingerprint());
  }
}

TEST(Tasks, HeldOutProblemsAreNeverTrainedOnByAnySeed) {
  for (const char* task : {"reverse", "sort", "countdown"}) {
    std::set<std::string> held_out, warm_start, train;
    for (uint64_t seed = 1; seed <= 4; ++seed) {
      for (uint64_t index = 0; index < 1500; ++index) {
        held_out.insert(Source(task, seed, Split::kHeldOut)->Get(index)->text);
        warm_start.insert(Source(task, seed, Split::kWarmStart)->Get(index)->text);
        train.insert(Source(task, seed, Split::kTrain)->Get(index)->text);
      }
    }
    EXPECT_GT(held_out.size(), 300u) << task;
    std::set<std::string> others = train;
    others.insert(warm_start.begin(), warm_start.end());
    EXPECT_EQ(others.size(), train.size() + warm_start.size()) << task;
    for (const std::string& prompt : held_out) EXPECT_EQ(others.count(prompt), 0u) << task << " " << prompt;
  }
}

TEST(Tasks, OwnSolutionsPassTheirChecker) {
  for (const char* task : {"reverse", "sort", "countdown"}) {
    for (Split split : {Split::kTrain, Split::kWarmStart, Split::kHeldOut}) {
      const auto source = Source(task, 3, split);
      for (uint64_t index = 0; index < 500; ++index) {
        const Prompt prompt = *source->Get(index);
        EXPECT_EQ(prompt.task.name, task);
        EXPECT_EQ(Reward(task, prompt.task.payload, prompt.solution), 1.0) << prompt.text << " " << prompt.solution;
        EXPECT_EQ(Reward(task, prompt.task.payload, prompt.solution, /*is_ended=*/false), 0.0);
        EXPECT_EQ(Reward(task, prompt.task.payload, ""), 0.0);
        EXPECT_EQ(CharTokenizer().Decode(prompt.token_ids), prompt.text);
      }
    }
  }
}

TEST(Tasks, ReverseAndSortWantTheWholeAnswer) {
  const Prompt reverse = *Source("reverse", 1, Split::kTrain)->Get(0);
  EXPECT_EQ(reverse.text.size(), 9u);
  EXPECT_EQ(std::string(reverse.text.rbegin() + 1, reverse.text.rend()), reverse.solution);
  EXPECT_EQ(Reward("reverse", "abc", "abc"), 1.0);
  EXPECT_EQ(Reward("reverse", "abc", "abcd"), 0.0);
  EXPECT_EQ(Reward("reverse", "abc", "ab"), 0.0);
  const Prompt sort = *Source("sort", 1, Split::kTrain)->Get(0);
  EXPECT_TRUE(std::is_sorted(sort.solution.begin(), sort.solution.end()));
}

TEST(Countdown, AcceptsEveryRightAnswerAndPaysATenthForTheFormat) {
  const char* task = "3,7,2:19";
  for (const char* right : {"3*7-2", "7*3-2", "(3*7)-2", "(7*3)-2", "((3*7)-2)", "3*7-(2)"})
    EXPECT_EQ(Reward("countdown", task, right), 1.0) << right;
  for (const char* format : {"3+7+2", "3*7*2", "(3+7)*2", "2-3*7", "7-3-2"})
    EXPECT_EQ(Reward("countdown", task, format), 0.1) << format;
  for (const char* wrong : {"", "19", "3*7", "3*7-2-2", "3*7-2=19", "3*7--2", "3*7-2)", "(3*7-2", "3 *7-2", "+3*7-2",
                            "3*7-2+", "37-2", "3*7-02a", "3**7-2", "()", "9*2+1", "-2+3*7", "3*7-2;", "3x7-2"}) {
    EXPECT_EQ(Reward("countdown", task, wrong), 0.0) << wrong;
  }
  EXPECT_EQ(Reward("countdown", "1,2,3:-4", "1-2-3"), 1.0);
  EXPECT_EQ(Reward("countdown", "1,2,3:2", "1-(2-3)"), 1.0);
  EXPECT_EQ(Reward("countdown", task, "3*7-2", /*is_ended=*/false), 0.0);
}

TEST(Countdown, DeepNestingAndLongTextCostNothing) {
  EXPECT_EQ(Reward("countdown", "3,7,2:19", std::string(1 << 20, '(')), 0.0);
  EXPECT_EQ(Reward("countdown", "3,7,2:19", std::string(40, '(') + "3*7-2"), 0.0);
  EXPECT_EQ(Reward("countdown", "3,7,2:19", "9999*9999*9999*9999*9999*9999*9999"), 0.0);
  for (const char* payload : {"", "3,7,2", "3,7,2:", ":19", "3,,2:19", "3,7,2:19x", "a"}) {
    EXPECT_EQ((*FindChecker("countdown"))->check(payload, "3", true).status().code(),
              absl::StatusCode::kInvalidArgument)
        << payload;
  }
}

TEST(Tasks, AnUnknownTaskIsAnErrorThatListsTheOthers) {
  EXPECT_THAT(std::string(FindChecker("chess").status().message()),
              HasSubstr("use one of reverse, sort, countdown, gsm8k"));
  EXPECT_THAT(std::string(MakeSyntheticSource("gsm8k", 1, Split::kTrain).status().message()),
              HasSubstr("use one of reverse, sort, countdown, or give task.prompt_file"));
}

TEST(CharTokenizer, RoundTripsAndNamesWhatItCannotEncode) {
  const CharTokenizer tokenizer;
  const std::string all(CharTokenizer::kCharacters);
  EXPECT_EQ(tokenizer.Decode(*tokenizer.Encode(all)), all);
  EXPECT_EQ(tokenizer.vocab_size(), 34);
  EXPECT_THAT(*tokenizer.Encode("0a"), ElementsAre(2, 12));
  EXPECT_EQ(tokenizer.Decode(std::vector<int32_t>{1, 12, 13, 0}), "ab");
  EXPECT_EQ(tokenizer.Decode(std::vector<int32_t>{12, 34, -1}), "a\xEF\xBF\xBD\xEF\xBF\xBD");
  EXPECT_EQ(tokenizer.Encode("a z").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(SupervisedExample, TrainsOnTheSolutionAndItsEndOnly) {
  const CharTokenizer tokenizer;
  const Prompt prompt = *Source("reverse", 1, Split::kWarmStart)->Get(3);
  const auto example = MakeSupervisedExample(prompt, tokenizer, CharTokenizer::kEndOfSequence);
  ASSERT_TRUE(example.ok());
  ASSERT_EQ(example->tokens.size(), 1u + 9u + 8u + 1u);
  EXPECT_EQ(example->tokens.front(), CharTokenizer::kBeginOfSequence);
  EXPECT_EQ(example->tokens.back(), CharTokenizer::kEndOfSequence);
  for (size_t t = 0; t < example->tokens.size(); ++t) EXPECT_EQ(example->trainable[t], t >= 10) << t;
  EXPECT_EQ(MakeSupervisedExample({}, tokenizer, 0).status().code(), absl::StatusCode::kFailedPrecondition);
}

class BuiltinEnvironmentTest : public testing::Test {
 protected:
  StepOutcome Step(const Task& task, std::vector<int32_t> answer, bool is_truncated = false) {
    const std::vector<Turn> transcript = {{{1, 2}, false, false}, {std::move(answer), true, is_truncated}};
    return *environment_->Step("any", task, 0, transcript);
  }
  const std::shared_ptr<const CharTokenizer> codec_ = std::make_shared<CharTokenizer>();
  const std::unique_ptr<Environment> environment_ = MakeBuiltinEnvironment(codec_);
};

TEST_F(BuiltinEnvironmentTest, JudgesAnAnswerInOneStep) {
  const Prompt prompt = *Source("reverse", 1, Split::kTrain)->Get(0);
  std::vector<int32_t> answer = *codec_->Encode(prompt.solution);
  answer.push_back(CharTokenizer::kEndOfSequence);
  for (int repeat = 0; repeat < 2; ++repeat) {
    const StepOutcome outcome = Step(prompt.task, answer);
    ASSERT_TRUE(std::holds_alternative<Judgement>(outcome));
    EXPECT_EQ(std::get<Judgement>(outcome).reward, 1.0);
    EXPECT_TRUE(std::get<Judgement>(outcome).is_done);
  }
  EXPECT_EQ(std::get<Judgement>(Step(prompt.task, answer, true)).reward, 0.0);
  answer[0] = 5;
  EXPECT_EQ(std::get<Judgement>(Step(prompt.task, answer)).reward, 0.0);
  answer[0] = 9999;  // an id of a larger model vocabulary is a wrong answer, not a failure
  EXPECT_EQ(std::get<Judgement>(Step(prompt.task, answer)).reward, 0.0);
}

TEST_F(BuiltinEnvironmentTest, ABadTaskIsATypedFailureNeverAZero) {
  const StepOutcome outcome = Step({"countdown", "nonsense"}, {2});
  ASSERT_TRUE(std::holds_alternative<Failure>(outcome));
  EXPECT_EQ(std::get<Failure>(outcome).reason, FailureReason::kVerifierError);
  EXPECT_EQ(FailureReasonName(std::get<Failure>(outcome).reason), "verifier_error");
  const std::vector<Turn> unanswered = {{{1, 2}, false, false}};
  EXPECT_TRUE(std::holds_alternative<Failure>(*environment_->Step("any", {"reverse", "a"}, 0, unanswered)));
  EXPECT_EQ(environment_->Step("any", {"chess", "a"}, 0, unanswered).status().code(), absl::StatusCode::kOk);
}

TEST_F(BuiltinEnvironmentTest, ResetEncodesThePrompt) {
  EXPECT_THAT(environment_->Reset({"reverse", "ba"}, "ab=")->prompt, ElementsAre(12, 13, 31));
  EXPECT_EQ(environment_->Reset({"chess", "ba"}, "ab=").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace moerl::rl
