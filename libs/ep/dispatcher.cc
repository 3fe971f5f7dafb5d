#include "libs/ep/dispatcher.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/fabric/mutation.h"

namespace moerl::ep {

using fabric::IsMutated;
using fabric::Mutation;

Dispatcher::Dispatcher(fabric::Hub* hub, const Topology* topology, const ExpertMap* map, Links* links,
                       Allocate allocate)
    : hub_(hub), topology_(topology), map_(map), links_(links), allocate_(std::move(allocate)) {
  const size_t num_local = topology_->local_ranks().size();
  forward_.resize(topology_->in_peers().size());
  route_pushed_.assign(topology_->in_peers().size(), std::vector<bool>(num_local));
  index_in_node_.resize(map_->num_experts());
  for (int node = 0; node < topology_->num_nodes(); ++node) {
    const std::vector<int>& experts = map_->experts_of_node(node);
    for (size_t i = 0; i < experts.size(); ++i) index_in_node_[experts[i]] = static_cast<int>(i);
  }
}

Dispatcher::Op* Dispatcher::Find(uint64_t sequence) {
  const auto found = ops_.find(sequence);
  return found == ops_.end() ? nullptr : found->second.get();
}

// The operation a message is about. Peers may be ahead of this rank, so it can be one that is not posted yet. Null for
// one that is over here: a READY that nobody needs any more.
Dispatcher::Op* Dispatcher::Live(uint64_t sequence) {
  if (Op* op = Find(sequence)) return op;
  if (sequence <= last_posted_) return nullptr;
  auto op = std::make_unique<Op>();
  op->sequence = sequence;
  op->route = std::make_shared<Route>();
  const size_t num_local = topology_->local_ranks().size();
  op->route->counts.resize(static_cast<size_t>(topology_->size()) * num_local_experts());
  op->route->received.resize(topology_->size());
  op->route->proxied.resize(topology_->in_peers().size());
  op->counted.resize(topology_->size());
  op->reader_ready.resize(num_local);
  op->received_of.resize(topology_->size());
  op->forwarded.resize(topology_->in_peers().size());
  op->expected.assign(topology_->in_peers().size(), -1);
  return (ops_[sequence] = std::move(op)).get();
}

Dispatcher::Op* Dispatcher::OpOfRow(uint64_t sequence) {
  if (IsMutated(Mutation::kNoSequence)) {
    for (auto& [unused, op] : ops_) {
      if (op->is_posted && !op->is_done) return op.get();
    }
  }
  return Find(sequence);
}

void Dispatcher::Post(uint64_t sequence, std::shared_ptr<Route> route, bool is_cached, const std::byte* payload,
                      size_t row_bytes) {
  Op& op = *Live(sequence);
  last_posted_ = sequence;
  op.is_posted = true;
  op.is_cached = is_cached;
  op.payload = payload;
  op.row_bytes = row_bytes;
  if (is_cached) {
    op.route = std::move(route);
    op.next_received.resize(topology_->size());
    for (size_t peer = 0; peer < op.expected.size(); ++peer) {
      op.expected[peer] = static_cast<int64_t>(op.route->proxied[peer].size());
    }
  } else {  // what came early is already in op.route
    op.route->num_tokens = route->num_tokens;
    op.route->top_k = route->top_k;
    op.route->own = std::move(route->own);
    op.route->choice = std::move(route->choice);
    op.route->own_weights = std::move(route->own_weights);
  }

  const int num_nodes = topology_->num_nodes();
  const size_t num_local = topology_->local_ranks().size();
  op.route_sent.assign(num_nodes, is_cached);
  op.count_sent.assign(num_local, is_cached);
  op.ready_sent.assign(num_local, false);
  op.node_rows.resize(num_nodes);
  op.node_next.resize(num_nodes);
  op.local_rows.resize(num_local);
  op.local_next.resize(num_local);
  const RowList& own = op.route->own;
  for (uint32_t row = 0; row < own.size(); ++row) {
    for (const uint16_t id : own.ids_of(row)) {
      const int node = map_->node(id);
      std::vector<uint32_t>& rows =
          node == topology_->node() ? op.local_rows[topology_->local_index(map_->owner(id))] : op.node_rows[node];
      if (rows.empty() || rows.back() != row || (IsMutated(Mutation::kRankDedup) && node != topology_->node()))
        rows.push_back(row);
    }
  }
  op.route_sent[topology_->node()] = true;
  op.count_sent[self_local()] = true;
  op.ready_sent[self_local()] = true;
  op.reader_ready[self_local()] = true;
  if (is_cached) {
    AllCounted(op);
  } else {
    std::vector<uint32_t> counts(num_local_experts());
    for (const uint32_t row : op.local_rows[self_local()]) {
      for (const uint16_t id : own.ids_of(row)) {
        if (map_->owner(id) == topology_->self()) ++counts[map_->local_index(id)];
      }
    }
    TakeCounts(op, topology_->self(), counts);
  }
}

bool Dispatcher::Move() {
  bool moved = false;
  const int num_local = static_cast<int>(topology_->local_ranks().size());
  const int num_peers = static_cast<int>(topology_->in_peers().size());
  for (int local = 0; local < num_local; ++local) {
    if (local == self_local()) continue;
    moved |= DrainControl(local);
    moved |= DrainRows(local);
  }
  for (int peer = 0; peer < num_peers; ++peer) {
    moved |= ForwardRoute(peer);
    moved |= ForwardRows(peer);
  }
  for (auto& [sequence, op] : ops_) {
    if (!op->is_posted || op->is_done) continue;
    moved |= SendRoutes(*op);
    moved |= SendControl(*op);
    moved |= SendToLocals(*op);
  }
  for (int node = 0; node < topology_->num_nodes(); ++node) {
    if (node != topology_->node()) moved |= SendToNode(node);
  }
  for (auto& [sequence, op] : ops_) {
    if (op->is_posted && !op->is_done) moved |= DeliverOwn(*op);  // after what others wait for
  }
  for (auto& [sequence, op] : ops_) {
    if (!op->is_posted || op->is_done || !IsDone(*op)) continue;
    op->is_done = moved = true;
    if (!op->is_cached) FinishRoute(*op->route);
  }
  return moved;
}

bool Dispatcher::IsDone(const Op& op) const {
  if (!op.has_counts || op.num_received != op.route->num_rows()) return false;
  for (size_t node = 0; node < op.node_rows.size(); ++node) {
    if (!op.route_sent[node] || op.node_next[node] < op.node_rows[node].size()) return false;
  }
  for (size_t local = 0; local < op.local_rows.size(); ++local) {
    if (!op.count_sent[local] || !op.ready_sent[local]) return false;
    if (op.local_next[local] < op.local_rows[local].size()) return false;
  }
  if (IsMutated(Mutation::kOwnRowsOnly)) return true;
  return op.forwarded == op.expected;
}

void Dispatcher::FinishRoute(Route& route) const {
  const auto by_row_and_source = [](const Route::Move& a, const Route::Move& b) {
    return a.row != b.row ? a.row < b.row : a.source < b.source;
  };
  route.emit.resize(topology_->local_ranks().size());
  for (int source = 0; source < topology_->size(); ++source) {
    const int proxy =
        topology_->node_of(source) == topology_->node() ? source : topology_->proxy(source, topology_->node());
    std::vector<Route::Move>& emit = route.emit[topology_->local_index(proxy)];
    const RowList& list = route.received[source];
    for (uint32_t i = 0; i < list.size(); ++i) emit.push_back({list.row[i], source, i});
  }
  for (std::vector<Route::Move>& emit : route.emit) std::sort(emit.begin(), emit.end(), by_row_and_source);
  for (uint32_t row = 0; row < route.own.size(); ++row) {
    const absl::Span<const uint16_t> ids = route.own.ids_of(row);
    const bool is_here =
        std::any_of(ids.begin(), ids.end(), [&](uint16_t id) { return map_->node(id) == topology_->node(); });
    if (is_here) route.merge.push_back({row, topology_->self(), row});
  }
  for (size_t peer = 0; peer < route.proxied.size(); ++peer) {
    const RowList& list = route.proxied[peer];
    for (uint32_t i = 0; i < list.size(); ++i) route.merge.push_back({list.row[i], topology_->in_peers()[peer], i});
  }
  std::sort(route.merge.begin(), route.merge.end(), by_row_and_source);
}

void Dispatcher::DescribeMissing(const Op& op, fabric::Hub::Missing* missing) const {
  const auto add = [&](int rank, std::string what) {
    missing->ranks.push_back(rank);
    absl::StrAppend(&missing->what, missing->what.empty() ? "" : "; ", what, " ", hub_->name_of(rank));
  };
  constexpr size_t kNamedMax = 4;
  for (int rank = 0; rank < topology_->size() && !op.has_counts; ++rank) {
    if (!op.counted[rank] && missing->ranks.size() < kNamedMax) add(rank, "counts expected, none received from");
  }
  if (!op.has_counts) return;
  const size_t experts = num_local_experts();
  for (int rank = 0; rank < topology_->size() && missing->ranks.size() < kNamedMax; ++rank) {
    int64_t expected = 0;
    for (size_t e = 0; e < experts; ++e) expected += op.route->counts[rank * experts + e];
    if (op.received_of[rank] < expected) {
      add(rank, absl::StrCat(expected, " rows expected, ", op.received_of[rank], " received from"));
    }
  }
  for (size_t peer = 0; peer < op.expected.size() && missing->ranks.size() < kNamedMax; ++peer) {
    if (op.forwarded[peer] == op.expected[peer]) continue;
    add(topology_->in_peers()[peer],
        absl::StrCat(op.expected[peer], " rows to forward expected, ", op.forwarded[peer], " forwarded from"));
  }
  for (size_t local = 0; local < op.local_rows.size() && missing->ranks.size() < kNamedMax; ++local) {
    if (op.local_next[local] == op.local_rows[local].size()) continue;
    add(topology_->local_ranks()[local],
        absl::StrCat(op.local_rows[local].size(), " rows to hand over, ", op.local_next[local], " taken by"));
  }
  for (int node = 0; node < topology_->num_nodes() && missing->ranks.size() < kNamedMax; ++node) {
    if (op.node_next[node] == op.node_rows[node].size()) continue;
    add(topology_->proxy(topology_->self(), node),
        absl::StrCat(op.node_rows[node].size(), " rows to send, ", op.node_next[node], " sent to"));
  }
}

void Dispatcher::Malformed(int rank, const char* what) {
  hub_->Fail(absl::DataLossError(
      absl::StrCat("ep: ", hub_->name_of(topology_->self()), " got ", what, " from ", hub_->name_of(rank))));
}

}  // namespace moerl::ep
