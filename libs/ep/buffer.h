#ifndef MOERL_LIBS_EP_BUFFER_H_
#define MOERL_LIBS_EP_BUFFER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "libs/ep/combiner.h"
#include "libs/ep/dispatcher.h"
#include "libs/ep/expert_map.h"
#include "libs/ep/group.h"
#include "libs/ep/links.h"
#include "libs/ep/route.h"

namespace moerl::ep {

// Element type of what a dispatch carries. kFp8 rows are e4m3 with one fp32 scale per 128 elements (fp8.h), quantised
// by the sender from fp32 or bf16 input, for tokens that stay on their rank too.
enum class RowType : uint8_t { kFp32, kBf16 };

struct BufferOptions {
  int hidden = 0;                // elements of a row
  int top_k_max = 8;             // 1..64
  size_t part_bytes = 64 << 10;  // of one write between nodes; raised to hold a single row
  uint32_t rows_slots = 0;       // parts of rows in flight to a peer; 0: 8 to 64, fewer the more nodes there are
  uint32_t part_slots = 0;       // parts of partial sums, likewise
  uint32_t ring_entries = 64;    // rows in flight to a rank of the node; at least 1
  int operations_max = 8;        // posted and not yet received back, on this rank
};

struct DispatchInput {
  const void* x = nullptr;        // [num_tokens, hidden] of `type`; stays alive until the operation is received
  RowType type = RowType::kFp32;  // of x
  bool to_fp8 = false;            // quantise on the way
  int64_t num_tokens = 0;         // may be 0, and may differ from rank to rank
  int top_k = 1;
  const int32_t* topk_ids = nullptr;  // [num_tokens, top_k] distinct within a token, -1 for none
  const float* weights = nullptr;     // [num_tokens, top_k], carried to the experts' ranks; null for all 1
};

// What this rank received: rows sorted by (local expert, source rank, source row). Owns the rows.
struct Dispatched {
  Handle handle;
  int64_t num_rows = 0;
  const std::byte* x = nullptr;             // row i starts at x + i * row_bytes
  size_t row_bytes = 0;                     // hidden * element size; fp8: hidden + 4 * ceil(hidden / 128)
  absl::Span<const int64_t> offsets;        // [local experts + 1]: rows of local expert i are offsets[i]..offsets[i+1]
  absl::Span<const float> weights;          // [num_rows] routing weights
  std::shared_ptr<const std::byte> memory;  // keeps x
};

struct CombineInput {
  Handle handle;
  const void* rows = nullptr;  // [handle->num_rows(), hidden] of `type`; stays alive until received
  RowType type = RowType::kFp32;
  bool is_weighted = true;         // by the dispatch's weights; false: plain sum (the backward of a dispatch)
  int wire_block = kNoWireBlock;   // see combine_tree.h; kNoWireBlock for fp32 compute
  bool has_scalars = false;        // on every rank alike: one number a row goes back too, unsummed
  const float* scalars = nullptr;  // [num_rows]
  float* out = nullptr;            // [num_tokens, hidden], overwritten; stays alive until received
  float* scalars_out = nullptr;    // [num_tokens, top_k], zero at masked entries
};

// Names an operation between its two halves.
struct Ticket {
  uint64_t sequence = 0;
};

// The memory and the state of one stream of dispatches and combines. Every member of the group makes the same
// buffers, and issues the same operations on each in the same order, with zero tokens where it has none. Operations of
// different buffers are independent, several may be in flight on each.
//
//   out = combine(experts(dispatch(x)))           forward
//   dy, w = cached dispatch of d_out along handle  backward of combine
//   dx = combine of the experts' dx, unweighted    backward of dispatch (scalars carry the routing weights' gradient)
//
// A token crosses to another node once, whatever the number of its experts there, and its sum crosses back once for
// each maximal subtree of experts there (combine_tree.h): once, for maps aligned to the tree.
//
// Thread-safe; the Send halves return at once, the Receive halves wait (and drive the traffic of all buffers of the
// group meanwhile). Errors of a Receive: UNAVAILABLE names a lost rank, DEADLINE_EXCEEDED the ranks waited for, both
// with the operation and what was expected and received; DATA_LOSS a broken message. After one the group is unusable
// and every call returns it. INVALID_ARGUMENT from a Send half names the argument and changes nothing; the other ranks
// then wait for this one, so repeat the call with right arguments or give the group up.
class Buffer : private fabric::Mover {
 public:
  // Collective. The group outlives the buffer.
  static absl::StatusOr<std::unique_ptr<Buffer>> Create(Group* group, ExpertMap map, BufferOptions options);

