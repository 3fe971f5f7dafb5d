#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <string>
#include <vector>

#include "libs/rl/checker.h"

namespace moerl::rl {
namespace {

double Reward(std::string_view payload, std::string_view completion, bool is_ended = true) {
  const absl::StatusOr<double> reward = (*FindChecker("gsm8k"))->check(payload, completion, is_ended);
  EXPECT_TRUE(reward.ok()) << reward.status();
  return reward.value_or(-1.0);
}

struct Pair {
  const char* payload;
  const char* completion;
};

TEST(Gsm8k, AcceptsTheRightNumberHoweverItIsWritten) {
  const std::vector<Pair> right = {
      {"72", "48/2 = 24 clips in May.\n#### 72"},
      {"72", "####72"},
      {"72", "####   72   "},
      {"72", "#### 72.\n"},
      {"72", "#### 72.0"},
      {"72", "#### 72.00"},
      {"72", "#### 072"},
      {"72", "#### +72"},
      {"72", "#### $72"},
      {"72", "#### \\$72"},
      {"72", "#### $72$"},
      {"72", "#### **72**"},
      {"72", "#### 72 clips"},
      {"72", "#### 72 clips sold in total."},
      {"72", "#### The answer is 72"},
      {"72", "#### x = 72"},
      {"72", "#### 48 + 24 = 72"},
      {"72", "#### USD 72"},
      {"72", "#### (72)"},
      {"72", "first #### 70, no:\n#### 72\n"},
      {"72", "#### 72\nand some words after it"},
      {"72", "So the answer is $\\boxed{72}$."},
      {"72", "\\boxed{72}"},
      {"72", "\\boxed 72 is wrong, \\boxed{72}"},
      {"72", "\\boxed{ 72 }"},
      {"72", "\\boxed{\\text{72 clips}}"},
      {"72", "\\boxed{72\\text{ clips}}"},
      {"72", "\\boxed{x=72}"},
      {"72", "\\boxed{\\$72}"},
      {"72", "\\boxed{\\mathrm{72}}"},
      {"72", "\\boxed{70} no, wait: \\boxed{72}"},
      {"72", "#### 70\n\\boxed{72}"},
      {"72", "\\boxed{70}\n#### 72"},
      {"72", "\\fbox{72}"},
      {"72", "#### \\boxed{72}"},
      {"72", "#### 144/2"},
      {"72", "#### 72 cm^2"},
      {"72", "#### 72 cm^{2}"},
      {"72", "#### 72 m\xC2\xB2"},
      {"72", "#### 72 km/h"},
      {"72", "#### $72/hour"},
      {"72", "#### 72\xC2\xB0"},
      {"72", "\\boxed{72^\\circ}"},
      {"72", "#### \xC2\xA0\x37\x32"},
      {"72", "#### 72%"},
      {"72", "\\boxed{72\\%}"},
      {"1234", "#### 1,234"},
      {"1,234", "#### 1234"},
      {"1234567", "#### 1,234,567"},
      {"1234", "\\boxed{1{,}234}"},
      {"1234", "\\boxed{1\\,234}"},
      {"1234", "\\boxed{1,\\!234}"},
      {"1234.5", "#### $1,234.50"},
      {"2000000", "#### 2 million"},
      {"2500000", "#### 2.5 million dollars"},
      {"3000", "#### 3 thousand"},
      {"-5", "#### -5"},
      {"-5", "#### \xE2\x88\x92\x35"},
      {"-5", "#### -$5"},
      {"-5", "#### $-5"},
      {"-5", "#### minus 5"},
      {"-5", "#### negative 5 degrees"},
      {"-5", "#### x = -5"},
      {"0", "#### 0"},
      {"0", "#### -0"},
      {"0", "#### 0.00"},
      {"0.5", "#### .5"},
      {"0.5", "#### 1/2"},
      {"1/2", "#### 0.50"},
      {"0.5", "\\boxed{\\frac{1}{2}}"},
      {"0.5", "\\boxed{\\dfrac{1}{2}}"},
      {"0.5", "\\boxed{\\tfrac12}"},
      {"-0.5", "\\boxed{-\\frac{1}{2}}"},
      {"1.5", "#### 1 1/2"},
      {"1.5", "\\boxed{1\\frac{1}{2}}"},
      {"1.5", "#### 1\xC2\xBD hours"},
      {"0.1", "#### 10/100"},
      {"100000000000000000", "#### 100,000,000,000,000,000"},
      {"Natalia sold 48/2 = 24.\n#### 72", "#### 72"},
      {"so \\boxed{72}", "#### 72"},
  };
  for (const Pair& pair : right)
    EXPECT_EQ(Reward(pair.payload, pair.completion), 1.0) << pair.payload << " | " << pair.completion;
  EXPECT_GE(right.size(), 60u);
}

TEST(Gsm8k, RefusesWhatIsNotTheRightNumberOrNotMarked) {
  const std::vector<Pair> wrong = {
      {"72", ""},
      {"72", "72"},
      {"72", "The answer is 72."},
      {"72", "### 72"},
      {"72", "#### 73"},
      {"72", "#### -72"},
      {"72", "#### 7.2"},
      {"72", "#### 7 2"},
      {"72", "#### 72 or 73"},
      {"72", "#### 71-72"},
      {"72", "#### 71 - 72"},
      {"72", "#### 71, 72"},
      {"72", "#### 72 #### 73"},
      {"72", "#### 72\n####"},
      {"72", "####\n72"},
      {"72", "#### seventy-two"},
      {"72", "#### 72!"},
      {"72", "#### 72^2"},
      {"72", "#### 72:00"},
      {"72", "#### 72e1"},
      {"72", "#### 7,2"},
      {"72",
       "#### 72,"
       "0"},
      {"72", "#### 72000"},
      {"72", "#### 72 thousand"},
      {"72", "#### 0.72"},
      {"72", "#### 72.5"},
      {"72", "#### > 72"},
      {"72", "#### 6*12"},
      {"72", "#### 2^72"},
      {"72", "\\boxed{72"},
      {"72", "\\boxed{}"},
      {"72", "\\boxed{73}"},
      {"72", "\\boxed{72}\n\\boxed{73}"},
      {"72", "\\boxed{72} #### 73"},
      {"72", "#### 72 \\boxed{73}"},
      {"72", "\\boxed{7}{2}"},
      {"72", "\\boxed{71 + 1}"},
      {"72", "\\boxed{\\frac{72}{0}}"},
      {"72", "\\boxed{\\frac{144}}"},
      {"72", "\\boxed{72 \\text{ or } 73}"},
      {"72", "#### nan"},
      {"72", "#### inf"},
      {"72", "#### 0x48"},
      {"72", "#### --72"},
      {"72", "#### 1/0"},
      {"1234", "#### 1,23,4"},
      {"1234", "#### 12,34"},
      {"1234", "#### ,1234"},
      {"1234", "#### 1234,000"},
      {"1.5", "#### 1,5"},
      {"1.5", "#### 1.5.0"},
      {"1.5", "#### 1 3/2"},
      {"0.33", "#### 1/3"},
      {"0.3333333333333333", "#### 1/3"},
      {"100000000000000000", "#### 100000000000000001"},
      {"100000000000000000", "#### 1000000000000000000000000000000000000"},
      {"5", "#### -5"},
      {"-5", "#### 5"},
      {"5", "#### 5 6"},
      {"5", "#### 5\xC2\xBD"},
      {"5", "#### 10:5"},
      {"5", "#### 5^{10}"},
      {"5", "#### \xD9\xA5"},
      {"5", "#### 55555555555555555555555555555555555555555555"},
  };
  for (const Pair& pair : wrong)
    EXPECT_EQ(Reward(pair.payload, pair.completion), 0.0) << pair.payload << " | " << pair.completion;
}

TEST(Gsm8k, DoesNotJudgeAnAnswerThatWasCutOff) {
  EXPECT_EQ(Reward("72", "#### 72", /*is_ended=*/false), 0.0);  // it could have become 720
  EXPECT_EQ(Reward("72", "#### 72\nThat", /*is_ended=*/false), 1.0);
  EXPECT_EQ(Reward("72", "\\boxed{72}", /*is_ended=*/false), 1.0);
  EXPECT_EQ(Reward("72", "\\boxed{72", /*is_ended=*/false), 0.0);
}

TEST(Gsm8k, APayloadWithoutANumberIsAnErrorNotAZero) {
  for (const char* payload : {"", "many", "1 2", "#### "}) {
    EXPECT_EQ((*FindChecker("gsm8k"))->check(payload, "#### 1", true).status().code(),
              absl::StatusCode::kInvalidArgument)
        << payload;
  }
}

// Processor time of this thread, so that a busy machine does not fail the test.
double Milliseconds(const std::string& completion) {
  const auto now = [] {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) * 1e-6;
  };
  const double start = now();
  (void)(*FindChecker("gsm8k"))->check("72", completion, true);
  return now() - start;
}

std::string Repeat(std::string_view piece, size_t bytes, const std::string& head = "", const std::string& tail = "") {
  std::string text = head;
  while (text.size() < bytes) text += piece;
  return text + tail;
}

TEST(Gsm8k, NoInputOfAMegabyteTakesTenMilliseconds) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the bound is for builds without sanitizers";
#endif
  constexpr size_t kMegabyte = 1 << 20;
  std::vector<std::string> inputs;
  for (const char* piece : {"a",
                            " ",
                            "\n",
                            "#",
                            "###",
                            "### ",
                            "####",
                            "#### ",
                            "\\",
                            "\\boxe",
                            "\\boxed",
                            "\\boxed{",
                            "\\fbox{",
                            "{",
                            "}",
                            "{}",
                            "9",
                            "1,",
                            "1,234",
                            "-",
                            "(",
                            "((((",
                            "\\frac{",
                            "\\frac{1}{",
                            "^{2}",
                            "m^2",
                            "/",
                            "1/",
                            "#### 1\n",
                            "\\boxed{1}",
                            "\xE2\x88\x92",
                            "\xC2\xBD",
                            "million ",
                            "9**",
                            "2^2^"}) {
    inputs.push_back(Repeat(piece, kMegabyte));
    inputs.push_back(Repeat(piece, kMegabyte, "#### "));
    inputs.push_back(Repeat(piece, kMegabyte, "\\boxed{", "}"));
    inputs.push_back(Repeat(piece, kMegabyte, "\\boxed{"));
    inputs.push_back(Repeat(piece, kMegabyte, "", "#### 72"));
  }
  double slowest = 0.0;
  for (const std::string& input : inputs) {
    const double milliseconds = Milliseconds(input);
    EXPECT_LT(milliseconds, 10.0) << input.substr(0, 20);
    slowest = std::max(slowest, milliseconds);
  }
  RecordProperty("slowest_ms", std::to_string(slowest));
  std::printf("slowest of %zu inputs of 1 MB: %.3f ms\n", inputs.size(), slowest);
}

}  // namespace
}  // namespace moerl::rl
