#ifndef MOERL_LIBS_EP_GROUP_H_
#define MOERL_LIBS_EP_GROUP_H_

#include <memory>

#include "absl/status/statusor.h"
#include "libs/ep/topology.h"
#include "libs/fabric/hub.h"

namespace moerl::ep {

// Who takes part in expert parallelism in one epoch: this rank's endpoint, the nodes, and the thread that keeps
// forwarding while this rank computes. Buffers and collectives are built on a group and die before it.
//
// When a member is lost every operation returns the error and the group is of no use any more; the next epoch makes a
// new group, with new buffers, from a new endpoint.
// Thread-safe: several threads may use different buffers of one group.
class Group {
 public:
  struct Options {
    absl::Duration timeout = absl::Seconds(30);        // of one operation, unless the peers it waits for are alive
    absl::Duration stall_timeout = absl::Minutes(10);  // of one operation, also when they are
    absl::Duration spin = absl::Microseconds(20);      // a wait spins this long before it sleeps
    // Forwarding between nodes needs a thread (a rank forwards for others while it computes). Off only where one
    // thread steps all ranks by hand (tests), or within one node, where nobody forwards.
    bool progress_thread = true;
  };

  Group(fabric::Endpoint endpoint, Options options)
      : topology_(endpoint.transport->membership()),
        hub_(std::move(endpoint), {.progress_thread = options.progress_thread && topology_.num_nodes() > 1,
                                   .timeout = options.timeout,
                                   .stall_timeout = options.stall_timeout,
                                   .spin = options.spin}) {}

  int rank() const { return topology_.self(); }
  int size() const { return topology_.size(); }
  const Topology& topology() const { return topology_; }
  const fabric::Membership& membership() const { return hub_.membership(); }
  fabric::Hub& hub() { return hub_; }

 private:
  const Topology topology_;
  fabric::Hub hub_;
};

}  // namespace moerl::ep

#endif  // MOERL_LIBS_EP_GROUP_H_
