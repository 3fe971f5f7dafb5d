#ifndef MOERL_SERVICES_WEIGHT_SYNC_CATALOGUE_H_
#define MOERL_SERVICES_WEIGHT_SYNC_CATALOGUE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "libs/base/sqlite.h"
#include "services/weight_sync/version_table.h"

namespace moerl {

struct LeaseRow {
  int64_t id = 0;
  VersionName version;
  std::string holder;
  int64_t duration_ms = 0;
};

// A mutation that may be repeated: its id and what it asked.
struct RequestKey {
  std::string id;        // empty: it is not remembered
  weights::Digest body;  // of everything asked but the id
};

// What a mutation answered: as many numbers as its kind needs.
using Answer = std::vector<int64_t>;

// The durable side of the version table: a SQLite file with versions, manifests, which version refers to which
// chunk, which chunks are stored, leases, and answers to repeatable requests. Thread-compatible, blocking.
//
// Rows of versions and forks carry a checksum: a flipped bit in the file is DATA_LOSS at Open(), not another policy.
// Every writing method belongs into a transaction:
//
//   MOERL_RETURN_IF_ERROR(catalogue.Write([&] { return catalogue.PutLease(lease); }));
class Catalogue {
 public:
  static absl::StatusOr<std::unique_ptr<Catalogue>> Open(const std::string& path);

  // What the file held when it was opened.
  absl::StatusOr<VersionChange> LoadVersions();
  absl::StatusOr<std::vector<LeaseRow>> LoadLeases();
  struct StoredChunk {
    uint64_t bytes = 0;
    bool is_inline = false;  // its bytes are in the catalogue, not in a file of their own
  };
  absl::StatusOr<std::map<weights::Digest, StoredChunk>> LoadChunks();

  // One durable transaction; on return it is on disk, whole, or the file is as before. Errors: as of `body` and
  // Sqlite::Commit(). After DATA_LOSS of a commit nothing more is written: the process must start anew.
  template <typename Body>
  absl::Status Write(Body body);

  // --- within Write() -----------------------------------------------------------------------------------------
  absl::Status Apply(const VersionChange& change);
  absl::Status PutManifest(int64_t version_id, std::string_view serialized);
  absl::Status Refer(int64_t version_id, std::span<const weights::ChunkRef> chunks);
  // Drops manifest and references; the version's row stays.
  absl::Status DropBytes(int64_t version_id);
  // Drops the references to chunks that are not among `chunks`.
  absl::Status ReferOnly(int64_t version_id, std::span<const weights::ChunkRef> chunks);
  // Says that the chunk is stored: in a file, or in the catalogue itself when `data` is given.
  absl::Status PutChunk(const weights::ChunkRef& chunk, std::optional<std::string_view> data);
  absl::Status ForgetChunk(const weights::Digest& sha256);
  absl::StatusOr<int64_t> NewLease(const LeaseRow& lease);  // its id
  absl::Status EraseLease(int64_t id);
  absl::Status Remember(const RequestKey& request, const Answer& answer, absl::Time now);
  absl::Status ForgetAnswers(absl::Time before);

  // Why nothing more may be written; OK until then.
  const absl::Status& broken() const { return broken_; }

  // --- any time -----------------------------------------------------------------------------------------------
  // The first answer to a request; nothing when it is new. INVALID_ARGUMENT: its id was used for another.
  absl::StatusOr<std::optional<Answer>> Recall(const RequestKey& request);
  absl::StatusOr<std::optional<std::string>> Manifest(int64_t version_id);
  // The bytes of a chunk that is kept inline, not verified; nothing when there is none.
  absl::StatusOr<std::optional<std::string>> InlineData(const weights::Digest& sha256);
  absl::StatusOr<bool> IsReferred(int64_t version_id, const weights::Digest& sha256);
  absl::StatusOr<bool> IsReferred(const weights::Digest& sha256);  // by any version
  // Ids of RETIRED versions whose bytes are still held.
  absl::StatusOr<std::vector<int64_t>> RetiredWithBytes();
  // Up to `count_max` stored chunks that no version refers to.
  absl::StatusOr<std::vector<weights::ChunkRef>> Unreferred(int count_max);

 private:
  explicit Catalogue(std::unique_ptr<Sqlite> db) : db_(std::move(db)) {}
  absl::Status BeginWrite();
  absl::Status EndWrite(absl::Status status);

  std::unique_ptr<Sqlite> db_;
  absl::Status broken_;
};

template <typename Body>
absl::Status Catalogue::Write(Body body) {
  if (absl::Status status = BeginWrite(); !status.ok()) return status;
  return EndWrite(body());
}

}  // namespace moerl

#endif  // MOERL_SERVICES_WEIGHT_SYNC_CATALOGUE_H_
