#include "tools/moerl/resumed_config.h"

#include "absl/strings/str_cat.h"
#include "libs/base/config.h"
#include "libs/base/env.h"
#include "libs/base/status_macros.h"

namespace moerl {
namespace {

constexpr char kStoredFile[] = "config.yaml";

// As if written now: the directory may have been moved since, and its secret with it.
absl::StatusOr<v1::Config> ReadStored(absl::string_view stored, const std::vector<std::string>& overrides,
                                      const std::string& run_directory) {
  v1::Config config;
  MOERL_RETURN_IF_ERROR(ParseConfig(stored, JoinPath(run_directory, kStoredFile), overrides, config));
  if (config.fabric().token_file() == TokenFile(config.trainer().run_directory())) {
    config.mutable_fabric()->clear_token_file();
  }
  config.mutable_trainer()->set_run_directory(run_directory);
  return config;
}

absl::Status CheckSameTraining(const v1::Config& was, const v1::Config& now) {
  absl::Status same = CheckFixedFields(was, now);
  if (same.ok()) return same;
  return absl::FailedPreconditionError(absl::StrCat(
      "run: --resume continues what was begun, and this would be other training: ", std::string(same.message()),
      "; leave that --set out to continue, or train so in another run directory: --set name=NAME, without --resume"));
}

std::string NotTaken(const std::string& file, const ConfigChange& change) {
  std::string what = absl::StrCat(file, " has ", change.path, ": ", change.now, "; the run goes on with ", change.was);
  if (change.is_fixed || change.now == "given" || change.now == "not given") return what;
  return absl::StrCat(what, " (--set '", change.path, "=", change.now, "' changes it)");
}

}  // namespace

std::string TokenFile(const std::string& run_directory) { return JoinPath(run_directory, "fabric.token"); }

absl::StatusOr<ResumedConfig> ResumeConfig(absl::string_view stored, const ResumeRequest& request) {
  const std::string& directory = request.config.trainer().run_directory();
  MOERL_ASSIGN_OR_RETURN(const v1::Config before, ReadStored(stored, {}, directory));
  ResumedConfig resumed;
  MOERL_ASSIGN_OR_RETURN(resumed.config, ReadStored(stored, request.overrides, directory));
  MOERL_RETURN_IF_ERROR(CheckSameTraining(before, resumed.config));
  for (const ConfigChange& change : CompareConfigs(before, resumed.config)) {
    resumed.notices.push_back(absl::StrCat(change.path, ": was ", change.was, ", now ", change.now));
  }
  for (const ConfigChange& difference : CompareConfigs(resumed.config, request.config)) {
    resumed.notices.push_back(NotTaken(request.file, difference));
  }
  return resumed;
}

}  // namespace moerl
