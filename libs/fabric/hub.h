#ifndef MOERL_LIBS_FABRIC_HUB_H_
#define MOERL_LIBS_FABRIC_HUB_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "libs/fabric/endpoint.h"

namespace moerl::fabric {

// Gets the events of the slots and writes it registered with a Hub. Called with the hub's lock held; never blocks.
class SlotClient {
 public:
  virtual ~SlotClient() = default;
  virtual void OnArrived(uint32_t index) = 0;  // the peer's write to our slot `index` is complete
  virtual void OnSent(uint32_t index) = 0;     // our write with context `index` no longer needs its source
};

// Something that has work to move along: a buffer, a collective. Called with the hub's lock held; never blocks.
class Mover {
 public:
  virtual ~Mover() = default;
  virtual bool Move() = 0;  // true when anything moved
};

// One rank's endpoint in one epoch, shared by all buffers and collectives of that rank. It numbers the places that
// peers write to, hands events to their owners, and moves every mover while anyone waits (so that no wait can starve
// another's traffic).
//
// The immediate is epoch8 | slot24: `slot` is the receiver's number for the place written. No field counts anything,
// so nothing wraps; the epoch byte is a sanity check only (a new epoch has new memory).
//
// Locking: one mutex guards everything built on the hub. With a progress thread (mandatory beyond one node: a rank
// forwards for others while it computes) that thread alone drives the transport; without one, whoever waits does.
class Hub {
 public:
  struct Options {
    bool progress_thread = false;
    absl::Duration timeout = absl::Seconds(30);        // of one wait, unless the peer is known to be alive
    absl::Duration stall_timeout = absl::Minutes(10);  // of one wait, whoever is alive
    absl::Duration setup_timeout = absl::Seconds(60);  // for all ranks to make the same buffer or collective
    absl::Duration spin = absl::Microseconds(20);      // before sleeping; 0 when ranks outnumber cores
  };
  static constexpr uint32_t kSlotsMax = (1u << 24) - 1;

  Hub(Endpoint endpoint, Options options);
  ~Hub();

  const Membership& membership() const { return transport_->membership(); }
  int self() const { return membership().self; }
  const std::string& name_of(int rank) const { return membership().members[rank].name; }
  const Options& options() const { return options_; }
  NodeMemory& node_memory() { return *endpoint_.node_memory; }
  Exchange* exchange() { return endpoint_.exchange.get(); }
  absl::Mutex& mutex() { return mutex_; }
  bool has_progress_thread() const { return thread_.joinable(); }

  // The members below need mutex() held (single-threaded callers may skip it).

  Transport& transport() { return *transport_; }

  // Numbers `count` places of `client`: the peer's write with immediate ImmediateOf(first + i) is OnArrived(i).
  // RESOURCE_EXHAUSTED beyond kSlotsMax, or when the completion queue could not hold one event for every place and
  // write: each place also costs a write of ours (credits or data), hence 2 x places <= completion_capacity.
  absl::StatusOr<uint32_t> AddSlots(SlotClient* client, uint32_t count);
  void RemoveSlots(uint32_t first, uint32_t count);
  uint32_t ImmediateOf(uint32_t slot) const { return static_cast<uint32_t>(membership().epoch & 0xff) << 24 | slot; }

  // Context for WriteRequest so that its completion is client->OnSent(index).
  uint32_t AddSender(SlotClient* client);
  void RemoveSender(uint32_t sender);
  static uint64_t ContextOf(uint32_t sender, uint32_t index) { return static_cast<uint64_t>(sender) << 32 | index; }

  // Numbers buffers and collectives in the order they are made, which is the same on every rank.
  uint16_t NextBufferId() { return next_buffer_id_++; }

  void AddMover(Mover* mover) { movers_.push_back(mover); }
  void RemoveMover(Mover* mover);

  // Memory that peers may still write to stays until the epoch ends.
  void Keep(std::shared_ptr<void> memory) { kept_.push_back(std::move(memory)); }

  // Polls the transport and moves everything once; true when anything moved. What a single-threaded test steps.
  bool Progress();

  // Something new for `rank` of this node is in a ring: wakes it when this round of Progress ends.
  void MarkNotify(int rank);

  // The first failure is kept: everything later on this hub returns it.
  void Fail(absl::Status status);
  const absl::Status& failure() const { return failure_; }

  // Blocks until done() holds, and drives progress meanwhile. done() and missing() run with the mutex held.
  // missing() names the ranks waited for and what was expected and received; it is called on failure only.
  // Errors: UNAVAILABLE a lost rank; DEADLINE_EXCEEDED after timeout (stall_timeout where all missing are alive).
  struct Missing {
    std::vector<int> ranks;
    std::string what;  // "dispatch 12: 128 rows expected, 64 received from rank 3 (node 1)"
  };
  absl::Status Await(absl::FunctionRef<bool()> done, absl::FunctionRef<Missing()> missing) ABSL_LOCKS_EXCLUDED(mutex_);

  // Tells the progress thread that there is new work.
  void Kick();

 private:
  struct Slot {
    SlotClient* client = nullptr;
    uint32_t index = 0;
  };

  bool PollOnce();
  void NotifyMarked();
  void RunProgressThread();
  absl::Status CheckPeers(absl::FunctionRef<Missing()> missing, absl::Duration waited);

  Endpoint endpoint_;
  Transport* transport_;
  const Options options_;
  absl::Mutex mutex_;
  std::vector<Slot> slots_;
  std::vector<SlotClient*> senders_;
  std::vector<Mover*> movers_;
  std::vector<std::shared_ptr<void>> kept_;
  std::vector<bool> notify_;
  std::vector<int> to_notify_;
  absl::Status failure_;
  uint16_t next_buffer_id_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_HUB_H_
