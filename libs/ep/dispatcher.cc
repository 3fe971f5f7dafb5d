#include "libs/ep/dispatcher.h"

#include <algorithm>
#include <cstring>

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
    if (!op->is_posted || op->is_done || !IsDone(*op)) continue;
    op->is_done = moved = true;
    if (!op->is_cached) FinishRoute(*op->route);
  }
  return moved;
}

// ---------------------------------------------------------------- sending this rank's tokens

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
    std::memcpy(to.data() + sizeof(record), counts.data(), counts.size() * sizeof(uint32_t));
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
      ring.Publish(sizeof(record));
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
  ring.Publish(sizeof(record) + experts.size() * sizeof(uint32_t));
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
  std::memcpy(weights, op.route->own_weights.data() + own.first_id[row], ids.size() * sizeof(float));
  std::memcpy(weights + ids.size() * sizeof(float), ids.data(), ids.size() * sizeof(uint16_t));
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
    if (next == rows.size() || static_cast<int>(local) == self_local()) continue;  // own rows: see AllCounted
    if (!CanTake(op, static_cast<int>(local))) continue;
    fabric::SpscRing& ring = links_->RingTo(Links::kRowRing, static_cast<int>(local));
    const size_t before = next;
    while (next < rows.size()) {
      std::byte* to = ring.Reserve();
      if (to == nullptr) break;
      ring.Publish(WriteRow(op, rows[next++], to));
    }
    if (next == before) continue;
    links_->Published(static_cast<int>(local));
    moved = true;
  }
  return moved;
}

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
  op->expected[peer] = record.num_rows;
  std::vector<uint32_t> counts(num_experts);
  std::memcpy(counts.data(), message.payload.data() + sizeof(record), num_experts * sizeof(uint32_t));
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
          MOERL_CHECK(row.Parse(record, todo[next].second, op->row_bytes));
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
        ring.Publish(todo[next++].second);
      }
      if (next != before) {
        moved = true;
        if (static_cast<int>(local) != self_local()) links_->Published(static_cast<int>(local));
      }
      is_empty &= next == todo.size();
    }
    if (!is_empty) return moved;
    forward.is_parsed = false;
    op->forwarded[peer] += message.header->count;
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
  RowList& list = op.route->proxied[peer];
  size_t at = 0;
  while (at < payload.size()) {
    RowView row;
    if (!row.Parse(payload.data() + at, payload.size() - at, op.row_bytes) || row.header.source != source) {
      Malformed(source, "a ROWS part with a broken record; do all ranks dispatch rows of the same size?");
      return false;
    }
    const bool is_repeat = IsMutated(Mutation::kRankDedup) && list.size() > 0 && list.row.back() == row.header.row;
    if (!op.is_cached && !is_repeat) {
      list.row.push_back(row.header.row);
      list.ids.insert(list.ids.end(), row.ids, row.ids + row.header.num_ids);
      list.first_id.push_back(static_cast<uint32_t>(list.ids.size()));
    }
    for (const uint16_t id : row.id_span()) {
      if (id >= map_->num_experts()) {
        Malformed(source, "a row with an unknown expert");
        return false;
      }
      if (map_->node(id) != topology_->node() || is_repeat) continue;
      auto& todo = forward.todo[topology_->local_index(map_->owner(id))];
      if (todo.empty() || todo.back().first != at) {
        todo.push_back({static_cast<uint32_t>(at), static_cast<uint32_t>(row.bytes)});
      }
    }
    at += row.bytes;
  }
  forward.is_parsed = true;
  return true;
}

// ---------------------------------------------------------------- receiving

