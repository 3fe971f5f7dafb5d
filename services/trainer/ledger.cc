#include "services/trainer/ledger.h"

#include <sqlite3.h>

#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/base/env.h"
#include "libs/base/status_macros.h"
#include "libs/experience/work_proto.h"

// One row a fact; blobs are TokenSpan messages (proto/moerl/v1/trajectory.proto). A write of the protocol is one
// or two statements, which leave the tables as LedgerState::Apply leaves the state; the round trip is tested.

namespace moerl::trainer {
namespace {

constexpr int64_t kSchemaVersion = 1;
constexpr int kBusyTimeoutMs = 10000;

constexpr const char* kSchema = R"(
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups(number INTEGER PRIMARY KEY, prompt_index INTEGER NOT NULL,
  staleness INTEGER NOT NULL, state INTEGER NOT NULL, reason INTEGER NOT NULL DEFAULT 0,
  detail TEXT NOT NULL DEFAULT '', step INTEGER NOT NULL DEFAULT -1);
CREATE TABLE IF NOT EXISTS outcomes(group_number INTEGER NOT NULL, sample INTEGER NOT NULL, reward REAL NOT NULL,
  finish_reason INTEGER NOT NULL, num_tokens INTEGER NOT NULL, tokens BLOB, PRIMARY KEY(group_number, sample))
  WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS leases(epoch INTEGER NOT NULL, counter INTEGER NOT NULL, group_number INTEGER NOT NULL,
  worker TEXT NOT NULL, incarnation INTEGER NOT NULL, is_live INTEGER NOT NULL, PRIMARY KEY(epoch, counter))
  WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS leases_by_group ON leases(group_number);
CREATE TABLE IF NOT EXISTS prefixes(epoch INTEGER NOT NULL, counter INTEGER NOT NULL, sample INTEGER NOT NULL,
  tokens BLOB NOT NULL, PRIMARY KEY(epoch, counter, sample)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batches(step INTEGER PRIMARY KEY, ranks INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS batch_groups(step INTEGER NOT NULL, place INTEGER NOT NULL, group_number INTEGER NOT NULL,
  PRIMARY KEY(step, place)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS forks(epoch INTEGER PRIMARY KEY, step INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS checkpoints(step INTEGER PRIMARY KEY, epoch INTEGER NOT NULL);
)";

absl::Status SqlError(sqlite3* database, const char* doing) {
  const int code = sqlite3_errcode(database);
  const std::string text = absl::StrCat("ledger: ", doing, ": ", sqlite3_errmsg(database));
  return code == SQLITE_FULL ? absl::ResourceExhaustedError(text) : absl::InternalError(text);
}

// A prepared statement; arguments are bound from 1 in order.
class Statement {
 public:
  Statement(sqlite3* database, const char* sql) : database_(database), sql_(sql) {
    const int code = sqlite3_prepare_v3(database, sql, -1, SQLITE_PREPARE_PERSISTENT, &statement_, nullptr);
    if (code != SQLITE_OK) MOERL_CHECK(statement_ == nullptr);
  }
  ~Statement() { sqlite3_finalize(statement_); }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  template <typename... Args>
  absl::Status Run(const Args&... args) {
    MOERL_RETURN_IF_ERROR(Bind(args...));
    const int code = sqlite3_step(statement_);
    sqlite3_reset(statement_);
    return code == SQLITE_DONE || code == SQLITE_ROW ? absl::OkStatus() : SqlError(database_, sql_);
  }

  // Calls row() for every row, with the columns readable, until it fails.
  template <typename Row, typename... Args>
  absl::Status Query(Row row, const Args&... args) {
    MOERL_RETURN_IF_ERROR(Bind(args...));
    const absl::Cleanup reset = [this] { sqlite3_reset(statement_); };
    int code;
    while ((code = sqlite3_step(statement_)) == SQLITE_ROW) MOERL_RETURN_IF_ERROR(row(*this));
    return code == SQLITE_DONE ? absl::OkStatus() : SqlError(database_, sql_);
  }

  int64_t Int(int column) const { return sqlite3_column_int64(statement_, column); }
  double Real(int column) const { return sqlite3_column_double(statement_, column); }
  bool IsNull(int column) const { return sqlite3_column_type(statement_, column) == SQLITE_NULL; }
  std::string Bytes(int column) const {
    const void* data = sqlite3_column_blob(statement_, column);
    return {static_cast<const char*>(data), data ? static_cast<size_t>(sqlite3_column_bytes(statement_, column)) : 0};
  }

 private:
  template <typename... Args>
  absl::Status Bind(const Args&... args) {
    if (statement_ == nullptr) return SqlError(database_, sql_);
    sqlite3_clear_bindings(statement_);
    int place = 0;
    const bool bound = ((BindOne(++place, args) == SQLITE_OK) && ...);
    return bound ? absl::OkStatus() : SqlError(database_, sql_);
  }
  int BindOne(int place, int64_t value) { return sqlite3_bind_int64(statement_, place, value); }
  int BindOne(int place, double value) { return sqlite3_bind_double(statement_, place, value); }
  int BindOne(int place, const std::string& value) {
    return sqlite3_bind_text(statement_, place, value.data(), static_cast<int>(value.size()), SQLITE_TRANSIENT);
  }
  int BindOne(int place, const v1::TokenSpan& value) {
    const std::string bytes = value.SerializeAsString();
    return sqlite3_bind_blob(statement_, place, bytes.data(), static_cast<int>(bytes.size()), SQLITE_TRANSIENT);
  }

  sqlite3* database_;
  const char* sql_;
  sqlite3_stmt* statement_ = nullptr;
};

v1::TokenSpan Span(const rl::TokenRun& tokens) {
  v1::TokenSpan span;
  TokensToProto(tokens, 0, &span);
  return span;
}

absl::StatusOr<rl::TokenRun> Tokens(const std::string& bytes) {
  v1::TokenSpan span;
  if (!span.ParseFromString(bytes)) return absl::DataLossError("ledger: a stored token span does not parse");
  return TokensFromProto(span);
}

absl::Status Execute(sqlite3* database, const char* sql) {
  return sqlite3_exec(database, sql, nullptr, nullptr, nullptr) == SQLITE_OK ? absl::OkStatus()
                                                                             : SqlError(database, sql);
}

// Runs `body` inside one transaction that takes the write lock first.
template <typename Body>
absl::Status InTransaction(sqlite3* database, Body body) {
  MOERL_RETURN_IF_ERROR(Execute(database, "BEGIN IMMEDIATE"));
  absl::Status status = body();
  if (status.ok()) status = Execute(database, "COMMIT");
  if (!status.ok()) sqlite3_exec(database, "ROLLBACK", nullptr, nullptr, nullptr);
  return status;
}

}  // namespace

struct SqliteLedger::Statements {
  explicit Statements(sqlite3* db)
      : get_meta(db, "SELECT value FROM meta WHERE key = ?1"),
        set_meta(db, "INSERT INTO meta VALUES(?1, ?2) ON CONFLICT DO UPDATE SET value = ?2"),
        admit(db,
              "INSERT INTO groups(number, prompt_index, staleness, state) SELECT coalesce(max(number) + 1, 0),"
              " (SELECT value FROM meta WHERE key = 'cursor'), ?1, 0 FROM groups"),
        move_cursor(db, "UPDATE meta SET value = value + 1 WHERE key = 'cursor'"),
        put_lease(db, "INSERT INTO leases VALUES(?1, ?2, ?3, ?4, ?5, 1)"),
        end_other_leases(db, "UPDATE leases SET is_live = 0 WHERE group_number = ?1"),
        put_prefix(db, "INSERT INTO prefixes VALUES(?1, ?2, ?3, ?4)"),
        end_lease(db, "UPDATE leases SET is_live = 0 WHERE epoch = ?1 AND counter = ?2"),
        put_outcome(db, "INSERT OR REPLACE INTO outcomes VALUES(?1, ?2, ?3, ?4, ?5, ?6)"),
        finish_group(db,
                     "UPDATE groups SET state = 1 WHERE number = ?1 AND state = 0 AND"
                     " (SELECT count(*) FROM outcomes WHERE group_number = ?1) = ?2"),
        drop_group(db, "UPDATE groups SET state = 3, reason = ?2, detail = ?3, step = -1 WHERE number = ?1"),
        forget_payloads_of(db, "UPDATE outcomes SET tokens = NULL WHERE group_number = ?1"),
        forget_prefixes(db,
                        "DELETE FROM prefixes WHERE (epoch, counter) IN (SELECT epoch, counter FROM leases l"
                        " JOIN groups g ON g.number = l.group_number WHERE g.number = ?1 AND g.state <> 0)"),
        forget_leases(db,
                      "DELETE FROM leases WHERE group_number = ?1 AND"
                      " (SELECT state FROM groups WHERE number = ?1) <> 0"),
        put_batch(db, "INSERT INTO batches VALUES(?1, ?2) ON CONFLICT DO UPDATE SET ranks = ?2"),
        put_batch_group(db, "INSERT OR REPLACE INTO batch_groups VALUES(?1, ?2, ?3)"),
        void_batch(db, "DELETE FROM batches WHERE step = ?1"),
        void_batch_groups(db, "DELETE FROM batch_groups WHERE step = ?1"),
        mark_trained(db,
                     "UPDATE groups SET state = 2, step = ?1 WHERE number IN"
                     " (SELECT group_number FROM batch_groups WHERE step = ?1)"),
        name_checkpoint(db, "INSERT OR REPLACE INTO checkpoints VALUES(?1, ?2)"),
        trim_checkpoints(db,
                         "DELETE FROM checkpoints WHERE step NOT IN"
                         " (SELECT step FROM checkpoints ORDER BY step DESC LIMIT ?1)"),
        forget_payloads(db,
                        "UPDATE outcomes SET tokens = NULL WHERE tokens IS NOT NULL AND group_number IN"
                        " (SELECT group_number FROM batch_groups WHERE step <= ?1 AND step > ?2)"),
        add_fork(db, "INSERT INTO forks VALUES(?1, ?2)"),
        end_leases(db, "UPDATE leases SET is_live = 0"),
        unname_checkpoints(db, "DELETE FROM checkpoints WHERE step > ?1"),
        rewind_batches(db,
                       "UPDATE groups SET step = CASE WHEN b.step <= ?1 THEN b.step ELSE -1 END,"
                       " state = CASE WHEN b.step <= ?1 THEN 2 ELSE 1 END"
                       " FROM batch_groups b WHERE b.group_number = groups.number"),
        rewind_voided(db, "UPDATE groups SET state = 1, step = -1 WHERE state = 2 AND step > ?1"),
        groups(db, "SELECT number, prompt_index, staleness, state, reason, detail, step FROM groups ORDER BY number"),
        outcomes(db, "SELECT group_number, sample, reward, finish_reason, tokens FROM outcomes"),
        leases(db,
               "SELECT epoch, counter, group_number, worker, incarnation, is_live FROM leases"
               " ORDER BY epoch, counter"),
        prefixes(db, "SELECT epoch, counter, sample, tokens FROM prefixes"),
        batches(db, "SELECT step, ranks FROM batches"),
        batch_groups(db, "SELECT step, group_number FROM batch_groups ORDER BY step, place"),
        forks(db, "SELECT epoch, step FROM forks ORDER BY epoch"),
        checkpoints(db, "SELECT step, epoch FROM checkpoints ORDER BY step") {}

  Statement get_meta, set_meta, admit, move_cursor, put_lease, end_other_leases, put_prefix, end_lease, put_outcome,
      finish_group, drop_group, forget_payloads_of, forget_prefixes, forget_leases, put_batch, put_batch_group,
      void_batch, void_batch_groups, mark_trained, name_checkpoint, trim_checkpoints, forget_payloads, add_fork,
      end_leases, unname_checkpoints, rewind_batches, rewind_voided;
  Statement groups, outcomes, leases, prefixes, batches, batch_groups, forks, checkpoints;

  // ---- writes
  absl::Status ForgetLeasesIfDecided(int64_t group) {
    MOERL_RETURN_IF_ERROR(forget_prefixes.Run(group));
    return forget_leases.Run(group);
  }

  absl::Status operator()(const AdmitGroup& write) {
    MOERL_RETURN_IF_ERROR(admit.Run(write.staleness));
    return move_cursor.Run();
  }

  absl::Status operator()(const PutLease& write) {
    const Lease& lease = write.lease;
    MOERL_RETURN_IF_ERROR(end_other_leases.Run(lease.group));
    MOERL_RETURN_IF_ERROR(
        put_lease.Run(lease.id.epoch, lease.id.counter, lease.group, lease.worker, lease.incarnation));
    for (size_t i = 0; i < lease.prefixes.size(); ++i) {
      if (!lease.prefixes[i]) continue;
      MOERL_RETURN_IF_ERROR(
          put_prefix.Run(lease.id.epoch, lease.id.counter, static_cast<int64_t>(i), Span(*lease.prefixes[i])));
    }
    return absl::OkStatus();
  }

  absl::Status operator()(const EndLease& write) { return end_lease.Run(write.id.epoch, write.id.counter); }

  absl::Status operator()(const PutOutcome& write) {
    const Trajectory& trajectory = *write.trajectory;
    MOERL_RETURN_IF_ERROR(put_outcome.Run(write.group, write.sample, trajectory.reward,
                                          static_cast<int64_t>(trajectory.finish_reason),
                                          static_cast<int64_t>(trajectory.tokens.size()), Span(trajectory.tokens)));
    MOERL_RETURN_IF_ERROR(finish_group.Run(write.group, group_size));
    return ForgetLeasesIfDecided(write.group);
  }

  absl::Status operator()(const DropGroup& write) {
    MOERL_RETURN_IF_ERROR(drop_group.Run(write.group, static_cast<int64_t>(write.reason), write.detail));
    MOERL_RETURN_IF_ERROR(forget_payloads_of.Run(write.group));
    return ForgetLeasesIfDecided(write.group);
  }

  absl::Status operator()(const RecordBatch& write) {
    MOERL_RETURN_IF_ERROR(put_batch.Run(write.step, write.batch.ranks));
    for (size_t i = 0; i < write.batch.groups.size(); ++i) {
      MOERL_RETURN_IF_ERROR(put_batch_group.Run(write.step, static_cast<int64_t>(i), write.batch.groups[i]));
    }
    return absl::OkStatus();
  }

  absl::Status operator()(const VoidBatch& write) {
    MOERL_RETURN_IF_ERROR(void_batch.Run(write.step));
    return void_batch_groups.Run(write.step);
  }

  absl::Status operator()(const MarkTrained& write) { return mark_trained.Run(write.step); }

  absl::Status operator()(const NameCheckpoint& write) {
    MOERL_RETURN_IF_ERROR(name_checkpoint.Run(write.name.step, write.name.epoch));
    return trim_checkpoints.Run(write.keep);
  }

  absl::Status operator()(const ForgetPayloads& write) {
    MOERL_RETURN_IF_ERROR(forget_payloads.Run(write.through_step, forgotten_through));
    forgotten_through = std::max(forgotten_through, write.through_step);
    return absl::OkStatus();
  }

  absl::Status operator()(const AddFork& write) {
    forgotten_through = -1;
    MOERL_RETURN_IF_ERROR(add_fork.Run(write.fork.epoch, write.fork.step));
    MOERL_RETURN_IF_ERROR(end_leases.Run());
    return unname_checkpoints.Run(write.fork.step);
  }

  absl::Status operator()(const RewindTo& write) {
    MOERL_RETURN_IF_ERROR(rewind_batches.Run(write.step));
    return rewind_voided.Run(write.step);
  }

  // ---- reads
  absl::Status LoadGroups(LedgerState& state) {
    MOERL_RETURN_IF_ERROR(groups.Query([&](Statement& row) {
      Group group;
      group.number = row.Int(0);
      group.prompt_index = row.Int(1);
      group.staleness = row.Int(2);
      group.state = static_cast<GroupState>(row.Int(3));
      group.reason = static_cast<DropReason>(row.Int(4));
      group.detail = row.Bytes(5);
      group.step = row.Int(6);
      group.finished.assign(static_cast<size_t>(group_size), false);
      group.samples.resize(static_cast<size_t>(group_size));
      if (group.state == GroupState::kDropped) state.dropped.push_back(group.number);
      state.groups.push_back(std::move(group));
      return absl::OkStatus();
    }));
    return outcomes.Query([&](Statement& row) -> absl::Status {
      Group& group = state.groups[static_cast<size_t>(row.Int(0))];
      const auto sample = static_cast<size_t>(row.Int(1));
      group.finished[sample] = true;
      if (row.IsNull(4)) return absl::OkStatus();
      MOERL_ASSIGN_OR_RETURN(rl::TokenRun tokens, Tokens(row.Bytes(4)));
      group.samples[sample] = std::make_shared<const Trajectory>(
          Trajectory{std::move(tokens), row.Real(2), static_cast<FinishReason>(row.Int(3))});
      return absl::OkStatus();
    });
  }

  absl::Status LoadLeases(LedgerState& state) {
    MOERL_RETURN_IF_ERROR(leases.Query([&](Statement& row) {
      const LeaseId id{row.Int(0), row.Int(1)};
      Lease& lease = state.leases[id];
      lease = {id, row.Int(2), row.Bytes(3), row.Int(4), {}};
      lease.prefixes.resize(static_cast<size_t>(group_size));
      Group& group = state.groups[static_cast<size_t>(lease.group)];
      group.last_lease = id;
      if (row.Int(5) != 0) group.lease = id;
      return absl::OkStatus();
    }));
    return prefixes.Query([&](Statement& row) -> absl::Status {
      MOERL_ASSIGN_OR_RETURN(rl::TokenRun tokens, Tokens(row.Bytes(3)));
      state.leases.at({row.Int(0), row.Int(1)}).prefixes[static_cast<size_t>(row.Int(2))] =
          std::make_shared<const rl::TokenRun>(std::move(tokens));
      return absl::OkStatus();
    });
  }

  absl::Status LoadSteps(LedgerState& state) {
    MOERL_RETURN_IF_ERROR(batches.Query([&](Statement& row) {
      state.batches[row.Int(0)].ranks = row.Int(1);
      return absl::OkStatus();
    }));
    MOERL_RETURN_IF_ERROR(batch_groups.Query([&](Statement& row) {
      state.batches[row.Int(0)].groups.push_back(row.Int(1));
      return absl::OkStatus();
    }));
    MOERL_RETURN_IF_ERROR(forks.Query([&](Statement& row) {
      state.forks.push_back({row.Int(0), row.Int(1)});
      return absl::OkStatus();
    }));
    return checkpoints.Query([&](Statement& row) {
      state.checkpoints.push_back({row.Int(0), row.Int(1)});
      return absl::OkStatus();
    });
  }

  int64_t group_size = 0;
  int64_t forgotten_through = -1;  // payloads of steps up to here are gone already
};

SqliteLedger::SqliteLedger(sqlite3* database, int64_t group_size)
    : database_(database), group_size_(group_size), statements_(std::make_unique<Statements>(database)) {
  statements_->group_size = group_size;
}

SqliteLedger::~SqliteLedger() {
  statements_.reset();
  sqlite3_close(database_);
}

absl::StatusOr<std::unique_ptr<SqliteLedger>> SqliteLedger::OpenFile(const std::string& path,
                                                                     const LedgerIdentity& identity) {
  MOERL_RETURN_IF_ERROR(CheckLocalFileSystem(DirName(path)));
  sqlite3* database = nullptr;
  const int code = sqlite3_open_v2(path.c_str(), &database,
                                   SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX, nullptr);
  absl::Cleanup close = [&] { sqlite3_close(database); };
  if (code != SQLITE_OK) return SqlError(database, path.c_str());
  sqlite3_busy_timeout(database, kBusyTimeoutMs);
  MOERL_RETURN_IF_ERROR(Execute(database, "PRAGMA journal_mode = WAL"));
  MOERL_RETURN_IF_ERROR(Execute(database, "PRAGMA synchronous = FULL"));
  MOERL_RETURN_IF_ERROR(Execute(database, kSchema));
  std::move(close).Cancel();
  auto ledger = std::unique_ptr<SqliteLedger>(new SqliteLedger(database, identity.group_size));
  MOERL_RETURN_IF_ERROR(ledger->CheckIdentity(identity));
  return ledger;
}

// Writes the identity into a new file, compares it with that of an old one.
absl::Status SqliteLedger::CheckIdentity(const LedgerIdentity& identity) {
  const std::pair<const char*, std::string> expected[] = {{"schema_version", absl::StrCat(kSchemaVersion)},
                                                          {"run_id", identity.run_id},
                                                          {"group_size", absl::StrCat(identity.group_size)},
                                                          {"prompt_fingerprint", identity.prompt_fingerprint}};
  return InTransaction(database_, [&]() -> absl::Status {
    for (const auto& [key, value] : expected) {
      std::string found;
      bool is_there = false;
      MOERL_RETURN_IF_ERROR(statements_->get_meta.Query(
          [&](Statement& row) {
            found = row.Bytes(0);
            is_there = true;
            return absl::OkStatus();
          },
          std::string(key)));
      if (!is_there) {
        MOERL_RETURN_IF_ERROR(statements_->set_meta.Run(std::string(key), value));
      } else if (found != value) {
        return absl::FailedPreconditionError(absl::StrCat("ledger: ", key, " is \"", found, "\" in the file, \"", value,
                                                          "\" in this run; start a new run directory"));
      }
    }
    return Execute(database_, "INSERT OR IGNORE INTO meta VALUES('cursor', 0), ('epoch', 0)");
  });
}

absl::StatusOr<LedgerState> SqliteLedger::Load() {
  LedgerState state;
  state.group_size = group_size_;
  const auto read = [&](const char* key, int64_t& value) {
    return statements_->get_meta.Query(
        [&](Statement& row) {
          value = row.Int(0);
          return absl::OkStatus();
        },
        std::string(key));
  };
  MOERL_RETURN_IF_ERROR(read("epoch", state.epoch));
  MOERL_RETURN_IF_ERROR(read("cursor", state.cursor));
  MOERL_RETURN_IF_ERROR(statements_->LoadGroups(state));
  MOERL_RETURN_IF_ERROR(statements_->LoadLeases(state));
  MOERL_RETURN_IF_ERROR(statements_->LoadSteps(state));
  return state;
}

absl::Status SqliteLedger::CheckEpoch(int64_t epoch) {
  int64_t stored = 0;
  MOERL_RETURN_IF_ERROR(statements_->get_meta.Query(
      [&](Statement& row) {
        stored = row.Int(0);
        return absl::OkStatus();
      },
      std::string("epoch")));
  if (stored == epoch) return absl::OkStatus();
  return absl::AbortedError(
      absl::StrCat("ledger: epoch ", epoch, " is over, a trainer of epoch ", stored, " owns this run; exiting"));
}

absl::StatusOr<LedgerState> SqliteLedger::Open(int64_t epoch) {
  LedgerState state;
  MOERL_RETURN_IF_ERROR(InTransaction(database_, [&]() -> absl::Status {
    MOERL_ASSIGN_OR_RETURN(state, Load());
    if (state.epoch >= epoch) return CheckEpoch(epoch == state.epoch ? epoch - 1 : epoch);
    state.epoch = epoch;
    return statements_->set_meta.Run(std::string("epoch"), epoch);
  }));
  return state;
}

absl::Status SqliteLedger::Commit(int64_t epoch, std::span<const LedgerWrite> writes) {
  if (writes.empty()) return CheckEpoch(epoch);
  return InTransaction(database_, [&]() -> absl::Status {
    MOERL_RETURN_IF_ERROR(CheckEpoch(epoch));
    return WriteAll(writes);
  });
}

absl::Status SqliteLedger::WriteAll(std::span<const LedgerWrite> writes) {
  for (const LedgerWrite& write : writes) {
    MOERL_RETURN_IF_ERROR(std::visit([&](const auto& one) { return (*statements_)(one); }, write));
  }
  return absl::OkStatus();
}

}  // namespace moerl::trainer
