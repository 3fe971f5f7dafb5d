#ifndef MOERL_LIBS_FABRIC_CLUSTER_H_
#define MOERL_LIBS_FABRIC_CLUSTER_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "libs/fabric/bootstrap.h"
#include "libs/fabric/detector.h"
#include "libs/fabric/endpoint.h"

namespace moerl::fabric {

struct ClusterOptions {
  BootstrapOptions bootstrap;
  // "efa", "net", "tcp", "shm" (one node only) or "auto": shm on one node, else the first of efa, net, tcp that is
  // there.
  std::string provider = "auto";
  // Address of the interface that data uses; empty: the one that reaches bootstrap.address.
  std::string local_address;
  // Ranks with equal names share memory; empty: this machine's. Set apart where one machine plays several nodes.
  std::string node;
  std::string name;  // what errors call this rank beside its number, for example the pod
  DetectorOptions detector;
};

struct JoinedCluster {
  Endpoint endpoint;
  std::string provider;  // what was chosen
};

// Joins all ranks and opens this rank's endpoint for their first epoch: bootstrap, then membership, shared memory
// inside the node, the provider's endpoint between nodes, and the failure detector. Collective. What was asked for and
// is not there is an error; nothing else is taken instead.
absl::StatusOr<JoinedCluster> JoinCluster(const ClusterOptions& options);

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_CLUSTER_H_
