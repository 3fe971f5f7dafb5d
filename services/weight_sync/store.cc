#include "services/weight_sync/store.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/base/failpoint.h"
#include "libs/base/log.h"
#include "libs/base/metrics.h"
#include "libs/base/status_macros.h"

namespace moerl {
namespace {

using weights::ChunkRef;
using weights::Digest;
using weights::ToString;

constexpr int kCollectedAtOnce = 256;  // chunks a transaction: the writer lock is held for their unlinking
constexpr size_t kLeasesMax = 100'000;
constexpr absl::Duration kAnswersKept = absl::Hours(24);
constexpr absl::Duration kAnswersForgottenEvery = absl::Hours(1);

Counter& VerifyFailures() {
  static Counter& counter = GetCounter("moerl_weight_sync_verify_failures_total",
                                       "Chunks and manifests whose stored bytes were not what they had been.");
  return counter;
}

std::vector<ChunkRef> ChunksOf(const weights::Manifest& manifest) {
  std::vector<ChunkRef> chunks;
  for (const weights::TensorEntry& tensor : manifest.tensors) {
    chunks.insert(chunks.end(), tensor.chunks.begin(), tensor.chunks.end());
  }
  return chunks;
}

}  // namespace

// ------------------------------------------------------------------------------------------------ opening
absl::StatusOr<std::unique_ptr<Store>> Store::Open(const StoreOptions& options, Env* env, Clock* clock) {
  std::unique_ptr<Store> store(new Store(options, env, clock));
  VerifyFailures();  // a scrape finds it from the start
  MOERL_RETURN_IF_ERROR(store->Load());
  return store;
}

absl::Status Store::Load() {
  absl::MutexLock lock(&mutex_);
  MOERL_RETURN_IF_ERROR(env_->CreateDirs(options_.directory));
  MOERL_RETURN_IF_ERROR(CheckLocalFileSystem(options_.directory));
  MOERL_ASSIGN_OR_RETURN(lock_, env_->Lock(JoinPath(options_.directory, "lock")));
  MOERL_ASSIGN_OR_RETURN(chunks_, ChunkStore::Open(env_, JoinPath(options_.directory, "chunks")));
  MOERL_ASSIGN_OR_RETURN(catalogue_, Catalogue::Open(JoinPath(options_.directory, "catalogue.sqlite")));
  MOERL_ASSIGN_OR_RETURN(const VersionChange loaded, catalogue_->LoadVersions());
  table_.Apply(loaded);
  MOERL_ASSIGN_OR_RETURN(const std::vector<LeaseRow> leases, catalogue_->LoadLeases());
  for (const LeaseRow& row : leases) {
    leases_[row.id] = {.row = row, .deadline = clock_->Now() + absl::Milliseconds(row.duration_ms)};
  }
  MOERL_ASSIGN_OR_RETURN(stored_, catalogue_->LoadChunks());
  for (const auto& [sha256, chunk] : stored_) stored_bytes_ += chunk.bytes;
  MOERL_RETURN_IF_ERROR(Reconcile());
  MOERL_RETURN_IF_ERROR(Collect());
  return CheckBudget();
}

// Files without a row are what a crash left; rows without their file are damage, to be put again.
absl::Status Store::Reconcile() {
  MOERL_ASSIGN_OR_RETURN(const std::vector<ChunkStore::Stored> files, chunks_->List());
  std::map<Digest, uint64_t> on_disk;
  for (const ChunkStore::Stored& file : files) on_disk[file.sha256] = file.bytes;
  for (const auto& [sha256, bytes] : on_disk) {
    const auto found = stored_.find(sha256);
    if (found == stored_.end() || found->second.is_inline) MOERL_RETURN_IF_ERROR(chunks_->Remove(sha256));
  }
  std::vector<ChunkRef> damaged;
  for (const auto& [sha256, chunk] : stored_) {
    if (chunk.is_inline) continue;
    const auto file = on_disk.find(sha256);
    if (file == on_disk.end() || file->second != chunk.bytes) {
      damaged.push_back({.sha256 = sha256, .bytes = static_cast<uint32_t>(chunk.bytes)});
    }
  }
  for (const ChunkRef& ref : damaged) Forget(ref);
  return absl::OkStatus();
}

absl::Status Store::CheckBudget() const {
  const uint64_t needed = table_.ReadyBytes() + 2 * table_.LargestReadyBytes();
  if (needed <= options_.bytes_max) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("weight_sync.store_bytes_max: ", options_.bytes_max,
                                                    " bytes are too few for the ", table_.ReadyBytes(), " kept in ",
                                                    options_.directory, " plus two versions of ",
                                                    table_.LargestReadyBytes(), "; give at least ", needed));
}

