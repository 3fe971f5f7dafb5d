#include "libs/weights/staging.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/base/status_macros.h"

namespace moerl::weights {
namespace {

constexpr size_t kAlignment = 64;  // a cache line, and the widest vector register

absl::Status Errno(int error, const std::string& path, const char* doing) {
  const std::string text = absl::StrCat(path.empty() ? "memory for weights" : path, ": ", doing, ": ", strerror(error));
  const bool is_full = error == ENOSPC || error == ENOMEM || error == EDQUOT || error == EFBIG;
  return is_full ? absl::ResourceExhaustedError(text) : absl::UnavailableError(text);
}

std::string_view AsText(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Calls visit(chunk, offset) for every chunk of every tensor.
template <typename Visit>
void ForEachChunk(const Manifest& manifest, const Visit& visit) {
  const std::vector<size_t> offsets = TensorOffsets(manifest);
  for (size_t t = 0; t < manifest.tensors.size(); ++t) {
    size_t offset = offsets[t];
    for (const ChunkRef& chunk : manifest.tensors[t].chunks) {
      visit(chunk, offset);
      offset += chunk.bytes;
    }
  }
}

}  // namespace

std::vector<size_t> TensorOffsets(const Manifest& manifest) {
  std::vector<size_t> offsets = {0};
  for (const TensorEntry& tensor : manifest.tensors) {
    const size_t end = offsets.back() + tensor.bytes();
    offsets.push_back((end + kAlignment - 1) / kAlignment * kAlignment);
  }
  return offsets;
}

absl::StatusOr<std::unique_ptr<Mapping>> Mapping::Create(const std::string& path, size_t bytes) {
  MOERL_CHECK(bytes > 0);
  int file = -1;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
  if (!path.empty()) {
    file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (file < 0) return Errno(errno, path, "open");
    // Space is taken now: a full disk is an error here, not a signal in the middle of a copy.
    int error = ftruncate(file, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
    if (error == 0) error = posix_fallocate(file, 0, static_cast<off_t>(bytes));
    if (error != 0) {
      close(file);
      unlink(path.c_str());  // or it would keep the space that it did get
      return Errno(error, path, "allocate");
    }
    flags = MAP_SHARED;
  }
  void* const address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, file, 0);
  const int error = errno;
  if (file >= 0) close(file);
  if (address == MAP_FAILED) return Errno(error, path, "map");
  return std::unique_ptr<Mapping>(new Mapping({static_cast<std::byte*>(address), bytes}));
}

Mapping::~Mapping() { munmap(bytes_.data(), bytes_.size()); }

void Mapping::MakeReadOnly() { MOERL_CHECK(mprotect(bytes_.data(), bytes_.size(), PROT_READ) == 0); }

LocalVersion::LocalVersion(Manifest manifest, std::unique_ptr<Mapping> mapping)
    : manifest_(std::move(manifest)), mapping_(std::move(mapping)) {
  const std::vector<size_t> offsets = TensorOffsets(manifest_);
  for (size_t t = 0; t < manifest_.tensors.size(); ++t) {
    const TensorEntry& tensor = manifest_.tensors[t];
    tensors_.push_back({.name = tensor.name,
                        .type = tensor.type,
                        .shape = tensor.shape,
                        .data = mapping_->bytes().subspan(offsets[t], tensor.bytes())});
  }
}

const TensorView* LocalVersion::Find(std::string_view name) const {
  const auto found = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                                      [](const TensorView& tensor, std::string_view n) { return tensor.name < n; });
  return found != tensors_.end() && found->name == name ? &*found : nullptr;
}

Staging::Staging(Manifest manifest, std::unique_ptr<Mapping> mapping)
    : manifest_(std::move(manifest)), mapping_(std::move(mapping)) {
  ForEachChunk(manifest_, [&](const ChunkRef& chunk, size_t offset) {
    const auto [at, is_new] = index_.try_emplace(chunk.sha256, places_.size());
    if (is_new) {
      places_.push_back({.ref = chunk, .offsets = {}});
      missing_bytes_ += chunk.bytes;
    }
    places_[at->second].offsets.push_back(offset);
  });
}

absl::StatusOr<std::unique_ptr<Staging>> Staging::Begin(Manifest manifest, const std::string& path,
                                                        const LocalVersion* current) {
  const bool is_resumed = !path.empty() && access(path.c_str(), F_OK) == 0;
  MOERL_ASSIGN_OR_RETURN(auto mapping, Mapping::Create(path, TensorOffsets(manifest).back()));
  std::unique_ptr<Staging> staging(new Staging(std::move(manifest), std::move(mapping)));
  for (Place& place : staging->places_) {
    if (!is_resumed) break;
    const std::string_view found = AsText(staging->mapping_->bytes().subspan(place.offsets[0], place.ref.bytes));
    if (Sha256(found) == place.ref.sha256) staging->Fill(place, std::string(found));
  }
  if (current != nullptr) staging->TakeOver(*current);
  return staging;
}

void Staging::TakeOver(const LocalVersion& current) {
  for (size_t t = 0; t < current.tensors().size(); ++t) {
    std::span<const std::byte> rest = current.tensors()[t].data;
    for (const ChunkRef& chunk : current.manifest().tensors[t].chunks) {
      const std::span<const std::byte> data = rest.first(chunk.bytes);
      rest = rest.subspan(chunk.bytes);
      const auto found = index_.find(chunk.sha256);
      if (found != index_.end()) (void)Put(places_[found->second].ref, AsText(data));  // refused if memory went bad
    }
  }
}

std::vector<ChunkRef> Staging::Missing() const {
  std::vector<ChunkRef> missing;
  for (const Place& place : places_) {
    if (!place.is_there) missing.push_back(place.ref);
  }
  return missing;
}

absl::Status Staging::Put(const ChunkRef& ref, std::string_view data) {
  const auto found = index_.find(ref.sha256);
  if (found == index_.end() || places_[found->second].ref != ref) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk ", ref.sha256.ToHex(), " is no part of version ", ToString(manifest_.version)));
  }
  Place& place = places_[found->second];
  if (place.is_there) return absl::OkStatus();
  if (data.size() != ref.bytes || Sha256(data) != ref.sha256) {
    return absl::DataLossError(absl::StrCat("chunk ", ref.sha256.ToHex(), " of version ", ToString(manifest_.version),
                                            ": the ", data.size(), " bytes received are not its"));
  }
  Fill(place, data);
  return absl::OkStatus();
}

void Staging::Fill(Place& place, std::string_view data) {
  for (size_t offset : place.offsets) std::memcpy(mapping_->bytes().data() + offset, data.data(), data.size());
  place.is_there = true;
  missing_bytes_ -= place.ref.bytes;
}

std::shared_ptr<const LocalVersion> Staging::Finish(std::unique_ptr<Staging> staging) {
  MOERL_CHECK(staging->missing_bytes_ == 0);
  staging->mapping_->MakeReadOnly();
  return std::make_shared<const LocalVersion>(std::move(staging->manifest_), std::move(staging->mapping_));
}

}  // namespace moerl::weights
