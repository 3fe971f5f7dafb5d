#include "libs/environment/task.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "libs/base/env.h"
#include "libs/base/status_macros.h"
#include "libs/environment/environment_client.h"
#include "libs/rl/byte_level_decoder.h"
#include "libs/rl/char_tokenizer.h"
#include "libs/rl/checker.h"

namespace moerl {
namespace {

absl::StatusOr<std::unique_ptr<rl::PromptSource>> LoadFile(const std::string& path, const v1::TaskConfig& task) {
  MOERL_ASSIGN_OR_RETURN(const std::string content, PosixEnv()->ReadFile(path));
  absl::StatusOr<std::unique_ptr<rl::PromptSource>> source = rl::ParsePromptFile(content, task.name(), task.seed());
  if (!source.ok()) return absl::Status(source.status().code(), absl::StrCat(path, ": ", source.status().message()));
  return source;
}

}  // namespace

bool IsSynthetic(const v1::TaskConfig& task) {
  return task.prompt_file().empty() &&
         (task.name() == "reverse" || task.name() == "sort" || task.name() == "countdown");
}

absl::StatusOr<TaskPrompts> LoadPrompts(const v1::TaskConfig& task) {
  TaskPrompts prompts;
  if (IsSynthetic(task)) {
    MOERL_ASSIGN_OR_RETURN(prompts.train, rl::MakeSyntheticSource(task.name(), task.seed(), rl::Split::kTrain));
    MOERL_ASSIGN_OR_RETURN(prompts.warm_start,
                           rl::MakeSyntheticSource(task.name(), task.seed(), rl::Split::kWarmStart));
    MOERL_ASSIGN_OR_RETURN(prompts.held_out, rl::MakeSyntheticSource(task.name(), task.seed(), rl::Split::kHeldOut));
    return prompts;
  }
  if (task.prompt_file().empty()) {
    return absl::InvalidArgumentError(absl::StrCat("config: task.prompt_file: task \"", task.name(),
                                                   "\" makes no prompts of its own; give a JSON-lines file"));
  }
  MOERL_ASSIGN_OR_RETURN(prompts.train, LoadFile(task.prompt_file(), task));
  MOERL_ASSIGN_OR_RETURN(const rl::Prompt first, prompts.train->Get(0));
  if (!first.solution.empty()) {
    MOERL_ASSIGN_OR_RETURN(prompts.warm_start, LoadFile(task.prompt_file(), task));
  }
  if (!task.held_out_file().empty()) {
    MOERL_ASSIGN_OR_RETURN(prompts.held_out, LoadFile(task.held_out_file(), task));
  }
  return prompts;
}

absl::StatusOr<std::shared_ptr<const rl::TokenCodec>> LoadCodec(const v1::TaskConfig& task) {
  if (!task.tokenizer_file().empty()) {
    MOERL_ASSIGN_OR_RETURN(const std::string content, PosixEnv()->ReadFile(task.tokenizer_file()));
    MOERL_ASSIGN_OR_RETURN(std::unique_ptr<rl::TokenCodec> codec, rl::ParseByteLevelTokenizer(content));
    return std::shared_ptr<const rl::TokenCodec>(std::move(codec));
  }
  if (IsSynthetic(task)) return std::make_shared<const rl::CharTokenizer>();
  return std::shared_ptr<const rl::TokenCodec>();
}

std::vector<int32_t> StopTokens(const v1::Config& config, std::span<const int64_t> model_ends) {
  const auto& given = config.rollout().sampling().stop_token_ids();
  std::vector<int32_t> tokens(given.begin(), given.end());
  if (IsSynthetic(config.task()) &&
      std::find(tokens.begin(), tokens.end(), rl::CharTokenizer::kEndOfSequence) == tokens.end()) {
    tokens.push_back(rl::CharTokenizer::kEndOfSequence);
  }
  if (tokens.empty() && config.rollout().sampling().stop_sequences().empty()) {
    tokens.assign(model_ends.begin(), model_ends.end());
  }
  return tokens;
}

absl::StatusOr<std::shared_ptr<rl::Environment>> MakeEnvironment(const v1::Config& config,
                                                                 const rpc::ChannelOptions& options) {
  const v1::EnvironmentConfig& environment = config.environment();
  if (!environment.address().empty()) {
    rpc::ChannelOptions once = options;
    once.attempts_max = 1;  // whoever asks again knows that it is not the verifier's deadline that passed
    MOERL_ASSIGN_OR_RETURN(std::shared_ptr<grpc::Channel> channel, rpc::MakeChannel(environment.address(), once));
    return std::shared_ptr<rl::Environment>(
        MakeEnvironmentClient(std::move(channel), absl::Milliseconds(environment.timeout_ms())));
  }
  if (absl::Status known = rl::FindChecker(config.task().name()).status(); !known.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("config: task.name: \"", config.task().name(),
                     "\" is not built in and environment.address is not set: ", known.message()));
  }
  MOERL_ASSIGN_OR_RETURN(std::shared_ptr<const rl::TokenCodec> codec, LoadCodec(config.task()));
  if (codec == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("config: task.tokenizer_file: task \"", config.task().name(),
                     "\" reads text; give the model's tokenizer.json, or serve it (environment.address)"));
  }
  return std::shared_ptr<rl::Environment>(rl::MakeBuiltinEnvironment(std::move(codec)));
}

}  // namespace moerl