// ------------------------------------------------------------------------------------------------ publishers
absl::Status Store::Write(const VersionChange& change, const RequestKey& request, const Answer& answer,
                          const std::function<absl::Status()>& also) {
  MOERL_RETURN_IF_ERROR(catalogue_->Write([&]() -> absl::Status {
    if (also) MOERL_RETURN_IF_ERROR(also());
    MOERL_RETURN_IF_ERROR(catalogue_->Apply(change));
    return catalogue_->Remember(request, answer, clock_->WallNow());
  }));
  table_.Apply(change);
  ++num_changes_;
  may_have_garbage_ = true;
  return absl::OkStatus();
}

absl::StatusOr<int64_t> Store::AcquirePublisher(const std::string& run_id, const RequestKey& request) {
  int64_t epoch = 0;
  {
    absl::MutexLock lock(&mutex_);
    MOERL_ASSIGN_OR_RETURN(const auto answered, catalogue_->Recall(request));
    if (answered) return answered->at(0);
    MOERL_ASSIGN_OR_RETURN(const VersionChange change, table_.Acquire(run_id));
    epoch = *change.epoch;
    MOERL_RETURN_IF_ERROR(Write(change, request, {epoch}));
  }
  LogInfo("publisher acquired", {{"run_id", run_id}, {"epoch", epoch}});
  if (on_change_) on_change_();
  return epoch;
}

absl::Status Store::RecordForks(int64_t epoch, const std::vector<Fork>& forks) {
  {
    absl::MutexLock lock(&mutex_);
    MOERL_ASSIGN_OR_RETURN(const VersionChange change, table_.DeclareForks(epoch, forks));
    if (change.empty()) return absl::OkStatus();
    MOERL_RETURN_IF_ERROR(Write(change, {}, {}));
  }
  LogInfo("forks recorded", {{"epoch", epoch}, {"num_forks", forks.size()}});
  if (on_change_) on_change_();
  return absl::OkStatus();
}

absl::StatusOr<VersionName> Store::Begin(int64_t epoch, int64_t number, uint32_t num_shards, uint64_t bytes,
                                         const RequestKey& request) {
  absl::MutexLock lock(&mutex_);
  MOERL_ASSIGN_OR_RETURN(const auto answered, catalogue_->Recall(request));
  if (answered) return VersionName{.epoch = answered->at(0), .number = answered->at(1)};
  MOERL_ASSIGN_OR_RETURN(const VersionChange change, table_.Begin(epoch, number, num_shards, bytes));
  if (stored_bytes_ + bytes > options_.bytes_max) MOERL_RETURN_IF_ERROR(Collect());
  if (stored_bytes_ + bytes > options_.bytes_max) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "weight_sync.store_bytes_max: ", bytes, " bytes of version number ", number, " do not fit beside ",
        stored_bytes_, " kept or leased within ", options_.bytes_max, "; wait for leases to end or raise the budget"));
  }
  const VersionName name{.epoch = epoch, .number = number};
  MOERL_RETURN_IF_ERROR(Write(change, request, {epoch, number}));
  return name;
}

absl::StatusOr<int64_t> Store::StagingId(int64_t epoch, int64_t number) const {
  MOERL_RETURN_IF_ERROR(table_.CheckEpoch(epoch));
  const VersionRow* staging = table_.Staging(number);
  if (staging != nullptr) return staging->id;
  return absl::FailedPreconditionError(absl::StrCat(
      "version number ", number, " is not STAGING: it was not begun, was committed, or another was begun after it"));
}

absl::StatusOr<std::vector<bool>> Store::Offer(int64_t epoch, int64_t number, uint32_t shard,
                                               std::span<const ChunkRef> chunks) {
  std::vector<bool> are_wanted(chunks.size(), true);
  {
    absl::MutexLock lock(&mutex_);
    MOERL_ASSIGN_OR_RETURN(const int64_t id, StagingId(epoch, number));
    const uint32_t num_shards = table_.Staging(number)->num_shards;
    if (shard >= num_shards) {
      return absl::InvalidArgumentError(
          absl::StrCat("shard: ", shard, " of version number ", number, ", which was begun with ", num_shards));
    }
    MOERL_RETURN_IF_ERROR(catalogue_->Write([&] { return catalogue_->Refer(id, chunks); }));
    for (size_t i = 0; i < chunks.size(); ++i) are_wanted[i] = !IsStored(chunks[i]);
  }
  // "Have it" is said of verified bytes only. The references just recorded keep them meanwhile.
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (are_wanted[i] || ReadStored(chunks[i]).ok()) continue;
    absl::MutexLock lock(&mutex_);
    Forget(chunks[i]);
    are_wanted[i] = true;
  }
  return are_wanted;
}

