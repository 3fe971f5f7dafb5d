#ifndef MOERL_TOOLS_MOERL_RESUMED_CONFIG_H_
#define MOERL_TOOLS_MOERL_RESUMED_CONFIG_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "moerl/v1/config.pb.h"

namespace moerl {

// What the user says at `moerl run FILE --resume --set …`.
struct ResumeRequest {
  std::string file;
  std::vector<std::string> overrides;
  v1::Config config;  // of the file and the overrides; run_directory is the one that was opened
};

struct ResumedConfig {
  v1::Config config;
  std::vector<std::string> notices;  // a line each: what changes, and what of the file is not taken
};

// A run goes on with the configuration it was started with, `stored`, the text of config.yaml in its directory; the
// overrides change it, aloud. What the file says otherwise is named and not taken: an earlier --set or an edit since.
//
// FAILED_PRECONDITION, naming them and both ways out: overrides that change fixed fields. The errors of ParseConfig.
absl::StatusOr<ResumedConfig> ResumeConfig(absl::string_view stored, const ResumeRequest& request);

// Where a run keeps the secret that `moerl run` made for its ranks.
std::string TokenFile(const std::string& run_directory);

}  // namespace moerl

#endif  // MOERL_TOOLS_MOERL_RESUMED_CONFIG_H_
