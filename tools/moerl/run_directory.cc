#include "tools/moerl/run_directory.h"

#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "libs/base/status_macros.h"

namespace moerl {

std::string RunDirectoryPath(const v1::Config& config) {
  const std::string& given = config.trainer().run_directory();
  const std::string path = given.empty() ? absl::StrCat("runs/", config.name()) : given;
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(path, error);
  return error ? path : absolute.lexically_normal().string();
}

absl::StatusOr<RunDirectory> RunDirectory::Open(Env& env, bool is_resume, v1::Config& config) {
  const std::string path = RunDirectoryPath(config);
  if (env.Exists(path) && !env.IsDir(path)) {
    return absl::FailedPreconditionError(
        absl::StrCat("run: ", path, " is not a directory; give another with --set trainer.run_directory=PATH"));
  }
  const bool was_started = env.Exists(JoinPath(path, "config.yaml"));
  // Without a ledger nobody was told anything: a start that failed leaves nothing to continue, and is begun anew.
  const bool holds_run = env.Exists(JoinPath(path, "ledger.sqlite")) || env.Exists(JoinPath(path, "checkpoints"));
  if (holds_run && !is_resume) {
    return absl::FailedPreconditionError(absl::StrCat("run: ", path,
                                                      " holds a run already; continue it with --resume, "
                                                      "remove it, or give another with --set name=NAME"));
  }
  if (!was_started && !holds_run && is_resume) {
    return absl::FailedPreconditionError(
        absl::StrCat("run: ", path, " holds no run to resume; start it without --resume"));
  }
  MOERL_RETURN_IF_ERROR(env.CreateDirs(JoinPath(path, "logs")));
  MOERL_RETURN_IF_ERROR(CheckLocalFileSystem(path));
  absl::StatusOr<std::unique_ptr<FileLock>> lock = env.Lock(JoinPath(path, "lock"));
  if (!lock.ok()) {
    const absl::string_view what = absl::IsFailedPrecondition(lock.status()) ? " is in use: " : " cannot be used: ";
    return absl::Status(lock.status().code(), absl::StrCat("run: ", path, what, lock.status().message()));
  }
  config.mutable_trainer()->set_run_directory(path);
  return RunDirectory(path, *std::move(lock));
}

}  // namespace moerl
