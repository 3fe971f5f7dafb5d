#include "libs/base/env.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

namespace moerl {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class PosixEnvTest : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = absl::StrCat(testing::TempDir(), "/env_test.", getpid());
    ASSERT_TRUE(env_->RemoveTree(dir_).ok());
    ASSERT_TRUE(env_->CreateDirs(dir_).ok());
  }
  void TearDown() override { EXPECT_TRUE(env_->RemoveTree(dir_).ok()); }

  std::string At(const std::string& name) const { return JoinPath(dir_, name); }

  Env* env_ = PosixEnv();
  std::string dir_;
};

TEST_F(PosixEnvTest, WriteFileDurablyReplacesTheWholeFileAndLeavesNothingBeside) {
  ASSERT_TRUE(env_->WriteFileDurably(At("f"), "first, longer").ok());
  ASSERT_TRUE(env_->WriteFileDurably(At("f"), "second").ok());
  EXPECT_EQ(env_->ReadFile(At("f")).value(), "second");
  EXPECT_THAT(env_->List(dir_).value(), ElementsAre("f"));
}

TEST_F(PosixEnvTest, WriteModesCreateTruncateAndAppend) {
  const auto put = [&](WriteMode mode, const char* text) {
    auto file = env_->OpenForWrite(At("f"), mode);
    return file.ok() ? (*file)->Append(text) : file.status();
  };
  EXPECT_TRUE(put(WriteMode::kCreate, "ab").ok());
  EXPECT_EQ(put(WriteMode::kCreate, "x").code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(put(WriteMode::kAppend, "cd").ok());
  EXPECT_EQ(env_->ReadFile(At("f")).value(), "abcd");
  EXPECT_TRUE(put(WriteMode::kTruncate, "e").ok());
  EXPECT_EQ(env_->FileSize(At("f")).value(), 1u);
}

TEST_F(PosixEnvTest, ReadsAnywhereAndStopsAtTheEnd) {
  ASSERT_TRUE(env_->WriteFileDurably(At("f"), "0123456789").ok());
  const auto file = env_->OpenForRead(At("f")).value();
  char buffer[8];
  EXPECT_EQ(file->Read(7, 8, buffer).value(), 3u);
  EXPECT_EQ(std::string(buffer, 3), "789");
  EXPECT_EQ(file->Read(10, 8, buffer).value(), 0u);
  EXPECT_EQ(file->Size().value(), 10u);
}

TEST_F(PosixEnvTest, ReadFileRefusesMoreThanItsBoundAndReadsFilesThatSayZero) {
  ASSERT_TRUE(env_->WriteFileDurably(At("f"), "0123456789").ok());
  EXPECT_EQ(env_->ReadFile(At("f"), 10).value().size(), 10u);
  EXPECT_EQ(env_->ReadFile(At("f"), 9).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(env_->ReadFile("/proc/self/status").value().empty());
}

TEST_F(PosixEnvTest, ErrorsNameOperationPathAndCode) {
  const absl::Status status = env_->ReadFile(At("absent")).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("open " + At("absent")));
}

TEST_F(PosixEnvTest, RemoveTreeRemovesLinksWithoutFollowingThem) {
  ASSERT_TRUE(env_->CreateDirs(At("keep/deep")).ok());
  ASSERT_TRUE(env_->WriteFileDurably(At("keep/deep/f"), "x").ok());
  ASSERT_TRUE(env_->CreateDirs(At("gone/a/b")).ok());
  ASSERT_EQ(symlink(At("keep").c_str(), At("gone/a/link").c_str()), 0);
  EXPECT_TRUE(env_->RemoveTree(At("gone")).ok());
  EXPECT_FALSE(env_->Exists(At("gone")));
  EXPECT_TRUE(env_->Exists(At("keep/deep/f")));
  EXPECT_TRUE(env_->RemoveTree(At("gone")).ok()) << "nothing there is not an error";
}

TEST_F(PosixEnvTest, RenameDurablyMovesADirectory) {
  ASSERT_TRUE(env_->CreateDirs(At("step_1.tmp")).ok());
  ASSERT_TRUE(env_->WriteFileDurably(At("step_1.tmp/f"), "x").ok());
  ASSERT_TRUE(env_->RenameDurably(At("step_1.tmp"), At("step_1")).ok());
  EXPECT_EQ(env_->ReadFile(At("step_1/f")).value(), "x");
}

TEST_F(PosixEnvTest, ALockIsExclusiveNamesItsHolderAndEndsWithIt) {
  auto lock = env_->Lock(At("lock"));
  ASSERT_TRUE(lock.ok()) << lock.status();
  const absl::Status second = env_->Lock(At("lock")).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.message()), HasSubstr(absl::StrCat("held by process ", getpid())));
  lock->reset();
  EXPECT_TRUE(env_->Lock(At("lock")).ok());
}

TEST_F(PosixEnvTest, FreeBytesAreThoseOfTheFileSystem) { EXPECT_GT(env_->FreeBytes(dir_).value(), 0u); }

TEST_F(PosixEnvTest, ALocalDirectoryPassesTheFileSystemCheck) {
  EXPECT_TRUE(CheckLocalFileSystem("/dev/shm").ok());
  EXPECT_EQ(CheckLocalFileSystem(At("absent")).code(), absl::StatusCode::kNotFound);
}

TEST(Path, PartsAndJoins) {
  EXPECT_EQ(JoinPath("a", "b"), "a/b");
  EXPECT_EQ(JoinPath("a/", "b"), "a/b");
  EXPECT_EQ(JoinPath("", "b"), "b");
  EXPECT_EQ(JoinPath("a", "/b"), "/b");
  EXPECT_EQ(DirName("a/b"), "a");
  EXPECT_EQ(DirName("b"), ".");
  EXPECT_EQ(DirName("/b"), "/");
  EXPECT_EQ(DirName("/"), "/");
  EXPECT_EQ(DirName("a/b/"), "a");
  EXPECT_EQ(BaseName("a/b"), "b");
  EXPECT_EQ(BaseName("b"), "b");
}

}  // namespace
}  // namespace moerl
