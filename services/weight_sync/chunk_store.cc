#include "services/weight_sync/chunk_store.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "libs/base/failpoint.h"
#include "libs/base/status_macros.h"

namespace moerl {
namespace {

constexpr absl::string_view kTemporary = ".tmp";

}  // namespace

using weights::ChunkRef;
using weights::Digest;

absl::Status CheckChunk(const ChunkRef& ref, std::string_view data) {
  if (data.size() != ref.bytes) {
    return absl::DataLossError(
        absl::StrCat("chunk ", ref.sha256.ToHex(), " should have ", ref.bytes, " bytes, has ", data.size()));
  }
  const Digest found = weights::Sha256(data);
  if (found == ref.sha256) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("chunk ", ref.sha256.ToHex(), " of ", ref.bytes, " bytes has digest ", found.ToHex()));
}

absl::StatusOr<std::unique_ptr<ChunkStore>> ChunkStore::Open(Env* env, std::string directory) {
  MOERL_RETURN_IF_ERROR(env->CreateDirs(directory));
  MOERL_ASSIGN_OR_RETURN(const std::vector<std::string> names, env->List(directory));
  for (const std::string& name : names) {
    if (absl::EndsWith(name, kTemporary)) MOERL_RETURN_IF_ERROR(env->Remove(JoinPath(directory, name)));
  }
  return std::unique_ptr<ChunkStore>(new ChunkStore(env, std::move(directory)));
}

std::string ChunkStore::Path(const Digest& sha256) const { return JoinPath(directory_, sha256.ToHex()); }

absl::Status ChunkStore::Write(std::span<const ChunkBytes> chunks) {
  if (chunks.empty()) return absl::OkStatus();
  for (const ChunkBytes& chunk : chunks) MOERL_RETURN_IF_ERROR(CheckChunk(chunk.ref, chunk.data));

  // All are written before the first is synced: the file system then commits many of them together.
  struct Open {
    std::string path;
    std::unique_ptr<WritableFile> file;
  };
  std::vector<Open> files;
  const auto write = [&]() -> absl::Status {
    for (const ChunkBytes& chunk : chunks) {
      // Two writers may store the same chunk at once, so a temporary name is used once.
      std::string path = absl::StrCat(Path(chunk.ref.sha256), ".", num_temporaries_.fetch_add(1), kTemporary);
      MOERL_ASSIGN_OR_RETURN(auto file, env_->OpenForWrite(path, WriteMode::kTruncate));
      files.push_back({std::move(path), std::move(file)});
      MOERL_RETURN_IF_ERROR(files.back().file->Append({chunk.data.data(), chunk.data.size()}));
    }
    MOERL_RETURN_IF_ERROR(MOERL_FAILPOINT("weight_sync.chunks_written"));
    for (Open& open : files) {
      MOERL_RETURN_IF_ERROR(open.file->Sync());
      MOERL_RETURN_IF_ERROR(open.file->Close());
    }
    MOERL_RETURN_IF_ERROR(MOERL_FAILPOINT("weight_sync.chunks_synced"));
    for (size_t i = 0; i < files.size(); ++i) {
      MOERL_RETURN_IF_ERROR(env_->Rename(files[i].path, Path(chunks[i].ref.sha256)));
    }
    MOERL_RETURN_IF_ERROR(MOERL_FAILPOINT("weight_sync.chunks_renamed"));
    return env_->SyncDir(directory_);
  };
  absl::Status status = write();
  if (status.ok()) return status;
  for (Open& open : files) (void)env_->Remove(open.path);  // those renamed already are whole
  return status;
}

absl::StatusOr<std::string> ChunkStore::Read(const ChunkRef& ref) const {
  MOERL_ASSIGN_OR_RETURN(const auto file, env_->OpenForRead(Path(ref.sha256)));
  std::string data(size_t{ref.bytes} + 1, '\0');  // one more, to notice a file that grew
  MOERL_ASSIGN_OR_RETURN(const size_t size, file->Read(0, data.size(), data.data()));
  data.resize(size);
  MOERL_RETURN_IF_ERROR(CheckChunk(ref, data));
  return data;
}

absl::Status ChunkStore::Remove(const Digest& sha256) {
  const absl::Status status = env_->Remove(Path(sha256));
  return absl::IsNotFound(status) ? absl::OkStatus() : status;
}

absl::StatusOr<std::vector<ChunkStore::Stored>> ChunkStore::List() const {
  MOERL_ASSIGN_OR_RETURN(const std::vector<std::string> names, env_->List(directory_));
  std::vector<Stored> stored;
  for (const std::string& name : names) {
    const std::optional<Digest> digest = Digest::FromHex(name);
    if (!digest) continue;  // not ours
    MOERL_ASSIGN_OR_RETURN(const uint64_t bytes, env_->FileSize(JoinPath(directory_, name)));
    stored.push_back({.sha256 = *digest, .bytes = bytes});
  }
  return stored;
}

}  // namespace moerl
