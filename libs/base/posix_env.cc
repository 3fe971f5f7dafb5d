#include <dirent.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/env.h"
#include "libs/base/status_macros.h"

namespace moerl {
namespace {

absl::Status Failed(absl::string_view operation, absl::string_view path) {
  return absl::ErrnoToStatus(errno, absl::StrCat(operation, " ", path));
}

template <typename Call>
auto RetryInterrupted(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// Owns a file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() { Close(); }

  int get() const { return fd_; }
  int Close() { return fd_ < 0 ? 0 : close(std::exchange(fd_, -1)); }

 private:
  int fd_;
};

absl::StatusOr<Descriptor> Open(const std::string& path, int flags) {
  const int fd = RetryInterrupted([&] { return open(path.c_str(), flags | O_CLOEXEC, 0644); });
  if (fd < 0) return Failed("open", path);
  return Descriptor(fd);
}

class PosixWritableFile final : public WritableFile {
 public:
  PosixWritableFile(std::string path, Descriptor fd) : path_(std::move(path)), fd_(std::move(fd)) {}

  absl::Status Append(absl::string_view data) override {
    while (!data.empty()) {
      const ssize_t written = RetryInterrupted([&] { return write(fd_.get(), data.data(), data.size()); });
      if (written < 0) return Failed("write", path_);
      data.remove_prefix(written);
    }
    return absl::OkStatus();
  }

  absl::Status Sync() override { return fsync(fd_.get()) == 0 ? absl::OkStatus() : Failed("fsync", path_); }

  absl::Status Close() override { return fd_.Close() == 0 ? absl::OkStatus() : Failed("close", path_); }

 private:
  std::string path_;
  Descriptor fd_;
};

class PosixRandomAccessFile final : public RandomAccessFile {
 public:
  PosixRandomAccessFile(std::string path, Descriptor fd) : path_(std::move(path)), fd_(std::move(fd)) {}

  absl::StatusOr<size_t> Read(uint64_t offset, size_t size, char* buffer) const override {
    size_t filled = 0;
    while (filled < size) {
      const ssize_t got =
          RetryInterrupted([&] { return pread(fd_.get(), buffer + filled, size - filled, offset + filled); });
      if (got < 0) return Failed("read", path_);
      if (got == 0) break;
      filled += got;
    }
    return filled;
  }

  absl::StatusOr<uint64_t> Size() const override {
    struct stat info;
    if (fstat(fd_.get(), &info) != 0) return Failed("stat", path_);
    return info.st_size;
  }

 private:
  std::string path_;
  Descriptor fd_;
};

class PosixFileLock final : public FileLock {
 public:
  explicit PosixFileLock(Descriptor fd) : fd_(std::move(fd)) {}

 private:
  Descriptor fd_;
};

class PosixEnvImpl final : public Env {
 public:
  absl::StatusOr<std::unique_ptr<WritableFile>> OpenForWrite(const std::string& path, WriteMode mode) override {
    int flags = O_WRONLY | O_CREAT | O_APPEND;
    if (mode == WriteMode::kCreate) flags |= O_EXCL;
    if (mode == WriteMode::kTruncate) flags |= O_TRUNC;
    MOERL_ASSIGN_OR_RETURN(Descriptor fd, Open(path, flags));
    return std::make_unique<PosixWritableFile>(path, std::move(fd));
  }

  absl::StatusOr<std::unique_ptr<RandomAccessFile>> OpenForRead(const std::string& path) override {
    MOERL_ASSIGN_OR_RETURN(Descriptor fd, Open(path, O_RDONLY));
    return std::make_unique<PosixRandomAccessFile>(path, std::move(fd));
  }

