#ifndef MOERL_LIBS_FABRIC_CLUSTER_H_
#define MOERL_LIBS_FABRIC_CLUSTER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "libs/fabric/bootstrap.h"
#include "libs/fabric/detector.h"
#include "libs/fabric/endpoint.h"

namespace moerl::fabric {

class Voter;

struct ClusterOptions {
  BootstrapOptions bootstrap;
  // "efa", "net", "tcp", "shm" (one node only) or "auto": shm on one node, else the first of efa, net, tcp that is
  // there.
  std::string provider = "auto";
  // Address of the interface that data and control use; empty: the one that reaches bootstrap.address.
  std::string local_address;
  // Ranks with equal names share memory; empty: this machine's. Set apart where one machine plays several nodes.
  std::string node;
  std::string name;  // what errors call this rank beside its number, for example the pod
  // Datagram port on which this process hears votes and those who want to join; 0: a free one.
  int control_port = 0;
  DetectorOptions detector;
};

// One rank's part in one epoch.
struct JoinedEpoch {
  Endpoint endpoint;
  std::string provider;   // what was chosen
  uint64_t finished = 0;  // SetFinished of the survivor that was furthest behind; redo from the next one. 0: none
};

// This process's membership of an elastic cluster, from its first epoch to its last.
//
// When a rank is lost, every operation of the epoch ends with UNAVAILABLE; each survivor then drops its group with all
// that was built on it, and calls Reform, which gives it an endpoint in the next epoch: a new endpoint, new memory, new
// keys. The survivors keep their order and are numbered anew without gaps; whoever waited to join comes after them.
//
// More than half of the last epoch's ranks go on, dead ones counted in the total, or an exact half with its rank 0; the
// others stop. A rank that was left out (stopped and woken, or cut off) learns it and comes back only as a new one.
// Thread-safe but for Reform: one thread at a time.
class Cluster {
 public:
  ~Cluster();

  // Ends the current epoch, if it has not ended, and joins the next. Collective: every rank of the next epoch calls it.
  // FAILED_PRECONDITION: left out; make a new process, or a new Cluster by JoinRunningCluster. UNAVAILABLE: no majority
  // within `timeout`, names the lost; the call may be repeated.
  absl::StatusOr<JoinedEpoch> Reform(absl::Duration timeout = absl::Seconds(60));

  // Says that this rank has finished operation `operation` (the caller's numbering, rising) of the current epoch.
  void SetFinished(uint64_t operation);
  // Processes that wait to be let in: they come with the next epoch, so that Reform at a step's end lets them in.
  size_t num_joiners() const;
  // Where the members of the current epoch hear those who want to join, for JoinRunningCluster.
  std::vector<std::string> control_addresses() const;

 private:
  struct Parts;
  friend absl::StatusOr<struct JoinedCluster> JoinCluster(const ClusterOptions& options);
  friend absl::StatusOr<struct JoinedCluster> JoinRunningCluster(const ClusterOptions& options,
                                                                 const std::vector<std::string>& control_addresses);
  Cluster() = default;
  static absl::StatusOr<std::shared_ptr<Cluster>> Create(const ClusterOptions& options, const std::string& towards);
  absl::StatusOr<JoinedEpoch> Open(std::unique_ptr<Bootstrap> exchange, absl::Duration timeout);

  std::unique_ptr<Parts> parts_;
};

struct JoinedCluster {
  Endpoint endpoint;
  std::string provider;
  uint64_t finished = 0;             // JoinedEpoch::finished
  std::shared_ptr<Cluster> cluster;  // may be dropped by who does not reform: the endpoint keeps what it needs
};

// Joins all ranks and opens this rank's endpoint for their first epoch: bootstrap, then membership, shared memory
// inside the node, the provider's endpoint between nodes, and the failure detector. Collective. What was asked for and
// is not there is an error; nothing else is taken instead.
absl::StatusOr<JoinedCluster> JoinCluster(const ClusterOptions& options);

// Joins a cluster that runs, as a new rank after the others, with the next epoch: when its members call Reform, or lose
// a rank. Waits options.bootstrap.timeout for that. Of the bootstrap options only cluster_id, token and timeout count.
absl::StatusOr<JoinedCluster> JoinRunningCluster(const ClusterOptions& options,
                                                 const std::vector<std::string>& control_addresses);

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_CLUSTER_H_
