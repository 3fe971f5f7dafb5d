#ifndef MOERL_LIBS_COLLECTIVE_FABRIC_COLLECTIVE_H_
#define MOERL_LIBS_COLLECTIVE_FABRIC_COLLECTIVE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "libs/collective/collective.h"
#include "libs/fabric/hub.h"
#include "libs/fabric/spsc_ring.h"
#include "libs/fabric/wire_stream.h"

namespace moerl::collective {

// Collectives over the fabric: a stream to and from every peer, a ring where the peer is on this node.
//
// A reduction sends each rank its segment, which adds up the chunks of all ranks in rank order and sends the result to
// everybody: 2 (size - 1) / size of the data leaves and enters each rank, the least there is. Chunks flow, so that
// adding up and both directions of sending overlap.
// Receive memory: (size - 1) * slots * chunk_bytes.
class FabricCollective : public Collective, private fabric::Mover {
 public:
  struct Options {
    size_t chunk_bytes = 64 << 10;  // of one message; a multiple of 8
    uint32_t slots = 4;             // messages in flight to a peer
  };

  // Collective. The hub outlives it.
  static absl::StatusOr<std::unique_ptr<FabricCollective>> Create(fabric::Hub* hub, Options options);
  ~FabricCollective() override;

  int rank() const override { return hub_->self(); }
  int size() const override { return hub_->membership().size(); }
  absl::Status AllReduce(Element element, Reduction reduction, void* data, int64_t count) override;
  absl::Status ReduceScatter(Element element, Reduction reduction, const void* in, int64_t count, void* out) override;
  absl::Status AllGather(const void* mine, absl::Span<const int64_t> bytes_of_rank, void* out) override;
  absl::Status AllToAll(const void* send, absl::Span<const int64_t> send_bytes, void* recv,
                        absl::Span<const int64_t> recv_bytes) override;
  absl::Status Broadcast(int root, void* data, int64_t bytes) override;
  absl::Status Barrier() override;

  // Written to other nodes since creation, headers included.
  uint64_t bytes_posted();

 private:
  // To and from one peer, whichever way its messages take. Null at this rank's own place.
  struct Peer {
    fabric::WireSender* wire_out = nullptr;
    fabric::WireReceiver* wire_in = nullptr;
    fabric::SpscRing ring_out, ring_in;
  };
  // Bytes that leave for a peer, or come from one, in chunks.
  struct Flow {
    std::byte* data = nullptr;
    int64_t bytes = 0;
    int64_t done = 0;
    bool is_open() const { return done < bytes; }
  };
  struct Op {
    const char* name = "";
    Element element = Element::kFloat;
    Reduction reduction = Reduction::kSum;
    std::vector<Flow> scatter;       // by peer: its segment of our data
    const std::byte* own = nullptr;  // our segment of our data
    Flow reduced;                    // our segment of the result
    std::vector<Flow> spread;        // by peer: what leaves after its scatter; may not pass `reduced`
    bool spread_follows_reduced = false;
    std::vector<Flow> gather;  // by peer: what comes after the chunks to reduce
  };

  FabricCollective(fabric::Hub* hub, Options options);
  absl::Status Open();
  absl::Status Run(Op op);
  Op Empty(const char* name) const;
  bool Move() override;
  bool Send(int peer);
  bool Reduce();
  bool Gather(int peer);
  std::byte* Reserve(int peer);
  void Publish(int peer, size_t bytes);
  absl::Span<const std::byte> Front(int peer);
  void Pop(int peer);
  bool IsDone() const;
  fabric::Hub::Missing DescribeMissing() const;

  fabric::Hub* const hub_;
  const Options options_;
  fabric::WireStreams streams_;
  std::vector<Peer> peers_;
  Op op_;
  bool is_running_ = false;
  uint64_t num_operations_ = 0;
};

}  // namespace moerl::collective

#endif  // MOERL_LIBS_COLLECTIVE_FABRIC_COLLECTIVE_H_
