#include "libs/rl/warm_start.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace moerl::rl {
namespace {

const WarmStartConfig kConfig{.pass_rate_min = 0.05, .pass_rate_max = 0.25, .max_steps = 100, .measure_every_steps = 8};

TEST(WarmStart, StopsOnTheMeasuredPassRateNotOnAStepCount) {
  EXPECT_EQ(JudgeWarmStart(kConfig, 8, 0.0), WarmStartVerdict::kContinue);
  EXPECT_EQ(JudgeWarmStart(kConfig, 8, 0.049), WarmStartVerdict::kContinue);
  EXPECT_EQ(JudgeWarmStart(kConfig, 8, 0.05), WarmStartVerdict::kInBand);
  EXPECT_EQ(JudgeWarmStart(kConfig, 96, 0.25), WarmStartVerdict::kInBand);
  EXPECT_EQ(JudgeWarmStart(kConfig, 8, 0.26), WarmStartVerdict::kAboveBand);
  EXPECT_EQ(JudgeWarmStart(kConfig, 0, 0.9), WarmStartVerdict::kAboveBand);
  EXPECT_EQ(JudgeWarmStart(kConfig, 100, 0.01), WarmStartVerdict::kGiveUp);
  EXPECT_EQ(JudgeWarmStart(kConfig, 100, 0.1), WarmStartVerdict::kInBand);
}

// A learning curve as measured on reverse: nothing until a sharp transition somewhere between steps 56 and 72.
double PassRate(int64_t step, double transition) {
  return 0.9 / (1.0 + std::exp(-(static_cast<double>(step) - transition) / 2.5));
}

TEST(WarmStart, FindsTheBandOfEverySeedsSharpTransition) {
  for (double transition = 50.0; transition <= 80.0; transition += 0.5) {
    WarmStartConfig config = kConfig;
    config.measure_every_steps = 2;
    WarmStartVerdict verdict = WarmStartVerdict::kContinue;
    int64_t step = 0;
    for (; verdict == WarmStartVerdict::kContinue; ++step) {
      ASSERT_LE(step, config.max_steps);
      if (ShouldMeasure(config, step)) verdict = JudgeWarmStart(config, step, PassRate(step, transition));
    }
    EXPECT_EQ(verdict, WarmStartVerdict::kInBand) << transition;
  }
}

TEST(WarmStart, MeasuresBeforeTheFirstStepAndAtTheLast) {
  EXPECT_TRUE(ShouldMeasure(kConfig, 0));
  EXPECT_FALSE(ShouldMeasure(kConfig, 7));
  EXPECT_TRUE(ShouldMeasure(kConfig, 8));
  EXPECT_TRUE(ShouldMeasure(kConfig, 100));  // no multiple of 8: the bound itself
}

TEST(WarmStart, SaysWhatToDo) {
  const auto describe = [](WarmStartVerdict verdict) { return DescribeVerdict(kConfig, verdict, 40, 0.125); };
  EXPECT_EQ(describe(WarmStartVerdict::kInBand),
            "warm start: sampled pass rate 0.125 after 40 steps, band 0.050 to 0.250: reinforcement learning begins");
  EXPECT_THAT(describe(WarmStartVerdict::kAboveBand), testing::HasSubstr("measure more often"));
  EXPECT_THAT(describe(WarmStartVerdict::kGiveUp), testing::HasSubstr("raise max_steps"));
  EXPECT_THAT(describe(WarmStartVerdict::kContinue), testing::HasSubstr("going on"));
}

}  // namespace
}  // namespace moerl::rl
