#include "libs/ep/combiner.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/fabric/mutation.h"

namespace moerl::ep {

using fabric::IsMutated;
using fabric::Mutation;

namespace {

constexpr int kIntervalEndMax = 1 << 16;  // stands as 0 in a record

bool BeginsBefore(const TreeItem& a, const TreeItem& b) { return a.begin < b.begin; }

// The items (ascending) that lie inside a subtree.
absl::Span<const TreeItem> ItemsIn(absl::Span<const TreeItem> items, const Subtree& subtree) {
  const auto before = [](const TreeItem& item, int at) { return item.begin < at; };
  const auto first = std::lower_bound(items.begin(), items.end(), subtree.begin, before);
  const auto last = std::lower_bound(first, items.end(), subtree.end, before);
  return items.subspan(first - items.begin(), last - first);
}

}  // namespace

Combiner::Combiner(fabric::Hub* hub, const Topology* topology, const ExpertMap* map, Links* links)
    : hub_(hub), topology_(topology), map_(map), links_(links) {
  emission_.resize(topology_->local_ranks().size());
  open_.resize(topology_->in_peers().size());
  part_at_.resize(topology_->num_nodes());
  peer_index_.assign(topology_->size(), -1);
  for (size_t i = 0; i < topology_->in_peers().size(); ++i) peer_index_[topology_->in_peers()[i]] = static_cast<int>(i);
}

Combiner::Op* Combiner::Find(uint64_t sequence) {
  const auto found = ops_.find(sequence);
  return found == ops_.end() ? nullptr : found->second.get();
}

void Combiner::Post(uint64_t sequence, CombineWork work) {
  auto op = std::make_unique<Op>();
  op->sequence = sequence;
  op->emitted.resize(topology_->local_ranks().size());
  op->own_merged.resize(work.route->num_tokens);
  if (work.has_scalars && work.route->num_tokens > 0) {
    std::fill_n(work.scalars_out, static_cast<size_t>(work.route->num_tokens) * work.route->top_k, 0.0f);
  }
  op->work = std::move(work);
  ops_[sequence] = std::move(op);
}

// Emission, merging and finishing each go through the operations in order.
bool Combiner::Move() {
  bool moved = false;
  for (size_t local = 0; local < emission_.size(); ++local) {
    if (static_cast<int>(local) == self_local()) continue;
    for (auto& [sequence, op] : ops_) {
      moved |= Emit(*op, static_cast<int>(local));
      if (op->emitted[local] < op->work.route->emit[local].size()) break;
    }
  }
  for (auto& [sequence, op] : ops_) {
    if (op->merged == op->work.route->merge.size()) continue;
    moved |= Merge(*op);
    if (op->merged < op->work.route->merge.size()) break;
  }
  for (auto& [sequence, op] : ops_) {
    moved |= Finish(*op);
    if (op->finished < op->own_merged.size()) break;
  }
  for (auto& [sequence, op] : ops_) {
    if (op->is_done || !IsDone(*op)) continue;
    op->is_done = moved = true;
  }
  return moved;
}

void Combiner::Add(const Op& op, const Subtree& subtree, absl::Span<const TreeItem> items, float* out) const {
  if (IsMutated(Mutation::kSumAsArrived) && items.size() > 2) {
    std::fill_n(out, op.work.hidden, 0.0f);
    for (size_t i = items.size(); i-- > 0;) {
      std::vector<float> one(op.work.hidden);
      ReduceTree(subtree.begin, subtree.end, items.subspan(i, 1), op.work.wire_block, op.work.hidden, one.data());
      for (int column = 0; column < op.work.hidden; ++column) out[column] += one[column];
    }
    return;
  }
  ReduceTree(subtree.begin, subtree.end, items, op.work.wire_block, op.work.hidden, out);
}

// ---------------------------------------------------------------- emit: this rank's experts of a row, to its proxy

// The outputs of this rank's experts for the row that move.index of received[move.source] is.
void Combiner::AddOwnLeaves(const Op& op, const Route::Move& move, std::vector<TreeItem>* items) const {
  const CombineWork& work = op.work;
  const Route::Received& received = work.route->received[move.source];
  for (uint32_t at = received.first_id[move.index]; at < received.first_id[move.index + 1]; ++at) {
    const uint32_t row = received.output[at];
    if (row == Route::kElsewhere) continue;
    TreeItem item;
    item.begin = received.ids[at];
    item.end = item.begin + 1;
    const size_t offset = static_cast<size_t>(row) * work.hidden;
    if (work.rows_fp32 != nullptr) {
      item.fp32 = work.rows_fp32 + offset;
    } else {
      item.bf16 = work.rows_bf16 + offset;
    }
    if (work.is_weighted) item.weight = work.route->row_weights[row];
    items->push_back(item);
  }
}

bool Combiner::Emit(Op& op, int local) {
  const Route& route = *op.work.route;
  Outgoing& row = emission_[local];
  bool moved = false;
  while (op.emitted[local] < route.emit[local].size()) {
    const Route::Move& move = route.emit[local][op.emitted[local]];
    const Route::Received& received = route.received[move.source];
    const absl::Span<const uint16_t> ids = received.ids_of(move.index);
    if (!row.is_ready) {
      bool is_owned[kTopKMax];
      for (size_t i = 0; i < ids.size(); ++i) is_owned[i] = map_->owner(ids[i]) == topology_->self();
      row.subtrees.clear();
      MaximalSubtrees(map_->num_experts(), ids, absl::MakeConstSpan(is_owned, ids.size()), &row.subtrees);
      row.next = 0;
      row.is_ready = true;
    }
    fabric::SpscRing& ring = links_->RingTo(Links::kPartialRing, local);
    std::byte* to = ring.Reserve();
    if (to == nullptr) break;
    std::vector<TreeItem> items;
    AddOwnLeaves(op, move, &items);
    float scalars[kTopKMax];
    size_t num_scalars = 0;
    if (op.work.has_scalars && row.next == 0) {
      for (uint32_t at = received.first_id[move.index]; at < received.first_id[move.index + 1]; ++at) {
        if (received.output[at] != Route::kElsewhere) scalars[num_scalars++] = op.work.scalars[received.output[at]];
      }
    }
    ring.Publish(WriteRecord(op, move, row, items, {scalars, num_scalars}, to));
    links_->Published(local);
    moved = true;
    if (++row.next == row.subtrees.size()) {
      row.is_ready = false;
      ++op.emitted[local];
    }
  }
  return moved;
}

size_t Combiner::WriteRecord(const Op& op, const Route::Move& move, const Outgoing& row,
                             absl::Span<const TreeItem> items, absl::Span<const float> scalars, std::byte* to) {
  const Subtree& subtree = row.subtrees[row.next];
  const size_t hidden = op.work.hidden;
  PartialRecord record = {};
  record.sequence = op.sequence;
  record.row = move.row;
  record.source = static_cast<uint16_t>(move.source);
  record.begin = static_cast<uint16_t>(subtree.begin);
  record.end = static_cast<uint16_t>(subtree.end % kIntervalEndMax);
  record.index = static_cast<uint8_t>(row.next);
  record.count = static_cast<uint8_t>(row.subtrees.size());
  record.num_scalars = static_cast<uint8_t>(scalars.size());
  record.is_bf16 = RoundsAt(op, subtree) ? 1 : 0;
  std::memcpy(to, &record, sizeof(record));
  std::memcpy(to + sizeof(record), scalars.data(), scalars.size() * sizeof(float));
  std::byte* vector = to + PartialMetaBytes(scalars.size());
  if (record.is_bf16 == 0) {
    Add(op, subtree, ItemsIn(items, subtree), reinterpret_cast<float*>(vector));
  } else {
    sum_.resize(hidden);
    Add(op, subtree, ItemsIn(items, subtree), sum_.data());
    uint16_t* halves = reinterpret_cast<uint16_t*>(vector);
    for (size_t i = 0; i < hidden; ++i) halves[i] = Bf16FromFloat(sum_[i]);
  }
  return PartialRecordBytes(scalars.size(), record.is_bf16 != 0, hidden);
}

// ---------------------------------------------------------------- merge: this node's partials of a row, to its source

absl::Span<const uint16_t> Combiner::IdsOf(const Op& op, const Route::Move& move) const {
  const Route& route = *op.work.route;
  const RowList& list = move.source == topology_->self() ? route.own : route.proxied[peer_index_[move.source]];
  return list.ids_of(move.index);
}

bool Combiner::Merge(Op& op) {
  const Route& route = *op.work.route;
  bool moved = false, is_blocked = false;
  while (op.merged < route.merge.size()) {
    const Route::Move& move = route.merge[op.merged];
    const absl::Span<const uint16_t> ids = IdsOf(op, move);
    if (!merged_.is_ready) {
      if (!CollectFromLocals(op, move, ids)) {
        is_blocked = true;
        break;
      }
      bool is_owned[kTopKMax];
      for (size_t i = 0; i < ids.size(); ++i) is_owned[i] = map_->node(ids[i]) == topology_->node();
      merged_.subtrees.clear();
      MaximalSubtrees(map_->num_experts(), ids, absl::MakeConstSpan(is_owned, ids.size()), &merged_.subtrees);
      merged_.next = 0;
      merged_.is_ready = true;
    }
    if (move.source == topology_->self()) {
      KeepOwn(op, move.row, ids);
    } else if (!SendMerged(op, move, ids)) {
      is_blocked = true;
      break;
    }
    merged_.is_ready = false;
    merging_.is_started = false;
    ++op.merged;
    moved = true;
  }
  // Others may wait for what lies in a partly filled part before they can let this rank go on.
  if (!is_blocked || (!moved && !IsMutated(Mutation::kNoFlush))) moved |= FlushParts(op);
  return moved;
}

// Takes what has come from the ranks of this node for the row; true when all of it is in merging_ and items_.
bool Combiner::CollectFromLocals(Op& op, const Route::Move& move, absl::Span<const uint16_t> ids) {
  Gather& gather = merging_;
  if (!gather.is_started) {
    gather.is_started = true;
    gather.parts.clear();
    gather.values.clear();
    gather.is_awaited.assign(topology_->local_ranks().size(), false);
    for (const uint16_t id : ids) {
      if (map_->node(id) == topology_->node()) gather.is_awaited[topology_->local_index(map_->owner(id))] = true;
    }
  }
  bool is_complete = true;
  for (size_t local = 0; local < gather.is_awaited.size(); ++local) {
    if (!gather.is_awaited[local] || static_cast<int>(local) == self_local()) continue;
    fabric::SpscRing& ring = links_->RingFrom(Links::kPartialRing, static_cast<int>(local));
    while (gather.is_awaited[local]) {
      const absl::Span<const std::byte> message = ring.Front();
      if (message.data() == nullptr) break;
      size_t bytes;
      if (!Take(message, op, move.row, move.source, ids, static_cast<int>(local), topology_->local_ranks()[local],
                /*is_from_node=*/false, &gather, &bytes)) {
        return false;
      }
      ring.Pop();
      links_->Published(static_cast<int>(local));  // there is room again
    }
    is_complete &= !gather.is_awaited[local];
  }
  if (!is_complete) return false;

  items_.clear();
  ItemsOf(gather, &items_);
  if (gather.is_awaited[self_local()]) {
    const size_t at = op.emitted[self_local()];
    const std::vector<Route::Move>& own = op.work.route->emit[self_local()];
    MOERL_CHECK(at < own.size() && own[at].row == move.row && own[at].source == move.source);
    AddOwnLeaves(op, own[at], &items_);
    if (op.work.has_scalars) {
      const Route::Received& received = op.work.route->received[move.source];
      const uint32_t first = received.first_id[own[at].index];
      for (size_t i = 0; i < ids.size(); ++i) {
        const uint32_t row = received.output[first + i];
        if (row != Route::kElsewhere) gather.scalars[i] = op.work.scalars[row];
      }
    }
    ++op.emitted[self_local()];
  }
  std::sort(items_.begin(), items_.end(), BeginsBefore);
  return true;
}

void Combiner::ItemsOf(const Gather& gather, std::vector<TreeItem>* items) const {
  for (const Gather::Part& part : gather.parts) {
    TreeItem item;
    item.begin = part.begin;
    item.end = part.end;
    item.fp32 = gather.values.data() + part.at;
    items->push_back(item);
  }
}

bool Combiner::Take(absl::Span<const std::byte> data, const Op& op, uint32_t row, int source,
                    absl::Span<const uint16_t> ids, int contributor, int sender, bool is_from_node, Gather* gather,
                    size_t* bytes) {
  PartialRecord record;
  const size_t hidden = op.work.hidden;
  if (data.size() < sizeof(record)) {
    Malformed(sender, "a broken partial");
    return false;
  }
  std::memcpy(&record, data.data(), sizeof(record));
  *bytes = PartialRecordBytes(record.num_scalars, record.is_bf16 != 0, hidden);
  if (record.sequence != op.sequence || record.row != row || record.source != source || *bytes > data.size() ||
      record.num_scalars > ids.size()) {
    Malformed(sender, "a partial of another row or size; all ranks must combine the same handle with the same options");
    return false;
  }
  const std::byte* scalars = data.data() + sizeof(record);
  size_t next = 0;
  for (size_t i = 0; i < ids.size() && next < record.num_scalars; ++i) {
    const bool is_theirs =
        is_from_node ? map_->node(ids[i]) == contributor : map_->owner(ids[i]) == topology_->local_ranks()[contributor];
    if (is_theirs) std::memcpy(&gather->scalars[i], scalars + sizeof(float) * next++, sizeof(float));
  }
  const size_t at = gather->values.size();
  gather->values.resize(at + hidden);
  const std::byte* vector = data.data() + PartialMetaBytes(record.num_scalars);
  if (record.is_bf16 != 0) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(vector);
    for (size_t i = 0; i < hidden; ++i) gather->values[at + i] = FloatFromBf16(halves[i]);
  } else {
    std::memcpy(gather->values.data() + at, vector, hidden * sizeof(float));
  }
  gather->parts.push_back({record.begin, record.end == 0 ? kIntervalEndMax : record.end, at});
  if (record.index + 1 == record.count) gather->is_awaited[contributor] = false;
  return true;
}

