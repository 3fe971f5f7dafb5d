#ifndef MOERL_LIBS_BASE_ENV_H_
#define MOERL_LIBS_BASE_ENV_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

// The seam between this code and the file system. Everything that must survive a crash is written
// through an Env, so that a test can lose what was not synced, fill the disk, fail a call or flip a bit
// (fault_injection_env.h).
//
// What survives power loss: bytes of a file up to its last Sync(); a name (created, renamed, removed)
// once SyncDir() has returned for its directory. Nothing else may be relied on.
//
// Errors name the operation and the path; the code is errno's: NOT_FOUND, ALREADY_EXISTS,
// RESOURCE_EXHAUSTED (disk full, quota), PERMISSION_DENIED, UNAVAILABLE and so on. After a failed write
// or Sync() the file's contents are unknown: abandon it, never retry the sync on the same file.
namespace moerl {

// A file open for writing at its end. Thread-compatible. Destruction closes it without syncing.
class WritableFile {
 public:
  virtual ~WritableFile() = default;

  // Appends all of `data`, or fails with some of it appended.
  virtual absl::Status Append(absl::string_view data) = 0;

  // Returns when everything appended so far is on stable storage (fsync).
  virtual absl::Status Sync() = 0;

  // Closes the file; a second call does nothing. Does not sync.
  virtual absl::Status Close() = 0;
};

// A file open for reading anywhere. Thread-safe. Keeps reading the same file after a rename or removal.
class RandomAccessFile {
 public:
  virtual ~RandomAccessFile() = default;

  // Reads up to `size` bytes from `offset` into `buffer` and returns how many; fewer only at the end
  // of the file.
  virtual absl::StatusOr<size_t> Read(uint64_t offset, size_t size, char* buffer) const = 0;

  virtual absl::StatusOr<uint64_t> Size() const = 0;
};

// Held until destroyed.
class FileLock {
 public:
  virtual ~FileLock() = default;
};

enum class WriteMode {
  kCreate,    // fails with ALREADY_EXISTS when there is such a file
  kTruncate,  // creates it or empties it
  kAppend,    // creates it or continues it
};

// Thread-safe.
class Env {
 public:
  // Largest file ReadFile takes, unless told otherwise.
  static constexpr uint64_t kReadFileBytesMax = uint64_t{1} << 30;

  virtual ~Env() = default;

  virtual absl::StatusOr<std::unique_ptr<WritableFile>> OpenForWrite(const std::string& path, WriteMode mode) = 0;
  virtual absl::StatusOr<std::unique_ptr<RandomAccessFile>> OpenForRead(const std::string& path) = 0;

  // Atomically gives `from` the name `to`, replacing a file (or an empty directory) of that name.
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;

  // Removes a file.
  virtual absl::Status Remove(const std::string& path) = 0;

  // Removes an empty directory.
  virtual absl::Status RemoveDir(const std::string& path) = 0;

  // Makes a directory (mode 0755). ALREADY_EXISTS when the name is taken.
  virtual absl::Status CreateDir(const std::string& path) = 0;

  // Names in the directory, sorted, without "." and "..".
  virtual absl::StatusOr<std::vector<std::string>> List(const std::string& path) = 0;

  // False when there is nothing at `path` or it cannot be looked at.
  virtual bool Exists(const std::string& path) = 0;
  virtual bool IsDir(const std::string& path) = 0;

  virtual absl::StatusOr<uint64_t> FileSize(const std::string& path) = 0;

  // Returns when every name in the directory is on stable storage.
  virtual absl::Status SyncDir(const std::string& path) = 0;

  // Bytes an unprivileged process can still write on the file system that holds `path`.
  virtual absl::StatusOr<uint64_t> FreeBytes(const std::string& path) = 0;

  // Takes an exclusive advisory lock on the file, creating it; it is released when the FileLock or the
  // process ends, and is not inherited by programs started. FAILED_PRECONDITION when it is held; the
  // message names the holder's process id.
  virtual absl::StatusOr<std::unique_ptr<FileLock>> Lock(const std::string& path) = 0;

  // --- Written once, in terms of the above.

  // The whole file; RESOURCE_EXHAUSTED when it is larger than `bytes_max`.
  absl::StatusOr<std::string> ReadFile(const std::string& path, uint64_t bytes_max = kReadFileBytesMax);

  // Replaces `path` by a file holding `data`, durably and as one step: writes `path`.tmp beside it,
  // syncs, renames, syncs the directory. After a crash there is the old file or the new one, whole.
  // One writer a path at a time.
  absl::Status WriteFileDurably(const std::string& path, absl::string_view data);

  // Rename, then SyncDir of the directory of `to`, and of `from` when it is another one.
  absl::Status RenameDurably(const std::string& from, const std::string& to);

  // Makes the directory and its parents where missing, and syncs the names made.
  absl::Status CreateDirs(const std::string& path);

  // Removes a file or a directory with everything in it; OK when there is nothing at `path`. Symbolic
  // links are removed, not followed. Not atomic.
  absl::Status RemoveTree(const std::string& path);
};

// The machine's file system. Never destroyed. Read() and Append() retry EINTR and short transfers.
Env* PosixEnv();

// FAILED_PRECONDITION, naming the file-system type, when `path` lies on a network file system (nfs, cifs,
// ceph, lustre, fuse and such), where locks and syncs do not mean what a ledger needs.
absl::Status CheckLocalFileSystem(const std::string& path);

// "a/b" for ("a", "b"); `name` alone when `directory` is empty or `name` is absolute.
std::string JoinPath(absl::string_view directory, absl::string_view name);

// The part before the last "/": "." when there is none, "/" for a name in the root.
std::string DirName(absl::string_view path);

// The part after the last "/".
std::string BaseName(absl::string_view path);

}  // namespace moerl

#endif  // MOERL_LIBS_BASE_ENV_H_