absl::Status Store::Put(int64_t epoch, int64_t number, std::span<const ChunkBytes> chunks) {
  int64_t id = 0;
  uint64_t bytes = 0;
  for (const ChunkBytes& chunk : chunks) bytes += chunk.data.size();
  {
    absl::MutexLock lock(&mutex_);
    MOERL_ASSIGN_OR_RETURN(id, StagingId(epoch, number));
    for (const ChunkBytes& chunk : chunks) {
      MOERL_ASSIGN_OR_RETURN(const bool is_referred, catalogue_->IsReferred(id, chunk.ref.sha256));
      if (is_referred) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("chunk: ", chunk.ref.sha256.ToHex(), " was not offered; offer a chunk before sending it"));
    }
    if (stored_bytes_ + bytes > options_.bytes_max) {
      return absl::ResourceExhaustedError(absl::StrCat("weight_sync.store_bytes_max: ", stored_bytes_, " bytes of ",
                                                       options_.bytes_max, " are taken, no room for ", bytes, " more"));
    }
  }
  std::vector<ChunkBytes> in_files;
  for (const ChunkBytes& chunk : chunks) {
    if (chunk.ref.bytes > kInlineBytesMax) {
      in_files.push_back(chunk);
    } else {
      MOERL_RETURN_IF_ERROR(CheckChunk(chunk.ref, chunk.data));
    }
  }
  MOERL_RETURN_IF_ERROR(chunks_->Write(in_files));

  absl::MutexLock lock(&mutex_);
  absl::StatusOr<int64_t> still = StagingId(epoch, number);
  if (still.ok() && *still == id) {
    MOERL_RETURN_IF_ERROR(catalogue_->Write([&]() -> absl::Status {
      mutex_.AssertHeld();
      for (const ChunkBytes& chunk : chunks) {
        const bool is_inline = chunk.ref.bytes <= kInlineBytesMax;
        MOERL_RETURN_IF_ERROR(catalogue_->PutChunk(chunk.ref, is_inline ? std::optional(chunk.data) : std::nullopt));
      }
      return absl::OkStatus();
    }));
    for (const ChunkBytes& chunk : chunks) {
      const Catalogue::StoredChunk stored = {.bytes = chunk.ref.bytes, .is_inline = chunk.ref.bytes <= kInlineBytesMax};
      if (stored_.insert({chunk.ref.sha256, stored}).second) stored_bytes_ += chunk.ref.bytes;
    }
    return absl::OkStatus();
  }
  // The version was given up while its chunks were written. Nobody else's are removed: a reference is recorded first.
  for (const ChunkBytes& chunk : in_files) {
    MOERL_ASSIGN_OR_RETURN(const bool is_referred, catalogue_->IsReferred(chunk.ref.sha256));
    if (!is_referred && !stored_.contains(chunk.ref.sha256)) MOERL_RETURN_IF_ERROR(chunks_->Remove(chunk.ref.sha256));
  }
  return still.ok()
             ? absl::FailedPreconditionError(absl::StrCat("version number ", number, " was begun anew meanwhile"))
             : still.status();
}

bool Store::IsStored(const ChunkRef& ref) const {
  const auto found = stored_.find(ref.sha256);
  return found != stored_.end() && found->second.bytes == ref.bytes;
}

absl::Status Store::CheckStored(const weights::Manifest& manifest, int64_t staging_id) {
  int num_missing = 0;
  std::string first;
  for (const ChunkRef& ref : ChunksOf(manifest)) {
    bool is_there = IsStored(ref);
    if (is_there) {
      MOERL_ASSIGN_OR_RETURN(is_there, catalogue_->IsReferred(staging_id, ref.sha256));
    }
    if (is_there) continue;
    if (num_missing++ == 0) first = ref.sha256.ToHex();
  }
  if (num_missing == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("version number ", manifest.version.number, ": ", num_missing,
                                                    " chunks of its manifest were not put, the first is ", first,
                                                    "; offer and put them, then commit"));
}

