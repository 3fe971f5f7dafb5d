#include "tests/integration/membership/fault_times.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "tests/time_scale.h"

namespace moerl {
namespace {

double Milliseconds(int64_t from_ns, int64_t to_ns) { return static_cast<double>(to_ns - from_ns) * 1e-6; }

double Quantile(std::vector<double>& values, double q) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(q * static_cast<double>(values.size())))];
}

}  // namespace

void FaultTimes::AddLoss(int64_t lost_at_ns, const Board::Rank& survivor) {
  error_ms_.push_back(Milliseconds(lost_at_ns, survivor.error_at_ns));
  EXPECT_GT(error_ms_.back(), 0);
  EXPECT_LT(error_ms_.back(), 1000 * TimeScale()) << survivor.error;
  if (survivor.state != RankState::kRunning) return;
  reform_ms_.push_back(Milliseconds(survivor.error_at_ns, survivor.running_at_ns));
  EXPECT_LT(reform_ms_.back(), 2000 * TimeScale());
}

void FaultTimes::AddJoin(const Board::Rank& joiner) {
  join_ms_.push_back(Milliseconds(joiner.asked_at_ns, joiner.running_at_ns));
  EXPECT_LT(join_ms_.back(), 2000 * TimeScale());
}

void FaultTimes::Print() {
  std::printf("%-28s errors %4zu: %4.0f %4.0f %4.0f ms   reform %4zu: %4.0f %4.0f %4.0f ms   join %4zu: %4.0f %4.0f ms",
              fault_.c_str(), error_ms_.size(), Quantile(error_ms_, 0.5), Quantile(error_ms_, 0.99),
              Quantile(error_ms_, 1), reform_ms_.size(), Quantile(reform_ms_, 0.5), Quantile(reform_ms_, 0.99),
              Quantile(reform_ms_, 1), join_ms_.size(), Quantile(join_ms_, 0.5), Quantile(join_ms_, 1));
  std::printf("   (median, 99 %%, most; join: median, most)\n");
  std::fflush(stdout);
}

}  // namespace moerl
