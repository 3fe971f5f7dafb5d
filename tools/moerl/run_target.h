#ifndef MOERL_TOOLS_MOERL_RUN_TARGET_H_
#define MOERL_TOOLS_MOERL_RUN_TARGET_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "libs/rpc/channel.h"
#include "moerl/v1/trainer.pb.h"

namespace moerl {

// A server of a run, as the command line finds it.
struct RunTarget {
  std::string name;       // of the run; the address when only that is known
  std::string directory;  // of the run; empty when only an address is known
  std::string address;    // of the server
  rpc::ChannelOptions options = {};
  uint64_t num_steps = 0;  // of the run; 0 when only an address is known
};

// The server `member` ("trainer" is its leader) of the run in the directory given, else of the only run in runs/; or
// whatever is at `address` when that is not empty. Errors name what was looked for and where.
absl::StatusOr<RunTarget> FindRunTarget(const std::string& member, const std::string& address,
                                        const std::vector<std::string>& directory);

// The last whole row of metrics.jsonl in the run directory; absent when there is none.
std::optional<v1::StepMetrics> LastMetricsRow(const std::string& directory);

}  // namespace moerl

#endif  // MOERL_TOOLS_MOERL_RUN_TARGET_H_
