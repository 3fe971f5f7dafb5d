#ifndef MOERL_LIBS_COLLECTIVE_COLLECTIVE_H_
#define MOERL_LIBS_COLLECTIVE_COLLECTIVE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace moerl::collective {

enum class Element : uint8_t { kFloat, kDouble, kInt64 };
enum class Reduction : uint8_t { kSum, kMax };

// Operations in which every rank of a group takes part. Every rank makes the same calls with the same sizes in the same
// order. Reductions add up in the order of ranks, ((x0 + x1) + x2) + ..., so that the result is the same bits on every
// rank, in every run, over every transport.
//
// A rank's segment of `count` elements is SegmentOf(count, rank, size): contiguous, in rank order, the first
// count % size of them one element longer.
//
// Thread-compatible. Calls block until this rank's part is done. Errors: UNAVAILABLE names a lost rank,
// DEADLINE_EXCEEDED the ranks waited for, with operation and bytes expected and received; the group is then unusable.
class Collective {
 public:
  virtual ~Collective() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // data [count] in place: the reduction over all ranks.
  virtual absl::Status AllReduce(Element element, Reduction reduction, void* data, int64_t count) = 0;

  // out: this rank's segment of the reduction of `in` [count]. out may point at the segment inside `in`.
  virtual absl::Status ReduceScatter(Element element, Reduction reduction, const void* in, int64_t count,
                                     void* out) = 0;

  // out: the blocks of all ranks one after the other, bytes_of_rank[r] from rank r. `mine` may lie in its place there.
  virtual absl::Status AllGather(const void* mine, absl::Span<const int64_t> bytes_of_rank, void* out) = 0;

  // Sends block r of `send` to rank r and receives block r of `recv` from it; the blocks lie one after the other.
  // recv_bytes[r] here is send_bytes[this rank] there. This rank's own block is copied.
  virtual absl::Status AllToAll(const void* send, absl::Span<const int64_t> send_bytes, void* recv,
                                absl::Span<const int64_t> recv_bytes) = 0;

  // data [bytes]: what `root` has.
  virtual absl::Status Broadcast(int root, void* data, int64_t bytes) = 0;

  // Returns when every rank has called it.
  virtual absl::Status Barrier() = 0;
};

struct Segment {
  int64_t begin = 0, end = 0;
};

inline Segment SegmentOf(int64_t count, int rank, int size) {
  const int64_t each = count / size, longer = count % size;
  const int64_t begin = rank * each + (rank < longer ? rank : longer);
  return {begin, begin + each + (rank < longer ? 1 : 0)};
}

}  // namespace moerl::collective

#endif  // MOERL_LIBS_COLLECTIVE_COLLECTIVE_H_
