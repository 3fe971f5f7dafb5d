#ifndef MOERL_LIBS_FABRIC_NODE_MEMORY_H_
#define MOERL_LIBS_FABRIC_NODE_MEMORY_H_

#include <cstddef>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace moerl::fabric {

// Memory shared by two ranks of one node. Traffic inside a node does not use Transport: it goes through SpscRing
// (spsc_ring.h) laid over such memory, in order and with the processor's own acquire and release.
//
// Thread-compatible; Notify may be called from any thread.
class NodeMemory {
 public:
  virtual ~NodeMemory() = default;

  // Maps the block that `producer` and `consumer` (dense ranks of this node, one of them the caller; they may be
  // equal) share under `name` in this epoch. Whoever comes first creates it, zero-filled; the other gets the same
  // memory. Page-aligned. Valid until Close(). Both sides name the same size, else FAILED_PRECONDITION.
  // The names of one epoch are unique and are not seen by another epoch: memory is new with every epoch.
  virtual absl::StatusOr<absl::Span<std::byte>> Map(int producer, int consumer, std::string_view name,
                                                    size_t bytes) = 0;

  // Wakes Transport::Wait of a rank of this node, whose ring has something new. Cheap when nobody sleeps.
  virtual void Notify(int peer) = 0;

  // Unmaps everything. Idempotent; the destructor calls it.
  virtual void Close() = 0;
};

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_NODE_MEMORY_H_
