#ifndef MOERL_SERVICES_WEIGHT_SYNC_STORE_H_
#define MOERL_SERVICES_WEIGHT_SYNC_STORE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "libs/base/clock.h"
#include "libs/base/env.h"
#include "libs/weights/manifest.h"
#include "services/weight_sync/catalogue.h"
#include "services/weight_sync/chunk_store.h"
#include "services/weight_sync/version_table.h"

namespace moerl {

struct StoreOptions {
  std::string directory;
  uint64_t bytes_max = uint64_t{10} << 30;  // of chunks on disk
  int versions_kept = 4;
};

// What a reader watches.
struct VersionsNow {
  std::optional<VersionName> latest;  // the READY version of the highest number
  weights::Digest root;               // its
  std::vector<Fork> forks;
  int64_t num_changes = 0;  // of the store since it was opened: of two states, the higher one is the newer
};

struct VersionInfo {
  VersionRow row;
  int num_leases = 0;
};

struct StoreUse {
  uint64_t chunk_bytes = 0;
  int num_ready = 0;
  int num_retired = 0;
  int num_staging = 0;
  int num_leases = 0;
};

// Versions of the weights on this machine's disk: the version table made durable, the chunk files, leases, garbage
// collection. Survives SIGKILL and loss of power at any moment: what was answered is there, whole.
//
//   store/lock               held while open
//   store/catalogue.sqlite   Catalogue, and the chunks of at most kInlineBytesMax
//   store/chunks/<sha256>    ChunkStore: the larger ones
//
// Thread-safe. Every method may wait for the disk. Errors beside those named: RESOURCE_EXHAUSTED when the disk or the
// budget is full, with nothing lost; DATA_LOSS when the disk gives back other bytes than were stored.
class Store {
 public:
  // A file of its own costs a small chunk more than its bytes do: a model of 130 small tensors takes 3 ms to store in
  // the catalogue's one write, and 30 ms in 130 synced files.
  static constexpr uint32_t kInlineBytesMax = 64 << 10;

  // Opens or creates the store, forgets what a crash left unfinished, and gives every lease its full duration again.
  //
  // Errors: FAILED_PRECONDITION when another process has it open, it lies on a network file system, or the budget is
  // below the READY versions plus two of the largest's size.
  static absl::StatusOr<std::unique_ptr<Store>> Open(const StoreOptions& options, Env* env, Clock* clock);

  // Publishers; see VersionTable for the rules and errors. Repeating a request by its id gives the first answer.
  absl::StatusOr<int64_t> AcquirePublisher(const std::string& run_id, const RequestKey& request);
  absl::Status RecordForks(int64_t epoch, const std::vector<Fork>& forks);
  // Errors: RESOURCE_EXHAUSTED when `bytes` more do not fit the budget after collecting garbage.
  absl::StatusOr<VersionName> Begin(int64_t epoch, int64_t number, uint32_t num_shards, uint64_t bytes,
                                    const RequestKey& request);
  // Records that the STAGING version refers to these chunks, durably, then answers by position which of them are
  // wanted: not stored, or damaged. From here on none of them is collected.
  absl::StatusOr<std::vector<bool>> Offer(int64_t epoch, int64_t number, uint32_t shard,
                                          std::span<const weights::ChunkRef> chunks);
  // Stores chunks that were offered. On return they are on disk. Errors: DATA_LOSS when bytes and reference differ.
  absl::Status Put(int64_t epoch, int64_t number, std::span<const ChunkBytes> chunks);
  struct Committed {
    VersionName name;
    bool was_ready = false;
  };
  // `manifest.version.number` says which version; its epoch is given by the store. Errors: FAILED_PRECONDITION when
  // a chunk of the manifest was not put, naming the first and how many.
  absl::StatusOr<Committed> Commit(int64_t epoch, const weights::Manifest& manifest, const RequestKey& request);

  // Readers.
  VersionsNow Now() const;
  std::vector<VersionInfo> List() const;
  // The manifest, serialized, of a version whose bytes are here: READY, or retired by count and leased. Errors:
  // NOT_FOUND for an unknown version, FAILED_PRECONDITION for one that is not READY.
  absl::StatusOr<std::string> GetManifest(std::optional<VersionName> name);
  // A chunk of such a version, verified. Errors: as GetManifest; NOT_FOUND when the version has no such chunk,
  // INVALID_ARGUMENT when it is of another size; DATA_LOSS when its bytes on disk are damaged: the next publisher that
  // offers it is asked for it.
  absl::StatusOr<std::string> ReadChunk(const VersionName& name, const weights::ChunkRef& ref);
  absl::StatusOr<int64_t> AcquireLease(const VersionName& name, const std::string& holder, absl::Duration duration,
                                       const RequestKey& request);
  absl::Status ReleaseLease(int64_t id);  // OK when there is no such lease: it is over

  // Ends leases whose time is over, forgets old answers, collects garbage. Call it every second or so. Errors:
  // DATA_LOSS, for good, once the catalogue cannot be written any more: end the process, the next one finds what was
  // durable.
  absl::Status Tick();

  // Called, from whichever thread changed it, after Now() has changed. Set it once, before the first change.
  void OnChange(std::function<void()> callback) { on_change_ = std::move(callback); }

  StoreUse Use() const;
  int64_t epoch() const;

 private:
  Store(const StoreOptions& options, Env* env, Clock* clock) : options_(options), env_(env), clock_(clock) {}
  absl::Status Load() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Reconcile() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckBudget() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Retention retention() const { return {.versions_max = options_.versions_kept, .bytes_max = options_.bytes_max}; }

  // Makes `change` durable, remembers the answer, and applies it.
  absl::Status Write(const VersionChange& change, const RequestKey& request, const Answer& answer,
                     const std::function<absl::Status()>& also = nullptr) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<int64_t> StagingId(int64_t epoch, int64_t number) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<const VersionRow*> Readable(const VersionName& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckStored(const weights::Manifest& manifest, int64_t staging_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Collect() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CollectBatch(bool& is_done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(const weights::ChunkRef& ref) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::string> ReadStored(const weights::ChunkRef& ref) ABSL_LOCKS_EXCLUDED(mutex_);
  bool IsStored(const weights::ChunkRef& ref) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  VersionsNow NowLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsLeased(const VersionName& name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  struct Lease {
    LeaseRow row;
    absl::Duration deadline;  // by clock_->Now()
  };

  const StoreOptions options_;
  Env* const env_;
  Clock* const clock_;
  std::unique_ptr<FileLock> lock_;
  std::unique_ptr<ChunkStore> chunks_;
  std::function<void()> on_change_;

  // The writer lock: whoever records, rechecks or forgets a reference holds it. Chunk bodies are written and read
  // without it: a reference recorded before keeps them.
  mutable absl::Mutex mutex_;
  std::unique_ptr<Catalogue> catalogue_ ABSL_GUARDED_BY(mutex_);
  VersionTable table_ ABSL_GUARDED_BY(mutex_);
  int64_t num_changes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int64_t, Lease> leases_ ABSL_GUARDED_BY(mutex_);
  std::map<weights::Digest, Catalogue::StoredChunk> stored_ ABSL_GUARDED_BY(mutex_);  // as the catalogue's chunks
  uint64_t stored_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool may_have_garbage_ ABSL_GUARDED_BY(mutex_) = true;  // something was given up since the last collection
  absl::Duration forget_answers_at_ ABSL_GUARDED_BY(mutex_) = absl::ZeroDuration();
};

}  // namespace moerl

#endif  // MOERL_SERVICES_WEIGHT_SYNC_STORE_H_
