#ifndef MOERL_LIBS_FABRIC_WIRE_STREAM_H_
#define MOERL_LIBS_FABRIC_WIRE_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "libs/fabric/hub.h"

namespace moerl::fabric {

// What stands in front of every slot. Little-endian, 48 bytes.
struct WireHeader {
  uint64_t epoch;
  uint64_t sequence;  // of the operation, per buffer; never wraps
  uint16_t source;    // dense rank of the sender
  uint16_t buffer;
  uint8_t kind;
  uint8_t flags;
  uint16_t count;   // records in the payload
  uint32_t part;    // position in the stream modulo 2^32, compared for equality only
  uint32_t bytes;   // of the payload
  uint64_t digest;  // XXH3 of the payload
  uint64_t reserved;
};
static_assert(sizeof(WireHeader) == 48);

// An ordered, bounded stream of messages from one rank to another, made of unordered one-sided writes.
//
// Message p of a stream goes into slot p mod n. The receiver takes the slots in turn, each once its immediate has
// come, so that order comes from the position and never from arrival. It then gives the slot back by a credit write
// that names it. The sender writes a slot again only with its credit back and the previous write's local completion
// seen; at most one credit write is outstanding per slot. So 2 events a slot is all that a completion queue must hold.
class WireSender : public SlotClient {
 public:
  // The payload of the next message; empty while its slot is not free.
  absl::Span<std::byte> Reserve();
  // Sends the reserved message with the first `bytes` bytes of its payload.
  void Publish(uint64_t sequence, uint8_t flags, uint16_t count, size_t bytes);
  // Posts what is published; true when anything was.
  bool Move();
  bool is_idle() const { return posted_ == published_ && num_unsent_ == 0; }
  bool has_all_credits() const;
  int peer() const { return peer_; }
  uint64_t bytes_posted() const { return bytes_posted_; }
  uint64_t num_published() const { return published_; }
  // Time in which a message was there to be written and its slot was not free: the peer is slow to take.
  absl::Duration stalled() const { return stalled_; }

  void OnArrived(uint32_t slot) override;
  void OnSent(uint32_t slot) override;

 private:
  friend class WireStreams;
  struct Slot {
    bool has_credit = true;
    bool is_unsent = false;
  };
  std::byte* Stage(uint64_t position) const;

  Hub* hub_ = nullptr;
  int peer_ = 0;
  uint16_t buffer_ = 0;
  uint8_t kind_ = 0;
  size_t stride_ = 0, payload_max_ = 0;
  int region_ = -1;
  std::byte* stage_ = nullptr;   // n slots
  std::byte* credit_ = nullptr;  // n x 8 bytes that credits are written to
  uint32_t first_credit_slot_ = 0;
  uint32_t sender_id_ = 0;
  RemoteRegion remote_;  // set when connected
  uint64_t remote_offset_ = 0;
  uint32_t remote_slot_ = 0;
  std::vector<Slot> slots_;
  uint64_t published_ = 0, posted_ = 0, bytes_posted_ = 0;
  uint64_t credits_ = 0;  // returned so far
  int num_unsent_ = 0;
  std::optional<absl::Time> stalled_since_;
  absl::Duration stalled_ = absl::ZeroDuration();
};

class WireReceiver : public SlotClient {
 public:
  struct Message {
    const WireHeader* header = nullptr;  // null: nothing there
    absl::Span<const std::byte> payload;
  };
  // The next message, valid until Pop(). A malformed one fails the hub (DATA_LOSS) and is not returned.
  Message Front();
  void Pop();
  // Sends the credits owed; true when any was.
  bool Move();
  bool is_idle() const { return owed_.empty() && num_unsent_ == 0; }
  int peer() const { return peer_; }
  uint64_t num_popped() const { return position_; }

  void OnArrived(uint32_t slot) override;
  void OnSent(uint32_t slot) override;

 private:
  friend class WireStreams;
  struct Slot {
    bool has_arrived = false;
    bool is_checked = false;
    bool is_unsent = false;  // its last credit write
  };
  const std::byte* At(uint64_t slot) const { return slots_memory_ + slot * stride_; }
  bool Check(const WireHeader& header, const std::byte* payload);

  Hub* hub_ = nullptr;
  int peer_ = 0;
  uint16_t buffer_ = 0;
  uint8_t kind_ = 0;
  size_t stride_ = 0, payload_max_ = 0;
  int region_ = -1;
  std::byte* slots_memory_ = nullptr;
  std::byte* credit_source_ = nullptr;  // n x 8 bytes
  uint32_t first_slot_ = 0;
  uint32_t sender_id_ = 0;
  RemoteRegion remote_;
  uint64_t remote_offset_ = 0;
  uint32_t remote_slot_ = 0;
  std::vector<Slot> slots_;
  std::vector<uint32_t> owed_;
  uint64_t position_ = 0;
  int num_unsent_ = 0;
  std::vector<uint32_t> arrivals_;  // in order; only a mutation reads it
};

// The streams of one buffer on one rank: their memory, numbers, and the exchange that connects them.
class WireStreams {
 public:
  struct Spec {
    int peer = 0;
    uint8_t kind = 0;
    bool is_sender = false;
    uint32_t num_slots = 1;
    size_t payload_bytes_max = 0;
  };

  // `buffer` tells the streams of one hub's buffers apart: unique on the hub, equal on all ranks.
  WireStreams(Hub* hub, uint16_t buffer) : hub_(hub), buffer_(buffer) {}
  ~WireStreams();
  WireStreams(const WireStreams&) = delete;
  WireStreams& operator=(const WireStreams&) = delete;

  // Gives the numbers back and leaves the memory to the hub. With the hub's mutex, before destruction.
  void Close();

  // Allocates and registers. Call once; then Offer, exchange the offers, Connect. The streams come in the order of
  // the specs: senders()[i] is the i-th sender among them.
  absl::Status Open(absl::Span<const Spec> specs);
  std::string Offer() const;
  // FAILED_PRECONDITION names a rank whose offer does not fit ours (other options).
  absl::Status Connect(absl::Span<const std::string> offers);

  std::vector<std::unique_ptr<WireSender>>& senders() { return senders_; }
  std::vector<std::unique_ptr<WireReceiver>>& receivers() { return receivers_; }

  bool Move();
  bool is_idle() const;
  uint16_t buffer() const { return buffer_; }
  size_t receive_bytes() const { return receive_bytes_; }  // memory that peers write to
  size_t send_bytes() const { return send_bytes_; }

 private:
  struct OfferEntry;

  Hub* hub_;
  const uint16_t buffer_;
  std::shared_ptr<std::byte[]> memory_;
  Region region_;
  std::vector<std::unique_ptr<WireSender>> senders_;
  std::vector<std::unique_ptr<WireReceiver>> receivers_;
  size_t receive_bytes_ = 0, send_bytes_ = 0;
};

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_WIRE_STREAM_H_