absl::StatusOr<Store::Committed> Store::Commit(int64_t epoch, const weights::Manifest& manifest,
                                               const RequestKey& request) {
  Committed result;
  {
    absl::MutexLock lock(&mutex_);
    MOERL_ASSIGN_OR_RETURN(const auto answered, catalogue_->Recall(request));
    if (answered) {
      return Committed{.name = {.epoch = answered->at(0), .number = answered->at(1)},
                       .was_ready = answered->at(2) != 0};
    }
    const int64_t number = manifest.version.number;
    MOERL_ASSIGN_OR_RETURN(const VersionTable::Committed decision,
                           table_.Commit(epoch, number, manifest.root, manifest.bytes(), retention()));
    result = {.name = decision.name, .was_ready = decision.was_ready};
    std::function<absl::Status()> also;
    if (!decision.was_ready) {
      const int64_t id = table_.Staging(number)->id;
      MOERL_RETURN_IF_ERROR(CheckStored(manifest, id));
      weights::Manifest stored = manifest;
      stored.version = decision.name;
      also = [this, id, stored = std::move(stored)]() -> absl::Status {
        mutex_.AssertHeld();
        MOERL_RETURN_IF_ERROR(catalogue_->ReferOnly(id, ChunksOf(stored)));
        return catalogue_->PutManifest(id, weights::SerializeManifest(stored));
      };
    }
    MOERL_RETURN_IF_ERROR(
        Write(decision.change, request, {result.name.epoch, result.name.number, result.was_ready}, also));
  }
  LogInfo("version ready", {{"version", ToString(result.name)},
                            {"root", manifest.root.Short()},
                            {"bytes", manifest.bytes()},
                            {"was_ready", result.was_ready}});
  if (on_change_) on_change_();
  return result;
}

// ------------------------------------------------------------------------------------------------ readers
VersionsNow Store::NowLocked() const {
  VersionsNow now{.latest = {}, .root = {}, .forks = table_.forks(), .num_changes = num_changes_};
  if (const VersionRow* head = table_.Head()) {
    now.latest = head->name;
    now.root = head->root;
  }
  return now;
}

VersionsNow Store::Now() const {
  absl::MutexLock lock(&mutex_);
  return NowLocked();
}

std::vector<VersionInfo> Store::List() const {
  absl::MutexLock lock(&mutex_);
  std::vector<VersionInfo> infos;
  for (const auto& [id, row] : table_.rows()) {
    infos.push_back({.row = row});
    for (const auto& [lease_id, lease] : leases_) infos.back().num_leases += lease.row.version == row.name;
  }
  std::sort(infos.begin(), infos.end(), [](const auto& a, const auto& b) { return a.row.name < b.row.name; });
  return infos;
}

int64_t Store::epoch() const {
  absl::MutexLock lock(&mutex_);
  return table_.epoch();
}

StoreUse Store::Use() const {
  absl::MutexLock lock(&mutex_);
  StoreUse use{.chunk_bytes = stored_bytes_, .num_leases = static_cast<int>(leases_.size())};
  for (const auto& [id, row] : table_.rows()) {
    use.num_ready += row.state == VersionState::kReady;
    use.num_staging += row.state == VersionState::kStaging;
    use.num_retired += row.state == VersionState::kRetiredByCount || row.state == VersionState::kRetiredByLineage;
  }
  return use;
}

bool Store::IsLeased(const VersionName& name) const {
  return std::any_of(leases_.begin(), leases_.end(),
                     [&](const auto& entry) { return entry.second.row.version == name; });
}

absl::StatusOr<const VersionRow*> Store::Readable(const VersionName& name) {
  const VersionRow* row = table_.Find(name);
  if (row == nullptr) return absl::NotFoundError(absl::StrCat("version ", ToString(name), " is unknown here"));
  if (row->state == VersionState::kReady) return row;
  if (row->state == VersionState::kRetiredByCount && IsLeased(name)) return row;
  return absl::FailedPreconditionError(absl::StrCat("version ", ToString(name), " is retired by ",
                                                    row->state == VersionState::kRetiredByCount ? "count" : "a fork",
                                                    "; take the latest that WatchVersions names"));
}

