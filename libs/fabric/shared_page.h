#ifndef MOERL_LIBS_FABRIC_SHARED_PAGE_H_
#define MOERL_LIBS_FABRIC_SHARED_PAGE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "libs/fabric/node_memory.h"
#include "libs/fabric/socket.h"

namespace moerl::fabric {

// What every rank lays open to the other ranks of its node: a bell that wakes it, a heartbeat counter, and a table of
// the memory it shares. Anonymous memory (memfd) that others open through /proc/<pid>/fd, so that nothing is left
// behind by a killed process. All ranks of a node are in one process namespace and run as one user.
struct SharedPage {
  static constexpr size_t kMappingsMax = 4096;

  struct Mapping {
    enum State : uint32_t { kFree, kClaimed, kReady };
    std::atomic<uint32_t> state;
    uint32_t pid;
    int32_t fd;
    uint64_t key[2];  // XXH3-128 of consumer and name
    uint64_t bytes;
  };

  alignas(64) std::atomic<uint32_t> is_rung;
  std::atomic<uint32_t> is_sleeping;
  alignas(64) std::atomic<uint64_t> heartbeats;
  alignas(64) Mapping mappings[kMappingsMax];
};

// How the others of the node find a rank's page and bell. Plain data, exchanged at bootstrap.
struct SharedPageName {
  int32_t pid = 0;
  int32_t page_fd = -1;
  int32_t bell_fd = -1;
};

// Maps memory of this or another process. UNAVAILABLE when that process is gone or may not be looked into.
absl::StatusOr<absl::Span<std::byte>> MapForeign(int pid, int fd, size_t bytes);

// A rank's own page and the reading end of its bell. Ring() may be called from any thread; Sleep() from one.
class OwnPage {
 public:
  static absl::StatusOr<std::unique_ptr<OwnPage>> Create();
  ~OwnPage();

  SharedPageName name() const;
  SharedPage* page() { return page_; }
  void Ring();
  // Sleeps until rung, until one of `fds` is readable, or for `timeout`. A Ring() before the call ends it at once.
  void Sleep(absl::Duration timeout, absl::Span<const int> fds);

 private:
  OwnPage() = default;
  SharedPage* page_ = nullptr;
  FileDescriptor memory_, bell_read_, bell_write_;
};

// Memory shared by the ranks of one node, and their bells.
class SharedNodeMemory : public NodeMemory {
 public:
  // `pages` by dense rank; those of other nodes have pid 0. `own` is this rank's, at index `self`.
  static absl::StatusOr<std::unique_ptr<SharedNodeMemory>> Open(std::shared_ptr<OwnPage> own, int self,
                                                                const std::vector<SharedPageName>& pages,
                                                                uint64_t epoch);
  ~SharedNodeMemory() override;

  absl::StatusOr<absl::Span<std::byte>> Map(int producer, int consumer, std::string_view name, size_t bytes) override;
  void Notify(int peer) override;
  void Close() override;

  // The page of a rank of this node, for its heartbeats; null for others. Valid until Close().
  SharedPage* page(int rank) const { return peers_[rank].page; }

 private:
  struct Peer {
    SharedPage* page = nullptr;
    FileDescriptor bell;
  };

  SharedNodeMemory() = default;
  absl::StatusOr<SharedPage::Mapping*> FindOrCreate(SharedPage& page, const uint64_t key[2], size_t bytes);

  std::shared_ptr<OwnPage> own_;
  int self_ = 0;
  uint64_t epoch_ = 0;
  std::vector<Peer> peers_;
  std::vector<absl::Span<std::byte>> mapped_;
  std::vector<FileDescriptor> created_;
};

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_SHARED_PAGE_H_