bool Dispatcher::DrainControl(int local) {
  bool moved = false;
  fabric::SpscRing& ring = links_->RingFrom(Links::kControlRing, local);
  for (absl::Span<const std::byte> message = ring.Front(); message.data() != nullptr; message = ring.Front()) {
    RouteRecord record;
    MOERL_CHECK(message.size() >= sizeof(record));
    std::memcpy(&record, message.data(), sizeof(record));
    if (Op* op = Live(record.sequence)) {
      if (record.is_ready != 0) {
        op->reader_ready[local] = true;
      } else {
        std::vector<uint32_t> counts(record.num_counts);
        MOERL_CHECK(message.size() == sizeof(record) + counts.size() * sizeof(uint32_t));
        std::memcpy(counts.data(), message.data() + sizeof(record), counts.size() * sizeof(uint32_t));
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
    RowRecord header;
    MOERL_CHECK(message.size() >= sizeof(header));
    std::memcpy(&header, message.data(), sizeof(header));
    Op* op = OpOfRow(header.sequence);
    if (op == nullptr || !op->has_counts) {
      Malformed(topology_->local_ranks()[local], "a row of an operation that has no memory here yet");
      return moved;
    }
    RowView row;
    if (!row.Parse(message.data(), message.size(), op->row_bytes) || row.bytes != message.size()) {
      Malformed(row.header.source, "a row of another size; all ranks must dispatch rows of the same size");
      return moved;
    }
    Deliver(*op, row);
    ring.Pop();
    links_->Published(local);  // there is room again
    moved = true;
  }
  return moved;
}

void Dispatcher::TakeCounts(Op& op, int source, absl::Span<const uint32_t> counts) {
  const size_t experts = num_local_experts();
  if (counts.size() != experts || op.counted[source]) {
    Malformed(source, op.counted[source] ? "counts twice" : "counts of another number of experts");
    return;
  }
  std::copy(counts.begin(), counts.end(), op.route->counts.begin() + source * experts);
  op.counted[source] = true;
  if (++op.num_counted == topology_->size() && op.is_posted) AllCounted(op);
}

// Every rank has said what it sends here (or a cached route knows): lays out the output and takes this rank's own rows.
void Dispatcher::AllCounted(Op& op) {
  Route& route = *op.route;
  const size_t experts = num_local_experts();
  const size_t sources = topology_->size();
  if (!op.is_cached) {
    op.next_in_block.resize(sources * experts);
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

  RowView row;
  for (const uint32_t own : op.local_rows[self_local()]) {
    const absl::Span<const uint16_t> ids = route.own.ids_of(own);
    row.header = {op.sequence, own, static_cast<uint16_t>(topology_->self()), static_cast<uint16_t>(ids.size())};
    std::copy(ids.begin(), ids.end(), row.ids);
    std::copy_n(route.own_weights.begin() + route.own.first_id[own], ids.size(), row.weights);
    row.payload = op.payload + own * op.row_bytes;
    Deliver(op, row);
  }
  op.local_next[self_local()] = op.local_rows[self_local()].size();
}

// Copies a row to its place behind each of its experts here. Rows of one source come in ascending order, so the next
// free place of its block is the right one.
void Dispatcher::Deliver(Op& op, const RowView& row) {
  Route& route = *op.route;
  const int source = row.header.source;
  const size_t experts = num_local_experts();
  Route::Received& received = route.received[source];
  size_t cached = 0;
  if (op.is_cached) {
    cached = op.next_received[source]++;
    if (cached >= received.size() || received.row[cached] != row.header.row) {
      Malformed(source, "a row that its cached route does not have");
      return;
    }
  }
  for (size_t i = 0; i < row.header.num_ids; ++i) {
    const uint16_t id = row.ids[i];
    uint32_t output = Route::kElsewhere;
    if (id < map_->num_experts() && map_->owner(id) == topology_->self()) {
      const size_t expert = map_->local_index(id), block = source * experts + expert;
      if (op.is_cached) {
        output = received.output[received.first_id[cached] + i];
      } else {
        output = op.next_in_block[block]++;
      }
      if (output >= route.offsets[expert + 1]) {
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
  if (op.is_cached) return;
  received.row.push_back(row.header.row);
  received.first_id.push_back(static_cast<uint32_t>(received.ids.size()));
}

// ---------------------------------------------------------------- the end

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
