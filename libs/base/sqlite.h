#ifndef MOERL_LIBS_BASE_SQLITE_H_
#define MOERL_LIBS_BASE_SQLITE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

struct sqlite3;
struct sqlite3_stmt;

namespace moerl {

class SqliteStatement;

enum class SqliteAccess {
  kExclusive,  // this process alone has it open
  kShared,     // other processes may read and write too; a write waits up to five seconds for another's
};

// A SQLite database that keeps what it acknowledged: write-ahead log, synchronous=FULL, so that a commit is on
// disk when it returns. Thread-compatible.
//
// Errors name the database and what SQLite says. RESOURCE_EXHAUSTED: the disk is full; the transaction is rolled
// back and the database is as before. DATA_LOSS: damaged, or the disk failed; whether a commit took place is then
// unknown: stop using the database and open it again. UNAVAILABLE: another process holds it.
class Sqlite {
 public:
  // Opens or creates `path`, checks its structure, and runs `schema` (any number of idempotent statements).
  static absl::StatusOr<std::unique_ptr<Sqlite>> Open(const std::string& path, SqliteAccess access, const char* schema);
  ~Sqlite();
  Sqlite(const Sqlite&) = delete;
  Sqlite& operator=(const Sqlite&) = delete;

  // Runs statements without parameters and results.
  absl::Status Execute(const char* sql);

  // A statement to bind and step; `sql` is a literal, compiled once and kept. Only one statement of the same text
  // may be in use at a time. One that does not compile against the file's schema fails when it is stepped.
  SqliteStatement Prepare(const char* sql);

  // BEGIN IMMEDIATE, COMMIT, ROLLBACK. A failed Commit() has rolled back.
  absl::Status Begin();
  absl::Status Commit();
  void Rollback();

 private:
  friend class SqliteStatement;
  Sqlite(std::string path, sqlite3* db) : path_(std::move(path)), db_(db) {}
  absl::Status Error(const char* doing) const;

  const std::string path_;
  sqlite3* const db_;
  std::map<std::string, sqlite3_stmt*, std::less<>> statements_;
};

// One use of a prepared statement: binds its parameters in order, steps, reads columns. Resets itself when destroyed.
//
//   SqliteStatement select = db.Prepare("SELECT bytes FROM chunks WHERE sha256 = ?");
//   select.BindBlob(digest);
//   while (select.Step()) sum += select.Int(0);
//   MOERL_RETURN_IF_ERROR(select.status());
class SqliteStatement {
 public:
  ~SqliteStatement();
  SqliteStatement(SqliteStatement&& other) noexcept;
  SqliteStatement(const SqliteStatement&) = delete;
  SqliteStatement& operator=(const SqliteStatement&) = delete;

  // Text and blobs are copied.
  SqliteStatement& Bind(int64_t value);
  SqliteStatement& Bind(double value);
  SqliteStatement& Bind(std::string_view text);
  SqliteStatement& BindBlob(std::string_view bytes);
  SqliteStatement& BindNull();

  // True: a row is there. False: done, or failed: see status().
  bool Step();
  const absl::Status& status() const { return status_; }
  // For statements without rows: steps once, and resets, so that the next use may bind anew.
  absl::Status Run();

  // Columns of the current row, from 0; NULL reads as 0 or empty. Views live until the next Step().
  int64_t Int(int column) const;
  double Real(int column) const;
  std::string_view Text(int column) const;
  std::string_view Blob(int column) const;
  bool IsNull(int column) const;

 private:
  friend class Sqlite;
  SqliteStatement(Sqlite* db, sqlite3_stmt* statement) : db_(db), statement_(statement) {}
  void Bound(int code);

  Sqlite* db_;
  sqlite3_stmt* statement_;
  int num_bound_ = 0;
  absl::Status status_;
};

}  // namespace moerl

#endif  // MOERL_LIBS_BASE_SQLITE_H_
