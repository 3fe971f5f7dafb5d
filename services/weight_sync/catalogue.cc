#include "services/weight_sync/catalogue.h"

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/failpoint.h"
#include "libs/base/status_macros.h"

namespace moerl {
namespace {

using weights::ChunkRef;
using weights::Digest;
using weights::Hasher;
using weights::ToString;

constexpr char kSchema[] = R"sql(
CREATE TABLE IF NOT EXISTS publisher (
  one INTEGER PRIMARY KEY CHECK (one = 1), run_id TEXT NOT NULL, epoch INTEGER NOT NULL, sum INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS forks (epoch INTEGER NOT NULL, step INTEGER NOT NULL, sum INTEGER NOT NULL,
  PRIMARY KEY (epoch, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS versions (
  id INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, number INTEGER NOT NULL, state INTEGER NOT NULL,
  num_shards INTEGER NOT NULL, root BLOB NOT NULL, bytes INTEGER NOT NULL, sum INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS manifests (version_id INTEGER PRIMARY KEY, bytes BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS refs (version_id INTEGER NOT NULL, sha256 BLOB NOT NULL,
  PRIMARY KEY (version_id, sha256)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS refs_by_chunk ON refs (sha256);
CREATE TABLE IF NOT EXISTS chunks (sha256 BLOB PRIMARY KEY, bytes INTEGER NOT NULL, is_inline INTEGER NOT NULL)
  WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS inline_chunks (sha256 BLOB PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS leases (
  id INTEGER PRIMARY KEY AUTOINCREMENT, epoch INTEGER NOT NULL, number INTEGER NOT NULL, holder TEXT NOT NULL,
  duration_ms INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS answers (
  id TEXT PRIMARY KEY, body BLOB NOT NULL, answer TEXT NOT NULL, unix_s INTEGER NOT NULL) WITHOUT ROWID;
)sql";

// Numbers on disk: do not change them.
int64_t StateOnDisk(VersionState state) {
  switch (state) {
    case VersionState::kStaging:
      return 1;
    case VersionState::kReady:
      return 2;
    case VersionState::kRetiredByCount:
      return 3;
    case VersionState::kRetiredByLineage:
      return 4;
  }
  return 0;
}

int64_t Folded(const Digest& digest) {
  int64_t sum;
  std::memcpy(&sum, digest.bytes.data(), sizeof(sum));
  return sum;
}

int64_t Sum(const std::string& run_id, int64_t epoch) {
  return Folded(Hasher().AddText("publisher").AddText(run_id).AddU64(epoch).Finish());
}

int64_t Sum(const Fork& fork) { return Folded(Hasher().AddText("fork").AddU64(fork.epoch).AddU64(fork.step).Finish()); }

int64_t Sum(const VersionRow& row) {
  return Folded(Hasher()
                    .AddText("version")
                    .AddU64(row.id)
                    .AddU64(row.name.epoch)
                    .AddU64(row.name.number)
                    .AddU64(StateOnDisk(row.state))
                    .AddU64(row.num_shards)
                    .Add(row.root.view())
                    .AddU64(row.bytes)
                    .Finish());
}

absl::Status Damaged(const std::string& what) {
  return absl::DataLossError(absl::StrCat(
      "catalogue: ", what, " is damaged on disk; empty the store directory, the trainer publishes its version again"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Catalogue>> Catalogue::Open(const std::string& path) {
  MOERL_ASSIGN_OR_RETURN(auto db, Sqlite::Open(path, SqliteAccess::kExclusive, kSchema));
  return std::unique_ptr<Catalogue>(new Catalogue(std::move(db)));
}

absl::StatusOr<VersionChange> Catalogue::LoadVersions() {
  VersionChange loaded;
  SqliteStatement publisher = db_->Prepare("SELECT run_id, epoch, sum FROM publisher");
  if (publisher.Step()) {
    loaded.run_id = std::string(publisher.Text(0));
    loaded.epoch = publisher.Int(1);
    if (publisher.Int(2) != Sum(*loaded.run_id, *loaded.epoch)) return Damaged("the publisher's row");
  }
  MOERL_RETURN_IF_ERROR(publisher.status());

  loaded.forks.emplace();
  SqliteStatement forks = db_->Prepare("SELECT epoch, step, sum FROM forks ORDER BY epoch, step");
  while (forks.Step()) {
    loaded.forks->push_back({.epoch = forks.Int(0), .step = forks.Int(1)});
    if (forks.Int(2) != Sum(loaded.forks->back())) return Damaged("a fork's row");
  }
  MOERL_RETURN_IF_ERROR(forks.status());

  SqliteStatement versions =
      db_->Prepare("SELECT id, epoch, number, state, num_shards, root, bytes, sum FROM versions ORDER BY id");
  while (versions.Step()) {
    VersionRow row{.id = versions.Int(0),
                   .name = {.epoch = versions.Int(1), .number = versions.Int(2)},
                   .num_shards = static_cast<uint32_t>(versions.Int(4)),
                   .root = Digest::FromBytes(versions.Blob(5)).value_or(Digest()),
                   .bytes = static_cast<uint64_t>(versions.Int(6))};
    for (VersionState state : {VersionState::kStaging, VersionState::kReady, VersionState::kRetiredByCount,
                               VersionState::kRetiredByLineage}) {
      if (StateOnDisk(state) == versions.Int(3)) row.state = state;
    }
    if (versions.Int(7) != Sum(row)) return Damaged(absl::StrCat("the row of version ", ToString(row.name)));
    loaded.put.push_back(row);
  }
  MOERL_RETURN_IF_ERROR(versions.status());
  return loaded;
}

absl::StatusOr<std::vector<LeaseRow>> Catalogue::LoadLeases() {
  std::vector<LeaseRow> leases;
  SqliteStatement select = db_->Prepare("SELECT id, epoch, number, holder, duration_ms FROM leases ORDER BY id");
  while (select.Step()) {
    leases.push_back({.id = select.Int(0),
                      .version = {.epoch = select.Int(1), .number = select.Int(2)},
                      .holder = std::string(select.Text(3)),
                      .duration_ms = select.Int(4)});
  }
  MOERL_RETURN_IF_ERROR(select.status());
  return leases;
}

absl::StatusOr<std::map<Digest, Catalogue::StoredChunk>> Catalogue::LoadChunks() {
  std::map<Digest, StoredChunk> chunks;
  SqliteStatement select = db_->Prepare("SELECT sha256, bytes, is_inline FROM chunks");
  while (select.Step()) {
    const std::optional<Digest> digest = Digest::FromBytes(select.Blob(0));
    if (!digest) return Damaged("a chunk's row");
    chunks[*digest] = {.bytes = static_cast<uint64_t>(select.Int(1)), .is_inline = select.Int(2) != 0};
  }
  MOERL_RETURN_IF_ERROR(select.status());
  return chunks;
}

absl::Status Catalogue::BeginWrite() {
  MOERL_RETURN_IF_ERROR(broken_);
  return db_->Begin();
}

absl::Status Catalogue::EndWrite(absl::Status status) {
  if (status.ok()) status = MOERL_FAILPOINT("weight_sync.before_commit");
  if (status.ok()) {
    status = db_->Commit();
  } else {
    db_->Rollback();
  }
  if (absl::IsDataLoss(status)) {
    broken_ = absl::DataLossError(absl::StrCat("the catalogue takes no more writes: ", status.ToString()));
  }
  if (status.ok()) (void)MOERL_FAILPOINT("weight_sync.after_commit");
  return status;
}

absl::Status Catalogue::Apply(const VersionChange& change) {
  if (change.epoch) {
    MOERL_RETURN_IF_ERROR(db_->Prepare("INSERT OR REPLACE INTO publisher VALUES (1, ?, ?, ?)")
                              .Bind(std::string_view(change.run_id.value_or("")))
                              .Bind(*change.epoch)
                              .Bind(Sum(change.run_id.value_or(""), *change.epoch))
                              .Run());
  }
  if (change.forks) {
    MOERL_RETURN_IF_ERROR(db_->Prepare("DELETE FROM forks").Run());
    for (const Fork& fork : *change.forks) {
      MOERL_RETURN_IF_ERROR(
          db_->Prepare("INSERT INTO forks VALUES (?, ?, ?)").Bind(fork.epoch).Bind(fork.step).Bind(Sum(fork)).Run());
    }
  }
  for (int64_t id : change.erase) {
    MOERL_RETURN_IF_ERROR(DropBytes(id));
    MOERL_RETURN_IF_ERROR(db_->Prepare("DELETE FROM versions WHERE id = ?").Bind(id).Run());
  }
  for (const VersionRow& row : change.put) {
    MOERL_RETURN_IF_ERROR(db_->Prepare("INSERT OR REPLACE INTO versions VALUES (?, ?, ?, ?, ?, ?, ?, ?)")
                              .Bind(row.id)
                              .Bind(row.name.epoch)
                              .Bind(row.name.number)
                              .Bind(StateOnDisk(row.state))
                              .Bind(static_cast<int64_t>(row.num_shards))
                              .BindBlob(row.root.view())
                              .Bind(static_cast<int64_t>(row.bytes))
                              .Bind(Sum(row))
                              .Run());
  }
  return absl::OkStatus();
}

absl::Status Catalogue::PutManifest(int64_t version_id, std::string_view serialized) {
  return db_->Prepare("INSERT OR REPLACE INTO manifests VALUES (?, ?)").Bind(version_id).BindBlob(serialized).Run();
}

absl::Status Catalogue::Refer(int64_t version_id, std::span<const ChunkRef> chunks) {
  for (const ChunkRef& chunk : chunks) {
    MOERL_RETURN_IF_ERROR(
        db_->Prepare("INSERT OR IGNORE INTO refs VALUES (?, ?)").Bind(version_id).BindBlob(chunk.sha256.view()).Run());
  }
  return absl::OkStatus();
}

absl::Status Catalogue::DropBytes(int64_t version_id) {
  MOERL_RETURN_IF_ERROR(db_->Prepare("DELETE FROM refs WHERE version_id = ?").Bind(version_id).Run());
  return db_->Prepare("DELETE FROM manifests WHERE version_id = ?").Bind(version_id).Run();
}

absl::Status Catalogue::ReferOnly(int64_t version_id, std::span<const ChunkRef> chunks) {
  std::set<Digest> kept;
  for (const ChunkRef& chunk : chunks) kept.insert(chunk.sha256);
  std::vector<Digest> dropped;
  {
    SqliteStatement select = db_->Prepare("SELECT sha256 FROM refs WHERE version_id = ?");
    select.Bind(version_id);
    while (select.Step()) {
      const std::optional<Digest> digest = Digest::FromBytes(select.Blob(0));
      if (!digest) return Damaged("a reference");
      if (!kept.contains(*digest)) dropped.push_back(*digest);
    }
    MOERL_RETURN_IF_ERROR(select.status());
  }
  for (const Digest& digest : dropped) {
    MOERL_RETURN_IF_ERROR(db_->Prepare("DELETE FROM refs WHERE version_id = ? AND sha256 = ?")
                              .Bind(version_id)
                              .BindBlob(digest.view())
                              .Run());
  }
  return absl::OkStatus();
}

absl::Status Catalogue::PutChunk(const ChunkRef& chunk, std::optional<std::string_view> data) {
  if (data) {
    MOERL_RETURN_IF_ERROR(db_->Prepare("INSERT OR REPLACE INTO inline_chunks VALUES (?, ?)")
                              .BindBlob(chunk.sha256.view())
                              .BindBlob(*data)
                              .Run());
  }
  return db_->Prepare("INSERT OR REPLACE INTO chunks VALUES (?, ?, ?)")
      .BindBlob(chunk.sha256.view())
      .Bind(static_cast<int64_t>(chunk.bytes))
      .Bind(int64_t{data.has_value()})
      .Run();
}

absl::Status Catalogue::ForgetChunk(const Digest& sha256) {
  MOERL_RETURN_IF_ERROR(db_->Prepare("DELETE FROM inline_chunks WHERE sha256 = ?").BindBlob(sha256.view()).Run());
  return db_->Prepare("DELETE FROM chunks WHERE sha256 = ?").BindBlob(sha256.view()).Run();
}

absl::StatusOr<int64_t> Catalogue::NewLease(const LeaseRow& lease) {
  SqliteStatement insert =
      db_->Prepare("INSERT INTO leases (epoch, number, holder, duration_ms) VALUES (?, ?, ?, ?) RETURNING id");
  insert.Bind(lease.version.epoch)
      .Bind(lease.version.number)
      .Bind(std::string_view(lease.holder))
      .Bind(lease.duration_ms);
  if (!insert.Step()) return insert.status();
  const int64_t id = insert.Int(0);
  while (insert.Step()) {
  }
  MOERL_RETURN_IF_ERROR(insert.status());
  return id;
}

absl::Status Catalogue::EraseLease(int64_t id) {
  return db_->Prepare("DELETE FROM leases WHERE id = ?").Bind(id).Run();
}

absl::Status Catalogue::Remember(const RequestKey& request, const Answer& answer, absl::Time now) {
  if (request.id.empty()) return absl::OkStatus();
  std::string text;
  for (int64_t number : answer) absl::StrAppend(&text, text.empty() ? "" : " ", number);
  return db_->Prepare("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)")
      .Bind(std::string_view(request.id))
      .BindBlob(request.body.view())
      .Bind(std::string_view(text))
      .Bind(absl::ToUnixSeconds(now))
      .Run();
}

absl::Status Catalogue::ForgetAnswers(absl::Time before) {
  return db_->Prepare("DELETE FROM answers WHERE unix_s < ?").Bind(absl::ToUnixSeconds(before)).Run();
}

absl::StatusOr<std::optional<Answer>> Catalogue::Recall(const RequestKey& request) {
  if (request.id.empty()) return std::nullopt;
  SqliteStatement select = db_->Prepare("SELECT body, answer FROM answers WHERE id = ?");
  select.Bind(std::string_view(request.id));
  if (!select.Step()) {
    MOERL_RETURN_IF_ERROR(select.status());
    return std::nullopt;
  }
  if (select.Blob(0) != request.body.view()) {
    return absl::InvalidArgumentError(absl::StrCat("request_id: '", request.id,
                                                   "' was used for another request; use a new one, or repeat the first "
                                                   "request unchanged"));
  }
  Answer answer;
  std::string_view text = select.Text(1);
  while (!text.empty()) {
    const size_t end = std::min(text.find(' '), text.size());
    int64_t number = 0;
    if (!absl::SimpleAtoi(absl::string_view(text.data(), end), &number)) return Damaged("an answer");
    answer.push_back(number);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return answer;
}

absl::StatusOr<std::optional<std::string>> Catalogue::Manifest(int64_t version_id) {
  SqliteStatement select = db_->Prepare("SELECT bytes FROM manifests WHERE version_id = ?");
  select.Bind(version_id);
  if (select.Step()) return std::string(select.Blob(0));
  MOERL_RETURN_IF_ERROR(select.status());
  return std::nullopt;
}

absl::StatusOr<std::optional<std::string>> Catalogue::InlineData(const Digest& sha256) {
  SqliteStatement select = db_->Prepare("SELECT data FROM inline_chunks WHERE sha256 = ?");
  select.BindBlob(sha256.view());
  if (select.Step()) return std::string(select.Blob(0));
  MOERL_RETURN_IF_ERROR(select.status());
  return std::nullopt;
}

absl::StatusOr<bool> Catalogue::IsReferred(int64_t version_id, const Digest& sha256) {
  SqliteStatement select = db_->Prepare("SELECT 1 FROM refs WHERE version_id = ? AND sha256 = ?");
  select.Bind(version_id).BindBlob(sha256.view());
  const bool found = select.Step();
  MOERL_RETURN_IF_ERROR(select.status());
  return found;
}

absl::StatusOr<bool> Catalogue::IsReferred(const Digest& sha256) {
  SqliteStatement select = db_->Prepare("SELECT 1 FROM refs WHERE sha256 = ? LIMIT 1");
  select.BindBlob(sha256.view());
  const bool found = select.Step();
  MOERL_RETURN_IF_ERROR(select.status());
  return found;
}

absl::StatusOr<std::vector<int64_t>> Catalogue::RetiredWithBytes() {
  std::vector<int64_t> ids;
  SqliteStatement select =
      db_->Prepare("SELECT version_id FROM manifests JOIN versions ON versions.id = version_id WHERE state IN (3, 4)");
  while (select.Step()) ids.push_back(select.Int(0));
  MOERL_RETURN_IF_ERROR(select.status());
  return ids;
}

absl::StatusOr<std::vector<ChunkRef>> Catalogue::Unreferred(int count_max) {
  std::vector<ChunkRef> chunks;
  SqliteStatement select = db_->Prepare(
      "SELECT sha256, bytes FROM chunks WHERE NOT EXISTS (SELECT 1 FROM refs WHERE refs.sha256 = chunks.sha256) LIMIT "
      "?");
  select.Bind(static_cast<int64_t>(count_max));
  while (select.Step()) {
    const std::optional<Digest> digest = Digest::FromBytes(select.Blob(0));
    if (!digest) return Damaged("a chunk's row");
    chunks.push_back({.sha256 = *digest, .bytes = static_cast<uint32_t>(select.Int(1))});
  }
  MOERL_RETURN_IF_ERROR(select.status());
  return chunks;
}

}  // namespace moerl
