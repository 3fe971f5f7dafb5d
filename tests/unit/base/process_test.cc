#include "libs/base/process.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "libs/base/env.h"

namespace moerl {
namespace {

using testing::HasSubstr;

constexpr absl::Duration kSoon = absl::Seconds(20);

class ProcessTest : public testing::Test {
 protected:
  void SetUp() override { log_ = absl::StrCat(testing::TempDir(), "/process_test.", getpid(), ".log"); }
  void TearDown() override { EXPECT_TRUE(PosixEnv()->RemoveTree(log_).ok()); }

  Process Shell(const std::string& script) {
    auto process =
        Process::Start({.command = {"sh", "-c", script}, .environment = {{"ANSWER", "42"}}, .log_file = log_});
    EXPECT_TRUE(process.ok()) << process.status();
    return *std::move(process);
  }
  std::string Log() { return PosixEnv()->ReadFile(log_).value_or(""); }

  // Waits until the log ends with a whole line and returns it.
  std::string LogLine() {
    for (const absl::Time until = absl::Now() + kSoon; absl::Now() < until; absl::SleepFor(absl::Milliseconds(5))) {
      const std::string log = Log();
      if (absl::string_view line = log; absl::ConsumeSuffix(&line, "\n")) return std::string(line);
    }
    return "";
  }

  std::string log_;
};

TEST_F(ProcessTest, TellsTheExitCode) {
  Process process = Shell("exit 75");
  EXPECT_EQ(process.Wait(kSoon)->ToString(), "exit code 75");
  EXPECT_EQ(process.Wait(absl::ZeroDuration())->code, 75) << "and again";
}

TEST_F(ProcessTest, TellsTheSignal) {
  Process process = Shell("sleep 100");
  process.Signal(SIGTERM);
  EXPECT_EQ(process.Wait(kSoon)->ToString(), "signal 15 (Terminated)");
}

TEST_F(ProcessTest, WaitGivesUpAfterItsTimeout) {
  Process process = Shell("sleep 100");
  EXPECT_FALSE(process.Wait(absl::Milliseconds(10)).has_value());
}

TEST_F(ProcessTest, OutputAndErrorGoToTheLogAfterWhatIsThere) {
  ASSERT_TRUE(PosixEnv()->WriteFileDurably(log_, "before\n").ok());
  Shell("echo out $ANSWER; echo err >&2").Wait(kSoon);
  EXPECT_EQ(Log(), "before\nout 42\nerr\n");
}

TEST_F(ProcessTest, LeadsAGroupOfItsOwnAndInheritsNoFiles) {
  const int leaked = dup(STDOUT_FILENO);
  Shell("ps -o pgid= -p $$; echo $$; ls /proc/self/fd | tail -n 1").Wait(kSoon);
  close(leaked);
  std::vector<int> numbers;
  for (absl::string_view line : absl::StrSplit(Log(), '\n', absl::SkipWhitespace())) {
    int number = -1;
    ASSERT_TRUE(absl::SimpleAtoi(line, &number)) << Log();
    numbers.push_back(number);
  }
  ASSERT_EQ(numbers.size(), 3u);
  EXPECT_EQ(numbers[0], numbers[1]) << "the group's id is the process's";
  EXPECT_LE(numbers[2], 3) << "ls itself opens the directory as 3";
}

TEST_F(ProcessTest, RunsOnTheCpusGiven) {
  auto process = Process::Start({.command = {"sh", "-c", "nproc"}, .environment = {}, .log_file = log_, .cpus = {0}});
  ASSERT_TRUE(process.ok());
  process->Wait(kSoon);
  EXPECT_EQ(Log(), "1\n");
}

TEST_F(ProcessTest, AMissingProgramOrLogDirectoryIsNamed) {
  EXPECT_THAT(std::string(Process::Start({.command = {"no-such-program"}}).status().message()),
              HasSubstr("no-such-program: not found on PATH"));
  EXPECT_EQ(Process::Start({.command = {"/no/such/program"}}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Process::Start({.command = {"true"}, .environment = {}, .log_file = "/no/such/log"}).status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(ProcessTest, DestructionEndsTheWholeGroup) {
  pid_t grandchild = -1;
  {
    Process process = Shell("sleep 100 & echo $!; wait");
    ASSERT_TRUE(absl::SimpleAtoi(LogLine(), &grandchild));
  }
  // It becomes a zombie of init's or is gone; either way it runs no longer.
  for (const absl::Time until = absl::Now() + kSoon; absl::Now() < until; absl::SleepFor(absl::Milliseconds(5))) {
    const auto stat = PosixEnv()->ReadFile(absl::StrCat("/proc/", grandchild, "/stat"));
    if (!stat.ok() || stat->find(") Z") != std::string::npos) return;
  }
  FAIL() << "process " << grandchild << " still runs";
}

TEST_F(ProcessTest, DiesWithItsParent) {
  // A child in between starts a process and is killed; fork is fine here: this program has one thread.
  const pid_t parent = fork();
  if (parent == 0) {
    Process process = Shell("echo $$; sleep 100");
    while (true) pause();
  }
  pid_t child = -1;
  ASSERT_TRUE(absl::SimpleAtoi(LogLine(), &child));
  ASSERT_EQ(kill(child, 0), 0);
  kill(parent, SIGKILL);
  waitpid(parent, nullptr, 0);
  for (const absl::Time until = absl::Now() + kSoon; absl::Now() < until; absl::SleepFor(absl::Milliseconds(5))) {
    const auto stat = PosixEnv()->ReadFile(absl::StrCat("/proc/", child, "/stat"));
    if (!stat.ok() || stat->find(") Z") != std::string::npos) return;
  }
  FAIL() << "process " << child << " survived its parent";
}

}  // namespace
}  // namespace moerl
