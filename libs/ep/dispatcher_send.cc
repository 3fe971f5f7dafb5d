// Dispatcher's sending side: this rank's tokens.
#include <algorithm>
#include <cstring>

#include "libs/base/check.h"
#include "libs/ep/dispatcher.h"
#include "libs/fabric/mutation.h"

namespace moerl::ep {

using fabric::IsMutated;
using fabric::Mutation;

bool Dispatcher::SendRoutes(Op& op) {
  bool moved = false;
  for (int node = 0; node < topology_->num_nodes(); ++node) {
    if (op.route_sent[node]) continue;
    fabric::WireSender& sender = links_->ToNode(Links::kRoute, node);
    absl::Span<std::byte> to = sender.Reserve();
    if (to.empty()) continue;
    const std::vector<int>& experts = map_->experts_of_node(node);
    std::vector<uint32_t> counts(experts.size());
    const std::vector<uint32_t>& rows = op.node_rows[node];
    for (size_t i = 0; i < rows.size(); ++i) {
      if (i > 0 && rows[i] == rows[i - 1]) continue;
      for (const uint16_t id : op.route->own.ids_of(rows[i])) {
        if (map_->node(id) == node) ++counts[index_in_node_[id]];
      }
    }
    RouteRecord record = {op.sequence,
                          static_cast<uint32_t>(rows.size()),
                          static_cast<uint32_t>(op.row_bytes),
                          static_cast<uint16_t>(topology_->self()),
                          0,
                          static_cast<uint32_t>(counts.size())};
    std::memcpy(to.data(), &record, sizeof(record));
    CopyBytes(to.data() + sizeof(record), counts.data(), counts.size() * sizeof(uint32_t));
    sender.Publish(op.sequence, 0, 1, sizeof(record) + counts.size() * sizeof(uint32_t));
    op.route_sent[node] = moved = true;
  }
  return moved;
}

// Tells the ranks of this node how many rows of each of their experts come from here, and, once this rank has memory
// for all that comes to it, that it takes rows.
bool Dispatcher::SendControl(Op& op) {
  bool moved = false;
  for (size_t local = 0; local < op.count_sent.size(); ++local) {
    if (!op.count_sent[local]) {
      std::vector<uint32_t> counts(map_->experts_of_node(topology_->node()).size());
      for (const uint32_t row : op.local_rows[local]) {
        for (const uint16_t id : op.route->own.ids_of(row)) {
          if (map_->node(id) == topology_->node()) ++counts[index_in_node_[id]];
        }
      }
      op.count_sent[local] = PushCounts(op, static_cast<int>(local), topology_->self(), counts);
      moved |= op.count_sent[local];
    }
    if (op.has_counts && !op.ready_sent[local]) {
      fabric::SpscRing& ring = links_->RingTo(Links::kControlRing, static_cast<int>(local));
      std::byte* to = ring.Reserve();
      if (to == nullptr) continue;
      const RouteRecord record = {op.sequence, 0, 0, static_cast<uint16_t>(topology_->self()), 1, 0};
      std::memcpy(to, &record, sizeof(record));
      links_->Publish(ring, sizeof(record));
      links_->Published(static_cast<int>(local));
      op.ready_sent[local] = moved = true;
    }
  }
  return moved;
}

// Hands the counts of the node's experts that belong to `local` to that rank; false when its ring is full.
bool Dispatcher::PushCounts(Op& op, int local, int source, absl::Span<const uint32_t> node_counts) {
  const int rank = topology_->local_ranks()[local];
  const std::vector<int>& experts = map_->experts_of_rank(rank);
  if (local == self_local()) {
    std::vector<uint32_t> mine;
    for (const int expert : experts) mine.push_back(node_counts[index_in_node_[expert]]);
    TakeCounts(op, source, mine);
    return true;
  }
  fabric::SpscRing& ring = links_->RingTo(Links::kControlRing, local);
  std::byte* to = ring.Reserve();
  if (to == nullptr) return false;
  const RouteRecord record = {
      op.sequence, 0, 0, static_cast<uint16_t>(source), 0, static_cast<uint32_t>(experts.size())};
  std::memcpy(to, &record, sizeof(record));
  for (size_t i = 0; i < experts.size(); ++i) {
    std::memcpy(to + sizeof(record) + i * sizeof(uint32_t), &node_counts[index_in_node_[experts[i]]], sizeof(uint32_t));
  }
  links_->Publish(ring, sizeof(record) + experts.size() * sizeof(uint32_t));
  links_->Published(local);
  return true;
}

// Streams to a node run in the order of operations.
bool Dispatcher::SendToNode(int node) {
  bool moved = false;
  for (auto& [sequence, op] : ops_) {
    if (!op->is_posted) break;
    moved |= FillParts(*op, node);
    if (op->node_next[node] < op->node_rows[node].size()) break;
  }
  return moved;
}

bool Dispatcher::FillParts(Op& op, int node) {
  fabric::WireSender& sender = links_->ToNode(Links::kRows, node);
  const std::vector<uint32_t>& rows = op.node_rows[node];
  size_t& next = op.node_next[node];
  bool moved = false;
  while (next < rows.size()) {
    absl::Span<std::byte> part = sender.Reserve();
    if (part.empty()) break;
    size_t used = 0;
    uint16_t count = 0;
    while (next < rows.size() && count < UINT16_MAX) {
      const size_t bytes = RowRecordBytes(op.route->own.ids_of(rows[next]).size(), op.row_bytes);
      if (used + bytes > part.size()) break;
      used += WriteRow(op, rows[next++], part.data() + used);
      ++count;
    }
    MOERL_CHECK(count > 0);
    rows_crossed_ += count;
    sender.Publish(op.sequence, 0, count, used);
    moved = true;
  }
  return moved;
}

size_t Dispatcher::WriteRow(const Op& op, uint32_t row, std::byte* to) const {
  const RowList& own = op.route->own;
  const absl::Span<const uint16_t> ids = own.ids_of(row);
  const RowRecord header = {op.sequence, row, static_cast<uint16_t>(topology_->self()),
                            static_cast<uint16_t>(ids.size())};
  std::memcpy(to, &header, sizeof(header));
  std::byte* weights = to + sizeof(header);
  CopyBytes(weights, op.route->own_weights.data() + own.first_id[row], ids.size() * sizeof(float));
  CopyBytes(weights + ids.size() * sizeof(float), ids.data(), ids.size() * sizeof(uint16_t));
  std::memcpy(to + RowMetaBytes(ids.size()), op.payload + row * op.row_bytes, op.row_bytes);
  return RowRecordBytes(ids.size(), op.row_bytes);
}

// A rank of this node takes rows of an operation once it has promised memory for it.
bool Dispatcher::CanTake(const Op& op, int local) const {
  return op.reader_ready[local] || IsMutated(Mutation::kNoReady);
}

bool Dispatcher::SendToLocals(Op& op) {
  bool moved = false;
  for (size_t local = 0; local < op.local_rows.size(); ++local) {
    const std::vector<uint32_t>& rows = op.local_rows[local];
    size_t& next = op.local_next[local];
    if (next == rows.size() || static_cast<int>(local) == self_local()) continue;  // own rows: DeliverOwn
    if (!CanTake(op, static_cast<int>(local))) continue;
    fabric::SpscRing& ring = links_->RingTo(Links::kRowRing, static_cast<int>(local));
    const size_t before = next;
    while (next < rows.size()) {
      std::byte* to = ring.Reserve();
      if (to == nullptr) break;
      links_->Publish(ring, WriteRow(op, rows[next++], to));
    }
    if (next == before) continue;
    links_->Published(static_cast<int>(local));
    moved = true;
  }
  return moved;
}

}  // namespace moerl::ep
