#include "libs/base/failpoint.h"

#include <gtest/gtest.h>

#include "absl/time/clock.h"
#include "libs/base/status_macros.h"

namespace moerl {
namespace {

absl::Status Work() {
  MOERL_RETURN_IF_ERROR(MOERL_FAILPOINT("test.work"));
  return absl::OkStatus();
}

#ifdef MOERL_FAILPOINTS

class FailpointTest : public testing::Test {
 protected:
  void TearDown() override { DisarmFailpoints(); }
};

TEST_F(FailpointTest, PassesUntilArmed) {
  EXPECT_TRUE(Work().ok());
  EXPECT_EQ(FailpointHits("test.work"), 0);
}

TEST_F(FailpointTest, FailsEveryHitAndNamesItself) {
  ASSERT_TRUE(ArmFailpoints("test.work=error").ok());
  EXPECT_EQ(Work(), absl::UnavailableError("failpoint test.work"));
  EXPECT_FALSE(Work().ok());
  EXPECT_EQ(FailpointHits("test.work"), 2);
}

TEST_F(FailpointTest, FailsOnlyTheHitAskedFor) {
  ASSERT_TRUE(ArmFailpoints("other=error; test.work=error@2").ok());
  EXPECT_TRUE(Work().ok());
  EXPECT_FALSE(Work().ok());
  EXPECT_TRUE(Work().ok());
}

TEST_F(FailpointTest, SleepsForTheDurationGiven) {
  ASSERT_TRUE(ArmFailpoints("test.work=sleep(20ms)").ok());
  const absl::Time before = absl::Now();
  EXPECT_TRUE(Work().ok());
  EXPECT_GE(absl::Now() - before, absl::Milliseconds(20));
}

TEST_F(FailpointTest, CrashIsSigkill) {
  ASSERT_TRUE(ArmFailpoints("test.work=crash").ok());
  EXPECT_EXIT((void)Work(), testing::KilledBySignal(SIGKILL), "");
}

TEST_F(FailpointTest, ABadSpecNamesThePointAndArmsNothing) {
  for (const char* bad : {"test.work", "test.work=boom", "test.work=error@0", "=error", "test.work=sleep(often)"}) {
    const absl::Status status = ArmFailpoints(std::string("test.work=error;") + bad);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_NE(status.message().find(bad), absl::string_view::npos) << status;
    EXPECT_TRUE(Work().ok());
  }
}

#else

TEST(FailpointTest, IsAbsentFromThisBuild) {
  EXPECT_EQ(ArmFailpoints("test.work=error").code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Work().ok());
}

#endif

}  // namespace
}  // namespace moerl
