#include "libs/collective/fabric_collective.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/base/status_macros.h"

namespace moerl::collective {
namespace {

size_t BytesOf(Element element) { return element == Element::kFloat ? 4 : 8; }

template <typename T>
void Combine(Reduction reduction, const T* x, int64_t count, T* sum) {
  if (reduction == Reduction::kSum) {
    for (int64_t i = 0; i < count; ++i) sum[i] = sum[i] + x[i];
  } else {
    for (int64_t i = 0; i < count; ++i) sum[i] = std::max(sum[i], x[i]);
  }
}

// sum[i] = sum[i] (+ or max) x[i]
void CombineBytes(Element element, Reduction reduction, const std::byte* x, int64_t bytes, std::byte* sum) {
  switch (element) {
    case Element::kFloat:
      return Combine(reduction, reinterpret_cast<const float*>(x), bytes / 4, reinterpret_cast<float*>(sum));
    case Element::kDouble:
      return Combine(reduction, reinterpret_cast<const double*>(x), bytes / 8, reinterpret_cast<double*>(sum));
    case Element::kInt64:
      return Combine(reduction, reinterpret_cast<const int64_t*>(x), bytes / 8, reinterpret_cast<int64_t*>(sum));
  }
}

}  // namespace

FabricCollective::FabricCollective(fabric::Hub* hub, Options options)
    : hub_(hub), options_(options), streams_(hub, hub->NextBufferId()), peers_(hub->membership().size()) {}

FabricCollective::~FabricCollective() {
  absl::MutexLock lock(&hub_->mutex());
  hub_->RemoveMover(this);
  streams_.Close();
}

absl::StatusOr<std::unique_ptr<FabricCollective>> FabricCollective::Create(fabric::Hub* hub, Options options) {
  if (options.chunk_bytes == 0 || options.chunk_bytes % 8 != 0 || options.slots == 0) {
    return absl::InvalidArgumentError("collective: chunk_bytes must be a positive multiple of 8 and slots at least 1");
  }
  std::unique_ptr<FabricCollective> collective;
  std::string offer;
  {
    absl::MutexLock lock(&hub->mutex());
    collective.reset(new FabricCollective(hub, options));
    MOERL_RETURN_IF_ERROR(collective->Open());
    offer = collective->streams_.Offer();
  }
  MOERL_CHECK(hub->exchange() != nullptr);
  MOERL_ASSIGN_OR_RETURN(std::vector<std::string> offers,
                         hub->exchange()->AllGather("collective", std::move(offer), hub->options().setup_timeout));
  absl::MutexLock lock(&hub->mutex());
  MOERL_RETURN_IF_ERROR(collective->streams_.Connect(offers));
  hub->AddMover(collective.get());
  return collective;
}

absl::Status FabricCollective::Open() {
  const fabric::Membership& all = hub_->membership();
  std::vector<fabric::WireStreams::Spec> specs;
  for (int peer = 0; peer < size(); ++peer) {
    if (all.node_of(peer) == all.node_of(rank())) continue;
    specs.push_back({peer, 1, true, options_.slots, options_.chunk_bytes});
    specs.push_back({peer, 1, false, options_.slots, options_.chunk_bytes});
  }
  MOERL_RETURN_IF_ERROR(streams_.Open(specs));
  for (auto& sender : streams_.senders()) peers_[sender->peer()].wire_out = sender.get();
  for (auto& receiver : streams_.receivers()) peers_[receiver->peer()].wire_in = receiver.get();
  const size_t bytes = fabric::SpscRing::Bytes(options_.slots, options_.chunk_bytes);
  const std::string name = absl::StrCat("collective-", streams_.buffer());
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank() || all.node_of(peer) != all.node_of(rank())) continue;
    MOERL_ASSIGN_OR_RETURN(absl::Span<std::byte> out, hub_->node_memory().Map(rank(), peer, name, bytes));
    MOERL_ASSIGN_OR_RETURN(absl::Span<std::byte> in, hub_->node_memory().Map(peer, rank(), name, bytes));
    peers_[peer].ring_out = fabric::SpscRing(out, options_.slots, options_.chunk_bytes);
    peers_[peer].ring_in = fabric::SpscRing(in, options_.slots, options_.chunk_bytes);
  }
  return absl::OkStatus();
}

// ---------------------------------------------------------------- messages, by stream or by ring

std::byte* FabricCollective::Reserve(int peer) {
  Peer& p = peers_[peer];
  return p.wire_out != nullptr ? p.wire_out->Reserve().data() : p.ring_out.Reserve();
}

void FabricCollective::Publish(int peer, size_t bytes) {
  Peer& p = peers_[peer];
  if (p.wire_out != nullptr) return p.wire_out->Publish(num_operations_, 0, 1, bytes);
  p.ring_out.Publish(bytes);
  hub_->MarkNotify(peer);
}

absl::Span<const std::byte> FabricCollective::Front(int peer) {
  Peer& p = peers_[peer];
  return p.wire_in != nullptr ? p.wire_in->Front().payload : p.ring_in.Front();
}

