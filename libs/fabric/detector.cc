#include "libs/fabric/detector.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "libs/base/metrics.h"
#include "libs/base/status_macros.h"
#include "libs/fabric/prompt_thread.h"

namespace moerl::fabric {
namespace {

struct Heartbeat {
  uint64_t epoch;
  uint32_t rank;
  uint32_t magic;
};
constexpr uint32_t kMagic = 0x6d6f6572;  // "moer"

absl::StatusOr<std::string> SocketAddress(const std::string& host, const std::string& port, int flags) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_DGRAM;
  hints.ai_flags = AI_NUMERICSERV | flags;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found); error != 0) {
    return absl::UnavailableError(absl::StrCat("fabric: cannot resolve ", host, ": ", gai_strerror(error)));
  }
  std::string bytes(reinterpret_cast<const char*>(found->ai_addr), found->ai_addrlen);
  freeaddrinfo(found);
  return bytes;
}

// Monotonic: a step of the wall clock is no silence.
absl::Time Now() { return absl::FromUnixNanos(std::chrono::steady_clock::now().time_since_epoch().count()); }

const sockaddr* AsSockaddr(const std::string& bytes) { return reinterpret_cast<const sockaddr*>(bytes.data()); }

struct Metrics {
  Gauge& peers = GetGauge("moerl_fabric_peers", "Peers watched and not lost.");
  Counter& peers_lost = GetCounter("moerl_fabric_peers_lost_total", "Peers found lost.");
  Histogram& heartbeat_gap =
      GetHistogram("moerl_fabric_heartbeat_gap_seconds",
                   "Between two heartbeats of a peer; long ones are cores or links too busy to beat.", SecondsBounds());
};

Metrics& GetMetrics() {
  static auto& metrics = *new Metrics();
  return metrics;
}

}  // namespace

absl::StatusOr<std::string> DatagramAddress(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos)
    return absl::InvalidArgumentError(absl::StrCat("fabric: address \"", address, "\" is not ip:port"));
  std::string host = address.substr(0, colon);
  if (host.size() > 1 && host.front() == '[') host = host.substr(1, host.size() - 2);
  return SocketAddress(host, address.substr(colon + 1), AI_NUMERICHOST);
}

