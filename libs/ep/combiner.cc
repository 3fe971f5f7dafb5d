#include "libs/ep/combiner.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/fabric/mutation.h"

namespace moerl::ep {

using fabric::IsMutated;
using fabric::Mutation;

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

// Finishing, emission and merging each go through the operations in order.
bool Combiner::Move() {
  bool moved = false;
  for (auto& [sequence, op] : ops_) {
    moved |= Finish(*op);
    if (op->finished < op->own_merged.size()) break;
  }
  links_->Move();  // credits first: merging may take as long as a window of parts lasts
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
    if (op->is_done || !IsDone(*op)) continue;
    op->is_done = moved = true;
  }
  return moved;
}

// The sum over a subtree of those items (ascending) that lie in it.
void Combiner::Add(const Op& op, const Subtree& subtree, absl::Span<const TreeItem> items, float* out) const {
  const auto before = [](const TreeItem& item, int at) { return item.begin < at; };
  const auto first = std::lower_bound(items.begin(), items.end(), subtree.begin, before);
  const auto last = std::lower_bound(first, items.end(), subtree.end, before);
  items = items.subspan(first - items.begin(), last - first);
  const int hidden = op.work.hidden;
  if (IsMutated(Mutation::kSumAsArrived) && items.size() > 2) {
    std::fill_n(out, hidden, 0.0f);
    for (size_t i = items.size(); i-- > 0;) {
      std::vector<float> one(hidden);
      ReduceTree(subtree.begin, subtree.end, items.subspan(i, 1), op.work.wire_block, hidden, one.data());
      for (int column = 0; column < hidden; ++column) out[column] += one[column];
    }
    return;
  }
  ReduceTree(subtree.begin, subtree.end, items, op.work.wire_block, hidden, out);
}

void Combiner::SubtreesOfNode(absl::Span<const uint16_t> ids, std::vector<Subtree>* subtrees) const {
  MaximalSubtrees(
      map_->num_experts(), ids, [this](int e) { return map_->node(e) == topology_->node(); }, subtrees);
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
      row.subtrees.clear();
      MaximalSubtrees(
          map_->num_experts(), ids, [this](int e) { return map_->owner(e) == topology_->self(); }, &row.subtrees);
      row.next = 0;
      row.is_ready = true;
    }
    fabric::SpscRing& ring = links_->RingTo(Links::kPartialRing, local);
    std::byte* to = ring.Reserve();
    if (to == nullptr) break;
    leaves_.clear();
    AddOwnLeaves(op, move, &leaves_);
    float scalars[kTopKMax];
    size_t num_scalars = 0;
    if (op.work.has_scalars && row.next == 0) {
      for (uint32_t at = received.first_id[move.index]; at < received.first_id[move.index + 1]; ++at) {
        if (received.output[at] != Route::kElsewhere) scalars[num_scalars++] = op.work.scalars[received.output[at]];
      }
    }
    links_->Publish(ring, WriteRecord(op, move, row, leaves_, {scalars, num_scalars}, to));
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
  record.num_scalars = static_cast<uint8_t>(scalars.size());
  record.is_bf16 = RoundsAt(op, subtree) ? 1 : 0;
  std::memcpy(to, &record, sizeof(record));
  CopyBytes(to + sizeof(record), scalars.data(), scalars.size() * sizeof(float));
  std::byte* vector = to + PartialMetaBytes(scalars.size());
  if (record.is_bf16 == 0) {
    Add(op, subtree, items, reinterpret_cast<float*>(vector));
  } else {
    sum_.resize(hidden);
    Add(op, subtree, items, sum_.data());
    uint16_t* halves = reinterpret_cast<uint16_t*>(vector);
    ToBf16(sum_.data(), static_cast<int>(hidden), halves);
  }
  return PartialRecordBytes(scalars.size(), record.is_bf16 != 0, hidden);
}

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
    for (size_t local = 0; local < merging_.left.size(); ++local) {
      if (merging_.left[local] == 0 || static_cast<int>(local) == self_local()) continue;
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
      if (finishing_.left[node] == 0 || node == topology_->node()) continue;
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
