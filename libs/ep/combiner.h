#ifndef MOERL_LIBS_EP_COMBINER_H_
#define MOERL_LIBS_EP_COMBINER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "libs/ep/combine_tree.h"
#include "libs/ep/expert_map.h"
#include "libs/ep/links.h"
#include "libs/ep/records.h"
#include "libs/ep/route.h"
#include "libs/ep/topology.h"

namespace moerl::ep {

// What a combine adds up.
struct CombineWork {
  Handle route;
  const float* rows_fp32 = nullptr;  // [rows, hidden] one of the two
  const uint16_t* rows_bf16 = nullptr;
  bool is_weighted = true;  // by the routing weights that came with the rows; else a plain sum
  int hidden = 0;
  int wire_block = kNoWireBlock;
  bool has_scalars = false;        // one number a row travels back unsummed, to its (token, choice)
  const float* scalars = nullptr;  // [rows]
  float* out = nullptr;            // [tokens, hidden]
  float* scalars_out = nullptr;    // [tokens, top_k], zero where the id was masked
};

// One rank's side of a buffer's combines. A state machine like Dispatcher. Three cursors move over the rows, all in
// the same order (operation, row, source) on every rank, so that one record in flight a ring is enough:
//   emit    adds up this rank's experts of a row, one partial for each maximal subtree, and hands it to the row's proxy
//   merge   (as proxy) adds the partials of this node's ranks, and sends the node's to the row's source
//   finish  (as source) adds the partials of all nodes into out
// Why nobody waits for himself: whoever waits for a slot or a record waits for a row that is earlier in the order, so
// the earliest row can always move; and a rank that waits flushes its partly filled parts first.
class Combiner {
 public:
  struct Op {
    uint64_t sequence = 0;
    CombineWork work;
    bool is_done = false;
    std::vector<size_t> emitted;   // by local index of the proxy: moves of route->emit done
    size_t merged = 0;             // moves of route->merge done
    uint32_t finished = 0;         // own tokens added up
    std::vector<bool> own_merged;  // by token: this node's share is in `out` (one subtree) or in `own_parts`
    struct OwnPart {
      Subtree subtree;
      std::vector<float> sum;
    };
    std::map<uint32_t, std::vector<OwnPart>> own_parts;  // maps that are not aligned to the tree only
  };

  Combiner(fabric::Hub* hub, const Topology* topology, const ExpertMap* map, Links* links);

  void Post(uint64_t sequence, CombineWork work);
  bool Move();
  Op* Find(uint64_t sequence);
  void Erase(uint64_t sequence) { ops_.erase(sequence); }
  void DescribeMissing(const Op& op, fabric::Hub::Missing* missing) const;

  uint64_t partials_crossed() const { return partials_crossed_; }  // sent to other nodes, all operations

 private:
  // Partials of one row, collected until every contributor has spoken.
  struct Gather {
    struct Part {
      int begin, end;
      size_t at;  // in values
    };
    bool is_started = false;
    std::vector<Part> parts;
    std::vector<float> values;
    std::vector<int> left;      // by contributor (local index, or node): ids of the row still to come
    std::vector<int> taken_to;  // by contributor: end of its last interval
    float scalars[kTopKMax];    // by the row's ids
  };
  // A row's records on their way out; `next` is the first that found no room yet.
  struct Outgoing {
    bool is_ready = false;
    std::vector<Subtree> subtrees;
    size_t next = 0;
  };
  // The part being filled for an in-peer.
  struct OpenPart {
    absl::Span<std::byte> payload;
    size_t used = 0;
    uint16_t count = 0;
  };

  bool Emit(Op& op, int local);
  bool Merge(Op& op);
  bool CollectFromLocals(Op& op, const Route::Move& move, absl::Span<const uint16_t> ids);
  bool SendMerged(Op& op, const Route::Move& move, absl::Span<const uint16_t> ids);
  void KeepOwn(Op& op, uint32_t token, absl::Span<const uint16_t> ids);
  bool Finish(Op& op);
  bool CollectFromNodes(const Op& op, uint32_t token, absl::Span<const uint16_t> ids, bool* moved);
  void FinishToken(Op& op, uint32_t token, absl::Span<const uint16_t> ids);
  // Copies one record of (op, row, source) into `gather`; false (hub failed) when it is not one.
  bool Take(absl::Span<const std::byte> data, const Op& op, uint32_t row, int source, absl::Span<const uint16_t> ids,
            int contributor, int sender, bool is_from_node, Gather* gather, size_t* bytes);
  // How many of the row's ids an interval of a contributor stands for. 0 when it cannot be: it must be a tree node
  // behind its last one with ids in it, all of them its own (so intervals of different contributors do not overlap).
  int IdsOfInterval(int begin, int end, absl::Span<const uint16_t> ids, int contributor, bool is_from_node,
                    const Gather& gather) const;
  bool IsOwnedBy(int expert, int contributor, bool is_from_node) const {
    return is_from_node ? map_->node(expert) == contributor
                        : map_->owner(expert) == topology_->local_ranks()[contributor];
  }
  void AddOwnLeaves(const Op& op, const Route::Move& move, std::vector<TreeItem>* items) const;
  // Writes record `index` of a row's subtrees, its sum computed in place; returns its bytes.
  size_t WriteRecord(const Op& op, const Route::Move& move, const Outgoing& row, absl::Span<const TreeItem> items,
                     absl::Span<const float> scalars, std::byte* to);
  void SubtreesOfNode(absl::Span<const uint16_t> ids, std::vector<Subtree>* subtrees) const;
  bool FlushParts(const Op& op);
  bool IsDone(const Op& op) const;
  absl::Span<const uint16_t> IdsOf(const Op& op, const Route::Move& move) const;
  void ItemsOf(const Gather& gather, std::vector<TreeItem>* items) const;
  bool RoundsAt(const Op& op, const Subtree& s) const { return s.end - s.begin >= op.work.wire_block; }
  void Add(const Op& op, const Subtree& subtree, absl::Span<const TreeItem> items, float* out) const;
  void Malformed(int rank, const char* what);
  int self_local() const { return topology_->local_index(topology_->self()); }

  fabric::Hub* const hub_;
  const Topology* const topology_;
  const ExpertMap* const map_;
  Links* const links_;
  std::map<uint64_t, std::unique_ptr<Op>> ops_;
  std::vector<Outgoing> emission_;  // by local index
  Gather merging_, finishing_;
  Outgoing merged_;               // of the row in merging_
  std::vector<TreeItem> items_;   // of the row in merging_
  std::vector<TreeItem> leaves_;  // of the row being emitted
  std::vector<OpenPart> open_;    // by in-peer
  std::vector<size_t> part_at_;   // by node: how much of the PART at the front has been read
  std::vector<int> peer_index_;   // by rank: its place in in_peers(), -1
  std::vector<float> sum_;        // [hidden]
  uint64_t partials_crossed_ = 0;
};

}  // namespace moerl::ep

#endif  // MOERL_LIBS_EP_COMBINER_H_
