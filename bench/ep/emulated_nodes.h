#ifndef MOERL_BENCH_EP_EMULATED_NODES_H_
#define MOERL_BENCH_EP_EMULATED_NODES_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace moerl::bench {

// Machines of a cluster, emulated on this one: a network namespace each, joined by a switch through links of a given
// rate in both directions (veth and tbf). Needs root and iproute2.
//
// The namespaces have no names: each lives as long as a process that holds it, and those processes die with their
// parent. So nothing is left behind, also when the parent is killed.
class EmulatedNodes {
 public:
  EmulatedNodes() = default;
  EmulatedNodes(const EmulatedNodes&) = delete;
  EmulatedNodes& operator=(const EmulatedNodes&) = delete;
  ~EmulatedNodes();

  // `rate` as tc understands it: "1gbit", "200mbit".
  absl::Status Start(int num_nodes, const std::string& rate);

  // Moves the calling process (single-threaded) to a node. Its address there is AddressOf(node).
  absl::Status Enter(int node) const;
  static std::string AddressOf(int node);

  // Runs an MPI program with `ranks_per_node` ranks on every node (shared memory inside, TCP between) and returns what
  // it printed. Needs Open MPI 4.
  absl::StatusOr<std::string> RunMpi(int ranks_per_node, const std::string& program) const;

  // Bytes that the calling process's node has sent on its link, headers of all layers included.
  static absl::StatusOr<uint64_t> BytesSent();

 private:
  std::vector<pid_t> holders_;  // of the nodes' namespaces, then of the switch's
};

}  // namespace moerl::bench

#endif  // MOERL_BENCH_EP_EMULATED_NODES_H_
