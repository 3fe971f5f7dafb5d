#include "services/trainer/ledger.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/env.h"
#include "libs/base/status_macros.h"
#include "libs/experience/work_proto.h"

// One row a fact; blobs are TokenSpan messages (docs/ledger.md). A write of the protocol is one or a few statements,
// which leave the tables as LedgerState::Apply leaves the state; tests compare the two after every commit.

namespace moerl::trainer {
namespace {

constexpr int64_t kSchemaVersion = 1;

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

void BindOne(SqliteStatement& statement, int64_t value) { statement.Bind(value); }
void BindOne(SqliteStatement& statement, double value) { statement.Bind(value); }
void BindOne(SqliteStatement& statement, const std::string& value) { statement.Bind(std::string_view(value)); }
void BindOne(SqliteStatement& statement, const rl::TokenRun& tokens) {
  v1::TokenSpan span;
  TokensToProto(tokens, 0, &span);
  statement.BindBlob(span.SerializeAsString());
}

// Runs a statement without rows; arguments are its parameters in order.
template <typename... Args>
absl::Status Run(Sqlite& database, const char* sql, const Args&... args) {
  SqliteStatement statement = database.Prepare(sql);
  (BindOne(statement, args), ...);
  return statement.Run();
}

// Calls row(statement) for every row of the answer.
template <typename Row>
absl::Status Query(Sqlite& database, const char* sql, Row row) {
  SqliteStatement statement = database.Prepare(sql);
  while (statement.Step()) MOERL_RETURN_IF_ERROR(row(statement));
  return statement.status();
}

absl::StatusOr<rl::TokenRun> Tokens(std::string_view bytes) {
  v1::TokenSpan span;
  if (!span.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return absl::DataLossError("ledger: a stored token span does not parse");
  }
  return TokensFromProto(span);
}

// Runs `body` inside one transaction that takes the write lock first.
template <typename Body>
absl::Status InTransaction(Sqlite& database, Body body) {
  MOERL_RETURN_IF_ERROR(database.Begin());
  if (absl::Status status = body(); !status.ok()) {
    database.Rollback();
    return status;
  }
  return database.Commit();
}

// ---------------------------------------------------------------------------------------------- writes

struct Writer {
  Sqlite& db;
  const int64_t group_size;
  int64_t& forgotten_through;

  // Leases matter only while their group is open.
  absl::Status ForgetLeasesIfDecided(int64_t group) {
    MOERL_RETURN_IF_ERROR(Run(db,
                              "DELETE FROM prefixes WHERE (epoch, counter) IN (SELECT epoch, counter FROM leases"
                              " WHERE group_number = ?1 AND (SELECT state FROM groups WHERE number = ?1) <> 0)",
                              group));
    return Run(db, "DELETE FROM leases WHERE group_number = ?1 AND (SELECT state FROM groups WHERE number = ?1) <> 0",
               group);
  }

  absl::Status operator()(const AdmitGroup& write) {
    MOERL_RETURN_IF_ERROR(Run(db,
                              "INSERT INTO groups(number, prompt_index, staleness, state)"
                              " SELECT coalesce(max(number) + 1, 0),"
                              " (SELECT value FROM meta WHERE key = 'cursor'), ?1, 0 FROM groups",
                              write.staleness));
    return Run(db, "UPDATE meta SET value = value + 1 WHERE key = 'cursor'");
  }

  absl::Status operator()(const PutLease& write) {
    const Lease& lease = write.lease;
    MOERL_RETURN_IF_ERROR(Run(db, "UPDATE leases SET is_live = 0 WHERE group_number = ?1", lease.group));
    MOERL_RETURN_IF_ERROR(Run(db, "INSERT INTO leases VALUES(?1, ?2, ?3, ?4, ?5, 1)", lease.id.epoch, lease.id.counter,
                              lease.group, lease.worker, lease.incarnation));
    for (size_t i = 0; i < lease.prefixes.size(); ++i) {
      if (!lease.prefixes[i]) continue;
      MOERL_RETURN_IF_ERROR(Run(db, "INSERT INTO prefixes VALUES(?1, ?2, ?3, ?4)", lease.id.epoch, lease.id.counter,
                                static_cast<int64_t>(i), *lease.prefixes[i]));
    }
    return absl::OkStatus();
  }

  absl::Status operator()(const EndLease& write) {
    return Run(db, "UPDATE leases SET is_live = 0 WHERE epoch = ?1 AND counter = ?2", write.id.epoch, write.id.counter);
  }

