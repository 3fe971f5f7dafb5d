#ifndef MOERL_LIBS_FABRIC_DETECTOR_H_
#define MOERL_LIBS_FABRIC_DETECTOR_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "libs/fabric/peer_watch.h"
#include "libs/fabric/shared_page.h"
#include "libs/fabric/socket.h"

namespace moerl::fabric {

struct DetectorOptions {
  absl::Duration interval = absl::Milliseconds(50);
  // Silence after which a peer is lost. Seven beats: a busy core or a full link delays some, not all.
  absl::Duration timeout = absl::Milliseconds(350);
  // The same for the first beat: members begin an epoch at slightly different times.
  absl::Duration start_timeout = absl::Milliseconds(800);
  // What the timeout grows by at most for time in which this process was ready but did not run.
  absl::Duration excuse_max = absl::Milliseconds(400);
};

// How a peer is watched. Inside the node: its process (pidfd) and the counter of its page. Elsewhere: datagrams to and
// from `address` ("ip:port"), which cross the same links as the data.
struct WatchedPeer {
  SharedPageName page;  // pid 0: on another node
  std::string address;
};

// Decides which peers are lost: their process ended, or no heartbeat came for the timeout although this process itself
// was running. A loss is final for the epoch, and is seen within timeout + excuse_max + 2 intervals.
// Owns one thread, asleep between beats.
class Detector : public PeerWatch {
 public:
  // `socket` is this rank's bound datagram socket, of one detector at a time; it outlives Stop(). `on_loss` is called
  // from the detector's thread, once a lost peer. A peer of the node that is already gone is lost at once.
  static absl::StatusOr<std::unique_ptr<Detector>> Start(std::shared_ptr<OwnPage> own, int self,
                                                         const std::vector<WatchedPeer>& peers, int socket,
                                                         uint64_t epoch, const DetectorOptions& options,
                                                         std::function<void()> on_loss);
  ~Detector() override;

  PeerState state(int rank, std::string* reason) const override;
  // Ends the thread; what was seen stays. Idempotent; not from on_loss.
  void Stop();

 private:
  struct Peer {
    int rank = 0;
    FileDescriptor process;  // pidfd
    int pid = 0;
    absl::Span<std::byte> page;
    uint64_t heartbeats_seen = 0;
    std::string remote;  // sockaddr bytes
    absl::Time last_heard;
    absl::Duration excused;  // since then
    bool is_heard = false;
  };

  Detector() = default;
  void Run();
  void Sleep(absl::Time until);
  void Beat();
  void ShowPeers() const;
  void Listen(absl::Time now);
  void Hear(Peer& peer, absl::Time now);
  void Excuse(absl::Duration late);
  void Judge(absl::Time now);
  void Lose(Peer& peer, std::string reason);

  std::shared_ptr<OwnPage> own_;
  int self_ = 0;
  uint64_t epoch_ = 0;
  DetectorOptions options_;
  int socket_ = -1;
  FileDescriptor stop_;  // eventfd
  std::function<void()> on_loss_;
  std::vector<Peer> peers_;
  std::unique_ptr<std::atomic<bool>[]> is_lost_;
  mutable absl::Mutex mutex_;
  std::vector<std::string> reasons_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

// A datagram socket bound to `port` of `host` (0: a free one); its address comes back in `address`.
absl::StatusOr<FileDescriptor> BindDatagram(const std::string& host, int port, std::string* address);
// The sockaddr bytes of "ip:port".
absl::StatusOr<std::string> DatagramAddress(const std::string& address);

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_DETECTOR_H_
