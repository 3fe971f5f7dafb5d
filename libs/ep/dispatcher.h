#ifndef MOERL_LIBS_EP_DISPATCHER_H_
#define MOERL_LIBS_EP_DISPATCHER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "libs/ep/expert_map.h"
#include "libs/ep/links.h"
#include "libs/ep/records.h"
#include "libs/ep/route.h"
#include "libs/ep/topology.h"

namespace moerl::ep {

// One rank's side of a buffer's dispatches: sends this rank's tokens, forwards those of its in-peers, and puts what
// arrives in its place. A state machine: Post() and the links' messages go in, messages and finished operations come
// out. No thread, no clock, no wait.
//
// An operation on a rank goes through: own rows leave for the other nodes and, once counts from every rank are in, a
// rank has memory for it, says READY to its node, and takes rows. It is done when all it sent is on its way, all its
// rows are in, and everything it forwards has been forwarded (else the combine's merge list would have gaps).
class Dispatcher {
 public:
  struct Op {
    uint64_t sequence = 0;
    bool is_posted = false;
    bool is_cached = false;
    bool is_done = false;
    std::shared_ptr<Route> route;        // being filled; the cached one's is not touched
    const std::byte* payload = nullptr;  // [tokens, row_bytes], the caller's
    size_t row_bytes = 0;
    std::byte* output = nullptr;  // [rows, row_bytes], once has_counts
    bool has_counts = false;

    // Sending.
    std::vector<bool> route_sent;                              // by node
    std::vector<bool> count_sent, ready_sent;                  // by local index
    std::vector<std::vector<uint32_t>> node_rows, local_rows;  // own rows for a node, for a local rank
    std::vector<size_t> node_next, local_next;
    // Receiving.
    std::vector<bool> counted;  // by source
    int num_counted = 0;
    std::vector<bool> reader_ready;       // by local index
    std::vector<uint32_t> next_in_block;  // [sources * local experts]: place of the block's next row
    std::vector<uint32_t> left_in_block;  // [sources * local experts]: rows to come
    std::vector<uint32_t> next_received;  // by source: cached only
    std::vector<int64_t> received_of;     // by source: (row, expert) pairs
    int64_t num_received = 0;
    std::vector<int64_t> forwarded, expected;  // by in-peer; expected -1 until its ROUTE came
  };

  // Allocates a dispatch's output; called once its size is known.
  using Allocate = std::function<std::byte*(uint64_t sequence, size_t bytes)>;

  Dispatcher(fabric::Hub* hub, const Topology* topology, const ExpertMap* map, Links* links, Allocate allocate);

  // Starts operation `sequence` with route->own filled (or, cached, a finished route to go along again).
  void Post(uint64_t sequence, std::shared_ptr<Route> route, bool is_cached, const std::byte* payload,
            size_t row_bytes);
  bool Move();
  // Null when there is none (never posted and nothing of it came yet).
  Op* Find(uint64_t sequence);
  void Erase(uint64_t sequence) { ops_.erase(sequence); }
  size_t num_ops() const { return ops_.size(); }

  // Whom the operation waits for, and for what; empty when for nobody.
  void DescribeMissing(const Op& op, fabric::Hub::Missing* missing) const;

  uint64_t rows_crossed() const { return rows_crossed_; }  // rows sent to other nodes, all operations

 private:
  // A part of an in-peer being forwarded: what is left of it for each rank of this node.
  struct Forward {
    bool is_parsed = false;
    std::vector<std::vector<std::pair<uint32_t, uint32_t>>> todo;  // by local index: (offset, bytes) of records
    std::vector<size_t> next;
    int64_t num_rows = 0;
  };

  Op* Live(uint64_t sequence);
  Op* OpOfRow(uint64_t sequence);
  bool SendRoutes(Op& op);
  bool SendControl(Op& op);
  bool SendToNode(int node);
  bool FillParts(Op& op, int node);
  bool SendToLocals(Op& op);
  bool ForwardRoute(int peer);
  bool ForwardRows(int peer);
  bool ParsePart(int peer, Op& op, absl::Span<const std::byte> payload);
  bool DrainControl(int local);
  bool DrainRows(int local);
  bool PushCounts(Op& op, int local, int source, absl::Span<const uint32_t> node_counts);
  bool MaySpeakFor(int local, int source) const;
  void TakeCounts(Op& op, int source, absl::Span<const uint32_t> counts);
  void AllCounted(Op& op);
  bool DeliverOwn(Op& op);
  void Deliver(Op& op, const RowView& row);
  size_t WriteRow(const Op& op, uint32_t row, std::byte* to) const;
  bool IsDone(const Op& op) const;
  void FinishRoute(Route& route) const;
  bool CanTake(const Op& op, int local) const;
  void Malformed(int rank, const char* what);
  int num_local_experts() const { return static_cast<int>(map_->experts_of_rank(topology_->self()).size()); }
  int self_local() const { return topology_->local_index(topology_->self()); }

  fabric::Hub* const hub_;
  const Topology* const topology_;
  const ExpertMap* const map_;
  Links* const links_;
  const Allocate allocate_;
  std::map<uint64_t, std::unique_ptr<Op>> ops_;
  uint64_t last_posted_ = 0;
  std::vector<Forward> forward_;                 // by in-peer
  std::vector<std::vector<bool>> route_pushed_;  // by in-peer, by local index: of the ROUTE at the front
  // Where an expert's count stands in its node's list.
  std::vector<int> index_in_node_;
  uint64_t rows_crossed_ = 0;
};

}  // namespace moerl::ep

#endif  // MOERL_LIBS_EP_DISPATCHER_H_
