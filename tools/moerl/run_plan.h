#ifndef MOERL_TOOLS_MOERL_RUN_PLAN_H_
#define MOERL_TOOLS_MOERL_RUN_PLAN_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "moerl/v1/config.pb.h"
#include "tools/moerl/supervision.h"

// Which processes a run consists of, and how each is started. Pure but for FreePorts.
namespace moerl {

struct MemberPlan {
  std::string name;  // "trainer-0", of the log file too
  std::vector<std::string> command;
  std::string log_file;
  std::string address;          // of its gRPC server, "127.0.0.1:20001"
  std::string metrics_address;  // of /metrics
};

struct RunPlan {
  std::vector<GroupSpec> groups;
  std::vector<std::vector<MemberPlan>> members;  // by group and member

  // Where the trainer's leader serves.
  const std::string& trainer_address() const;
};

struct RunPlace {
  std::string programs;   // directory of moerl-trainer and the others
  std::string directory;  // the run directory, absolute
  int num_cores = 1;      // to divide among the processes
};

// weight_sync; the trainer's ranks as one group; each rollout server a group. The configuration of all is
// config.yaml in the run directory, and what differs by process is --set on its command line.
//
// Cores are divided where the configuration says num_threads: 0. With staleness 0 trainer and rollouts work in turn,
// and each side gets all cores; otherwise each gets half. Every process has at least one.
//
// `ports` are NumPorts(config) free ones.
RunPlan PlanRun(const v1::Config& config, const RunPlace& place, const std::vector<int>& ports);
int NumPorts(const v1::Config& config);

// `count` ports of 127.0.0.1 on which nobody listens, below those that the kernel gives to outgoing connections.
// They are not held: whoever comes first has them. RESOURCE_EXHAUSTED when there are not that many.
absl::StatusOr<std::vector<int>> FreePorts(int count);

// endpoints.json: who serves where, for `moerl status` and for people.
std::string EndpointsJson(const RunPlan& plan);

}  // namespace moerl

#endif  // MOERL_TOOLS_MOERL_RUN_PLAN_H_