bool Combiner::SendMerged(Op& op, const Route::Move& move, absl::Span<const uint16_t> ids) {
  const int peer = peer_index_[move.source];
  OpenPart& part = open_[peer];
  fabric::WireSender& sender = links_->PartToPeer(peer);
  while (merged_.next < merged_.subtrees.size()) {
    float scalars[kTopKMax];
    size_t num_scalars = 0;
    if (op.work.has_scalars && merged_.next == 0) {
      for (size_t i = 0; i < ids.size(); ++i) {
        if (map_->node(ids[i]) == topology_->node()) scalars[num_scalars++] = merging_.scalars[i];
      }
    }
    const size_t bytes = PartialRecordBytes(num_scalars, RoundsAt(op, merged_.subtrees[merged_.next]), op.work.hidden);
    if (!part.payload.empty() && part.used + bytes > part.payload.size()) {
      sender.Publish(op.sequence, 0, part.count, part.used);
      part = {};
    }
    if (part.payload.empty()) part.payload = sender.Reserve();
    if (part.payload.empty()) return false;
    part.used += WriteRecord(op, move, merged_, items_, {scalars, num_scalars}, part.payload.data() + part.used);
    ++part.count;
    ++merged_.next;
    ++partials_crossed_;
  }
  return true;
}

// A row of this rank's own: its node's share waits in `out` for the other nodes'.
void Combiner::KeepOwn(Op& op, uint32_t token, absl::Span<const uint16_t> ids) {
  const CombineWork& work = op.work;
  if (merged_.subtrees.size() == 1) {
    Add(op, merged_.subtrees[0], ItemsIn(items_, merged_.subtrees[0]),
        work.out + static_cast<size_t>(token) * work.hidden);
  } else {
    std::vector<Op::OwnPart>& parts = op.own_parts[token];
    for (const Subtree& subtree : merged_.subtrees) {
      parts.push_back({subtree, std::vector<float>(work.hidden)});
      Add(op, subtree, ItemsIn(items_, subtree), parts.back().sum.data());
    }
  }
  if (work.has_scalars) {
    const uint8_t* choice = work.route->choice.data() + work.route->own.first_id[token];
    for (size_t i = 0; i < ids.size(); ++i) {
      if (map_->node(ids[i]) != topology_->node()) continue;
      work.scalars_out[static_cast<size_t>(token) * work.route->top_k + choice[i]] = merging_.scalars[i];
    }
  }
  op.own_merged[token] = true;
}

