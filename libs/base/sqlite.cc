#include "libs/base/sqlite.h"

#include <sqlite3.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/base/status_macros.h"

namespace moerl {
namespace {

constexpr int kBusyTimeoutMs = 5000;

}  // namespace

absl::StatusOr<std::unique_ptr<Sqlite>> Sqlite::Open(const std::string& path, SqliteAccess access, const char* schema) {
  sqlite3* db = nullptr;
  const int flags = SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX;
  const int opened = sqlite3_open_v2(path.c_str(), &db, flags, nullptr);
  if (db == nullptr) return absl::ResourceExhaustedError(absl::StrCat(path, ": no memory to open it"));
  sqlite3_extended_result_codes(db, 1);
  std::unique_ptr<Sqlite> sqlite(new Sqlite(path, db));
  if (opened != SQLITE_OK) return sqlite->Error("open");
  sqlite3_busy_timeout(db, access == SqliteAccess::kShared ? kBusyTimeoutMs : 0);
  // The exclusive lock is taken by the first use and held; there is no shared-memory file beside then.
  if (access == SqliteAccess::kExclusive) MOERL_RETURN_IF_ERROR(sqlite->Execute("PRAGMA locking_mode=EXCLUSIVE"));
  MOERL_RETURN_IF_ERROR(sqlite->Execute("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL"));
  {
    SqliteStatement check = sqlite->Prepare("PRAGMA quick_check(1)");
    if (!check.Step()) return check.status();
    if (check.Text(0) != "ok")
      return absl::DataLossError(absl::StrCat(path, ": damaged: ", std::string(check.Text(0))));
  }
  MOERL_RETURN_IF_ERROR(sqlite->Begin());
  if (absl::Status status = sqlite->Execute(schema); !status.ok()) {
    sqlite->Rollback();
    return status;
  }
  MOERL_RETURN_IF_ERROR(sqlite->Commit());
  return sqlite;
}

Sqlite::~Sqlite() {
  for (auto& [sql, statement] : statements_) sqlite3_finalize(statement);
  sqlite3_close(db_);
}

absl::Status Sqlite::Error(const char* doing) const {
  const int code = sqlite3_extended_errcode(db_);
  const std::string text = absl::StrCat(path_, ": ", doing, ": ", sqlite3_errmsg(db_), " (SQLite ", code, ")");
  switch (code & 0xff) {
    case SQLITE_FULL:
    case SQLITE_NOMEM:
    case SQLITE_TOOBIG:
      return absl::ResourceExhaustedError(text);
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
      return absl::UnavailableError(absl::StrCat(text, "; another process has it open"));
    case SQLITE_CANTOPEN:
    case SQLITE_PERM:
    case SQLITE_READONLY:
      return absl::PermissionDeniedError(text);
    case SQLITE_CONSTRAINT:
      return absl::AlreadyExistsError(text);
    default:
      return absl::DataLossError(text);
  }
}

absl::Status Sqlite::Execute(const char* sql) {
  return sqlite3_exec(db_, sql, nullptr, nullptr, nullptr) == SQLITE_OK ? absl::OkStatus() : Error("execute");
}

SqliteStatement Sqlite::Prepare(const char* sql) {
  auto found = statements_.find(std::string_view(sql));
  if (found == statements_.end()) {
    sqlite3_stmt* statement = nullptr;
    const int code = sqlite3_prepare_v3(db_, sql, -1, SQLITE_PREPARE_PERSISTENT, &statement, nullptr);
    if (code != SQLITE_OK) {  // the file's schema is not what this text was written for
      SqliteStatement failed(this, nullptr);
      failed.status_ = Error("prepare");
      return failed;
    }
    found = statements_.emplace(sql, statement).first;
  }
  MOERL_CHECK(!sqlite3_stmt_busy(found->second));
  return SqliteStatement(this, found->second);
}

absl::Status Sqlite::Begin() { return Execute("BEGIN IMMEDIATE"); }

absl::Status Sqlite::Commit() {
  absl::Status status = Execute("COMMIT");
  if (!status.ok()) Rollback();
  return status;
}

void Sqlite::Rollback() {
  if (!sqlite3_get_autocommit(db_)) (void)Execute("ROLLBACK");  // some errors have rolled back already
}

SqliteStatement::SqliteStatement(SqliteStatement&& other) noexcept
    : db_(other.db_),
      statement_(std::exchange(other.statement_, nullptr)),
      num_bound_(other.num_bound_),
      status_(std::move(other.status_)) {}

SqliteStatement::~SqliteStatement() {
  if (statement_ == nullptr) return;
  sqlite3_reset(statement_);
  sqlite3_clear_bindings(statement_);
}

void SqliteStatement::Bound(int code) {
  if (statement_ == nullptr) return;
  MOERL_CHECK(code == SQLITE_OK || code == SQLITE_NOMEM || code == SQLITE_TOOBIG);
  if (code != SQLITE_OK) status_ = db_->Error("bind");
}

SqliteStatement& SqliteStatement::Bind(int64_t value) {
  Bound(sqlite3_bind_int64(statement_, ++num_bound_, value));
  return *this;
}

SqliteStatement& SqliteStatement::Bind(double value) {
  Bound(sqlite3_bind_double(statement_, ++num_bound_, value));
  return *this;
}

SqliteStatement& SqliteStatement::Bind(std::string_view text) {
  const char* data = text.data() == nullptr ? "" : text.data();  // an empty view is an empty text, not NULL
  Bound(sqlite3_bind_text64(statement_, ++num_bound_, data, text.size(), SQLITE_TRANSIENT, SQLITE_UTF8));
  return *this;
}

SqliteStatement& SqliteStatement::BindBlob(std::string_view bytes) {
  const char* data = bytes.data() == nullptr ? "" : bytes.data();
  Bound(sqlite3_bind_blob64(statement_, ++num_bound_, data, bytes.size(), SQLITE_TRANSIENT));
  return *this;
}

SqliteStatement& SqliteStatement::BindNull() {
  Bound(sqlite3_bind_null(statement_, ++num_bound_));
  return *this;
}

bool SqliteStatement::Step() {
  if (!status_.ok()) return false;
  const int code = sqlite3_step(statement_);
  if (code == SQLITE_ROW) return true;
  if (code != SQLITE_DONE) status_ = db_->Error("step");
  return false;
}

absl::Status SqliteStatement::Run() {
  MOERL_CHECK(!Step());
  if (statement_ != nullptr) sqlite3_reset(statement_);
  num_bound_ = 0;
  return status_;
}

int64_t SqliteStatement::Int(int column) const { return sqlite3_column_int64(statement_, column); }

double SqliteStatement::Real(int column) const { return sqlite3_column_double(statement_, column); }

std::string_view SqliteStatement::Text(int column) const {
  const auto* text = reinterpret_cast<const char*>(sqlite3_column_text(statement_, column));
  return {text == nullptr ? "" : text, static_cast<size_t>(sqlite3_column_bytes(statement_, column))};
}

std::string_view SqliteStatement::Blob(int column) const {
  const auto* bytes = static_cast<const char*>(sqlite3_column_blob(statement_, column));
  return {bytes == nullptr ? "" : bytes, static_cast<size_t>(sqlite3_column_bytes(statement_, column))};
}

bool SqliteStatement::IsNull(int column) const { return sqlite3_column_type(statement_, column) == SQLITE_NULL; }

}  // namespace moerl
