// Dispatcher's receiving side: forwarding for in-peers, and this rank's rows.
#include <algorithm>
#include <cstring>

#include "libs/base/check.h"
#include "libs/ep/dispatcher.h"
#include "libs/fabric/mutation.h"

namespace moerl::ep {

using fabric::IsMutated;
using fabric::Mutation;

// ---------------------------------------------------------------- forwarding for in-peers

bool Dispatcher::ForwardRoute(int peer) {
  bool moved = false;
  fabric::WireReceiver& stream = links_->FromPeer(Links::kRoute, peer);
  const fabric::WireReceiver::Message message = stream.Front();
  if (message.header == nullptr) return false;
  const int source = topology_->in_peers()[peer];
  RouteRecord record;
  const size_t num_experts = map_->experts_of_node(topology_->node()).size();
  if (message.payload.size() != sizeof(record) + num_experts * sizeof(uint32_t)) {
    Malformed(source, "a ROUTE of another length");
    return false;
  }
  std::memcpy(&record, message.payload.data(), sizeof(record));
  Op* op = Live(record.sequence);
  if (op == nullptr || (op->is_posted && op->is_cached)) {
    Malformed(source, "a ROUTE for an operation that exchanges none");
    return false;
  }
  std::vector<uint32_t> counts(num_experts);
  CopyBytes(counts.data(), message.payload.data() + sizeof(record), num_experts * sizeof(uint32_t));
  const bool is_sane = std::all_of(counts.begin(), counts.end(), [&](uint32_t n) { return n <= record.num_rows; });
  if (!is_sane || record.num_rows > kTokensMax || (op->is_posted && record.row_bytes != op->row_bytes)) {
    Malformed(source, "a ROUTE that cannot be; all ranks must dispatch rows of the same size");
    return false;
  }
  op->expected[peer] = record.num_rows;
  std::vector<bool>& pushed = route_pushed_[peer];
  for (size_t local = 0; local < pushed.size(); ++local) {
    if (pushed[local]) continue;
    pushed[local] = PushCounts(*op, static_cast<int>(local), source, counts);
    moved |= pushed[local];
  }
  if (std::find(pushed.begin(), pushed.end(), false) == pushed.end()) {
    pushed.assign(pushed.size(), false);
    stream.Pop();
    moved = true;
  }
  return moved;
}

bool Dispatcher::ForwardRows(int peer) {
  bool moved = false;
  fabric::WireReceiver& stream = links_->FromPeer(Links::kRows, peer);
  Forward& forward = forward_[peer];
  while (true) {
    const fabric::WireReceiver::Message message = stream.Front();
    if (message.header == nullptr) return moved;
    Op* op = OpOfRow(message.header->sequence);
    if (op == nullptr || !op->is_posted || !op->has_counts) return moved;
    if (!forward.is_parsed && !ParsePart(peer, *op, message.payload)) return moved;
    bool is_empty = true;
    for (size_t local = 0; local < forward.todo.size(); ++local) {
      const auto& todo = forward.todo[local];
      size_t& next = forward.next[local];
      const size_t before = next;
      while (next < todo.size()) {
        const std::byte* record = message.payload.data() + todo[next].first;
        if (static_cast<int>(local) == self_local()) {
          RowView row;
          MOERL_CHECK(row.Parse(record, todo[next].second, op->row_bytes, map_->num_experts()));
          Deliver(*op, row);
          ++next;
          continue;
        }
        if (!CanTake(*op, static_cast<int>(local))) break;
        if (IsMutated(Mutation::kOnePool)) {
          bool has_free = true;
          for (int node = 0; node < topology_->num_nodes(); ++node) {
            if (node != topology_->node()) has_free &= !links_->ToNode(Links::kRows, node).Reserve().empty();
          }
          if (!has_free) break;
        }
        fabric::SpscRing& ring = links_->RingTo(Links::kRowRing, static_cast<int>(local));
        std::byte* to = ring.Reserve();
        if (to == nullptr) break;
        std::memcpy(to, record, todo[next].second);
        links_->Publish(ring, todo[next++].second);
      }
      if (next != before) {
        moved = true;
        if (static_cast<int>(local) != self_local()) links_->Published(static_cast<int>(local));
      }
      is_empty &= next == todo.size();
    }
    if (!is_empty) return moved;
    forward.is_parsed = false;
    op->forwarded[peer] += forward.num_rows;
    stream.Pop();
    moved = true;
  }
}

// Notes for whom each record of the part is, and (first time along these routes) that this rank forwards it.
bool Dispatcher::ParsePart(int peer, Op& op, absl::Span<const std::byte> payload) {
  Forward& forward = forward_[peer];
  const int source = topology_->in_peers()[peer];
  forward.todo.assign(topology_->local_ranks().size(), {});
  forward.next.assign(topology_->local_ranks().size(), 0);
  forward.num_rows = 0;
  RowList& list = op.route->proxied[peer];
  size_t at = 0;
  while (at < payload.size()) {
    RowView row;
    if (!row.Parse(payload.data() + at, payload.size() - at, op.row_bytes, map_->num_experts()) ||
        row.header.source != source) {
      Malformed(source, "a ROWS part with a broken record; do all ranks dispatch rows of the same size?");
      return false;
    }
    const bool is_repeat = IsMutated(Mutation::kRankDedup) && list.size() > 0 && list.row.back() == row.header.row;
    if (!op.is_cached && !is_repeat) {
      if (list.size() > 0 && list.row.back() >= row.header.row) {
        Malformed(source, "rows out of order");
        return false;
      }
      list.row.push_back(row.header.row);
      list.ids.insert(list.ids.end(), row.ids, row.ids + row.header.num_ids);
      list.first_id.push_back(static_cast<uint32_t>(list.ids.size()));
    }
    ++forward.num_rows;
    for (const uint16_t id : row.id_span()) {
      if (map_->node(id) != topology_->node() || is_repeat) continue;
      auto& todo = forward.todo[topology_->local_index(map_->owner(id))];
      if (todo.empty() || todo.back().first != at) {
        todo.push_back({static_cast<uint32_t>(at), static_cast<uint32_t>(row.bytes)});
      }
    }
    at += row.bytes;
  }
  if (op.forwarded[peer] + forward.num_rows > op.expected[peer]) {
    Malformed(source, "more rows than its ROUTE said");
    return false;
  }
  forward.is_parsed = true;
  return true;
}

// ---------------------------------------------------------------- receiving

constexpr int64_t kOwnBytesAtOnce = 256 << 10;

bool Dispatcher::DrainControl(int local) {
  bool moved = false;
  fabric::SpscRing& ring = links_->RingFrom(Links::kControlRing, local);
  for (absl::Span<const std::byte> message = ring.Front(); message.data() != nullptr; message = ring.Front()) {
    RouteRecord record = {};
    std::memcpy(&record, message.data(), std::min(message.size(), sizeof(record)));
    const size_t bytes = sizeof(record) + record.num_counts * sizeof(uint32_t);
    if (message.size() != bytes || !MaySpeakFor(local, record.source)) {
      Malformed(topology_->local_ranks()[local], "a broken control record");
      return moved;
    }
    if (Op* op = Live(record.sequence)) {
      if (record.is_ready != 0) {
        op->reader_ready[local] = true;
      } else {
        std::vector<uint32_t> counts(record.num_counts);
        CopyBytes(counts.data(), message.data() + sizeof(record), counts.size() * sizeof(uint32_t));
        TakeCounts(*op, record.source, counts);
      }
    }
    ring.Pop();
    links_->Published(local);  // there is room again
    moved = true;
  }
  return moved;
}

bool Dispatcher::DrainRows(int local) {
  bool moved = false;
  fabric::SpscRing& ring = links_->RingFrom(Links::kRowRing, local);
  for (absl::Span<const std::byte> message = ring.Front(); message.data() != nullptr; message = ring.Front()) {
    RowRecord header = {};
    std::memcpy(&header, message.data(), std::min(message.size(), sizeof(header)));
    Op* op = OpOfRow(header.sequence);
    if (op == nullptr || !op->has_counts) {
      Malformed(topology_->local_ranks()[local], "a row of an operation that has no memory here yet");
      return moved;
    }
    RowView row;
    if (!row.Parse(message.data(), message.size(), op->row_bytes, map_->num_experts()) || row.bytes != message.size() ||
        !MaySpeakFor(local, row.header.source)) {
      Malformed(topology_->local_ranks()[local], "a broken row; all ranks must dispatch rows of the same size");
      return moved;
    }
    Deliver(*op, row);
    ring.Pop();
    links_->Published(local);  // there is room again
    moved = true;
  }
  return moved;
}

// Whether rows of `source` reach this rank by that rank of its node: its own, and those it forwards.
bool Dispatcher::MaySpeakFor(int local, int source) const {
  if (source >= topology_->size()) return false;
  const int by = topology_->node_of(source) == topology_->node() ? source : topology_->proxy(source, topology_->node());
  return by == topology_->local_ranks()[local];
}

void Dispatcher::TakeCounts(Op& op, int source, absl::Span<const uint32_t> counts) {
  const size_t experts = num_local_experts();
  const bool is_sane = std::all_of(counts.begin(), counts.end(), [](uint32_t n) { return n <= kTokensMax; });
  if (counts.size() != experts || op.counted[source] || !is_sane) {
    Malformed(source, op.counted[source] ? "counts twice" : "counts that cannot be");
    return;
  }
  std::copy(counts.begin(), counts.end(), op.route->counts.begin() + source * experts);
  op.counted[source] = true;
  if (++op.num_counted == topology_->size() && op.is_posted) AllCounted(op);
}

// Every rank has said what it sends here (or a cached route knows): lays out the output.
void Dispatcher::AllCounted(Op& op) {
  Route& route = *op.route;
  const size_t experts = num_local_experts();
  const size_t sources = topology_->size();
  if (!op.is_cached) {
    op.next_in_block.resize(sources * experts);
    op.left_in_block = route.counts;
    route.offsets.assign(experts + 1, 0);
    int64_t rows = 0;
    for (size_t expert = 0; expert < experts; ++expert) {
      route.offsets[expert] = rows;
      for (size_t source = 0; source < sources; ++source) {
        op.next_in_block[source * experts + expert] = static_cast<uint32_t>(rows);
        rows += route.counts[source * experts + expert];
      }
    }
    route.offsets[experts] = rows;
    route.row_weights.resize(rows);
  }
  op.output = allocate_(op.sequence, route.num_rows() * op.row_bytes);
  op.has_counts = true;
}

// Some of this rank's rows for itself. Not all at once: meanwhile nothing moves on the links.
bool Dispatcher::DeliverOwn(Op& op) {
  const std::vector<uint32_t>& rows = op.local_rows[self_local()];
  size_t& next = op.local_next[self_local()];
  if (!op.has_counts || next == rows.size()) return false;
  const Route& route = *op.route;
  const int64_t before = op.num_received;
  RowView row;
  while (next < rows.size() && (op.num_received - before) * static_cast<int64_t>(op.row_bytes) < kOwnBytesAtOnce) {
    const uint32_t own = rows[next++];
    const absl::Span<const uint16_t> ids = route.own.ids_of(own);
    row.header = {op.sequence, own, static_cast<uint16_t>(topology_->self()), static_cast<uint16_t>(ids.size())};
    std::copy(ids.begin(), ids.end(), row.ids);
    std::copy_n(route.own_weights.begin() + route.own.first_id[own], ids.size(), row.weights);
    row.payload = op.payload + own * op.row_bytes;
    Deliver(op, row);
  }
  return true;
}

// Copies a row to its place behind each of its experts here. Rows of one source come in ascending order, so the next
// free place of its block is the right one.
void Dispatcher::Deliver(Op& op, const RowView& row) {
  Route& route = *op.route;
  const int source = row.header.source;
  const size_t experts = num_local_experts();
  Route::Received& received = route.received[source];
  size_t cached = 0;
  if (!op.is_cached && received.size() > 0 && received.row.back() >= row.header.row) {
    Malformed(source, "rows out of order");
    return;
  }
  if (op.is_cached) {
    cached = op.next_received[source]++;
    if (cached >= received.size() || received.row[cached] != row.header.row) {
      Malformed(source, "a row that its cached route does not have");
      return;
    }
  }
  const int64_t before = op.num_received;
  for (size_t i = 0; i < row.header.num_ids; ++i) {
    const uint16_t id = row.ids[i];
    uint32_t output = Route::kElsewhere;
    if (map_->owner(id) == topology_->self()) {
      const size_t expert = map_->local_index(id), block = source * experts + expert;
      if (op.is_cached) {
        output =
            i < received.ids_of(cached).size() ? received.output[received.first_id[cached] + i] : Route::kElsewhere;
      } else if (op.left_in_block[block] > 0) {
        output = op.next_in_block[block]++;
        --op.left_in_block[block];
      }
      if (output >= route.offsets[experts]) {
        Malformed(source, "more rows than it counted");
        return;
      }
      std::memcpy(op.output + output * op.row_bytes, row.payload, op.row_bytes);
      if (!op.is_cached) route.row_weights[output] = row.weights[i];
      ++op.num_received;
      ++op.received_of[source];
    }
    if (!op.is_cached) {
      received.ids.push_back(id);
      received.output.push_back(output);
    }
  }
  if (op.num_received == before) {
    Malformed(source, "a row for none of the experts here");
    return;
  }
  if (op.is_cached) return;
  received.row.push_back(row.header.row);
  received.first_id.push_back(static_cast<uint32_t>(received.ids.size()));
}

}  // namespace moerl::ep
