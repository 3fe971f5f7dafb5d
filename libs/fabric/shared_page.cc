#include "libs/fabric/shared_page.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "libs/base/check.h"
#include "libs/base/status_macros.h"

namespace moerl::fabric {
namespace {

// A claimed entry becomes ready within microseconds unless its claimer died.
constexpr absl::Duration kClaimTimeout = absl::Seconds(2);

absl::StatusOr<absl::Span<std::byte>> MapDescriptor(int fd, size_t bytes) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("fabric: cannot map ", bytes, " bytes shared in the node: ", strerror(errno)));
  }
  return absl::Span<std::byte>(static_cast<std::byte*>(address), bytes);
}

absl::StatusOr<FileDescriptor> OpenForeign(int pid, int fd, int flags) {
  FileDescriptor opened(open(absl::StrCat("/proc/", pid, "/fd/", fd).c_str(), flags | O_CLOEXEC));
  if (!opened.valid()) {
    return absl::UnavailableError(absl::StrCat("fabric: cannot reach process ", pid, " of this node: ", strerror(errno),
                                               "; ranks of a node share a process namespace and a user"));
  }
  return opened;
}

absl::StatusOr<FileDescriptor> CreateMemory(size_t bytes) {
  FileDescriptor memory(memfd_create("moerl", MFD_CLOEXEC));
  if (!memory.valid() || ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("fabric: cannot create ", bytes, " bytes of shared memory: ", strerror(errno)));
  }
  return memory;
}

void RingBell(SharedPage& page, int bell_fd) {
  page.is_rung.store(1, std::memory_order_seq_cst);
  if (page.is_sleeping.exchange(0, std::memory_order_seq_cst) == 0) return;
  const char byte = 0;
  // A full pipe is a rung bell.
  [[maybe_unused]] const ssize_t written = write(bell_fd, &byte, 1);
}

}  // namespace

absl::StatusOr<absl::Span<std::byte>> MapForeign(int pid, int fd, size_t bytes) {
  MOERL_ASSIGN_OR_RETURN(const FileDescriptor opened, OpenForeign(pid, fd, O_RDWR));
  return MapDescriptor(opened.get(), bytes);
}

absl::StatusOr<std::unique_ptr<OwnPage>> OwnPage::Create() {
  std::unique_ptr<OwnPage> own(new OwnPage());
  MOERL_ASSIGN_OR_RETURN(own->memory_, CreateMemory(sizeof(SharedPage)));
  MOERL_ASSIGN_OR_RETURN(const absl::Span<std::byte> page, MapDescriptor(own->memory_.get(), sizeof(SharedPage)));
  own->page_ = reinterpret_cast<SharedPage*>(page.data());
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0)
    return absl::ResourceExhaustedError(absl::StrCat("fabric: pipe: ", strerror(errno)));
  own->bell_read_ = FileDescriptor(ends[0]);
  own->bell_write_ = FileDescriptor(ends[1]);
  return own;
}

OwnPage::~OwnPage() {
  if (page_ != nullptr) munmap(page_, sizeof(SharedPage));
}

SharedPageName OwnPage::name() const {
  return {.pid = getpid(), .page_fd = memory_.get(), .bell_fd = bell_write_.get()};
}

void OwnPage::Ring() { RingBell(*page_, bell_write_.get()); }

void OwnPage::Sleep(absl::Duration timeout, absl::Span<const int> fds) {
  page_->is_sleeping.store(1, std::memory_order_seq_cst);
  if (page_->is_rung.exchange(0, std::memory_order_seq_cst) == 0) {
    std::vector<pollfd> polled(fds.size() + 1);
    polled[0] = {.fd = bell_read_.get(), .events = POLLIN, .revents = 0};
    for (size_t i = 0; i < fds.size(); ++i) polled[i + 1] = {.fd = fds[i], .events = POLLIN, .revents = 0};
    const timespec left = absl::ToTimespec(std::clamp(timeout, absl::ZeroDuration(), absl::Hours(1)));
    ppoll(polled.data(), polled.size(), &left, nullptr);
  }
  page_->is_sleeping.store(0, std::memory_order_seq_cst);
  page_->is_rung.store(0, std::memory_order_seq_cst);
  char drained[64];
  while (read(bell_read_.get(), drained, sizeof(drained)) == sizeof(drained)) {
  }
}

