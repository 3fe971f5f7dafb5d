#include "services/trainer/metrics_log.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace moerl::trainer {
namespace {

using testing::HasSubstr;
using testing::Not;

v1::StepMetrics Row(uint64_t step) {
  v1::StepMetrics row;
  row.set_step(step);
  row.set_reward_mean(0.5);
  row.set_mismatch_tokens(uint64_t{1} << 40);
  row.add_staleness_histogram(7);
  return row;
}

TEST(MetricsLog, WritesNumbersAsNumbers) {
  const std::string line = ToJsonLine(Row(3));
  EXPECT_THAT(line, HasSubstr("\"step\":3,"));
  EXPECT_THAT(line, HasSubstr("\"mismatch_tokens\":1099511627776,"));
  EXPECT_THAT(line, HasSubstr("\"staleness_histogram\":[7]"));
  EXPECT_THAT(line, Not(HasSubstr("eval_pass_rate")));
}

TEST(MetricsLog, CutsRowsPastTheCheckpointAndAHalfWrittenOne) {
  const std::string path = testing::TempDir() + "/metrics-" + std::to_string(getpid()) + ".jsonl";
  std::filesystem::remove(path);
  {
    auto log = MetricsLog::Open(path, 0);
    ASSERT_TRUE(log.ok()) << log.status();
    for (uint64_t step = 1; step <= 4; ++step) ASSERT_TRUE((*log)->Append(Row(step)).ok());
  }
  std::ofstream(path, std::ios::app) << "{\"step\":5,\"rew";
  auto log = MetricsLog::Open(path, 2);
  ASSERT_TRUE(log.ok()) << log.status();
  ASSERT_EQ((*log)->rows().size(), 2u);
  EXPECT_EQ((*log)->rows()[1].mismatch_tokens(), uint64_t{1} << 40);
  ASSERT_TRUE((*log)->Append(Row(3)).ok());
  auto again = MetricsLog::Open(path, 9);
  EXPECT_EQ((*again)->rows().size(), 3u);
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace moerl::trainer
