// Combiner's receiving sides: a proxy adds up its node's partials, a source those of all nodes.
#include <algorithm>
#include <cstring>

#include "libs/base/check.h"
#include "libs/ep/combiner.h"
#include "libs/fabric/mutation.h"

namespace moerl::ep {

using fabric::IsMutated;
using fabric::Mutation;

namespace {

bool BeginsBefore(const TreeItem& a, const TreeItem& b) { return a.begin < b.begin; }

}  // namespace

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
      merged_.subtrees.clear();
      SubtreesOfNode(ids, &merged_.subtrees);
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
    gather.left.assign(topology_->local_ranks().size(), 0);
    gather.taken_to.assign(topology_->local_ranks().size(), 0);
    for (const uint16_t id : ids) {
      if (map_->node(id) == topology_->node()) ++gather.left[topology_->local_index(map_->owner(id))];
    }
  }
  bool is_complete = true;
  for (size_t local = 0; local < gather.left.size(); ++local) {
    if (gather.left[local] == 0 || static_cast<int>(local) == self_local()) continue;
    fabric::SpscRing& ring = links_->RingFrom(Links::kPartialRing, static_cast<int>(local));
    while (gather.left[local] > 0) {
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
    is_complete &= gather.left[local] == 0;
  }
  if (!is_complete) return false;

  items_.clear();
  ItemsOf(gather, &items_);
  if (gather.left[self_local()] > 0) {
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
  const int begin = record.begin, end = record.end == 0 ? kIntervalEndMax : record.end;
  const int num_ids = IdsOfInterval(begin, end, ids, contributor, is_from_node, *gather);
  if (record.sequence != op.sequence || record.row != row || record.source != source || *bytes > data.size() ||
      record.num_scalars > ids.size() || num_ids == 0 || (record.is_bf16 != 0) != (end - begin >= op.work.wire_block)) {
    Malformed(sender, "a partial of another row or size; all ranks must combine the same handle with the same options");
    return false;
  }
  const std::byte* scalars = data.data() + sizeof(record);
  size_t next = 0;
  for (size_t i = 0; i < ids.size() && next < record.num_scalars; ++i) {
    const bool is_theirs = IsOwnedBy(ids[i], contributor, is_from_node);
    if (is_theirs) std::memcpy(&gather->scalars[i], scalars + sizeof(float) * next++, sizeof(float));
  }
  const size_t at = gather->values.size();
  gather->values.resize(at + hidden);
  const std::byte* vector = data.data() + PartialMetaBytes(record.num_scalars);
  if (record.is_bf16 != 0) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(vector);
    FromBf16(halves, static_cast<int>(hidden), gather->values.data() + at);
  } else {
    std::memcpy(gather->values.data() + at, vector, hidden * sizeof(float));
  }
  gather->parts.push_back({begin, end, at});
  gather->taken_to[contributor] = end;
  gather->left[contributor] -= num_ids;
  return true;
}

int Combiner::IdsOfInterval(int begin, int end, absl::Span<const uint16_t> ids, int contributor, bool is_from_node,
                            const Gather& gather) const {
  if (!IsTreeNode(map_->num_experts(), begin, end) || begin < gather.taken_to[contributor]) return 0;
  int num_ids = 0;
  for (const uint16_t id : ids) {
    if (id < begin || id >= end) continue;
    if (!IsOwnedBy(id, contributor, is_from_node)) return 0;
    ++num_ids;
  }
  return num_ids;
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
    Add(op, merged_.subtrees[0], items_, work.out + static_cast<size_t>(token) * work.hidden);
  } else {
    std::vector<Op::OwnPart>& parts = op.own_parts[token];
    for (const Subtree& subtree : merged_.subtrees) {
      parts.push_back({subtree, std::vector<float>(work.hidden)});
      Add(op, subtree, items_, parts.back().sum.data());
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
    gather.left.assign(topology_->num_nodes(), 0);
    gather.taken_to.assign(topology_->num_nodes(), 0);
    for (const uint16_t id : ids) ++gather.left[map_->node(id)];
  }
  bool is_complete = true;
  for (int node = 0; node < topology_->num_nodes(); ++node) {
    if (gather.left[node] == 0) continue;
    if (node == topology_->node()) {
      is_complete &= op.own_merged[token];
      continue;
    }
    fabric::WireReceiver& stream = links_->PartFromNode(node);
    while (gather.left[node] > 0) {
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
    is_complete &= gather.left[node] == 0;
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
    std::vector<Subtree> subtrees;
    SubtreesOfNode(ids, &subtrees);
    add(subtrees[0], out);
  }
  std::sort(items.begin(), items.end(), BeginsBefore);
  sum_.resize(work.hidden);
  Add(op, {0, map_->num_experts(), 0, 0}, items, sum_.data());
  std::copy_n(sum_.begin(), work.hidden, out);
  if (own_parts != op.own_parts.end()) op.own_parts.erase(own_parts);
}

}  // namespace moerl::ep