void FabricCollective::Pop(int peer) {
  Peer& p = peers_[peer];
  if (p.wire_in != nullptr) return p.wire_in->Pop();
  p.ring_in.Pop();
  hub_->MarkNotify(peer);  // there is room again
}

// ---------------------------------------------------------------- the state machine

bool FabricCollective::Move() {
  bool moved = streams_.Move();
  if (!is_running_) return moved;
  moved |= Reduce();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    moved |= Send(peer);
    moved |= Gather(peer);
  }
  return moved | streams_.Move();
}

bool FabricCollective::Send(int peer) {
  bool moved = false;
  while (true) {
    Flow& flow = op_.scatter[peer].is_open() ? op_.scatter[peer] : op_.spread[peer];
    if (!flow.is_open()) return moved;
    const int64_t bytes = std::min<int64_t>(options_.chunk_bytes, flow.bytes - flow.done);
    const bool waits = &flow == &op_.spread[peer] && op_.spread_follows_reduced && flow.done + bytes > op_.reduced.done;
    std::byte* to = waits ? nullptr : Reserve(peer);
    if (to == nullptr) return moved;
    std::memcpy(to, flow.data + flow.done, bytes);
    Publish(peer, bytes);
    flow.done += bytes;
    moved = true;
  }
}

// Adds up the next chunk of this rank's segment once every peer's is there.
bool FabricCollective::Reduce() {
  bool moved = false;
  Flow& flow = op_.reduced;
  while (flow.is_open()) {
    const int64_t bytes = std::min<int64_t>(options_.chunk_bytes, flow.bytes - flow.done);
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank() && Front(peer).data() == nullptr) return moved;
    }
    std::vector<std::byte> sum(bytes);
    for (int peer = 0; peer < size(); ++peer) {
      const std::byte* x = peer == rank() ? op_.own + flow.done : Front(peer).data();
      if (peer == 0) {
        std::memcpy(sum.data(), x, bytes);
      } else {
        CombineBytes(op_.element, op_.reduction, x, bytes, sum.data());
      }
    }
    std::memcpy(flow.data + flow.done, sum.data(), bytes);
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) Pop(peer);
    }
    flow.done += bytes;
    moved = true;
  }
  return moved;
}

bool FabricCollective::Gather(int peer) {
  bool moved = false;
  if (op_.reduced.is_open()) return false;  // what lies in front is for Reduce
  Flow& flow = op_.gather[peer];
  while (flow.is_open()) {
    const absl::Span<const std::byte> message = Front(peer);
    if (message.data() == nullptr) return moved;
    if (static_cast<int64_t>(message.size()) > flow.bytes - flow.done) {
      hub_->Fail(absl::InvalidArgumentError(absl::StrCat("collective: ", op_.name, ": ", hub_->name_of(peer),
                                                         " sent more than the ", flow.bytes,
                                                         " bytes expected; all ranks must give the same sizes")));
      return false;
    }
    if (!message.empty()) std::memcpy(flow.data + flow.done, message.data(), message.size());
    flow.done += static_cast<int64_t>(message.size());
    Pop(peer);
    moved = true;
  }
  return moved;
}

bool FabricCollective::IsDone() const {
  if (op_.reduced.is_open()) return false;
  for (int peer = 0; peer < size(); ++peer) {
    if (op_.scatter[peer].is_open() || op_.spread[peer].is_open() || op_.gather[peer].is_open()) return false;
  }
  return true;
}

fabric::Hub::Missing FabricCollective::DescribeMissing() const {
  fabric::Hub::Missing missing;
  missing.what = absl::StrCat(op_.name, " ", num_operations_, " on ", hub_->name_of(rank()), ":");
  constexpr size_t kNamedMax = 4;
  for (int peer = 0; peer < size() && missing.ranks.size() < kNamedMax; ++peer) {
    if (peer == rank()) continue;
    const bool awaits_chunk =
        op_.reduced.is_open() && (peers_[peer].wire_in != nullptr ? peers_[peer].wire_in->Front().header == nullptr
                                                                  : peers_[peer].ring_in.Front().data() == nullptr);
    const Flow& flow = op_.reduced.is_open() ? op_.reduced : op_.gather[peer];
    const bool is_stuck = op_.scatter[peer].is_open() || op_.spread[peer].is_open();
    if (!awaits_chunk && !(flow.is_open() && !op_.reduced.is_open()) && !is_stuck) continue;
    missing.ranks.push_back(peer);
    absl::StrAppend(&missing.what, missing.ranks.size() > 1 ? ";" : "", " ", flow.bytes, " bytes expected, ", flow.done,
                    " received from ", hub_->name_of(peer));
  }
  return missing;
}