absl::StatusOr<FileDescriptor> BindDatagram(const std::string& host, int port, std::string* address) {
  MOERL_ASSIGN_OR_RETURN(const std::string local, SocketAddress(host, absl::StrCat(port), AI_PASSIVE));
  FileDescriptor socket(::socket(AsSockaddr(local)->sa_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid() || bind(socket.get(), AsSockaddr(local), static_cast<socklen_t>(local.size())) != 0) {
    return absl::UnavailableError(absl::StrCat("fabric: cannot bind datagrams to ", host, ": ", strerror(errno),
                                               "; set fabric.local_address to an address of this host"));
  }
  MOERL_ASSIGN_OR_RETURN(const int bound, BoundPort(socket));
  *address = absl::StrCat(host.find(':') == std::string::npos ? host : absl::StrCat("[", host, "]"), ":", bound);
  return socket;
}

absl::StatusOr<std::unique_ptr<Detector>> Detector::Start(std::shared_ptr<OwnPage> own, int self,
                                                          const std::vector<WatchedPeer>& peers, int socket,
                                                          uint64_t epoch, const DetectorOptions& options,
                                                          std::function<void()> on_loss) {
  std::unique_ptr<Detector> detector(new Detector());
  detector->own_ = std::move(own);
  detector->self_ = self;
  detector->epoch_ = epoch;
  detector->options_ = options;
  detector->socket_ = socket;
  detector->stop_ = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  detector->on_loss_ = std::move(on_loss);
  detector->reasons_.resize(peers.size());
  detector->is_lost_ = std::make_unique<std::atomic<bool>[]>(peers.size());
  for (size_t rank = 0; rank < peers.size(); ++rank) {
    if (static_cast<int>(rank) == self) continue;
    Peer peer;
    peer.rank = static_cast<int>(rank);
    peer.last_heard = Now();
    if (peers[rank].page.pid != 0) {
      peer.pid = peers[rank].page.pid;
      peer.process = FileDescriptor(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
      const absl::StatusOr<absl::Span<std::byte>> page =
          MapForeign(peer.pid, peers[rank].page.page_fd, sizeof(SharedPage));
      if (page.ok()) {
        peer.page = *page;
        peer.heartbeats_seen = reinterpret_cast<SharedPage*>(page->data())->heartbeats.load(std::memory_order_relaxed);
      } else {
        detector->Lose(peer, absl::StrCat("its process ", peer.pid, " is gone"));
      }
    } else {
      MOERL_ASSIGN_OR_RETURN(peer.remote, DatagramAddress(peers[rank].address));
    }
    detector->peers_.push_back(std::move(peer));
  }
  detector->ShowPeers();
  detector->thread_ = std::thread([raw = detector.get()] { raw->Run(); });
  return detector;
}

void Detector::Stop() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(stop_.get(), &one, sizeof(one));
  thread_.join();
}

Detector::~Detector() {
  Stop();
  for (Peer& peer : peers_) {
    if (!peer.page.empty()) munmap(peer.page.data(), peer.page.size());
  }
}

PeerState Detector::state(int rank, std::string* reason) const {
  if (rank == self_ || !is_lost_[rank].load(std::memory_order_acquire)) return PeerState::kAlive;
  absl::MutexLock lock(&mutex_);
  if (reason != nullptr) *reason = reasons_[rank];
  return PeerState::kLost;
}

void Detector::Run() {
  RunPromptly();
  absl::Time next = Now();
  for (uint64_t stopped = 0; read(stop_.get(), &stopped, sizeof(stopped)) < 0;) {
    Beat();
    next += options_.interval;
    Sleep(next);
    const absl::Time now = Now();
    if (now - next > options_.interval) {
      Excuse(now - next);
      next = now;
    }
    Listen(now);
    Judge(now);
  }
}

// Not having run is no evidence against anybody: where this process did not run, others may not have either. Beats that
// came meanwhile are still in the socket, so short delays on a busy machine add up to excuse_max at most; a pause as
// long as the timeout (of the whole machine, perhaps) does not count at all.
void Detector::Excuse(absl::Duration late) {
  for (Peer& peer : peers_) {
    if (late >= options_.timeout) {
      peer.last_heard += late;
    } else {
      peer.excused = std::min(peer.excused + late, options_.excuse_max);
    }
  }
}

void Detector::Hear(Peer& peer, absl::Time now) {
  if (peer.is_heard) GetMetrics().heartbeat_gap.Observe(absl::ToDoubleSeconds(now - peer.last_heard));
  peer.last_heard = now;
  peer.excused = absl::ZeroDuration();
  peer.is_heard = true;
}

void Detector::Sleep(absl::Time until) {
  std::vector<pollfd> polled = {{.fd = stop_.get(), .events = POLLIN, .revents = 0}};
  for (const Peer& peer : peers_) {
    if (peer.process.valid() && !is_lost_[peer.rank])
      polled.push_back({.fd = peer.process.get(), .events = POLLIN, .revents = 0});
  }
  const timespec left = absl::ToTimespec(std::max(until - Now(), absl::ZeroDuration()));
  ppoll(polled.data(), polled.size(), &left, nullptr);
}

void Detector::Beat() {
  own_->page()->heartbeats.fetch_add(1, std::memory_order_relaxed);
  const Heartbeat heartbeat = {.epoch = epoch_, .rank = static_cast<uint32_t>(self_), .magic = kMagic};
  for (const Peer& peer : peers_) {
    if (peer.remote.empty()) continue;
    sendto(socket_, &heartbeat, sizeof(heartbeat), MSG_NOSIGNAL, AsSockaddr(peer.remote),
           static_cast<socklen_t>(peer.remote.size()));
  }
}

void Detector::Listen(absl::Time now) {
  // Bounded by what the socket's buffer holds.
  for (Heartbeat heartbeat; recv(socket_, &heartbeat, sizeof(heartbeat), 0) == sizeof(heartbeat);) {
    if (heartbeat.magic != kMagic || heartbeat.epoch != epoch_) continue;
    for (Peer& peer : peers_) {
      if (peer.rank == static_cast<int>(heartbeat.rank)) Hear(peer, now);
    }
  }
  for (Peer& peer : peers_) {
    if (peer.page.empty()) continue;
    const uint64_t seen = reinterpret_cast<SharedPage*>(peer.page.data())->heartbeats.load(std::memory_order_relaxed);
    if (seen == peer.heartbeats_seen) continue;
    Hear(peer, now);
    peer.heartbeats_seen = seen;
  }
}

void Detector::Judge(absl::Time now) {
  for (Peer& peer : peers_) {
    if (is_lost_[peer.rank]) continue;
    if (peer.process.valid()) {
      pollfd poller = {.fd = peer.process.get(), .events = POLLIN, .revents = 0};
      if (poll(&poller, 1, 0) == 1) {
        Lose(peer, absl::StrCat("its process ", peer.pid, " ended"));
        continue;
      }
    }
    const absl::Duration patience = options_.timeout + peer.excused;
    if (now - peer.last_heard > (peer.is_heard ? patience : std::max(patience, options_.start_timeout))) {
      Lose(peer, absl::StrCat("no heartbeat for ", absl::ToInt64Milliseconds(now - peer.last_heard), " ms"));
    }
  }
}

void Detector::ShowPeers() const {
  GetMetrics().peers.Set(static_cast<double>(
      std::count_if(peers_.begin(), peers_.end(), [this](const Peer& peer) { return !is_lost_[peer.rank]; })));
}

void Detector::Lose(Peer& peer, std::string reason) {
  {
    absl::MutexLock lock(&mutex_);
    reasons_[peer.rank] = std::move(reason);
  }
  is_lost_[peer.rank].store(true, std::memory_order_release);
  GetMetrics().peers_lost.Add();
  ShowPeers();
  if (on_loss_) on_loss_();
}

}  // namespace moerl::fabric
