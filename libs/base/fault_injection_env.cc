#include "libs/base/fault_injection_env.h"

#include <algorithm>
#include <functional>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "libs/base/status_macros.h"

namespace moerl {

// A file or a directory: what a reader sees now, and what the disk would still know after a crash.
struct FaultInjectionEnv::Node {
  bool is_dir = false;
  std::string data, synced_data;
  std::map<std::string, NodePtr> entries, synced_entries;
};

namespace {

absl::Status Failed(absl::StatusCode code, const char* operation, absl::string_view path, absl::string_view why) {
  return absl::Status(code, absl::StrCat(operation, " ", path, ": ", why));
}

absl::Status NotFound(const char* operation, absl::string_view path) {
  return Failed(absl::StatusCode::kNotFound, operation, path, "No such file or directory");
}

absl::Status Crashed(const char* operation, absl::string_view path) {
  return Failed(absl::StatusCode::kUnavailable, operation, path, "opened before the crash");
}

constexpr uint64_t kUnlimitedFreeBytes = uint64_t{1} << 40;

}  // namespace

class MemoryWritableFile final : public WritableFile {
 public:
  MemoryWritableFile(FaultInjectionEnv* env, FaultInjectionEnv::NodePtr file, std::string path, int64_t generation)
      : env_(env), file_(std::move(file)), path_(std::move(path)), generation_(generation) {}

  absl::Status Append(absl::string_view data) override { return env_->Append(file_, path_, generation_, data); }
  absl::Status Sync() override { return env_->Sync(file_, path_, generation_); }
  absl::Status Close() override { return absl::OkStatus(); }

 private:
  FaultInjectionEnv* env_;
  FaultInjectionEnv::NodePtr file_;
  std::string path_;
  int64_t generation_;
};

class MemoryRandomAccessFile final : public RandomAccessFile {
 public:
  MemoryRandomAccessFile(FaultInjectionEnv* env, FaultInjectionEnv::NodePtr file, std::string path, int64_t generation)
      : env_(env), file_(std::move(file)), path_(std::move(path)), generation_(generation) {}

  absl::StatusOr<size_t> Read(uint64_t offset, size_t size, char* buffer) const override {
    return env_->Read(file_, path_, generation_, offset, size, buffer);
  }
  absl::StatusOr<uint64_t> Size() const override {
    absl::MutexLock lock(&env_->mutex_);
    return file_->data.size();
  }

 private:
  FaultInjectionEnv* env_;
  FaultInjectionEnv::NodePtr file_;
  std::string path_;
  int64_t generation_;
};

class MemoryFileLock final : public FileLock {
 public:
  MemoryFileLock(FaultInjectionEnv* env, std::string path, int64_t generation)
      : env_(env), path_(std::move(path)), generation_(generation) {}
  ~MemoryFileLock() override { env_->Unlock(path_, generation_); }

