#include "libs/rl/diagnostics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace moerl::rl {
namespace {

TEST(Diagnostics, SummarisesByTokenAndSortsByOrdinal) {
  SampleReport a, b;
  a.ordinal = 1, a.num_tokens = 3, a.policy_loss = 0.5, a.sum_ratio = 3.3, a.max_ratio = 1.2, a.min_ratio = 1.0;
  a.num_clipped_high = 1, a.mismatch_tokens = 2, a.sum_abs_mismatch = 0.2, a.max_abs_mismatch = 0.15;
  b.ordinal = 0, b.num_tokens = 1, b.kl_loss = 0.25, b.sum_ratio = 0.7, b.max_ratio = 0.7, b.min_ratio = 0.7;
  b.num_clipped_low = 1, b.staleness[3] = 1;
  const UpdateSummary summary = Summarize({a, b});
  EXPECT_EQ(summary.num_tokens, 4);
  EXPECT_EQ(summary.loss, 0.75);
  EXPECT_DOUBLE_EQ(summary.mean_ratio, 1.0);
  EXPECT_EQ(summary.max_ratio, 1.2);
  EXPECT_EQ(summary.min_ratio, 0.7);
  EXPECT_EQ(summary.clip_fraction, 0.5);
  EXPECT_EQ(summary.clip_fraction_low, 0.25);
  EXPECT_EQ(summary.mean_abs_mismatch, 0.1);
  EXPECT_EQ(summary.max_abs_mismatch, 0.15);
  EXPECT_EQ(summary.staleness[3], 1);
}

TEST(Diagnostics, EffectiveSampleFractionFallsWithUnevenWeights) {
  CorrectionStats even{4, 0, 0, 4.0, 4.0}, uneven{4, 0, 0, 4.0, 16.0};
  EXPECT_EQ(even.effective_fraction(), 1.0);
  EXPECT_EQ(uneven.effective_fraction(), 0.25);
  EXPECT_EQ(CorrectionStats{}.effective_fraction(), 1.0);
}

TEST(Diagnostics, ExpertLoadNamesDeadExpertsByLayer) {
  const std::vector<int64_t> counts = {4, 4, 4, 4,   // even
                                       8, 0, 8, 0,   // two dead
                                       0, 0, 0, 0};  // no tokens: no verdict
  const ExpertLoad load = DescribeExpertLoad(counts, 3, 4);
  EXPECT_EQ(load.max_over_mean, 2.0);
  EXPECT_EQ(load.mean_max_over_mean, 1.5);
  ASSERT_EQ(load.dead.size(), 2u);
  EXPECT_EQ(load.dead[0].layer, 1);
  EXPECT_EQ(load.dead[0].expert, 1);
  EXPECT_EQ(load.dead[1].expert, 3);
  EXPECT_EQ(DescribeExpertLoad({}, 0, 4).max_over_mean, 0.0);
}

}  // namespace
}  // namespace moerl::rl
