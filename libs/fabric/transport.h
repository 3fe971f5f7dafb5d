#ifndef MOERL_LIBS_FABRIC_TRANSPORT_H_
#define MOERL_LIBS_FABRIC_TRANSPORT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace moerl::fabric {

// One member of an epoch. Members have dense indices 0..n-1 in the order of Membership::members.
struct Member {
  int node = 0;      // dense index of the machine, 0..num_nodes-1; every node of an epoch has a member
  std::string name;  // what errors call it, for example "rank 3 (trainer-1, 10.0.0.7)"
};

// Who takes part in one epoch and which of them this process is. The same on every member but for `self`.
struct Membership {
  uint64_t epoch = 0;  // never used twice by one cluster
  int self = 0;
  std::vector<Member> members;

  int size() const { return static_cast<int>(members.size()); }
  int node_of(int rank) const { return members[rank].node; }
};

// Where a peer may write. Plain data: travels to the peers as bytes when an epoch forms.
// `address` is what the peer's provider calls the first byte (0 under offset addressing).
struct RemoteRegion {
  uint64_t address = 0;
  uint64_t key = 0;
  uint64_t bytes = 0;
};

// Memory registered with a transport. `id` is good for this transport only.
struct Region {
  int id = -1;
  std::byte* base = nullptr;
  size_t bytes = 0;
  RemoteRegion remote;
};

// A one-sided write of `bytes` from registered local memory into a peer's, with 32 bits that the peer's Poll reports.
struct WriteRequest {
  int peer = 0;
  int region = -1;  // Region::id the source lies in
  const std::byte* source = nullptr;
  RemoteRegion to;
  uint64_t to_offset = 0;  // bytes from the start of `to`
  size_t bytes = 0;        // 1 .. kWriteBytesMax
  uint32_t immediate = 0;
  uint64_t context = 0;  // comes back in the local completion
};

struct Event {
  enum class Kind : uint8_t {
    kSent,     // a write of ours: its source memory may be reused. NOT that it arrived.
    kArrived,  // a peer's write: all its bytes are in our memory, `immediate` is what it carried
  };
  Kind kind = Kind::kSent;
  uint32_t immediate = 0;  // kArrived
  uint64_t context = 0;    // kSent
};

// EFA refuses larger RDMA writes than 1 GiB; every provider takes this much.
inline constexpr size_t kWriteBytesMax = size_t{1} << 30;

// One rank's endpoint in one epoch. A new epoch opens a new Transport, with new memory and new keys.
//
// What it promises, and nothing more:
//   - writes to one peer, and to different peers, arrive in any order;
//   - the fragments of one write become visible in any order;
//   - a write's immediate is reported after all of that write's bytes are visible, and says nothing about other writes;
//   - a local completion (kSent) means that the source may be reused, never that anything arrived;
//   - a write to a region that was closed, or to a key of an earlier epoch, lands nowhere.
// It does not report a dead peer: writes to one may never complete. Deadlines and the failure detector do that.
//
// Thread-compatible: one thread at a time calls it, except Wake(), which any thread may call at any time.
// Both sides must Poll for writes to move (several providers make no progress otherwise).
class Transport {
 public:
  virtual ~Transport() = default;

  virtual const Membership& membership() const = 0;

  // Registers [base, base+bytes) for sending from and for being written to. The memory is the caller's, outlives the
  // transport's Close(), and is not registered twice. RESOURCE_EXHAUSTED when the provider has no more registrations.
  virtual absl::StatusOr<Region> Register(std::byte* base, size_t bytes) = 0;

  // Posts one write. False: no room now (the provider's EAGAIN); Poll, then try again. The source stays untouched
  // until its kSent. Out-of-range requests are programmer errors (MOERL_CHECK).
  virtual bool Write(const WriteRequest& request) = 0;

  // Makes progress and fills `events` with up to its size of them; returns how many. Never blocks.
  virtual size_t Poll(absl::Span<Event> events) = 0;

  // Events that may wait unpolled before the queue overflows, which is an error of status(). Whoever registers slots
  // keeps 2 x (slots written to + slots written from) below it.
  virtual size_t completion_capacity() const = 0;

  // Sleeps until there may be an event, Wake() is called, or `timeout` passes. May return early. A Wake() before the
  // call makes it return at once (level-triggered), so that no wake-up is lost.
  virtual void Wait(absl::Duration timeout) = 0;
  virtual void Wake() = 0;

  // OK, or why this endpoint can no longer be used (a queue overflowed, the provider failed). Never a single peer's
  // loss.
  virtual absl::Status status() const = 0;

  // Ends every registration: later writes of peers land nowhere. Idempotent; the destructor calls it.
  virtual void Close() = 0;
};

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_TRANSPORT_H_