  absl::Status operator()(const PutOutcome& write) {
    const Trajectory& trajectory = *write.trajectory;
    MOERL_RETURN_IF_ERROR(Run(db, "INSERT OR REPLACE INTO outcomes VALUES(?1, ?2, ?3, ?4, ?5, ?6)", write.group,
                              write.sample, trajectory.reward, static_cast<int64_t>(trajectory.finish_reason),
                              static_cast<int64_t>(trajectory.tokens.size()), trajectory.tokens));
    MOERL_RETURN_IF_ERROR(Run(db,
                              "UPDATE groups SET state = 1 WHERE number = ?1 AND state = 0 AND"
                              " (SELECT count(*) FROM outcomes WHERE group_number = ?1) = ?2",
                              write.group, group_size));
    return ForgetLeasesIfDecided(write.group);
  }

  absl::Status operator()(const DropGroup& write) {
    MOERL_RETURN_IF_ERROR(Run(db, "UPDATE groups SET state = 3, reason = ?2, detail = ?3, step = -1 WHERE number = ?1",
                              write.group, static_cast<int64_t>(write.reason), write.detail));
    MOERL_RETURN_IF_ERROR(Run(db, "UPDATE outcomes SET tokens = NULL WHERE group_number = ?1", write.group));
    return ForgetLeasesIfDecided(write.group);
  }

  absl::Status operator()(const RecordBatch& write) {
    MOERL_RETURN_IF_ERROR(Run(db, "INSERT INTO batches VALUES(?1, ?2) ON CONFLICT DO UPDATE SET ranks = ?2", write.step,
                              write.batch.ranks));
    for (size_t i = 0; i < write.batch.groups.size(); ++i) {
      MOERL_RETURN_IF_ERROR(Run(db, "INSERT OR REPLACE INTO batch_groups VALUES(?1, ?2, ?3)", write.step,
                                static_cast<int64_t>(i), write.batch.groups[i]));
    }
    return absl::OkStatus();
  }

  absl::Status operator()(const VoidBatch& write) {
    MOERL_RETURN_IF_ERROR(Run(db, "DELETE FROM batches WHERE step = ?1", write.step));
    return Run(db, "DELETE FROM batch_groups WHERE step = ?1", write.step);
  }

  absl::Status operator()(const MarkTrained& write) {
    return Run(db,
               "UPDATE groups SET state = 2, step = ?1 WHERE number IN"
               " (SELECT group_number FROM batch_groups WHERE step = ?1)",
               write.step);
  }

  absl::Status operator()(const NameCheckpoint& write) {
    MOERL_RETURN_IF_ERROR(
        Run(db, "INSERT OR REPLACE INTO checkpoints VALUES(?1, ?2)", write.name.step, write.name.epoch));
    return Run(db,
               "DELETE FROM checkpoints WHERE step NOT IN"
               " (SELECT step FROM checkpoints ORDER BY step DESC LIMIT ?1)",
               write.keep);
  }

  absl::Status operator()(const ForgetPayloads& write) {
    MOERL_RETURN_IF_ERROR(Run(db,
                              "UPDATE outcomes SET tokens = NULL WHERE tokens IS NOT NULL AND group_number IN"
                              " (SELECT group_number FROM batch_groups WHERE step <= ?1 AND step > ?2)",
                              write.through_step, forgotten_through));
    forgotten_through = std::max(forgotten_through, write.through_step);
    return absl::OkStatus();
  }

  absl::Status operator()(const AddFork& write) {
    MOERL_RETURN_IF_ERROR(Run(db, "INSERT INTO forks VALUES(?1, ?2)", write.fork.epoch, write.fork.step));
    MOERL_RETURN_IF_ERROR(Run(db, "UPDATE leases SET is_live = 0"));
    return Run(db, "DELETE FROM checkpoints WHERE step > ?1", write.fork.step);
  }