absl::StatusOr<std::string> Store::GetManifest(std::optional<VersionName> name) {
  absl::MutexLock lock(&mutex_);
  if (!name) {
    name = NowLocked().latest;
    if (!name) return absl::NotFoundError("no version is READY yet");
  }
  MOERL_ASSIGN_OR_RETURN(const VersionRow* row, Readable(*name));
  MOERL_ASSIGN_OR_RETURN(std::optional<std::string> serialized, catalogue_->Manifest(row->id));
  if (!serialized) return absl::FailedPreconditionError(absl::StrCat("version ", ToString(*name), " was collected"));
  const absl::StatusOr<weights::Manifest> manifest = weights::ParseManifest(*serialized);
  if (manifest.ok() && manifest->version == *name && manifest->root == row->root) return *std::move(serialized);
  VerifyFailures().Add();
  return absl::DataLossError(absl::StrCat("the manifest of version ", ToString(*name), " is damaged on disk"));
}

absl::StatusOr<std::string> Store::ReadChunk(const VersionName& name, const ChunkRef& ref) {
  {
    absl::MutexLock lock(&mutex_);
    MOERL_ASSIGN_OR_RETURN(const VersionRow* row, Readable(name));
    MOERL_ASSIGN_OR_RETURN(const bool is_referred, catalogue_->IsReferred(row->id, ref.sha256));
    if (!is_referred) {
      return absl::NotFoundError(absl::StrCat("version ", ToString(name), " has no chunk ", ref.sha256.ToHex()));
    }
    const auto found = stored_.find(ref.sha256);
    if (found != stored_.end() && found->second.bytes != ref.bytes) {
      return absl::InvalidArgumentError(absl::StrCat("num_bytes: chunk ", ref.sha256.ToHex(), " has ",
                                                     found->second.bytes, ", asked for were ", ref.bytes,
                                                     "; ask as the manifest says"));
    }
    if (found == stored_.end()) {
      return absl::DataLossError(absl::StrCat("chunk ", ref.sha256.ToHex(), " of version ", ToString(name),
                                              " was found damaged; it waits for the publisher to put it again"));
    }
  }
  absl::StatusOr<std::string> data = ReadStored(ref);
  if (data.ok()) return data;
  absl::MutexLock lock(&mutex_);
  MOERL_RETURN_IF_ERROR(Readable(name).status());  // collected meanwhile, that is all
  Forget(ref);
  return absl::DataLossError(data.status().message());
}

absl::StatusOr<std::string> Store::ReadStored(const ChunkRef& ref) {
  if (ref.bytes > kInlineBytesMax) return chunks_->Read(ref);
  std::optional<std::string> data;
  {
    absl::MutexLock lock(&mutex_);
    MOERL_ASSIGN_OR_RETURN(data, catalogue_->InlineData(ref.sha256));
  }
  if (!data) return absl::NotFoundError(absl::StrCat("chunk ", ref.sha256.ToHex(), " is not stored"));
  MOERL_RETURN_IF_ERROR(CheckChunk(ref, *data));
  return *std::move(data);
}

// The chunk is not what its name says: the next offer of it is answered with "wanted".
void Store::Forget(const ChunkRef& ref) {
  VerifyFailures().Add();
  LogError("chunk damaged", {{"chunk", ref.sha256.ToHex()}, {"bytes", ref.bytes}});
  const absl::Status status = catalogue_->Write([&] { return catalogue_->ForgetChunk(ref.sha256); });
  if (!status.ok()) LogError("damaged chunk not forgotten", {{"status", status.ToString()}});
  const auto found = stored_.find(ref.sha256);
  if (found == stored_.end()) return;
  stored_bytes_ -= found->second.bytes;
  stored_.erase(found);
}

absl::StatusOr<int64_t> Store::AcquireLease(const VersionName& name, const std::string& holder, absl::Duration duration,
                                            const RequestKey& request) {
  absl::MutexLock lock(&mutex_);
  MOERL_ASSIGN_OR_RETURN(const auto answered, catalogue_->Recall(request));
  if (answered) return answered->at(0);
  MOERL_RETURN_IF_ERROR(Readable(name).status());
  if (leases_.size() >= kLeasesMax) {
    return absl::ResourceExhaustedError(absl::StrCat(kLeasesMax, " leases are held; release some"));
  }
  LeaseRow row{.version = name, .holder = holder, .duration_ms = absl::ToInt64Milliseconds(duration)};
  MOERL_RETURN_IF_ERROR(catalogue_->Write([&]() -> absl::Status {
    mutex_.AssertHeld();
    MOERL_ASSIGN_OR_RETURN(row.id, catalogue_->NewLease(row));
    return catalogue_->Remember(request, {row.id}, clock_->WallNow());
  }));
  leases_[row.id] = {.row = row, .deadline = clock_->Now() + duration};
  return row.id;
}

