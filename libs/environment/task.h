#ifndef MOERL_LIBS_ENVIRONMENT_TASK_H_
#define MOERL_LIBS_ENVIRONMENT_TASK_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "libs/rl/environment.h"
#include "libs/rl/prompt_source.h"
#include "libs/rpc/channel.h"
#include "moerl/v1/config.pb.h"

// What a configuration's task is made of: its prompts, its tokens, its judge. The same for every program that needs a
// part.
namespace moerl {

// True for the tasks that make their own prompts (reverse, sort, countdown).
bool IsSynthetic(const v1::TaskConfig& task);

struct TaskPrompts {
  std::unique_ptr<rl::PromptSource> train;
  std::unique_ptr<rl::PromptSource> warm_start;  // of prompts with solutions; null where there are none
  std::unique_ptr<rl::PromptSource> held_out;    // null where the configuration names no held-out prompts
};

// INVALID_ARGUMENT names the missing or bad field (task.prompt_file for tasks that are not synthetic); errors of the
// files name file and line.
absl::StatusOr<TaskPrompts> LoadPrompts(const v1::TaskConfig& task);

// The task's vocabulary: characters for synthetic tasks, task.tokenizer_file where given, else null (nobody here reads
// text).
absl::StatusOr<std::shared_ptr<const rl::TokenCodec>> LoadCodec(const v1::TaskConfig& task);

// What ends a completion: the configuration's stop tokens, and the end of sequence of synthetic tasks. Where that is
// nothing, and no stop sequence is given either, the model's own ends of sequence.
std::vector<int32_t> StopTokens(const v1::Config& config, std::span<const int64_t> model_ends);

// Who judges: the environment at environment.address, else the built-in task in process. Thread-safe.
// INVALID_ARGUMENT where the task is neither served nor built in.
absl::StatusOr<std::shared_ptr<rl::Environment>> MakeEnvironment(const v1::Config& config,
                                                                 const rpc::ChannelOptions& channel);

}  // namespace moerl

#endif  // MOERL_LIBS_ENVIRONMENT_TASK_H_
