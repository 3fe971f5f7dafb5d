#ifndef MOERL_SERVICES_WEIGHT_SYNC_CHUNK_STORE_H_
#define MOERL_SERVICES_WEIGHT_SYNC_CHUNK_STORE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "libs/base/env.h"
#include "libs/weights/manifest.h"

namespace moerl {

// A chunk and its bytes; `data` is not owned.
struct ChunkBytes {
  weights::ChunkRef ref;
  std::string_view data;
};

// Immutable files named by their SHA-256, flat in one directory. A name that survives a crash has all its
// bytes: a file is written beside, synced, renamed, and the directory synced, before Write() returns.
// Thread-safe, blocking. Who may write or remove a chunk when is the Store's business.
class ChunkStore {
 public:
  // Makes the directory where missing. Files that a crash left half-written are removed.
  static absl::StatusOr<std::unique_ptr<ChunkStore>> Open(Env* env, std::string directory);

  // Stores all chunks durably, replacing files that are there.
  //
  // Errors: DATA_LOSS, with nothing stored, when bytes do not match their reference: they changed on the
  // way. RESOURCE_EXHAUSTED: the disk is full. Some may be stored then, none of them by halves.
  absl::Status Write(std::span<const ChunkBytes> chunks);

  // The chunk's bytes, verified.
  //
  // Errors: NOT_FOUND; DATA_LOSS when the file does not match its name any more.
  absl::StatusOr<std::string> Read(const weights::ChunkRef& ref) const;

  // Removes the file; OK when there is none. Durable with the next Write() or never: a file that comes back
  // after a crash is in nobody's way.
  absl::Status Remove(const weights::Digest& sha256);

  struct Stored {
    weights::Digest sha256;
    uint64_t bytes = 0;
  };
  absl::StatusOr<std::vector<Stored>> List() const;

 private:
  ChunkStore(Env* env, std::string directory) : env_(env), directory_(std::move(directory)) {}
  std::string Path(const weights::Digest& sha256) const;

  Env* const env_;
  const std::string directory_;
  std::atomic<uint64_t> num_temporaries_{0};
};

// DATA_LOSS, naming the chunk, unless `data` has the size and digest of `ref`.
absl::Status CheckChunk(const weights::ChunkRef& ref, std::string_view data);

}  // namespace moerl

#endif  // MOERL_SERVICES_WEIGHT_SYNC_CHUNK_STORE_H_