bool Combiner::FlushParts(const Op& op) {
  bool moved = false;
  for (size_t peer = 0; peer < open_.size(); ++peer) {
    OpenPart& part = open_[peer];
    if (part.count == 0) continue;
    links_->PartToPeer(static_cast<int>(peer)).Publish(op.sequence, 0, part.count, part.used);
    part = {};
    moved = true;
  }
  return moved;
}

// ---------------------------------------------------------------- finish: all nodes' partials of this rank's own rows

bool Combiner::Finish(Op& op) {
  bool moved = false;
  while (op.finished < op.own_merged.size()) {
    const uint32_t token = op.finished;
    const absl::Span<const uint16_t> ids = op.work.route->own.ids_of(token);
    if (!CollectFromNodes(op, token, ids, &moved)) break;
    FinishToken(op, token, ids);
    finishing_.is_started = false;
    ++op.finished;
    moved = true;
  }
  return moved;
}

bool Combiner::CollectFromNodes(const Op& op, uint32_t token, absl::Span<const uint16_t> ids, bool* moved) {
  Gather& gather = finishing_;
  if (!gather.is_started) {
    gather.is_started = true;
    gather.parts.clear();
    gather.values.clear();
    gather.is_awaited.assign(topology_->num_nodes(), false);
    for (const uint16_t id : ids) gather.is_awaited[map_->node(id)] = true;
  }
  bool is_complete = true;
  for (int node = 0; node < topology_->num_nodes(); ++node) {
    if (!gather.is_awaited[node]) continue;
    if (node == topology_->node()) {
      is_complete &= op.own_merged[token];
      continue;
    }
    fabric::WireReceiver& stream = links_->PartFromNode(node);
    while (gather.is_awaited[node]) {
      const fabric::WireReceiver::Message message = stream.Front();
      if (message.header == nullptr) break;
      size_t bytes;
      if (!Take(message.payload.subspan(part_at_[node]), op, token, topology_->self(), ids, node, stream.peer(),
                /*is_from_node=*/true, &gather, &bytes)) {
        return false;
      }
      part_at_[node] += bytes;
      if (part_at_[node] == message.payload.size()) {
        stream.Pop();
        part_at_[node] = 0;
      }
      *moved = true;
    }
    is_complete &= !gather.is_awaited[node];
  }
  return is_complete;
}