  absl::Status Rename(const std::string& from, const std::string& to) override {
    if (rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
    return Failed("rename", absl::StrCat(from, " to ", to));
  }

  absl::Status Remove(const std::string& path) override {
    return unlink(path.c_str()) == 0 ? absl::OkStatus() : Failed("remove", path);
  }

  absl::Status RemoveDir(const std::string& path) override {
    return rmdir(path.c_str()) == 0 ? absl::OkStatus() : Failed("rmdir", path);
  }

  absl::Status CreateDir(const std::string& path) override {
    return mkdir(path.c_str(), 0755) == 0 ? absl::OkStatus() : Failed("mkdir", path);
  }

  absl::StatusOr<std::vector<std::string>> List(const std::string& path) override {
    DIR* dir = opendir(path.c_str());
    if (dir == nullptr) return Failed("list", path);
    std::vector<std::string> names;
    errno = 0;
    while (const dirent* entry = readdir(dir)) {
      const absl::string_view name = entry->d_name;
      if (name != "." && name != "..") names.emplace_back(name);
    }
    const int error = errno;
    closedir(dir);
    if (error != 0) return absl::ErrnoToStatus(error, absl::StrCat("list ", path));
    std::sort(names.begin(), names.end());
    return names;
  }

  bool Exists(const std::string& path) override {
    struct stat info;
    return lstat(path.c_str(), &info) == 0;
  }

  bool IsDir(const std::string& path) override {
    struct stat info;
    return lstat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
  }

  absl::StatusOr<uint64_t> FileSize(const std::string& path) override {
    struct stat info;
    if (stat(path.c_str(), &info) != 0) return Failed("stat", path);
    return info.st_size;
  }

  absl::Status SyncDir(const std::string& path) override {
    MOERL_ASSIGN_OR_RETURN(const Descriptor fd, Open(path, O_RDONLY | O_DIRECTORY));
    return fsync(fd.get()) == 0 ? absl::OkStatus() : Failed("fsync", path);
  }

  absl::StatusOr<uint64_t> FreeBytes(const std::string& path) override {
    struct statvfs info;
    if (statvfs(path.c_str(), &info) != 0) return Failed("statvfs", path);
    return uint64_t{info.f_bavail} * info.f_frsize;
  }

  absl::StatusOr<std::unique_ptr<FileLock>> Lock(const std::string& path) override {
    MOERL_ASSIGN_OR_RETURN(Descriptor fd, Open(path, O_RDWR | O_CREAT));
    if (RetryInterrupted([&] { return flock(fd.get(), LOCK_EX | LOCK_NB); }) != 0) {
      if (errno != EWOULDBLOCK) return Failed("lock", path);
      return absl::FailedPreconditionError(absl::StrCat("lock ", path, ": held by process ", HolderOf(fd.get())));
    }
    const std::string pid = absl::StrCat(getpid(), "\n");
    if (ftruncate(fd.get(), 0) != 0 || pwrite(fd.get(), pid.data(), pid.size(), 0) < 0) return Failed("lock", path);
    return std::make_unique<PosixFileLock>(std::move(fd));
  }

 private:
  static std::string HolderOf(int fd) {
    std::array<char, 32> text;
    const ssize_t got = pread(fd, text.data(), text.size(), 0);
    const absl::string_view line(text.data(), std::max<ssize_t>(got, 0));
    return line.empty() ? "unknown" : std::string(line.substr(0, line.find('\n')));
  }
};

}  // namespace

Env* PosixEnv() {
  static Env* env = new PosixEnvImpl;
  return env;
}

absl::Status CheckLocalFileSystem(const std::string& path) {
  // Magic numbers of statfs(2); those that linux/magic.h does not carry are written out.
  static constexpr std::array<std::pair<uint32_t, absl::string_view>, 9> kNetwork = {{
      {NFS_SUPER_MAGIC, "nfs"},
      {SMB_SUPER_MAGIC, "smb"},
      {0xFF534D42, "cifs"},
      {0xFE534D42, "smb2"},
      {AFS_SUPER_MAGIC, "afs"},
      {V9FS_MAGIC, "9p"},
      {CEPH_SUPER_MAGIC, "ceph"},
      {0x0BD00BD0, "lustre"},
      {FUSE_SUPER_MAGIC, "fuse"},
  }};
  struct statfs info;
  if (statfs(path.c_str(), &info) != 0) return Failed("statfs", path);
  for (const auto& [magic, name] : kNetwork) {
    if (static_cast<uint32_t>(info.f_type) != magic) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": a local file system expected, found ", name,
                     ", where locks and syncs do not hold what a ledger needs; use a local disk (ext4, xfs)"));
  }
  return absl::OkStatus();
}

}  // namespace moerl
