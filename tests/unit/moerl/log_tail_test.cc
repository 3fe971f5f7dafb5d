#include "tools/moerl/log_tail.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace moerl {
namespace {

class LogTailTest : public testing::Test {
 protected:
  void SetUp() override { path_ = testing::TempDir() + "/log_tail_test." + std::to_string(getpid()); }
  void TearDown() override { std::filesystem::remove(path_); }
  std::string WordsOf(const std::string& log, uint64_t from = 0) {
    std::ofstream(path_, std::ios::binary) << log;
    return LastWords(*PosixEnv(), path_, from);
  }
  std::string path_;
};

TEST_F(LogTailTest, LastErrorWithItsReason) {
  const std::string first = R"({"level":"error","message":"first","why":"a"})";
  const std::string log = first + "\n" +
                          R"({"level":"error","message":"the trainer cannot start","why":"NOT_FOUND: /nope"})"
                          "\n"
                          R"({"level":"info","message":"stopped"})"
                          "\n";
  EXPECT_EQ(WordsOf(log), "the trainer cannot start: NOT_FOUND: /nope");
  EXPECT_EQ(WordsOf(first + "\n"), "first: a");
}

TEST_F(LogTailTest, OnlyWhatCameSinceTheStart) {
  const std::string old = R"({"level":"error","message":"of the last start"})"
                          "\n";
  EXPECT_EQ(WordsOf(old + R"({"level":"info","message":"serving"})"
                          "\n",
                    old.size()),
            "");
  EXPECT_EQ(WordsOf(old, 10 * old.size()), "");
}

TEST_F(LogTailTest, ALineThatIsNoLogLine) {
  EXPECT_EQ(WordsOf("moerl-trainer: config: x.yaml:3: trainer.nope: unknown field\n"),
            "moerl-trainer: config: x.yaml:3: trainer.nope: unknown field");
}

TEST_F(LogTailTest, SilenceAndNoFile) {
  EXPECT_EQ(WordsOf(""), "");
  EXPECT_EQ(LastWords(*PosixEnv(), path_ + ".none", 0), "");
}

TEST_F(LogTailTest, ReadsTheEndOfALongLog) {
  std::string log;
  for (int i = 0; i < 5000; ++i)
    log += R"({"level":"info","message":"step"})"
           "\n";
  EXPECT_EQ(WordsOf(log + R"({"level":"error","message":"disk full"})"
                          "\n"),
            "disk full");
  EXPECT_LE(ReadTail(*PosixEnv(), path_).size(), size_t{64} << 10);
}

}  // namespace
}  // namespace moerl
