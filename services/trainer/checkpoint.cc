#include "services/trainer/checkpoint.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "libs/base/config.h"
#include "libs/base/env.h"
#include "libs/base/status_macros.h"

namespace moerl::trainer {
namespace {

constexpr const char* kInfoFile = "checkpoint.json";
constexpr const char* kConfigFile = "config.yaml";
constexpr const char* kUnfinished = ".unfinished";

std::string NameOf(CheckpointName name) { return absl::StrFormat("step_%08d_epoch_%d", name.step, name.epoch); }
std::string Parent(const std::string& run_directory) { return JoinPath(run_directory, "checkpoints"); }

std::string Format(const CheckpointInfo& info) {
  const nlohmann::json json = {{"step", info.name.step},
                               {"epoch", info.name.epoch},
                               {"trained_groups", info.trained.count},
                               {"trained_hash", absl::StrFormat("%016x", info.trained.hash)},
                               {"prompt_cursor", info.cursor},
                               {"prompt_fingerprint", info.prompt_fingerprint},
                               {"num_ranks", info.num_ranks},
                               {"kl_coefficient", info.kl_coefficient}};
  return json.dump(2) + "\n";
}

}  // namespace

std::string CheckpointDirectory(const std::string& run_directory, CheckpointName name) {
  return JoinPath(Parent(run_directory), NameOf(name));
}

absl::Status WriteCheckpoint(Team& team, const std::string& run_directory, const CheckpointInfo& info) {
  Env& env = *PosixEnv();
  const std::string directory = CheckpointDirectory(run_directory, info.name);
  const std::string beside = directory + kUnfinished;
  MOERL_RETURN_IF_ERROR(env.RemoveTree(beside));
  MOERL_RETURN_IF_ERROR(env.CreateDirs(beside));
  MOERL_RETURN_IF_ERROR(team.SaveState(beside));
  MOERL_RETURN_IF_ERROR(team.ExportPolicy(JoinPath(beside, "model")));
  MOERL_RETURN_IF_ERROR(env.WriteFileDurably(JoinPath(beside, kConfigFile), FormatConfig(info.config)));
  MOERL_RETURN_IF_ERROR(env.WriteFileDurably(JoinPath(beside, kInfoFile), Format(info)));
  MOERL_RETURN_IF_ERROR(env.SyncDir(beside));
  MOERL_RETURN_IF_ERROR(env.RemoveTree(directory));  // of this epoch and step: not named yet
  return env.RenameDurably(beside, directory);
}

absl::StatusOr<CheckpointInfo> ReadCheckpointInfo(const std::string& run_directory, CheckpointName name) {
  const std::string directory = CheckpointDirectory(run_directory, name);
  const std::string path = JoinPath(directory, kInfoFile);
  MOERL_ASSIGN_OR_RETURN(const std::string text, PosixEnv()->ReadFile(path));
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object()) return absl::DataLossError(absl::StrCat(path, ": not a JSON object"));
  CheckpointInfo info;
  info.name = {json.value("step", int64_t{-1}), json.value("epoch", int64_t{-1})};
  info.trained.count = json.value("trained_groups", int64_t{-1});
  info.trained.hash = std::strtoull(json.value("trained_hash", std::string()).c_str(), nullptr, 16);
  info.cursor = json.value("prompt_cursor", int64_t{0});
  info.prompt_fingerprint = json.value("prompt_fingerprint", std::string());
  info.num_ranks = json.value("num_ranks", int64_t{0});
  info.kl_coefficient = json.value("kl_coefficient", 0.0);
  if (info.name != name || info.num_ranks < 1) return absl::DataLossError(absl::StrCat(path, ": belongs elsewhere"));
  MOERL_RETURN_IF_ERROR(LoadConfig(JoinPath(directory, kConfigFile), {}, info.config));
  return info;
}

absl::Status RemoveOtherCheckpoints(const std::string& run_directory, const LedgerState& state) {
  Env& env = *PosixEnv();
  MOERL_ASSIGN_OR_RETURN(const std::vector<std::string> entries, env.List(Parent(run_directory)));
  for (const std::string& entry : entries) {
    const bool is_named = std::any_of(state.checkpoints.begin(), state.checkpoints.end(),
                                      [&](CheckpointName name) { return NameOf(name) == entry; });
    if (is_named || !absl::StartsWith(entry, "step_")) continue;
    MOERL_RETURN_IF_ERROR(env.RemoveTree(JoinPath(Parent(run_directory), entry)));
  }
  return absl::OkStatus();
}

}  // namespace moerl::trainer
