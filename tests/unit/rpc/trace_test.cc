#include "libs/rpc/trace.h"

#include <gtest/gtest.h>

namespace moerl::rpc {
namespace {

constexpr char kTraceId[] = "0af7651916cd43dd8448eb211c80319c";

TEST(Trace, SurvivesTheWire) {
  const std::string traceparent = FormatTraceparent(kTraceId);
  EXPECT_EQ(traceparent.size(), 55u);
  EXPECT_EQ(TraceIdOf(traceparent), kTraceId);
}

TEST(Trace, ReadsTheExampleOfTheStandard) {
  EXPECT_EQ(TraceIdOf("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"), kTraceId);
}

TEST(Trace, IgnoresWhatIsNotATrace) {
  EXPECT_EQ(FormatTraceparent("group 7"), "");
  EXPECT_EQ(FormatTraceparent("0AF7651916CD43DD8448EB211C80319C"), "");
  for (const char* bad : {"", "00", "00-00000000000000000000000000000000-b7ad6b7169203331-01",
                          "00-0af7651916cd43dd8448eb211c80319X-b7ad6b7169203331-01",
                          "00_0af7651916cd43dd8448eb211c80319c_b7ad6b7169203331-01"}) {
    EXPECT_EQ(TraceIdOf(bad), "") << bad;
  }
}

}  // namespace
}  // namespace moerl::rpc