void Combiner::FinishToken(Op& op, uint32_t token, absl::Span<const uint16_t> ids) {
  const CombineWork& work = op.work;
  float* out = work.out + static_cast<size_t>(token) * work.hidden;
  if (ids.empty()) std::fill_n(out, work.hidden, 0.0f);
  if (work.has_scalars) {
    const uint8_t* choice = work.route->choice.data() + work.route->own.first_id[token];
    for (size_t i = 0; i < ids.size(); ++i) {
      if (map_->node(ids[i]) == topology_->node()) continue;
      work.scalars_out[static_cast<size_t>(token) * work.route->top_k + choice[i]] = finishing_.scalars[i];
    }
  }
  if (finishing_.parts.empty()) return;  // all on this node: `out` has it

  std::vector<TreeItem> items;
  ItemsOf(finishing_, &items);
  const auto add = [&](const Subtree& subtree, const float* sum) {
    TreeItem item;
    item.begin = subtree.begin;
    item.end = subtree.end;
    item.fp32 = sum;
    items.push_back(item);
  };
  const auto own_parts = op.own_parts.find(token);
  if (own_parts != op.own_parts.end()) {
    for (const Op::OwnPart& part : own_parts->second) add(part.subtree, part.sum.data());
  } else if (op.own_merged[token]) {
    bool is_owned[kTopKMax];
    for (size_t i = 0; i < ids.size(); ++i) is_owned[i] = map_->node(ids[i]) == topology_->node();
    std::vector<Subtree> subtrees;
    MaximalSubtrees(map_->num_experts(), ids, absl::MakeConstSpan(is_owned, ids.size()), &subtrees);
    add(subtrees[0], out);
  }
  std::sort(items.begin(), items.end(), BeginsBefore);
  sum_.resize(work.hidden);
  Add(op, {0, map_->num_experts(), 0, 0}, items, sum_.data());
  std::copy_n(sum_.begin(), work.hidden, out);
  if (own_parts != op.own_parts.end()) op.own_parts.erase(own_parts);
}

