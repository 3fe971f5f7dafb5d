#include "libs/base/env.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "libs/base/status_macros.h"

namespace moerl {

absl::StatusOr<std::string> Env::ReadFile(const std::string& path, uint64_t bytes_max) {
  MOERL_ASSIGN_OR_RETURN(const std::unique_ptr<RandomAccessFile> file, OpenForRead(path));
  // Files of /proc and /sys say size 0 and have contents: read until the end, whatever the size says.
  MOERL_ASSIGN_OR_RETURN(const uint64_t size, file->Size());
  std::string data;
  size_t filled = 0;
  size_t step = std::min(size, bytes_max) + 1;
  while (true) {
    data.resize(filled + step);
    MOERL_ASSIGN_OR_RETURN(const size_t got, file->Read(filled, step, data.data() + filled));
    filled += got;
    if (filled > bytes_max) {
      return absl::ResourceExhaustedError(
          absl::StrCat("read ", path, ": at most ", bytes_max, " bytes expected, found more"));
    }
    if (got < step) break;
    step = 64 << 10;
  }
  data.resize(filled);
  return data;
}

absl::Status Env::WriteFileDurably(const std::string& path, absl::string_view data) {
  const std::string beside = path + ".tmp";
  MOERL_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> file, OpenForWrite(beside, WriteMode::kTruncate));
  MOERL_RETURN_IF_ERROR(file->Append(data));
  MOERL_RETURN_IF_ERROR(file->Sync());
  MOERL_RETURN_IF_ERROR(file->Close());
  return RenameDurably(beside, path);
}

absl::Status Env::RenameDurably(const std::string& from, const std::string& to) {
  MOERL_RETURN_IF_ERROR(Rename(from, to));
  const std::string to_dir = DirName(to);
  const std::string from_dir = DirName(from);
  MOERL_RETURN_IF_ERROR(SyncDir(to_dir));
  return from_dir == to_dir ? absl::OkStatus() : SyncDir(from_dir);
}

absl::Status Env::CreateDirs(const std::string& path) {
  if (path.empty() || IsDir(path)) return absl::OkStatus();
  const std::string parent = DirName(path);
  if (parent != path) MOERL_RETURN_IF_ERROR(CreateDirs(parent));
  const absl::Status made = CreateDir(path);
  // A link to a directory serves as one (checkpoints on another volume).
  if (!made.ok()) return absl::IsAlreadyExists(made) && List(path).ok() ? absl::OkStatus() : made;
  return SyncDir(parent);
}

absl::Status Env::RemoveTree(const std::string& path) {
  if (!IsDir(path)) {
    const absl::Status removed = Remove(path);
    return absl::IsNotFound(removed) ? absl::OkStatus() : removed;
  }
  MOERL_ASSIGN_OR_RETURN(const std::vector<std::string> names, List(path));
  for (const std::string& name : names) MOERL_RETURN_IF_ERROR(RemoveTree(JoinPath(path, name)));
  return RemoveDir(path);
}

std::string JoinPath(absl::string_view directory, absl::string_view name) {
  if (directory.empty() || (!name.empty() && name.front() == '/')) return std::string(name);
  if (directory.back() == '/') return absl::StrCat(directory, name);
  return absl::StrCat(directory, "/", name);
}

std::string DirName(absl::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  const size_t slash = path.rfind('/');
  if (slash == absl::string_view::npos) return ".";
  return std::string(path.substr(0, std::max<size_t>(slash, 1)));
}

std::string BaseName(absl::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  const size_t slash = path.rfind('/');
  return std::string(slash == absl::string_view::npos ? path : path.substr(slash + 1));
}

}  // namespace moerl
