#include "libs/ep/links.h"

#include "absl/strings/str_cat.h"
#include "libs/base/status_macros.h"

namespace moerl::ep {

Links::Links(fabric::Hub* hub, const Topology* topology, uint16_t buffer)
    : hub_(hub), topology_(topology), buffer_(buffer), streams_(hub, buffer) {}

absl::Status Links::Open(const LinkSizes& sizes) {
  const Topology& t = *topology_;
  std::vector<fabric::WireStreams::Spec> specs;
  // Senders and receivers come back in the order of their specs; the loops below and after Open are the same.
  for (int node = 0; node < t.num_nodes(); ++node) {
    if (node == t.node()) continue;
    const int there = t.proxy(t.self(), node);
    specs.push_back({there, kRoute, true, 1, sizes.route_bytes});
    specs.push_back({there, kRows, true, sizes.rows_slots, sizes.part_bytes});
    specs.push_back({there, kPart, false, sizes.part_slots, sizes.part_bytes});
  }
  for (const int peer : t.in_peers()) {
    specs.push_back({peer, kPart, true, sizes.part_slots, sizes.part_bytes});
    specs.push_back({peer, kRoute, false, 1, sizes.route_bytes});
    specs.push_back({peer, kRows, false, sizes.rows_slots, sizes.part_bytes});
  }
  MOERL_RETURN_IF_ERROR(streams_.Open(specs));
  size_t sender = 0, receiver = 0;
  to_node_[0].resize(t.num_nodes());
  to_node_[1].resize(t.num_nodes());
  part_from_node_.resize(t.num_nodes());
  for (int node = 0; node < t.num_nodes(); ++node) {
    if (node == t.node()) continue;
    to_node_[0][node] = streams_.senders()[sender++].get();
    to_node_[1][node] = streams_.senders()[sender++].get();
    part_from_node_[node] = streams_.receivers()[receiver++].get();
  }
  for (size_t peer = 0; peer < t.in_peers().size(); ++peer) {
    part_to_peer_.push_back(streams_.senders()[sender++].get());
    from_peer_[0].push_back(streams_.receivers()[receiver++].get());
    from_peer_[1].push_back(streams_.receivers()[receiver++].get());
  }

  const size_t record_bytes[kNumChannels] = {sizes.control_record_bytes, sizes.row_record_bytes,
                                             sizes.partial_record_bytes};
  const int num_local = static_cast<int>(t.local_ranks().size());
  for (int channel = 0; channel < kNumChannels; ++channel) {
    const size_t bytes = fabric::SpscRing::Bytes(sizes.ring_entries, record_bytes[channel]);
    const std::string name = absl::StrCat("ep-", buffer_, "-", channel);
    out_[channel].resize(num_local);
    in_[channel].resize(num_local);
    for (int local = 0; local < num_local; ++local) {
      const int rank = t.local_ranks()[local];
      if (rank == t.self()) continue;
      MOERL_ASSIGN_OR_RETURN(absl::Span<std::byte> to, hub_->node_memory().Map(t.self(), rank, name, bytes));
      MOERL_ASSIGN_OR_RETURN(absl::Span<std::byte> from, hub_->node_memory().Map(rank, t.self(), name, bytes));
      out_[channel][local] = fabric::SpscRing(to, sizes.ring_entries, record_bytes[channel]);
      in_[channel][local] = fabric::SpscRing(from, sizes.ring_entries, record_bytes[channel]);
      ring_bytes_ += bytes;
    }
  }
  return absl::OkStatus();
}

bool Links::has_all_credits() const {
  for (const auto* streams : {&to_node_[0], &to_node_[1], &part_to_peer_}) {
    for (const fabric::WireSender* sender : *streams) {
      if (sender != nullptr && !sender->has_all_credits()) return false;
    }
  }
  return true;
}

absl::Duration Links::stalled() const {
  absl::Duration stalled = absl::ZeroDuration();
  for (const auto* streams : {&to_node_[0], &to_node_[1], &part_to_peer_}) {
    for (const fabric::WireSender* sender : *streams) {
      if (sender != nullptr) stalled += sender->stalled();
    }
  }
  return stalled;
}

uint64_t Links::bytes_posted(Kind kind) const {
  const auto& senders = kind == kPart ? part_to_peer_ : to_node_[kind == kRoute ? 0 : 1];
  uint64_t bytes = 0;
  for (const fabric::WireSender* sender : senders) bytes += sender == nullptr ? 0 : sender->bytes_posted();
  return bytes;
}

}  // namespace moerl::ep
