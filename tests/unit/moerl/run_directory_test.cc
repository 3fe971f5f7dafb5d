#include "tools/moerl/run_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "absl/strings/str_cat.h"

namespace moerl {
namespace {

using testing::HasSubstr;

class RunDirectoryTest : public testing::Test {
 protected:
  void SetUp() override {
    path_ = absl::StrCat(testing::TempDir(), "/run_directory_test.", getpid());
    ASSERT_TRUE(env_.RemoveTree(path_).ok());
    config_.mutable_trainer()->set_run_directory(path_);
  }
  void TearDown() override { EXPECT_TRUE(env_.RemoveTree(path_).ok()); }

  std::string ErrorOf(bool is_resume) {
    return std::string(RunDirectory::Open(env_, is_resume, config_).status().message());
  }

  Env& env_ = *PosixEnv();
  std::string path_;
  v1::Config config_;
};

TEST_F(RunDirectoryTest, IsMadeWithItsLogs) {
  const auto directory = RunDirectory::Open(env_, /*is_resume=*/false, config_);
  ASSERT_TRUE(directory.ok()) << directory.status();
  EXPECT_TRUE(env_.IsDir(directory->At("logs")));
  EXPECT_EQ(config_.trainer().run_directory(), directory->path());
}

TEST_F(RunDirectoryTest, WithARunInItIsOpenedOnlyToResume) {
  EXPECT_THAT(ErrorOf(/*is_resume=*/true), HasSubstr("holds no run to resume; start it without --resume"));
  {
    const auto directory = RunDirectory::Open(env_, /*is_resume=*/false, config_);
    ASSERT_TRUE(directory.ok());
    ASSERT_TRUE(env_.WriteFileDurably(directory->At("config.yaml"), "name: r\n").ok());
    ASSERT_TRUE(env_.WriteFileDurably(directory->At("ledger.sqlite"), "").ok());
  }
  EXPECT_THAT(ErrorOf(/*is_resume=*/false), HasSubstr("holds a run already; continue it with --resume"));
  EXPECT_TRUE(RunDirectory::Open(env_, /*is_resume=*/true, config_).ok());
}

TEST_F(RunDirectoryTest, OfAStartThatFailedIsBegunAnewOrResumed) {
  {
    const auto directory = RunDirectory::Open(env_, /*is_resume=*/false, config_);
    ASSERT_TRUE(env_.WriteFileDurably(directory->At("config.yaml"), "name: r\n").ok());
  }
  EXPECT_TRUE(RunDirectory::Open(env_, /*is_resume=*/false, config_).ok());
  EXPECT_TRUE(RunDirectory::Open(env_, /*is_resume=*/true, config_).ok());
}

TEST_F(RunDirectoryTest, ThatIsAFileIsRefused) {
  ASSERT_TRUE(env_.WriteFileDurably(path_, "mine").ok());
  EXPECT_THAT(ErrorOf(/*is_resume=*/false), HasSubstr("is not a directory; give another"));
}

TEST_F(RunDirectoryTest, IsRefusedWhileAnotherHasIt) {
  const auto first = RunDirectory::Open(env_, /*is_resume=*/false, config_);
  ASSERT_TRUE(first.ok());
  EXPECT_THAT(ErrorOf(/*is_resume=*/false), HasSubstr(absl::StrCat("/lock: held by process ", getpid())));
}

TEST_F(RunDirectoryTest, ThatCannotBeLockedIsNotSaidToBeInUse) {
  ASSERT_TRUE(env_.CreateDirs(path_).ok());
  std::filesystem::create_symlink("/nowhere/lock", JoinPath(path_, "lock"));
  EXPECT_THAT(ErrorOf(/*is_resume=*/false), HasSubstr(" cannot be used: "));
}

TEST_F(RunDirectoryTest, IsRunsNameByDefaultAndAlwaysAbsolute) {
  v1::Config config;
  config.set_name("sort");
  const std::string path = RunDirectoryPath(config);
  EXPECT_EQ(path.front(), '/');
  EXPECT_THAT(path, HasSubstr("/runs/sort"));
}

}  // namespace
}  // namespace moerl