// ---------------------------------------------------------------- the end

bool Combiner::IsDone(const Op& op) const {
  const Route& route = *op.work.route;
  for (size_t local = 0; local < op.emitted.size(); ++local) {
    if (static_cast<int>(local) != self_local() && op.emitted[local] < route.emit[local].size()) return false;
  }
  if (op.merged < route.merge.size() || op.finished < op.own_merged.size()) return false;
  return true;
}

void Combiner::DescribeMissing(const Op& op, fabric::Hub::Missing* missing) const {
  const Route& route = *op.work.route;
  const auto add = [&](int rank, std::string what) {
    if (std::find(missing->ranks.begin(), missing->ranks.end(), rank) != missing->ranks.end()) return;
    missing->ranks.push_back(rank);
    absl::StrAppend(&missing->what, missing->what.empty() ? "" : "; ", what, " ", hub_->name_of(rank));
  };
  if (op.merged < route.merge.size() && merging_.is_started) {
    for (size_t local = 0; local < merging_.is_awaited.size(); ++local) {
      if (!merging_.is_awaited[local] || static_cast<int>(local) == self_local()) continue;
      add(topology_->local_ranks()[local],
          absl::StrCat(route.merge.size(), " rows of this node expected, ", op.merged, " merged, the next waits for"));
    }
  }
  if (op.merged < route.merge.size() && merged_.is_ready && route.merge[op.merged].source != topology_->self()) {
    add(route.merge[op.merged].source,
        absl::StrCat(route.merge.size(), " rows to send back, ", op.merged, " merged, the next waits for room at"));
  }
  if (op.finished < op.own_merged.size() && finishing_.is_started) {
    for (int node = 0; node < topology_->num_nodes(); ++node) {
      if (!finishing_.is_awaited[node] || node == topology_->node()) continue;
      add(topology_->proxy(topology_->self(), node),
          absl::StrCat(op.own_merged.size(), " rows expected, ", op.finished, " added up, the next waits for"));
    }
  }
  for (size_t local = 0; local < op.emitted.size(); ++local) {
    if (static_cast<int>(local) == self_local() || op.emitted[local] == route.emit[local].size()) continue;
    add(topology_->local_ranks()[local],
        absl::StrCat(route.emit[local].size(), " rows to hand over, ", op.emitted[local], " taken by"));
  }
}

void Combiner::Malformed(int rank, const char* what) {
  hub_->Fail(absl::DataLossError(
      absl::StrCat("ep: ", hub_->name_of(topology_->self()), " got ", what, " from ", hub_->name_of(rank))));
}

}  // namespace moerl::ep
