#include "libs/base/log.h"

#include <gtest/gtest.h>

#include <limits>
#include <thread>

namespace moerl {
namespace {

using internal::FormatHuman;
using internal::FormatJson;

TEST(Log, JsonKeepsTypes) {
  EXPECT_EQ(FormatJson("done", {{"ok", true}, {"n", -3}, {"big", ~uint64_t{0}}, {"s", 0.1}, {"name", "a b"}}),
            R"("message":"done","ok":true,"n":-3,"big":18446744073709551615,"s":0.1,"name":"a b")");
}

TEST(Log, JsonEscapesWhatWouldBreakTheLine) {
  EXPECT_EQ(FormatJson("a\nb\"c\\", {{"k", absl::string_view("\x01\t", 2)}}),
            R"("message":"a\nb\"c\\","k":"\u0001\t")");
}

TEST(Log, JsonWritesNotANumberAsText) {
  EXPECT_EQ(FormatJson("m", {{"x", std::numeric_limits<double>::quiet_NaN()},
                             {"y", -std::numeric_limits<double>::infinity()}}),
            R"("message":"m","x":"nan","y":"-inf")");
}

TEST(Log, HumanQuotesOnlyWhatNeedsIt) {
  EXPECT_EQ(FormatHuman("it's \"on\"\n", {{"path", "/a/b"}, {"why", "disk full"}, {"none", ""}}),
            R"(it's "on"\n path=/a/b why="disk full" none="")");
}

TEST(Log, TraceIdNestsAndStaysOnItsThread) {
  const ScopedTraceId outer("t1");
  {
    const ScopedTraceId inner("t2");
    EXPECT_EQ(FormatHuman("m", {}), "m trace_id=t2");
  }
  EXPECT_EQ(FormatJson("m", {}), R"("message":"m","trace_id":"t1")");
  std::thread([] { EXPECT_EQ(FormatHuman("m", {}), "m"); }).join();
}

TEST(Log, OneEventIsOneJsonLineOnStandardError) {
  InitLogging({.program = "moerl-\"test\"", .level = LogLevel::kInfo, .format = LogFormat::kJson});
  testing::internal::CaptureStderr();
  LogDebug("not shown");
  LogInfo("100% {} shown\nwhole", {{"k", 1}});
  const std::string out = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(out.begin(), out.end(), '\n'), 1) << out;
  EXPECT_EQ(out.substr(0, 9), R"({"time":")");
  EXPECT_NE(out.find(R"(Z","level":"info","program":"moerl-\"test\"","message":"100% {} shown\nwhole","k":1})"),
            std::string::npos)
      << out;
}

TEST(Log, LevelsAreKnownByTheirNames) {
  LogLevel level = LogLevel::kInfo;
  EXPECT_TRUE(ParseLogLevel("warning", level));
  EXPECT_EQ(level, LogLevel::kWarning);
  EXPECT_FALSE(ParseLogLevel("loud", level));
}

}  // namespace
}  // namespace moerl
