#ifndef MOERL_LIBS_BASE_FAULT_INJECTION_ENV_H_
#define MOERL_LIBS_BASE_FAULT_INJECTION_ENV_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "libs/base/env.h"

namespace moerl {

// A file system in memory for tests, which forgets what was not synced, fills up, fails, and flips bits.
// Thread-safe. Starts with the root directory "/"; paths that are not absolute count from there.
//
// The systematic crash test: run the work with FailAfter(n) for n = 0, 1, 2, … until it succeeds; after each
// run Crash(), open again, and check what must hold.
class FaultInjectionEnv : public Env {
 public:
  FaultInjectionEnv();
  ~FaultInjectionEnv() override;

  // The power goes off and on: file contents not synced and names not synced are gone, locks are free, and
  // files opened before fail with UNAVAILABLE. Takes back FailAfter and FailPath, not the capacity.
  void Crash();

  // The same, but of what was not synced some survives, as on a real disk: of each file a prefix of what
  // was appended, of each directory all changes or none.
  void CrashRandomly(uint64_t seed);

  // After `num_operations` more changes (opening for write, append, sync, rename, remove, making directories,
  // syncing them) every change fails with UNAVAILABLE; a failing append leaves half of its bytes.
  void FailAfter(int64_t num_operations);

  // Changes so far, failed ones included.
  int64_t NumOperations() const;

  // Every operation on a path that contains `part`, reads too, fails with `status`.
  void FailPath(const std::string& part, absl::Status status);

  // Files may hold this many bytes in all; an append past it keeps what fits and fails with RESOURCE_EXHAUSTED.
  void SetCapacityBytes(uint64_t bytes);

  // Flips bit `bit` (0 is the lowest of the first byte) of the file, synced contents and all.
  absl::Status FlipBit(const std::string& path, uint64_t bit);

  // Cuts the file to `size` bytes, synced contents and all.
  absl::Status Truncate(const std::string& path, uint64_t size);

  absl::StatusOr<std::unique_ptr<WritableFile>> OpenForWrite(const std::string& path, WriteMode mode) override;
  absl::StatusOr<std::unique_ptr<RandomAccessFile>> OpenForRead(const std::string& path) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status Remove(const std::string& path) override;
  absl::Status RemoveDir(const std::string& path) override;
  absl::Status CreateDir(const std::string& path) override;
  absl::StatusOr<std::vector<std::string>> List(const std::string& path) override;
  bool Exists(const std::string& path) override;
  bool IsDir(const std::string& path) override;
  absl::StatusOr<uint64_t> FileSize(const std::string& path) override;
  absl::Status SyncDir(const std::string& path) override;
  absl::StatusOr<uint64_t> FreeBytes(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<FileLock>> Lock(const std::string& path) override;

 private:
  friend class MemoryWritableFile;
  friend class MemoryRandomAccessFile;
  friend class MemoryFileLock;
  struct Node;
  using NodePtr = std::shared_ptr<Node>;

  // A name in a directory, which need not exist.
  struct Slot {
    NodePtr dir;
    std::string name;
    NodePtr Get() const;
  };

  NodePtr Find(const std::string& path) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Slot> FindSlot(const char* operation, const std::string& path) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<NodePtr> FindKind(const char* operation, const std::string& path, bool is_dir) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckPath(const char* operation, const std::string& path) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status BeginChange(const char* operation, const std::string& path) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  uint64_t UsedBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Append(const NodePtr& file, const std::string& path, int64_t generation, absl::string_view data);
  absl::Status Sync(const NodePtr& file, const std::string& path, int64_t generation);
  absl::StatusOr<size_t> Read(const NodePtr& file, const std::string& path, int64_t generation, uint64_t offset,
                              size_t size, char* buffer);
  void Unlock(const std::string& path, int64_t generation);
  void Restart() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;
  NodePtr root_ ABSL_GUARDED_BY(mutex_);
  int64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;  // crashes so far
  int64_t num_operations_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<int64_t> operations_max_ ABSL_GUARDED_BY(mutex_);
  std::optional<uint64_t> capacity_bytes_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, absl::Status> failing_paths_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> locks_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace moerl

#endif  // MOERL_LIBS_BASE_FAULT_INJECTION_ENV_H_
