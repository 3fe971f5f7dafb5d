#include "libs/base/fault_injection_env.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "libs/base/status_macros.h"

namespace moerl {
namespace {

using testing::ElementsAre;

absl::Status Put(Env& env, const std::string& path, absl::string_view data, bool is_synced) {
  MOERL_ASSIGN_OR_RETURN(const auto file, env.OpenForWrite(path, WriteMode::kAppend));
  MOERL_RETURN_IF_ERROR(file->Append(data));
  return is_synced ? file->Sync() : absl::OkStatus();
}

TEST(FaultInjectionEnv, ACrashLosesBytesThatWereNotSynced) {
  FaultInjectionEnv env;
  ASSERT_TRUE(Put(env, "/f", "kept", true).ok());
  ASSERT_TRUE(env.SyncDir("/").ok());
  ASSERT_TRUE(Put(env, "/f", " lost", false).ok());
  EXPECT_EQ(env.ReadFile("/f").value(), "kept lost");
  env.Crash();
  EXPECT_EQ(env.ReadFile("/f").value(), "kept");
}

TEST(FaultInjectionEnv, ACrashLosesNamesWhoseDirectoryWasNotSynced) {
  FaultInjectionEnv env;
  ASSERT_TRUE(Put(env, "/old", "x", true).ok());
  ASSERT_TRUE(env.SyncDir("/").ok());
  ASSERT_TRUE(Put(env, "/new", "y", true).ok());
  ASSERT_TRUE(env.Rename("/old", "/renamed").ok());
  env.Crash();
  EXPECT_THAT(env.List("/").value(), ElementsAre("old"));
}

TEST(FaultInjectionEnv, AFileOpenedBeforeACrashIsDead) {
  FaultInjectionEnv env;
  const auto file = env.OpenForWrite("/f", WriteMode::kCreate).value();
  const auto lock = env.Lock("/lock").value();
  env.Crash();
  EXPECT_EQ(file->Append("x").code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(env.Lock("/lock").ok());
}

// What WriteFileDurably promises: the old file or the new one, whole, whenever the power goes; the new
// one for sure once it has returned.
TEST(FaultInjectionEnv, WriteFileDurablyIsAllOrNothingAtEveryPoint) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    bool has_succeeded = false;
    for (int64_t n = 0; !has_succeeded; ++n) {
      ASSERT_LT(n, 20);
      FaultInjectionEnv env;
      ASSERT_TRUE(env.CreateDirs("/d").ok());
      ASSERT_TRUE(env.WriteFileDurably("/d/f", "old").ok());
      env.FailAfter(n);
      has_succeeded = env.WriteFileDurably("/d/f", "new!").ok();
      env.CrashRandomly(seed);
      const std::string found = env.ReadFile("/d/f").value();
      EXPECT_TRUE(found == "new!" || (found == "old" && !has_succeeded))
          << found << " after " << n << ", seed " << seed;
    }
  }
}

// The same test must catch code that forgets a sync.
TEST(FaultInjectionEnv, CatchesARenameWithoutASync) {
  bool is_caught = false;
  for (uint64_t seed = 0; seed < 50 && !is_caught; ++seed) {
    FaultInjectionEnv env;
    ASSERT_TRUE(env.WriteFileDurably("/f", "old").ok());
    ASSERT_TRUE(Put(env, "/f.tmp", "new!", false).ok());
    ASSERT_TRUE(env.RenameDurably("/f.tmp", "/f").ok());
    env.CrashRandomly(seed);
    is_caught = env.ReadFile("/f").value() != "new!";
  }
  EXPECT_TRUE(is_caught);
}

TEST(FaultInjectionEnv, AFullDiskKeepsWhatFitsAndSaysSo) {
  FaultInjectionEnv env;
  env.SetCapacityBytes(10);
  EXPECT_TRUE(Put(env, "/a", "1234567", false).ok());
  EXPECT_EQ(env.FreeBytes("/").value(), 3u);
  EXPECT_EQ(Put(env, "/b", "12345", false).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(env.ReadFile("/b").value(), "123");
  EXPECT_TRUE(env.Remove("/a").ok());
  EXPECT_TRUE(Put(env, "/b", "45", false).ok());
}

TEST(FaultInjectionEnv, FailsThePathsItIsToldTo) {
  FaultInjectionEnv env;
  ASSERT_TRUE(Put(env, "/chunks", "x", true).ok());
  env.FailPath("chunk", absl::DataLossError("bad sector"));
  EXPECT_EQ(env.ReadFile("/chunks").status(), absl::DataLossError("open /chunks: bad sector"));
  EXPECT_TRUE(Put(env, "/other", "x", true).ok());
}

TEST(FaultInjectionEnv, FlipsABitAndCutsAFile) {
  FaultInjectionEnv env;
  ASSERT_TRUE(env.WriteFileDurably("/f", "abc").ok());
  ASSERT_TRUE(env.FlipBit("/f", 9).ok());
  EXPECT_EQ(env.ReadFile("/f").value(), "a`c");
  ASSERT_TRUE(env.Truncate("/f", 2).ok());
  env.Crash();
  EXPECT_EQ(env.ReadFile("/f").value(), "a`");
  EXPECT_FALSE(env.FlipBit("/f", 16).ok());
}

TEST(FaultInjectionEnv, DirectoriesMoveWithWhatIsInThem) {
  FaultInjectionEnv env;
  ASSERT_TRUE(env.CreateDirs("/run/step_1.tmp").ok());
  ASSERT_TRUE(env.WriteFileDurably("/run/step_1.tmp/f", "x").ok());
  ASSERT_TRUE(env.RenameDurably("/run/step_1.tmp", "/run/step_1").ok());
  env.Crash();
  EXPECT_EQ(env.ReadFile("/run/step_1/f").value(), "x");
  EXPECT_FALSE(env.RemoveDir("/run/step_1").ok()) << "not empty";
  EXPECT_TRUE(env.RemoveTree("/run").ok());
  EXPECT_THAT(env.List("/").value(), ElementsAre());
}

}  // namespace
}  // namespace moerl
