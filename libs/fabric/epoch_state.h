#ifndef MOERL_LIBS_FABRIC_EPOCH_STATE_H_
#define MOERL_LIBS_FABRIC_EPOCH_STATE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "libs/fabric/detector.h"
#include "libs/fabric/peer_watch.h"
#include "libs/fabric/shared_page.h"
#include "libs/fabric/socket.h"
#include "libs/fabric/transport.h"

namespace moerl::fabric {

// What is known of one epoch while it lasts, and why it ended: shared by the thread that votes and by whoever waits for
// the epoch's operations. Thread-safe.
class EpochState : public PeerWatch {
 public:
  explicit EpochState(Membership membership);

  const Membership& membership() const { return membership_; }
  uint64_t number() const { return membership_.epoch; }

  // Once, before others than the voting thread use the detector's losses.
  void set_detector(std::unique_ptr<Detector> detector) { detector_ = std::move(detector); }
  Detector* detector() { return detector_.get(); }

  // `rank` is lost to somebody; the first reason stays.
  void Lose(int rank, std::string reason);
  // Operations and exchanges of this epoch end soon. The first reason stays.
  void End(std::string reason);
  // Wakes whoever sleeps on this epoch's page.
  void Wake();
  void set_page(std::shared_ptr<OwnPage> page);
  // Readable once the epoch has ended.
  std::shared_ptr<FileDescriptor> ended() const { return ended_; }

  PeerState state(int rank, std::string* reason) const override;
  bool HasEnded(std::string* reason) const override;

 private:
  const Membership membership_;
  const std::shared_ptr<FileDescriptor> ended_;
  std::unique_ptr<Detector> detector_;
  std::atomic<bool> is_marked_ = false;  // any loss or the end: the lock is worth taking
  mutable absl::Mutex mutex_;
  std::shared_ptr<OwnPage> page_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> losses_ ABSL_GUARDED_BY(mutex_);
  std::string end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_EPOCH_STATE_H_
