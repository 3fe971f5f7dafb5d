#ifndef MOERL_LIBS_WEIGHTS_STAGING_H_
#define MOERL_LIBS_WEIGHTS_STAGING_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "libs/weights/manifest.h"

namespace moerl::weights {

// Memory that holds a whole version: of a file, or anonymous. Unmapped when destroyed; the file stays.
class Mapping {
 public:
  // `path` empty: anonymous memory. Otherwise the file is created with `bytes` of disk space, or an old one is used
  // with what it holds. Errors: RESOURCE_EXHAUSTED when memory or disk do not suffice.
  static absl::StatusOr<std::unique_ptr<Mapping>> Create(const std::string& path, size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }
  void MakeReadOnly();

 private:
  explicit Mapping(std::span<std::byte> bytes) : bytes_(bytes) {}
  const std::span<std::byte> bytes_;
};

// A version on this machine, whole and verified: it never changes. Thread-safe.
class LocalVersion {
 public:
  LocalVersion(Manifest manifest, std::unique_ptr<Mapping> mapping);

  const VersionName& name() const { return manifest_.version; }
  const Manifest& manifest() const { return manifest_; }
  // In ascending order of name; data starts at multiples of 64 bytes and lives as long as this object.
  std::span<const TensorView> tensors() const { return tensors_; }
  // Null when there is none of this name.
  const TensorView* Find(std::string_view name) const;

 private:
  const Manifest manifest_;
  const std::unique_ptr<Mapping> mapping_;
  std::vector<TensorView> tensors_;
};

// A version on its way: beside the one in use, chunk by chunk. Thread-compatible.
//
// A file needs no list of what it holds: a chunk is there when its bytes have its digest, which is looked up when the
// staging begins. So nothing must be synced, and a kill or a loss of power at any moment costs what was not written.
class Staging {
 public:
  // Takes over what the file at `path` holds already (none: memory), and from `current`, which may be null, chunks that
  // did not change.
  static absl::StatusOr<std::unique_ptr<Staging>> Begin(Manifest manifest, const std::string& path,
                                                        const LocalVersion* current);

  const Manifest& manifest() const { return manifest_; }
  // Chunks still missing, each once, in the order of the tensors.
  std::vector<ChunkRef> Missing() const;
  uint64_t missing_bytes() const { return missing_bytes_; }

  // Puts a chunk wherever the version has it. Errors: DATA_LOSS when the bytes are not the chunk's; INVALID_ARGUMENT
  // when the version has no such chunk.
  absl::Status Put(const ChunkRef& ref, std::string_view data);

  // The whole version: every byte of it has been verified by its chunk's digest. Must not be called while something is
  // missing.
  static std::shared_ptr<const LocalVersion> Finish(std::unique_ptr<Staging> staging);

 private:
  struct Place {
    ChunkRef ref;
    std::vector<size_t> offsets;
    bool is_there = false;
  };
  Staging(Manifest manifest, std::unique_ptr<Mapping> mapping);
  void TakeOver(const LocalVersion& current);
  void Fill(Place& place, std::string_view data);

  Manifest manifest_;
  std::unique_ptr<Mapping> mapping_;
  std::vector<Place> places_;  // distinct chunks in the order of the tensors
  std::unordered_map<Digest, size_t, DigestHash> index_;
  uint64_t missing_bytes_ = 0;
};

// Where each tensor starts in a mapping of the version, and last the size of it.
std::vector<size_t> TensorOffsets(const Manifest& manifest);

}  // namespace moerl::weights

#endif  // MOERL_LIBS_WEIGHTS_STAGING_H_