absl::Status Store::ReleaseLease(int64_t id) {
  absl::MutexLock lock(&mutex_);
  if (!leases_.contains(id)) return absl::OkStatus();
  MOERL_RETURN_IF_ERROR(catalogue_->Write([&] { return catalogue_->EraseLease(id); }));
  leases_.erase(id);
  may_have_garbage_ = true;
  return absl::OkStatus();
}

// ------------------------------------------------------------------------------------------------ garbage
absl::Status Store::Tick() {
  {
    absl::MutexLock lock(&mutex_);
    MOERL_RETURN_IF_ERROR(catalogue_->broken());
    std::vector<int64_t> over;
    for (const auto& [id, lease] : leases_) {
      if (clock_->Now() >= lease.deadline) over.push_back(id);
    }
    const bool is_time_to_forget = clock_->Now() >= forget_answers_at_;
    if (!over.empty() || is_time_to_forget) {
      MOERL_RETURN_IF_ERROR(catalogue_->Write([&]() -> absl::Status {
        mutex_.AssertHeld();
        for (int64_t id : over) MOERL_RETURN_IF_ERROR(catalogue_->EraseLease(id));
        return catalogue_->ForgetAnswers(clock_->WallNow() - kAnswersKept);
      }));
    }
    for (int64_t id : over) leases_.erase(id);
    may_have_garbage_ = may_have_garbage_ || !over.empty();
    if (is_time_to_forget) forget_answers_at_ = clock_->Now() + kAnswersForgottenEvery;
  }
  bool is_done = false;
  while (!is_done) {  // one batch a hold of the lock, so that publishers get between
    absl::MutexLock lock(&mutex_);
    MOERL_RETURN_IF_ERROR(CollectBatch(is_done));
  }
  return absl::OkStatus();
}

absl::Status Store::Collect() {
  bool is_done = false;
  while (!is_done) MOERL_RETURN_IF_ERROR(CollectBatch(is_done));
  return absl::OkStatus();
}

// Drops what retired versions refer to, unless they are leased, then forgets and unlinks chunks that no version
// refers to, under one hold of the writer lock: no reference can come between the check and the unlink. They are
// forgotten before they are unlinked: a crash between leaves a file without a row, which the next start removes.
absl::Status Store::CollectBatch(bool& is_done) {
  is_done = true;
  if (!may_have_garbage_) return absl::OkStatus();
  MOERL_ASSIGN_OR_RETURN(const std::vector<int64_t> retired, catalogue_->RetiredWithBytes());
  std::vector<int64_t> droppable;
  for (int64_t id : retired) {
    if (!IsLeased(table_.rows().at(id).name)) droppable.push_back(id);
  }
  if (!droppable.empty()) {
    MOERL_RETURN_IF_ERROR(catalogue_->Write([&]() -> absl::Status {
      mutex_.AssertHeld();
      for (int64_t id : droppable) MOERL_RETURN_IF_ERROR(catalogue_->DropBytes(id));
      return absl::OkStatus();
    }));
  }
  MOERL_ASSIGN_OR_RETURN(const std::vector<ChunkRef> garbage, catalogue_->Unreferred(kCollectedAtOnce));
  if (garbage.empty()) {
    may_have_garbage_ = false;
    return absl::OkStatus();
  }
  MOERL_RETURN_IF_ERROR(catalogue_->Write([&]() -> absl::Status {
    mutex_.AssertHeld();
    for (const ChunkRef& ref : garbage) MOERL_RETURN_IF_ERROR(catalogue_->ForgetChunk(ref.sha256));
    return absl::OkStatus();
  }));
  (void)MOERL_FAILPOINT("weight_sync.garbage_forgotten");
  for (const ChunkRef& ref : garbage) {
    if (stored_.erase(ref.sha256) != 0) stored_bytes_ -= ref.bytes;
  }
  for (const ChunkRef& ref : garbage) {
    if (ref.bytes > kInlineBytesMax) MOERL_RETURN_IF_ERROR(chunks_->Remove(ref.sha256));
  }
  is_done = false;
  return absl::OkStatus();
}

}  // namespace moerl
