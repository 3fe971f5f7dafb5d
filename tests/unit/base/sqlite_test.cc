#include "libs/base/sqlite.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>

#include "libs/base/env.h"

namespace moerl {
namespace {

constexpr char kSchema[] = "CREATE TABLE IF NOT EXISTS t (id INTEGER PRIMARY KEY, text TEXT, bytes BLOB, real REAL);";

class SqliteTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(PosixEnv()->CreateDirs(directory_).ok()); }
  void TearDown() override { (void)PosixEnv()->RemoveTree(directory_); }

  absl::StatusOr<std::unique_ptr<Sqlite>> Open(SqliteAccess access = SqliteAccess::kExclusive) {
    return Sqlite::Open(path_, access, kSchema);
  }

  const std::string directory_ = testing::TempDir() + "/sqlite_" + std::to_string(getpid());
  const std::string path_ = directory_ + "/db";
};

absl::Status Insert(Sqlite& db, int64_t id, std::string_view text) {
  return db.Prepare("INSERT INTO t (id, text) VALUES (?, ?)").Bind(id).Bind(text).Run();
}

int64_t Count(Sqlite& db) {
  SqliteStatement select = db.Prepare("SELECT count(*) FROM t");
  EXPECT_TRUE(select.Step()) << select.status();
  return select.Int(0);
}

TEST_F(SqliteTest, ReadsBackWhatItBinds) {
  auto db = Open();
  ASSERT_TRUE(db.ok()) << db.status();
  const std::string bytes("\0\xff\0", 3);
  ASSERT_TRUE((*db)
                  ->Prepare("INSERT INTO t VALUES (?, ?, ?, ?)")
                  .Bind(int64_t{7})
                  .Bind("text")
                  .BindBlob(bytes)
                  .Bind(0.5)
                  .Run()
                  .ok());
  ASSERT_TRUE(
      (*db)->Prepare("INSERT INTO t VALUES (?, ?, ?, ?)").Bind(int64_t{8}).Bind("").BindBlob("").BindNull().Run().ok());
  SqliteStatement select = (*db)->Prepare("SELECT id, text, bytes, real FROM t ORDER BY id");
  ASSERT_TRUE(select.Step());
  EXPECT_EQ(select.Int(0), 7);
  EXPECT_EQ(select.Text(1), "text");
  EXPECT_EQ(select.Blob(2), bytes);
  EXPECT_EQ(select.Real(3), 0.5);
  ASSERT_TRUE(select.Step());
  EXPECT_FALSE(select.IsNull(1)) << "an empty text is no NULL";
  EXPECT_TRUE(select.IsNull(3));
  EXPECT_FALSE(select.Step());
  EXPECT_TRUE(select.status().ok());
}

TEST_F(SqliteTest, ARolledBackTransactionLeavesNothing) {
  auto db = Open();
  ASSERT_TRUE(db.ok());
  ASSERT_TRUE((*db)->Begin().ok());
  ASSERT_TRUE(Insert(**db, 1, "a").ok());
  (*db)->Rollback();
  EXPECT_EQ(Count(**db), 0);
}

TEST_F(SqliteTest, AFullDatabaseIsResourceExhaustedAndAsBefore) {
  auto db = Open();
  ASSERT_TRUE(db.ok());
  ASSERT_TRUE(Insert(**db, 1, "a").ok());
  ASSERT_TRUE((*db)->Execute("PRAGMA max_page_count = 4").ok());
  ASSERT_TRUE((*db)->Begin().ok());
  const absl::Status status = Insert(**db, 2, std::string(100'000, 'x'));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  (*db)->Rollback();
  EXPECT_EQ(Count(**db), 1);
}

TEST_F(SqliteTest, ExclusiveKeepsOthersOut) {
  auto db = Open();
  ASSERT_TRUE(db.ok());
  EXPECT_EQ(Open().status().code(), absl::StatusCode::kUnavailable) << Open().status();
}

TEST_F(SqliteTest, SharedLetsOthersReadWhatWasCommitted) {
  auto writer = Open(SqliteAccess::kShared), reader = Open(SqliteAccess::kShared);
  ASSERT_TRUE(writer.ok() && reader.ok());
  ASSERT_TRUE((*writer)->Begin().ok());
  ASSERT_TRUE(Insert(**writer, 1, "a").ok());
  EXPECT_EQ(Count(**reader), 0);
  ASSERT_TRUE((*writer)->Commit().ok());
  EXPECT_EQ(Count(**reader), 1);
}

TEST_F(SqliteTest, WhatWasCommittedSurvivesAKill) {
  const pid_t child = fork();
  if (child == 0) {
    auto db = Sqlite::Open(path_, SqliteAccess::kExclusive, kSchema);
    if (!db.ok() || !Insert(**db, 1, "committed").ok() || !(*db)->Begin().ok() || !Insert(**db, 2, "not").ok())
      _exit(1);
    kill(getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  auto db = Open();
  ASSERT_TRUE(db.ok()) << db.status();
  EXPECT_EQ(Count(**db), 1);
}

TEST_F(SqliteTest, WhatIsNoDatabaseIsDataLoss) {
  std::ofstream(path_) << std::string(8192, 'x');
  EXPECT_EQ(Open().status().code(), absl::StatusCode::kDataLoss) << Open().status();
}

}  // namespace
}  // namespace moerl
