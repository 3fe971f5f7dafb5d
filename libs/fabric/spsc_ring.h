#ifndef MOERL_LIBS_FABRIC_SPSC_RING_H_
#define MOERL_LIBS_FABRIC_SPSC_RING_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "libs/base/check.h"

namespace moerl::fabric {

// A ring of messages from one producer to one consumer, laid over zero-filled memory that both map (their addresses
// may differ). Messages come out whole and in order. One thread at a time on each side.
//
// Layout: head (consumer) and tail (producer) on cache lines of their own, then `entries` slots of
// 8 bytes length + `message_bytes_max` payload, payloads 8-byte aligned.
class SpscRing {
 public:
  static constexpr size_t kLine = 64;

  // Bytes of memory for a ring of `entries` messages of at most `message_bytes_max`.
  static size_t Bytes(size_t entries, size_t message_bytes_max) {
    return 2 * kLine + entries * SlotBytes(message_bytes_max);
  }

  SpscRing() = default;
  SpscRing(absl::Span<std::byte> memory, size_t entries, size_t message_bytes_max)
      : base_(memory.data()), entries_(entries), slot_bytes_(SlotBytes(message_bytes_max)), max_(message_bytes_max) {
    static_assert(std::atomic<uint64_t>::is_always_lock_free);
    MOERL_CHECK(entries > 0 && memory.size() >= Bytes(entries, message_bytes_max));
  }

  // Producer: the payload of the next message, `message_bytes_max` long; null when the ring is full.
  std::byte* Reserve() {
    const uint64_t tail = Tail().load(std::memory_order_relaxed);
    if (tail - Head().load(std::memory_order_acquire) == entries_) return nullptr;
    return Slot(tail) + 8;
  }
  // Producer: makes the reserved message visible with its first `bytes` bytes.
  void Publish(size_t bytes) {
    MOERL_CHECK(bytes <= max_);
    const uint64_t tail = Tail().load(std::memory_order_relaxed);
    *reinterpret_cast<uint64_t*>(Slot(tail)) = bytes;
    Tail().store(tail + 1, std::memory_order_release);
  }

  // Consumer: the oldest message, valid until Pop(); data() is null when there is none.
  absl::Span<const std::byte> Front() const {
    const uint64_t head = Head().load(std::memory_order_relaxed);
    if (head == Tail().load(std::memory_order_acquire)) return {};
    const std::byte* slot = Slot(head);
    return {slot + 8, std::min<size_t>(*reinterpret_cast<const uint64_t*>(slot), max_)};  // whatever it says, no more
  }
  void Pop() { Head().store(Head().load(std::memory_order_relaxed) + 1, std::memory_order_release); }

  size_t message_bytes_max() const { return max_; }

 private:
  static size_t SlotBytes(size_t message_bytes_max) { return 8 + (message_bytes_max + 7) / 8 * 8; }
  std::atomic<uint64_t>& Head() const { return *reinterpret_cast<std::atomic<uint64_t>*>(base_); }
  std::atomic<uint64_t>& Tail() const { return *reinterpret_cast<std::atomic<uint64_t>*>(base_ + kLine); }
  std::byte* Slot(uint64_t position) const { return base_ + 2 * kLine + (position % entries_) * slot_bytes_; }

  std::byte* base_ = nullptr;
  size_t entries_ = 0;
  size_t slot_bytes_ = 0;
  size_t max_ = 0;
};

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_SPSC_RING_H_