  // Create in steps, for who exchanges the offers himself: Open on every rank, then Connect with all offers by rank.
  static absl::StatusOr<std::unique_ptr<Buffer>> Open(Group* group, ExpertMap map, BufferOptions options);
  std::string Offer() const;
  absl::Status Connect(absl::Span<const std::string> offers);

  // Without Close: peers' late credits land in memory that the group keeps.
  ~Buffer() override;

  // Collective: returns when no member has traffic of this buffer left. No operation may be unreceived.
  absl::Status Close();

  absl::StatusOr<Ticket> SendDispatch(const DispatchInput& input);
  // Sends other rows along the routes of `handle` (num_tokens, ids and weights are its own): no counts are exchanged.
  absl::StatusOr<Ticket> SendDispatch(const Handle& handle, const void* x, RowType type, bool to_fp8 = false);
  absl::StatusOr<Dispatched> ReceiveDispatch(Ticket ticket);
  absl::StatusOr<Dispatched> Dispatch(const DispatchInput& input);
  absl::StatusOr<Dispatched> Dispatch(const Handle& handle, const void* x, RowType type, bool to_fp8 = false);

  absl::StatusOr<Ticket> SendCombine(const CombineInput& input);
  absl::Status ReceiveCombine(Ticket ticket);
  absl::Status Combine(const CombineInput& input);

  // True when the Receive half would not wait. Also what a single-threaded caller polls, with group->hub().Progress().
  bool IsDone(Ticket ticket);

  const ExpertMap& map() const { return map_; }
  const BufferOptions& options() const { return options_; }

  // Since creation, on this rank, towards other nodes.
  struct Stats {
    uint64_t rows = 0;                                           // tokens that crossed
    uint64_t partials = 0;                                       // partial sums that crossed
    uint64_t row_bytes = 0, partial_bytes = 0, route_bytes = 0;  // on the wire, headers included
    uint64_t ring_bytes = 0;                                     // to the other ranks of the node, by shared memory
    absl::Duration stalled = absl::ZeroDuration();               // messages ready, but no credit from their receiver
    uint64_t receive_bytes = 0;                                  // memory that peers write to: slots and rings
  };
  Stats stats();
  // True when every credit is back and nothing is on its way: what Close waits for.
  bool is_quiet();

 private:
  struct Pending;
  struct Pool;
  struct Metrics;

  Buffer(Group* group, ExpertMap map, BufferOptions options);
  bool Move() override;
  absl::Status CheckInput(const DispatchInput& input) const;
  absl::Status CheckRoom() const;
  absl::StatusOr<Ticket> Post(std::shared_ptr<Route> route, bool is_cached, const void* x, RowType type, bool to_fp8);
  void Started();
  bool IsDoneLocked(uint64_t sequence);
  absl::Status Await(uint64_t sequence, absl::FunctionRef<fabric::Hub::Missing()> missing);
  Stats StatsLocked() const;
  void Measure(bool is_combine, absl::Time began);

  Group* const group_;
  const ExpertMap map_;
  const BufferOptions options_;
  const uint16_t id_;
  Links links_;
  std::shared_ptr<Pool> pool_;
  Dispatcher dispatcher_;
  Combiner combiner_;
  std::map<uint64_t, Pending> pending_;
  uint64_t next_sequence_ = 1;
  Stats measured_;  // what the process's metrics have of this buffer
};

}  // namespace moerl::ep

#endif  // MOERL_LIBS_EP_BUFFER_H_
