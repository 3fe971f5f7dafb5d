#ifndef MOERL_LIBS_FABRIC_VOTER_H_
#define MOERL_LIBS_FABRIC_VOTER_H_

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "libs/fabric/contact.h"
#include "libs/fabric/epoch_state.h"
#include "libs/fabric/membership.h"

namespace moerl::fabric {

// Drives one process's membership: votes over datagrams, begins epochs with a detector of their own, and says when one
// has ended. Owns one thread, which sleeps while nothing is to be decided. Thread-safe.
class Voter {
 public:
  struct Options {
    std::string cluster_id, token;
    DetectorOptions detector;
    absl::Duration tick = absl::Milliseconds(10);
  };

  // `control` and `heartbeats` are the bound sockets behind the contact's addresses, `page` counts the heartbeats.
  struct Sockets {
    FileDescriptor control, heartbeats;
    std::shared_ptr<OwnPage> page;
  };

  static absl::StatusOr<std::unique_ptr<Voter>> OfMember(Options options, Sockets sockets, uint64_t epoch,
                                                         std::vector<Lifetime> members, int self);
  // `known`: control addresses of some members.
  static absl::StatusOr<std::unique_ptr<Voter>> OfJoiner(Options options, Sockets sockets, Lifetime self,
                                                         const std::vector<std::string>& known);
  ~Voter();

  struct Current {
    std::shared_ptr<EpochState> state;  // null: joining, not in yet
    std::vector<Contact> contacts;      // by rank
    uint64_t finished = 0;              // the last operation that all survivors of the epoch before had finished
  };
  // Waits for an epoch other than `last` (0: any). FAILED_PRECONDITION: this process was left out and comes back only
  // as a new one; UNAVAILABLE at the deadline, saying who is missing.
  absl::StatusOr<Current> AwaitEpochAfter(uint64_t last, absl::Time deadline);
  Current current() const;

  // Asks for the epoch after `epoch`, unless that one has ended anyway.
  void Wish(uint64_t epoch);
  void SetFinished(uint64_t operation);
  size_t num_joiners() const { return num_joiners_; }

 private:
  Voter(Options options, Sockets sockets, MembershipMachine machine);
  absl::Status Begin();
  void Run();
  void Receive();
  void TakeRequests();
  void TakeLosses();
  void Apply(const MembershipMachine::Sends& sends);
  void Publish();
  void EndUnsettled();
  void Wake();

  const Options options_;
  const Sockets sockets_;
  const FileDescriptor wake_;  // eventfd

  // The thread's.
  MembershipMachine machine_;
  std::map<uint64_t, std::string> addresses_;  // sockaddr bytes by lifetime
  std::vector<bool> is_told_;                  // losses told to the machine, by rank

  std::atomic<uint64_t> wished_epoch_ = 0, finished_ = 0;
  std::atomic<size_t> num_joiners_ = 0;
  std::atomic<bool> is_stopping_ = false;
  mutable absl::Mutex mutex_;
  Current current_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_VOTER_H_