 private:
  FaultInjectionEnv* env_;
  std::string path_;
  int64_t generation_;
};

FaultInjectionEnv::FaultInjectionEnv() : root_(std::make_shared<Node>()) { root_->is_dir = true; }
FaultInjectionEnv::~FaultInjectionEnv() = default;

FaultInjectionEnv::NodePtr FaultInjectionEnv::Slot::Get() const {
  const auto it = dir->entries.find(name);
  return it == dir->entries.end() ? nullptr : it->second;
}

// --- Faults

void FaultInjectionEnv::Restart() {
  ++generation_;
  operations_max_.reset();
  failing_paths_.clear();
  locks_.clear();
}

void FaultInjectionEnv::Crash() {
  absl::MutexLock lock(&mutex_);
  Restart();
  const std::function<void(Node&)> forget = [&](Node& node) {
    node.data = node.synced_data;
    node.entries = node.synced_entries;
    for (auto& [name, child] : node.entries) forget(*child);
  };
  forget(*root_);
}

void FaultInjectionEnv::CrashRandomly(uint64_t seed) {
  absl::MutexLock lock(&mutex_);
  Restart();
  std::mt19937_64 random(seed);
  const std::function<void(Node&)> forget = [&](Node& node) {
    if (absl::StartsWith(node.data, node.synced_data)) {
      const size_t unsynced = node.data.size() - node.synced_data.size();
      node.data.resize(node.synced_data.size() + random() % (unsynced + 1));
    } else if (random() % 2 == 0) {
      node.data = node.synced_data;
    }
    node.synced_data = node.data;
    if (random() % 2 == 0) node.entries = node.synced_entries;
    node.synced_entries = node.entries;
    for (auto& [name, child] : node.entries) forget(*child);
  };
  forget(*root_);
}

void FaultInjectionEnv::FailAfter(int64_t num_operations) {
  absl::MutexLock lock(&mutex_);
  operations_max_ = num_operations_ + num_operations;
}

int64_t FaultInjectionEnv::NumOperations() const {
  absl::MutexLock lock(&mutex_);
  return num_operations_;
}

void FaultInjectionEnv::FailPath(const std::string& part, absl::Status status) {
  absl::MutexLock lock(&mutex_);
  failing_paths_[part] = std::move(status);
}

void FaultInjectionEnv::SetCapacityBytes(uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  capacity_bytes_ = bytes;
}

absl::Status FaultInjectionEnv::FlipBit(const std::string& path, uint64_t bit) {
  absl::MutexLock lock(&mutex_);
  MOERL_ASSIGN_OR_RETURN(const NodePtr file, FindKind("flip", path, /*is_dir=*/false));
  const uint64_t byte = bit / 8;
  if (byte >= file->data.size()) return Failed(absl::StatusCode::kOutOfRange, "flip", path, "the file is shorter");
  const auto mask = static_cast<char>(1u << (bit % 8));
  file->data[byte] ^= mask;
  if (byte < file->synced_data.size()) file->synced_data[byte] ^= mask;
  return absl::OkStatus();
}

absl::Status FaultInjectionEnv::Truncate(const std::string& path, uint64_t size) {
  absl::MutexLock lock(&mutex_);
  MOERL_ASSIGN_OR_RETURN(const NodePtr file, FindKind("truncate", path, /*is_dir=*/false));
  file->data.resize(std::min<uint64_t>(size, file->data.size()));
  file->synced_data.resize(std::min<uint64_t>(size, file->synced_data.size()));
  return absl::OkStatus();
}

// --- Look-up and bookkeeping

FaultInjectionEnv::NodePtr FaultInjectionEnv::Find(const std::string& path) const {
  NodePtr node = root_;
  for (absl::string_view name : absl::StrSplit(path, '/', absl::SkipEmpty())) {
    if (name == ".") continue;
    const auto it = node->entries.find(std::string(name));
    if (it == node->entries.end()) return nullptr;
    node = it->second;
  }
  return node;
}

absl::StatusOr<FaultInjectionEnv::Slot> FaultInjectionEnv::FindSlot(const char* operation,
                                                                    const std::string& path) const {
  const NodePtr dir = Find(DirName(path));
  if (dir == nullptr || !dir->is_dir) return NotFound(operation, path);
  return Slot{dir, BaseName(path)};
}

absl::StatusOr<FaultInjectionEnv::NodePtr> FaultInjectionEnv::FindKind(const char* operation, const std::string& path,
                                                                       bool is_dir) const {
  const NodePtr node = Find(path);
  if (node == nullptr) return NotFound(operation, path);
  if (node->is_dir == is_dir) return node;
  return Failed(absl::StatusCode::kFailedPrecondition, operation, path, is_dir ? "Not a directory" : "Is a directory");
}

absl::Status FaultInjectionEnv::CheckPath(const char* operation, const std::string& path) const {
  for (const auto& [part, status] : failing_paths_) {
    if (absl::StrContains(path, part)) return Failed(status.code(), operation, path, status.message());
  }
  return absl::OkStatus();
}

absl::Status FaultInjectionEnv::BeginChange(const char* operation, const std::string& path) {
  ++num_operations_;
  if (operations_max_.has_value() && num_operations_ > *operations_max_) {
    return Failed(absl::StatusCode::kUnavailable, operation, path, "injected failure");
  }
  return CheckPath(operation, path);
}

uint64_t FaultInjectionEnv::UsedBytes() const {
  uint64_t used = 0;
  const std::function<void(const Node&)> add = [&](const Node& node) {
    used += node.data.size();
    for (const auto& [name, child] : node.entries) add(*child);
  };
  add(*root_);
  return used;
}

// --- Open files

absl::Status FaultInjectionEnv::Append(const NodePtr& file, const std::string& path, int64_t generation,
                                       absl::string_view data) {
  absl::MutexLock lock(&mutex_);
  if (generation != generation_) return Crashed("write", path);
  if (absl::Status status = BeginChange("write", path); !status.ok()) {
    absl::StrAppend(&file->data, data.substr(0, data.size() / 2));
    return status;
  }
  if (capacity_bytes_.has_value()) {
    const uint64_t used = UsedBytes();
    const uint64_t free = *capacity_bytes_ - std::min(used, *capacity_bytes_);
    if (data.size() > free) {
      absl::StrAppend(&file->data, data.substr(0, free));
      return Failed(absl::StatusCode::kResourceExhausted, "write", path, "No space left on device");
    }
  }
  absl::StrAppend(&file->data, data);
  return absl::OkStatus();
}

absl::Status FaultInjectionEnv::Sync(const NodePtr& file, const std::string& path, int64_t generation) {
  absl::MutexLock lock(&mutex_);
  if (generation != generation_) return Crashed("fsync", path);
  MOERL_RETURN_IF_ERROR(BeginChange("fsync", path));
  file->synced_data = file->data;
  return absl::OkStatus();
}

absl::StatusOr<size_t> FaultInjectionEnv::Read(const NodePtr& file, const std::string& path, int64_t generation,
                                               uint64_t offset, size_t size, char* buffer) {
  absl::MutexLock lock(&mutex_);
  if (generation != generation_) return Crashed("read", path);
  MOERL_RETURN_IF_ERROR(CheckPath("read", path));
  if (offset >= file->data.size()) return 0;
  return file->data.copy(buffer, size, offset);
}

void FaultInjectionEnv::Unlock(const std::string& path, int64_t generation) {
  absl::MutexLock lock(&mutex_);
  if (generation == generation_) locks_.erase(path);
}

// --- Env

absl::StatusOr<std::unique_ptr<WritableFile>> FaultInjectionEnv::OpenForWrite(const std::string& path, WriteMode mode) {
  absl::MutexLock lock(&mutex_);
  MOERL_RETURN_IF_ERROR(BeginChange("open", path));
  MOERL_ASSIGN_OR_RETURN(const Slot slot, FindSlot("open", path));
  NodePtr file = slot.Get();
  if (file != nullptr && file->is_dir)
    return Failed(absl::StatusCode::kFailedPrecondition, "open", path, "Is a directory");
  if (file != nullptr && mode == WriteMode::kCreate) {
    return Failed(absl::StatusCode::kAlreadyExists, "open", path, "File exists");
  }
  if (file == nullptr) file = slot.dir->entries[slot.name] = std::make_shared<Node>();
  if (mode == WriteMode::kTruncate) file->data.clear();
  return std::make_unique<MemoryWritableFile>(this, file, path, generation_);
}

absl::StatusOr<std::unique_ptr<RandomAccessFile>> FaultInjectionEnv::OpenForRead(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  MOERL_RETURN_IF_ERROR(CheckPath("open", path));
  MOERL_ASSIGN_OR_RETURN(const NodePtr file, FindKind("open", path, /*is_dir=*/false));
  return std::make_unique<MemoryRandomAccessFile>(this, file, path, generation_);
}

absl::Status FaultInjectionEnv::Rename(const std::string& from, const std::string& to) {
  absl::MutexLock lock(&mutex_);
  const std::string both = absl::StrCat(from, " to ", to);
  MOERL_RETURN_IF_ERROR(BeginChange("rename", both));
  MOERL_ASSIGN_OR_RETURN(const Slot source, FindSlot("rename", from));
  MOERL_ASSIGN_OR_RETURN(const Slot target, FindSlot("rename", to));
  const NodePtr node = source.Get();
  const NodePtr replaced = target.Get();
  if (node == nullptr) return NotFound("rename", both);
  if (replaced != nullptr && (replaced->is_dir != node->is_dir || !replaced->entries.empty())) {
    return Failed(absl::StatusCode::kAlreadyExists, "rename", both, "another kind of file, or a directory with files");
  }
  source.dir->entries.erase(source.name);
  target.dir->entries[target.name] = node;
  return absl::OkStatus();
}

absl::Status FaultInjectionEnv::Remove(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  MOERL_RETURN_IF_ERROR(BeginChange("remove", path));
  MOERL_RETURN_IF_ERROR(FindKind("remove", path, /*is_dir=*/false).status());
  MOERL_ASSIGN_OR_RETURN(const Slot slot, FindSlot("remove", path));
  slot.dir->entries.erase(slot.name);
  return absl::OkStatus();
}

absl::Status FaultInjectionEnv::RemoveDir(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  MOERL_RETURN_IF_ERROR(BeginChange("rmdir", path));
  MOERL_ASSIGN_OR_RETURN(const NodePtr dir, FindKind("rmdir", path, /*is_dir=*/true));
  if (!dir->entries.empty()) {
    return Failed(absl::StatusCode::kFailedPrecondition, "rmdir", path, "Directory not empty");
  }
  MOERL_ASSIGN_OR_RETURN(const Slot slot, FindSlot("rmdir", path));
  slot.dir->entries.erase(slot.name);
  return absl::OkStatus();
}

absl::Status FaultInjectionEnv::CreateDir(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  MOERL_RETURN_IF_ERROR(BeginChange("mkdir", path));
  MOERL_ASSIGN_OR_RETURN(const Slot slot, FindSlot("mkdir", path));
  if (slot.Get() != nullptr) return Failed(absl::StatusCode::kAlreadyExists, "mkdir", path, "File exists");
  const NodePtr dir = slot.dir->entries[slot.name] = std::make_shared<Node>();
  dir->is_dir = true;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> FaultInjectionEnv::List(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  MOERL_RETURN_IF_ERROR(CheckPath("list", path));
  MOERL_ASSIGN_OR_RETURN(const NodePtr dir, FindKind("list", path, /*is_dir=*/true));
  std::vector<std::string> names;
  for (const auto& [name, node] : dir->entries) names.push_back(name);
  return names;
}

bool FaultInjectionEnv::Exists(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  return Find(path) != nullptr;
}

bool FaultInjectionEnv::IsDir(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  const NodePtr node = Find(path);
  return node != nullptr && node->is_dir;
}

absl::StatusOr<uint64_t> FaultInjectionEnv::FileSize(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  MOERL_RETURN_IF_ERROR(CheckPath("stat", path));
  MOERL_ASSIGN_OR_RETURN(const NodePtr file, FindKind("stat", path, /*is_dir=*/false));
  return file->data.size();
}

absl::Status FaultInjectionEnv::SyncDir(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  MOERL_RETURN_IF_ERROR(BeginChange("fsync", path));
  MOERL_ASSIGN_OR_RETURN(const NodePtr dir, FindKind("fsync", path, /*is_dir=*/true));
  dir->synced_entries = dir->entries;
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> FaultInjectionEnv::FreeBytes(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  MOERL_RETURN_IF_ERROR(CheckPath("statvfs", path));
  if (Find(path) == nullptr) return NotFound("statvfs", path);
  if (!capacity_bytes_.has_value()) return kUnlimitedFreeBytes;
  return *capacity_bytes_ - std::min(UsedBytes(), *capacity_bytes_);
}

absl::StatusOr<std::unique_ptr<FileLock>> FaultInjectionEnv::Lock(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  MOERL_RETURN_IF_ERROR(CheckPath("lock", path));
  MOERL_ASSIGN_OR_RETURN(const Slot slot, FindSlot("lock", path));
  if (!locks_.insert(path).second) {
    return Failed(absl::StatusCode::kFailedPrecondition, "lock", path, "held by this process");
  }
  if (slot.Get() == nullptr) slot.dir->entries[slot.name] = std::make_shared<Node>();
  return std::make_unique<MemoryFileLock>(this, path, generation_);
}

}  // namespace moerl
