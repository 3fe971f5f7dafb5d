#ifndef MOERL_LIBS_EP_LINKS_H_
#define MOERL_LIBS_EP_LINKS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "libs/ep/expert_map.h"
#include "libs/ep/topology.h"
#include "libs/fabric/spsc_ring.h"
#include "libs/fabric/wire_stream.h"

namespace moerl::ep {

// Sizes of one buffer's pools. The two hops have separate pools: slots between nodes, rings inside a node.
struct LinkSizes {
  size_t route_bytes = 0;  // payload of a ROUTE message
  size_t part_bytes = 0;   // payload of ROWS and PART messages
  uint32_t rows_slots = 1, part_slots = 1, ring_entries = 1;
  size_t control_record_bytes = 0, row_record_bytes = 0, partial_record_bytes = 0;
};

// All the ways a buffer's messages take on one rank: streams between nodes, rings inside the node.
class Links {
 public:
  enum Kind : uint8_t { kRoute = 1, kRows = 2, kPart = 3 };
  enum Channel { kControlRing, kRowRing, kPartialRing, kNumChannels };

  // `buffer` numbers the buffers of a hub alike on all ranks.
  Links(fabric::Hub* hub, const Topology* topology, uint16_t buffer);

  absl::Status Open(const LinkSizes& sizes);
  void Close() { streams_.Close(); }  // with the hub's mutex
  std::string Offer() const { return streams_.Offer(); }
  absl::Status Connect(absl::Span<const std::string> offers) { return streams_.Connect(offers); }

  // Between nodes. `node` is another node; `peer` indexes Topology::in_peers().
  fabric::WireSender& ToNode(Kind kind, int node) { return *to_node_[kind == kRoute ? 0 : 1][node]; }
  fabric::WireReceiver& FromPeer(Kind kind, int peer) { return *from_peer_[kind == kRoute ? 0 : 1][peer]; }
  fabric::WireSender& PartToPeer(int peer) { return *part_to_peer_[peer]; }
  fabric::WireReceiver& PartFromNode(int node) { return *part_from_node_[node]; }

  // Inside the node; `local` is a local index other than this rank's.
  fabric::SpscRing& RingTo(Channel channel, int local) { return out_[channel][local]; }
  fabric::SpscRing& RingFrom(Channel channel, int local) { return in_[channel][local]; }
  // Makes the reserved message of `ring` visible with its first `bytes` bytes.
  void Publish(fabric::SpscRing& ring, size_t bytes) {
    ring.Publish(bytes);
    ring_bytes_published_ += bytes;
  }
  void Published(int local) { hub_->MarkNotify(topology_->local_ranks()[local]); }

  bool Move() { return streams_.Move(); }
  bool is_idle() const { return streams_.is_idle(); }
  bool has_all_credits() const;
  uint64_t bytes_posted(Kind kind) const;
  uint64_t ring_bytes_published() const { return ring_bytes_published_; }
  absl::Duration stalled() const;  // see WireSender::stalled, all senders together
  size_t receive_bytes() const { return streams_.receive_bytes() + ring_bytes_; }

 private:
  fabric::Hub* const hub_;
  const Topology* const topology_;
  const uint16_t buffer_;
  fabric::WireStreams streams_;
  std::vector<fabric::WireSender*> to_node_[2];
  std::vector<fabric::WireReceiver*> from_peer_[2];
  std::vector<fabric::WireSender*> part_to_peer_;
  std::vector<fabric::WireReceiver*> part_from_node_;
  std::vector<fabric::SpscRing> out_[kNumChannels], in_[kNumChannels];
  size_t ring_bytes_ = 0;
  uint64_t ring_bytes_published_ = 0;
};

}  // namespace moerl::ep

#endif  // MOERL_LIBS_EP_LINKS_H_