absl::StatusOr<std::unique_ptr<SharedNodeMemory>> SharedNodeMemory::Open(std::shared_ptr<OwnPage> own, int self,
                                                                         const std::vector<SharedPageName>& pages,
                                                                         uint64_t epoch) {
  std::unique_ptr<SharedNodeMemory> memory(new SharedNodeMemory());
  memory->own_ = std::move(own);
  memory->self_ = self;
  memory->epoch_ = epoch;
  memory->peers_.resize(pages.size());
  for (size_t rank = 0; rank < pages.size(); ++rank) {
    const SharedPageName& name = pages[rank];
    if (name.pid == 0) continue;
    MOERL_ASSIGN_OR_RETURN(const absl::Span<std::byte> page, MapForeign(name.pid, name.page_fd, sizeof(SharedPage)));
    memory->peers_[rank].page = reinterpret_cast<SharedPage*>(page.data());
    // For reading too: a pipe with a reader never raises SIGPIPE, also when the process at its other end is gone.
    MOERL_ASSIGN_OR_RETURN(memory->peers_[rank].bell, OpenForeign(name.pid, name.bell_fd, O_RDWR | O_NONBLOCK));
  }
  return memory;
}

SharedNodeMemory::~SharedNodeMemory() { Close(); }

absl::StatusOr<SharedPage::Mapping*> SharedNodeMemory::FindOrCreate(SharedPage& page, const uint64_t key[2],
                                                                    size_t bytes) {
  // Open addressing without deletion: both sides of a mapping meet at the first entry that is free or theirs.
  for (size_t probe = 0; probe < SharedPage::kMappingsMax; ++probe) {
    SharedPage::Mapping& mapping = page.mappings[(key[0] + probe) % SharedPage::kMappingsMax];
    uint32_t expected = SharedPage::Mapping::kFree;
    if (mapping.state.compare_exchange_strong(expected, SharedPage::Mapping::kClaimed, std::memory_order_acq_rel)) {
      MOERL_ASSIGN_OR_RETURN(FileDescriptor created, CreateMemory(bytes));
      mapping.pid = static_cast<uint32_t>(getpid());
      mapping.fd = created.get();
      mapping.key[0] = key[0];
      mapping.key[1] = key[1];
      mapping.bytes = bytes;
      mapping.state.store(SharedPage::Mapping::kReady, std::memory_order_release);
      created_.push_back(std::move(created));
      return &mapping;
    }
    for (const absl::Time deadline = absl::Now() + kClaimTimeout;
         mapping.state.load(std::memory_order_acquire) != SharedPage::Mapping::kReady;) {
      if (absl::Now() > deadline)
        return absl::UnavailableError("fabric: a rank of this node died while it shared memory");
      absl::SleepFor(absl::Microseconds(50));
    }
    if (mapping.key[0] == key[0] && mapping.key[1] == key[1]) return &mapping;
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("fabric: more than ", SharedPage::kMappingsMax, " blocks shared with one rank; use fewer buffers"));
}

absl::StatusOr<absl::Span<std::byte>> SharedNodeMemory::Map(int producer, int consumer, std::string_view name,
                                                            size_t bytes) {
  MOERL_CHECK(producer == self_ || consumer == self_);
  SharedPage* page = peers_[producer].page;
  MOERL_CHECK(page != nullptr && peers_[consumer].page != nullptr);
  const std::string text = absl::StrCat(epoch_, "/", consumer, "/", std::string(name));
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  const uint64_t key[2] = {hash.low64, hash.high64};
  const size_t page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t rounded = std::max(page_bytes, (bytes + page_bytes - 1) / page_bytes * page_bytes);
  MOERL_ASSIGN_OR_RETURN(SharedPage::Mapping * mapping, FindOrCreate(*page, key, rounded));
  if (mapping->bytes != rounded) {
    return absl::FailedPreconditionError(absl::StrCat("fabric: \"", std::string(name), "\" shared by ranks ", producer,
                                                      " and ", consumer, " is ", mapping->bytes, " bytes there, ",
                                                      rounded, " here; give all ranks the same options"));
  }
  MOERL_ASSIGN_OR_RETURN(const absl::Span<std::byte> mapped,
                         MapForeign(static_cast<int>(mapping->pid), mapping->fd, rounded));
  mapped_.push_back(mapped);
  return mapped.first(bytes);
}

void SharedNodeMemory::Notify(int peer) {
  if (peer == self_) {
    own_->Ring();
    return;
  }
  MOERL_CHECK(peers_[peer].page != nullptr);
  RingBell(*peers_[peer].page, peers_[peer].bell.get());
}

void SharedNodeMemory::Close() {
  for (const absl::Span<std::byte> mapped : mapped_) munmap(mapped.data(), mapped.size());
  mapped_.clear();
  created_.clear();
  for (Peer& peer : peers_) {
    if (peer.page != nullptr) munmap(peer.page, sizeof(SharedPage));
    peer.page = nullptr;
  }
}

}  // namespace moerl::fabric
