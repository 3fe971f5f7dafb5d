#include "services/trainer/run_metrics.h"

#include <gtest/gtest.h>

#include "libs/base/metrics.h"

namespace moerl::trainer {
namespace {

double SecondsIn(const char* phase) {
  return GetCounter("moerl_trainer_phase_seconds_total", "", {{"phase", phase}}).Value();
}

bool IsCurrent(const char* phase) { return GetGauge("moerl_trainer_phase", "", {{"phase", phase}}).Value() == 1; }

TEST(RunMetrics, CountsTimeForThePhaseThatItWasSpentIn) {
  RunMetrics metrics;
  metrics.ObservePhase(v1::TRAINER_PHASE_WAITING, absl::Seconds(10));
  metrics.ObservePhase(v1::TRAINER_PHASE_TRAINING, absl::Seconds(12));
  EXPECT_TRUE(IsCurrent("training"));
  metrics.ObservePhase(v1::TRAINER_PHASE_WAITING, absl::Seconds(17));
  EXPECT_TRUE(IsCurrent("waiting"));
  EXPECT_FALSE(IsCurrent("training"));
  EXPECT_EQ(SecondsIn("waiting"), 2);
  EXPECT_EQ(SecondsIn("training"), 5);
  EXPECT_EQ(SecondsIn("warm_start"), 0);
}

TEST(RunMetrics, ShowsTheAgeOfTheTokensOfTheLastStep) {
  RunMetrics metrics;
  v1::StepMetrics row;
  for (const uint64_t tokens : {30, 10, 0, 0}) row.add_staleness_histogram(tokens);
  metrics.ObserveStep(row);
  EXPECT_EQ(GetGauge("moerl_trainer_staleness_max", "").Value(), 1);
  EXPECT_EQ(GetGauge("moerl_trainer_staleness_mean", "").Value(), 0.25);
}

}  // namespace
}  // namespace moerl::trainer