  absl::Status operator()(const RewindTo& write) {
    MOERL_RETURN_IF_ERROR(Run(db,
                              "UPDATE groups SET step = CASE WHEN b.step <= ?1 THEN b.step ELSE -1 END,"
                              " state = CASE WHEN b.step <= ?1 THEN 2 ELSE 1 END"
                              " FROM batch_groups b WHERE b.group_number = groups.number",
                              write.step));
    return Run(db, "UPDATE groups SET state = 1, step = -1 WHERE state = 2 AND step > ?1", write.step);
  }
};

// ---------------------------------------------------------------------------------------------- reads

absl::Status LoadGroups(Sqlite& db, LedgerState& state) {
  const auto group_size = static_cast<size_t>(state.group_size);
  MOERL_RETURN_IF_ERROR(
      Query(db, "SELECT number, prompt_index, staleness, state, reason, detail, step FROM groups ORDER BY number",
            [&](SqliteStatement& row) {
              Group group;
              group.number = row.Int(0);
              group.prompt_index = row.Int(1);
              group.staleness = row.Int(2);
              group.state = static_cast<GroupState>(row.Int(3));
              group.reason = static_cast<DropReason>(row.Int(4));
              group.detail = std::string(row.Text(5));
              group.step = row.Int(6);
              group.finished.assign(group_size, false);
              group.samples.resize(group_size);
              if (group.state == GroupState::kDropped) state.dropped.push_back(group.number);
              state.groups.push_back(std::move(group));
              return absl::OkStatus();
            }));
  return Query(db, "SELECT group_number, sample, reward, finish_reason, tokens FROM outcomes",
               [&](SqliteStatement& row) -> absl::Status {
                 Group& group = state.groups[static_cast<size_t>(row.Int(0))];
                 const auto sample = static_cast<size_t>(row.Int(1));
                 group.finished[sample] = true;
                 if (row.IsNull(4)) return absl::OkStatus();
                 MOERL_ASSIGN_OR_RETURN(rl::TokenRun tokens, Tokens(row.Blob(4)));
                 group.samples[sample] = std::make_shared<const Trajectory>(
                     Trajectory{std::move(tokens), row.Real(2), static_cast<FinishReason>(row.Int(3))});
                 return absl::OkStatus();
               });
}

absl::Status LoadLeases(Sqlite& db, LedgerState& state) {
  MOERL_RETURN_IF_ERROR(
      Query(db, "SELECT epoch, counter, group_number, worker, incarnation, is_live FROM leases ORDER BY epoch, counter",
            [&](SqliteStatement& row) {
              const LeaseId id{row.Int(0), row.Int(1)};
              Lease& lease = state.leases[id];
              lease = {id, row.Int(2), std::string(row.Text(3)), row.Int(4), {}};
              lease.prefixes.resize(static_cast<size_t>(state.group_size));
              Group& group = state.groups[static_cast<size_t>(lease.group)];
              group.last_lease = id;
              if (row.Int(5) != 0) group.lease = id;
              return absl::OkStatus();
            }));
  return Query(db, "SELECT epoch, counter, sample, tokens FROM prefixes", [&](SqliteStatement& row) -> absl::Status {
    MOERL_ASSIGN_OR_RETURN(rl::TokenRun tokens, Tokens(row.Blob(3)));
    state.leases.at({row.Int(0), row.Int(1)}).prefixes[static_cast<size_t>(row.Int(2))] =
        std::make_shared<const rl::TokenRun>(std::move(tokens));
    return absl::OkStatus();
  });
}

absl::Status LoadSteps(Sqlite& db, LedgerState& state) {
  MOERL_RETURN_IF_ERROR(Query(db, "SELECT step, ranks FROM batches", [&](SqliteStatement& row) {
    state.batches[row.Int(0)].ranks = row.Int(1);
    return absl::OkStatus();
  }));
  MOERL_RETURN_IF_ERROR(
      Query(db, "SELECT step, group_number FROM batch_groups ORDER BY step, place", [&](SqliteStatement& row) {
        state.batches[row.Int(0)].groups.push_back(row.Int(1));
        return absl::OkStatus();
      }));
  MOERL_RETURN_IF_ERROR(Query(db, "SELECT epoch, step FROM forks ORDER BY epoch", [&](SqliteStatement& row) {
    state.forks.push_back({row.Int(0), row.Int(1)});
    return absl::OkStatus();
  }));
  return Query(db, "SELECT step, epoch FROM checkpoints ORDER BY step", [&](SqliteStatement& row) {
    state.checkpoints.push_back({row.Int(0), row.Int(1)});
    return absl::OkStatus();
  });
}

// The value of a fact, empty where it is not known.
absl::StatusOr<std::string> Meta(Sqlite& db, const std::string& key) {
  SqliteStatement statement = db.Prepare("SELECT value FROM meta WHERE key = ?1");
  statement.Bind(std::string_view(key));
  std::string value;
  if (statement.Step()) value = std::string(statement.Text(0));
  MOERL_RETURN_IF_ERROR(statement.status());
  return value;
}

absl::StatusOr<int64_t> MetaNumber(Sqlite& db, const std::string& key) {
  MOERL_ASSIGN_OR_RETURN(const std::string text, Meta(db, key));
  return std::strtoll(text.c_str(), nullptr, 10);
}

}  // namespace

absl::StatusOr<std::unique_ptr<SqliteLedger>> SqliteLedger::OpenFile(const std::string& path,
                                                                     const LedgerIdentity& identity) {
  MOERL_RETURN_IF_ERROR(CheckLocalFileSystem(DirName(path)));
  MOERL_ASSIGN_OR_RETURN(auto database, Sqlite::Open(path, SqliteAccess::kShared, kSchema));
  auto ledger = std::unique_ptr<SqliteLedger>(new SqliteLedger(std::move(database), identity.group_size));
  MOERL_RETURN_IF_ERROR(ledger->CheckIdentity(identity));
  return ledger;
}

// Writes the identity into a new file, compares it with that of an old one.
absl::Status SqliteLedger::CheckIdentity(const LedgerIdentity& identity) {
  const std::pair<const char*, std::string> expected[] = {{"schema_version", absl::StrCat(kSchemaVersion)},
                                                          {"run_id", identity.run_id},
                                                          {"group_size", absl::StrCat(identity.group_size)},
                                                          {"prompt_fingerprint", identity.prompt_fingerprint}};
  return InTransaction(*database_, [&]() -> absl::Status {
    MOERL_ASSIGN_OR_RETURN(const std::string schema, Meta(*database_, "schema_version"));
    for (const auto& [key, value] : expected) {
      MOERL_ASSIGN_OR_RETURN(const std::string found, Meta(*database_, key));
      if (schema.empty()) {
        MOERL_RETURN_IF_ERROR(Run(*database_, "INSERT INTO meta VALUES(?1, ?2)", std::string(key), value));
      } else if (found != value) {
        return absl::FailedPreconditionError(absl::StrCat("ledger: ", key, " is \"", found, "\" in the file, \"", value,
                                                          "\" in this run; start a new run directory"));
      }
    }
    return Run(*database_, "INSERT OR IGNORE INTO meta VALUES('cursor', 0), ('epoch', 0)");
  });
}

absl::StatusOr<LedgerState> SqliteLedger::Load() {
  LedgerState state;
  state.group_size = group_size_;
  MOERL_ASSIGN_OR_RETURN(state.epoch, MetaNumber(*database_, "epoch"));
  MOERL_ASSIGN_OR_RETURN(state.cursor, MetaNumber(*database_, "cursor"));
  MOERL_RETURN_IF_ERROR(LoadGroups(*database_, state));
  MOERL_RETURN_IF_ERROR(LoadLeases(*database_, state));
  MOERL_RETURN_IF_ERROR(LoadSteps(*database_, state));
  return state;
}

absl::Status SqliteLedger::CheckEpoch(int64_t epoch) {
  MOERL_ASSIGN_OR_RETURN(const int64_t stored, MetaNumber(*database_, "epoch"));
  if (stored == epoch) return absl::OkStatus();
  return absl::AbortedError(
      absl::StrCat("ledger: epoch ", epoch, " is over, a trainer of epoch ", stored, " owns this run; exiting"));
}

absl::StatusOr<LedgerState> SqliteLedger::Open(int64_t epoch) {
  LedgerState state;
  MOERL_RETURN_IF_ERROR(InTransaction(*database_, [&]() -> absl::Status {
    MOERL_ASSIGN_OR_RETURN(state, Load());
    if (state.epoch >= epoch) {
      return absl::AbortedError(absl::StrCat("ledger: epoch ", epoch, " is not above ", state.epoch,
                                             ", that of the trainer that owns this run; exiting"));
    }
    state.epoch = epoch;
    return Run(*database_, "UPDATE meta SET value = ?1 WHERE key = 'epoch'", epoch);
  }));
  return state;
}

absl::Status SqliteLedger::Commit(int64_t epoch, std::span<const LedgerWrite> writes) {
  if (writes.empty()) return CheckEpoch(epoch);
  return InTransaction(*database_, [&]() -> absl::Status {
    MOERL_RETURN_IF_ERROR(CheckEpoch(epoch));
    Writer writer{*database_, group_size_, forgotten_through_};
    for (const LedgerWrite& write : writes) MOERL_RETURN_IF_ERROR(std::visit(writer, write));
    return absl::OkStatus();
  });
}

}  // namespace moerl::trainer