absl::Status FabricCollective::Run(Op op) {
  {
    absl::MutexLock lock(&hub_->mutex());
    MOERL_CHECK(!is_running_);
    op_ = std::move(op);
    is_running_ = true;
    ++num_operations_;
  }
  const absl::Status status = hub_->Await([this] { return IsDone(); }, [this] { return DescribeMissing(); });
  absl::MutexLock lock(&hub_->mutex());
  is_running_ = false;
  return status;
}

FabricCollective::Op FabricCollective::Empty(const char* name) const {
  Op op;
  op.name = name;
  op.scatter.resize(size());
  op.spread.resize(size());
  op.gather.resize(size());
  return op;
}

// ---------------------------------------------------------------- operations

absl::Status FabricCollective::AllReduce(Element element, Reduction reduction, void* data, int64_t count) {
  if (size() == 1) return absl::OkStatus();
  std::byte* base = static_cast<std::byte*>(data);
  const int64_t bytes = static_cast<int64_t>(BytesOf(element));
  Op op = Empty("all-reduce");
  op.element = element;
  op.reduction = reduction;
  const auto flow_of = [&](int of) {
    const Segment segment = SegmentOf(count, of, size());
    return Flow{base + segment.begin * bytes, (segment.end - segment.begin) * bytes, 0};
  };
  op.reduced = flow_of(rank());
  op.own = op.reduced.data;
  op.spread_follows_reduced = true;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    op.scatter[peer] = flow_of(peer);
    op.spread[peer] = flow_of(rank());
    op.gather[peer] = flow_of(peer);
  }
  return Run(std::move(op));
}

absl::Status FabricCollective::ReduceScatter(Element element, Reduction reduction, const void* in, int64_t count,
                                             void* out) {
  std::byte* base = const_cast<std::byte*>(static_cast<const std::byte*>(in));  // only read
  const int64_t bytes = static_cast<int64_t>(BytesOf(element));
  const Segment own = SegmentOf(count, rank(), size());
  if (size() == 1) {
    if (in != out) std::memcpy(out, in, count * bytes);
    return absl::OkStatus();
  }
  Op op = Empty("reduce-scatter");
  op.element = element;
  op.reduction = reduction;
  op.reduced = {static_cast<std::byte*>(out), (own.end - own.begin) * bytes, 0};
  op.own = base + own.begin * bytes;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    const Segment segment = SegmentOf(count, peer, size());
    op.scatter[peer] = {base + segment.begin * bytes, (segment.end - segment.begin) * bytes, 0};
  }
  return Run(std::move(op));
}

absl::Status FabricCollective::AllGather(const void* mine, absl::Span<const int64_t> bytes_of_rank, void* out) {
  MOERL_CHECK(static_cast<int>(bytes_of_rank.size()) == size());
  Op op = Empty("all-gather");
  std::byte* at = static_cast<std::byte*>(out);
  for (int peer = 0; peer < size(); ++peer) {
    const int64_t bytes = bytes_of_rank[peer];
    if (peer != rank()) {
      op.gather[peer] = {at, bytes, 0};
    } else {
      if (at != mine && bytes > 0) std::memcpy(at, mine, bytes);
      for (int to = 0; to < size(); ++to) {
        if (to != rank()) op.spread[to] = {at, bytes, 0};
      }
    }
    at += bytes;
  }
  return Run(std::move(op));
}

absl::Status FabricCollective::AllToAll(const void* send, absl::Span<const int64_t> send_bytes, void* recv,
                                        absl::Span<const int64_t> recv_bytes) {
  MOERL_CHECK(static_cast<int>(send_bytes.size()) == size() && static_cast<int>(recv_bytes.size()) == size());
  Op op = Empty("all-to-all");
  std::byte* from = const_cast<std::byte*>(static_cast<const std::byte*>(send));  // only read
  std::byte* to = static_cast<std::byte*>(recv);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) {
      op.spread[peer] = {from, send_bytes[peer], 0};
      op.gather[peer] = {to, recv_bytes[peer], 0};
    } else if (send_bytes[peer] > 0) {
      std::memcpy(to, from, send_bytes[peer]);
    }
    from += send_bytes[peer];
    to += recv_bytes[peer];
  }
  return Run(std::move(op));
}

absl::Status FabricCollective::Broadcast(int root, void* data, int64_t bytes) {
  MOERL_CHECK(root >= 0 && root < size());
  Op op = Empty("broadcast");
  const Flow flow = {static_cast<std::byte*>(data), bytes, 0};
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    if (rank() == root) op.spread[peer] = flow;
    if (peer == root) op.gather[peer] = flow;
  }
  return Run(std::move(op));
}

uint64_t FabricCollective::bytes_posted() {
  absl::MutexLock lock(&hub_->mutex());
  uint64_t bytes = 0;
  for (const auto& sender : streams_.senders()) bytes += sender->bytes_posted();
  return bytes;
}

absl::Status FabricCollective::Barrier() {
  std::vector<int64_t> bytes(size(), 1);
  std::vector<std::byte> all(size());
  const std::byte mine{1};
  return AllGather(&mine, bytes, all.data());
}

}  // namespace moerl::collective
