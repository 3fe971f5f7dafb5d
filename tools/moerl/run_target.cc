#include "tools/moerl/run_target.h"

#include <google/protobuf/util/json_util.h>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "libs/base/config.h"
#include "libs/base/env.h"
#include "libs/base/status_macros.h"
#include "libs/rpc/program.h"
#include "moerl/v1/config.pb.h"
#include "tools/moerl/log_tail.h"

namespace moerl {
namespace {

absl::StatusOr<std::string> OnlyRun() {
  const absl::StatusOr<std::vector<std::string>> names = PosixEnv()->List("runs");
  if (names.ok() && names->size() == 1) return JoinPath("runs", names->front());
  return absl::NotFoundError(absl::StrCat("one run in runs/ expected, found ", names.ok() ? names->size() : 0,
                                          "; name its directory or give --address"));
}

absl::StatusOr<RunTarget> TargetInDirectory(const std::string& member, const std::string& directory) {
  v1::Config config;
  MOERL_RETURN_IF_ERROR(LoadConfig(JoinPath(directory, "config.yaml"), {}, config));
  MOERL_ASSIGN_OR_RETURN(const std::string text, PosixEnv()->ReadFile(JoinPath(directory, "endpoints.json")));
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  // A trainer of several ranks is led by rank 0.
  for (const std::string& name : {member, member + "-0"}) {
    if (!json.is_object() || !json.contains(name) || !json[name].is_object()) continue;
    return RunTarget{.name = config.name(),
                     .directory = directory,
                     .address = json[name].value("address", ""),
                     .options = rpc::ChannelOptionsOf(config.server()),
                     .num_steps = config.trainer().num_steps()};
  }
  return absl::DataLossError(absl::StrCat(directory, "/endpoints.json: ", member, " expected, not found"));
}

}  // namespace

absl::StatusOr<RunTarget> FindRunTarget(const std::string& member, const std::string& address,
                                        const std::vector<std::string>& directory) {
  if (!address.empty()) return RunTarget{.name = address, .directory = "", .address = address};
  if (!directory.empty()) return TargetInDirectory(member, directory[0]);
  MOERL_ASSIGN_OR_RETURN(const std::string only, OnlyRun());
  return TargetInDirectory(member, only);
}

std::optional<v1::StepMetrics> LastMetricsRow(const std::string& directory) {
  // A row is far shorter than the tail.
  const std::string tail = ReadTail(*PosixEnv(), JoinPath(directory, "metrics.jsonl"));
  const std::vector<std::string> lines = absl::StrSplit(tail, '\n', absl::SkipEmpty());
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = true;
  for (auto line = lines.rbegin(); line != lines.rend(); ++line) {
    v1::StepMetrics row;
    if (google::protobuf::util::JsonStringToMessage(*line, &row, options).ok()) return row;
  }
  return std::nullopt;
}

}  // namespace moerl
