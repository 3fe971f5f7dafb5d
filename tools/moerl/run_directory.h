#ifndef MOERL_TOOLS_MOERL_RUN_DIRECTORY_H_
#define MOERL_TOOLS_MOERL_RUN_DIRECTORY_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "libs/base/env.h"
#include "moerl/v1/config.pb.h"

namespace moerl {

// Everything a run writes:
//   lock config.yaml endpoints.json ledger.sqlite checkpoints/step_%08d store/ logs/ metrics.jsonl model/
// Held from Open until destroyed: one `moerl run` at a time.
class RunDirectory {
 public:
  // Takes trainer.run_directory, or runs/<name> where that is empty; creates and locks it, with logs/, and sets
  // trainer.run_directory to its absolute path. It holds a run when config.yaml is there, which the caller writes.
  // FAILED_PRECONDITION, saying what to do: it holds a run and `is_resume` is false; it holds none and
  // `is_resume` is true; another `moerl run` has it; it lies on a network file system.
  static absl::StatusOr<RunDirectory> Open(Env& env, bool is_resume, v1::Config& config);

  const std::string& path() const { return path_; }  // absolute
  std::string At(absl::string_view name) const { return JoinPath(path_, name); }

 private:
  RunDirectory(std::string path, std::unique_ptr<FileLock> lock) : path_(std::move(path)), lock_(std::move(lock)) {}

  std::string path_;
  std::unique_ptr<FileLock> lock_;
};

// trainer.run_directory, or runs/<name>; absolute.
std::string RunDirectoryPath(const v1::Config& config);

}  // namespace moerl

#endif  // MOERL_TOOLS_MOERL_RUN_DIRECTORY_H_
