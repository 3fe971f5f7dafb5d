#include "services/trainer/team.h"

#include "absl/strings/str_cat.h"
#include "libs/base/status_macros.h"
#include "libs/experience/work_proto.h"
#include "moerl/v1/rank_command.pb.h"

namespace moerl::trainer {
namespace {

constexpr int kPublishAttemptsMax = 5;

v1::RankCommand TrainCommand(const StepJob& job, int route_bytes) {
  v1::RankCommand command;
  v1::TrainStepCommand& to = *command.mutable_train_step();
  to.set_step(static_cast<uint64_t>(job.step));
  to.set_epoch(static_cast<uint64_t>(job.epoch));
  *to.mutable_version() = VersionToProto(job.version);
  for (const rl::Group& group : job.groups) {
    v1::TrainGroup* entry = to.add_groups();
    entry->set_group_id(group.group_id);
    entry->mutable_prompt_token_ids()->Add(group.prompt.begin(), group.prompt.end());
    for (const rl::Sample& sample : group.samples) {
      v1::TrainSample* one = entry->add_samples();
      TokensToProto(sample.run, route_bytes, one->mutable_tokens());
      one->set_reward(*sample.reward);
      one->set_is_truncated(sample.is_truncated);
    }
  }
  return command;
}

absl::StatusOr<StepJob> JobFrom(const v1::TrainStepCommand& from, const rl::Sampling& sampling) {
  StepJob job;
  job.step = static_cast<int64_t>(from.step());
  job.epoch = static_cast<int64_t>(from.epoch());
  job.version = VersionFromProto(from.version());
  for (const v1::TrainGroup& entry : from.groups()) {
    rl::Group group;
    group.group_id = entry.group_id();
    group.prompt.assign(entry.prompt_token_ids().begin(), entry.prompt_token_ids().end());
    group.sampling = sampling;
    for (const v1::TrainSample& one : entry.samples()) {
      rl::Sample sample;
      sample.group_id = group.group_id;
      sample.sample_index = static_cast<uint32_t>(group.samples.size());
      MOERL_ASSIGN_OR_RETURN(sample.run, TokensFromProto(one.tokens()));
      sample.reward = one.reward();
      sample.is_truncated = one.is_truncated();
      group.samples.push_back(std::move(sample));
    }
    job.groups.push_back(std::move(group));
  }
  return job;
}

// The tensors a rank publishes, kept alive together with their bytes.
struct Shard {
  std::vector<std::string> bytes;
  std::vector<weights::TensorView> views;
};

absl::StatusOr<Shard> ShardOf(const RunSettings& settings, const RankGroup& ranks, const Learner& learner) {
  Shard shard;
  const model::ParameterTable table(settings.model);
  shard.bytes.reserve(table.parameters().size() + 1);  // views point into the strings: they must not move
  const absl::Status status = learner.policy().ForEachTensor([&](const model::TensorView& view) -> absl::Status {
    const int index = table.Find(view.name);
    const bool is_expert = index >= 0 && table.parameters()[static_cast<size_t>(index)].expert >= 0;
    if (!is_expert && ranks.rank() != 0) return absl::OkStatus();  // replicated ones come from rank 0
    if (shard.bytes.size() == shard.bytes.capacity())
      return absl::InternalError("publish: more tensors than parameters");
    shard.bytes.emplace_back(view.bytes.data(), view.bytes.size());
    weights::TensorView to;
    to.name = view.name;
    to.type = view.dtype == model::FileDType::kF32 ? weights::ElementType::kF32 : weights::ElementType::kBf16;
    to.shape.assign(view.shape.begin(), view.shape.end());
    to.data = std::as_bytes(std::span(shard.bytes.back().data(), shard.bytes.back().size()));
    shard.views.push_back(std::move(to));
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  return shard;
}

}  // namespace

absl::Status Team::Tell(const v1::RankCommand& command) {
  if (ranks_.size() == 1) return absl::OkStatus();
  return ranks_.Broadcast(command.SerializeAsString()).status();
}

absl::StatusOr<double> Team::DoSupervisedUpdate(uint64_t first_index, int64_t num_examples) {
  std::vector<rl::SupervisedExample> examples;
  for (int64_t i = 0; i < num_examples; ++i) {
    MOERL_ASSIGN_OR_RETURN(const rl::Prompt prompt, settings_.supervised->Get(first_index + static_cast<uint64_t>(i)));
    MOERL_ASSIGN_OR_RETURN(rl::SupervisedExample example,
                           rl::MakeSupervisedExample(prompt, *settings_.codec, settings_.end_of_sequence));
    examples.push_back(std::move(example));
  }
  return learner_.SupervisedUpdate(examples);
}

absl::StatusOr<double> Team::SupervisedUpdate(uint64_t first_index, int64_t num_examples) {
  v1::RankCommand command;
  command.mutable_supervised_update()->set_first_index(first_index);
  command.mutable_supervised_update()->set_num_examples(static_cast<uint32_t>(num_examples));
  MOERL_RETURN_IF_ERROR(Tell(command));
  return DoSupervisedUpdate(first_index, num_examples);
}

absl::Status Team::BeginReinforcement() {
  v1::RankCommand command;
  command.mutable_begin_reinforcement();
  MOERL_RETURN_IF_ERROR(Tell(command));
  return learner_.BeginReinforcement();
}

absl::Status Team::LoadReference(const std::string& directory) {
  v1::RankCommand command;
  command.mutable_load_reference()->set_directory(directory);
  MOERL_RETURN_IF_ERROR(Tell(command));
  return learner_.LoadReference(directory);
}

absl::StatusOr<StepReport> Team::TrainStep(const StepJob& job) {
  if (ranks_.size() > 1) {
    MOERL_RETURN_IF_ERROR(Tell(TrainCommand(job, settings_.model.num_experts <= 256 ? 1 : 2)));
  }
  return learner_.TrainStep(job);
}

absl::StatusOr<double> Team::PassRate(uint64_t first_index, int64_t num_prompts, bool is_greedy) {
  v1::RankCommand command;
  command.mutable_pass_rate()->set_first_index(first_index);
  command.mutable_pass_rate()->set_num_prompts(static_cast<uint32_t>(num_prompts));
  command.mutable_pass_rate()->set_is_greedy(is_greedy);
  MOERL_RETURN_IF_ERROR(Tell(command));
  return learner_.PassRate(*settings_.held_out, environment_, first_index, num_prompts, is_greedy);
}

absl::Status Team::SaveState(const std::string& directory) {
  v1::RankCommand command;
  command.mutable_save_state()->set_directory(directory);
  MOERL_RETURN_IF_ERROR(Tell(command));
  return Obey(command);
}

absl::Status Team::RestoreState(const std::string& directory, int num_ranks_saved, double kl_coefficient) {
  v1::RankCommand command;
  command.mutable_restore_state()->set_directory(directory);
  command.mutable_restore_state()->set_num_ranks_saved(static_cast<uint32_t>(num_ranks_saved));
  command.mutable_restore_state()->set_kl_coefficient(kl_coefficient);
  MOERL_RETURN_IF_ERROR(Tell(command));
  return Obey(command);
}

// A rank whose files are damaged goes on, to be told of an older checkpoint: the leader hears what every rank found.
absl::Status Team::DoRestoreState(const v1::RestoreStateCommand& command) {
  const absl::Status mine = learner_.RestoreState(command.directory(), static_cast<int>(command.num_ranks_saved()));
  learner_.set_kl_coefficient(command.kl_coefficient());
  MOERL_ASSIGN_OR_RETURN(const std::vector<std::string> all, ranks_.Gather(mine.ok() ? "" : mine.ToString()));
  if (ranks_.rank() != 0) return absl::OkStatus();
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].empty()) return absl::DataLossError(absl::StrCat("rank ", rank, ": ", all[rank]));
  }
  return absl::OkStatus();
}

absl::Status Team::ExportPolicy(const std::string& directory) {
  v1::RankCommand command;
  command.mutable_export_policy()->set_directory(directory);
  MOERL_RETURN_IF_ERROR(Tell(command));
  return learner_.ExportPolicy(directory);
}

absl::StatusOr<std::vector<std::string>> Team::PutShards(int64_t number) {
  MOERL_ASSIGN_OR_RETURN(const Shard shard, ShardOf(settings_, ranks_, learner_));
  MOERL_ASSIGN_OR_RETURN(const std::string mine, publisher_.PutShard(number, ranks_.rank(), shard.views));
  return ranks_.Gather(mine);
}

absl::StatusOr<VersionName> Team::Publish(int64_t epoch, int64_t number, const std::function<void()>& before_commit) {
  const uint64_t element_bytes = settings_.compute == model::Compute::kFp32 ? 4 : 2;
  const uint64_t bytes = static_cast<uint64_t>(settings_.model.num_parameters()) * element_bytes;
  const std::string config_json =
      model::FormatConfig(settings_.model, settings_.compute == model::Compute::kFp32 ? "float32" : "bfloat16");
  v1::RankCommand command;
  command.mutable_put_shard()->set_publisher_epoch(static_cast<uint64_t>(epoch));
  command.mutable_put_shard()->set_number(static_cast<uint64_t>(number));
  absl::Status status;
  for (int attempt = 0; attempt < kPublishAttemptsMax; ++attempt) {
    // Refused here only if a newer publisher exists; a refused Commit may mean that the version must begin again.
    status = publisher_.Begin(number, ranks_.size(), bytes);
    if (absl::IsFailedPrecondition(status)) return absl::AbortedError(status.message());
    if (!status.ok()) continue;
    MOERL_RETURN_IF_ERROR(Tell(command));
    MOERL_ASSIGN_OR_RETURN(const std::vector<std::string> shards, PutShards(number));
    if (before_commit) before_commit();
    const auto committed = publisher_.Commit(number, shards, config_json, settings_.numerics_fingerprint);
    if (committed.ok()) return committed->name;
    status = committed.status();
  }
  return status;
}

absl::Status Team::Stop() {
  v1::RankCommand command;
  command.mutable_stop();
  return Tell(command);
}

absl::Status Team::Obey(const v1::RankCommand& command) {
  switch (command.command_case()) {
    case v1::RankCommand::kSupervisedUpdate:
      return DoSupervisedUpdate(command.supervised_update().first_index(), command.supervised_update().num_examples())
          .status();
    case v1::RankCommand::kBeginReinforcement:
      return learner_.BeginReinforcement();
    case v1::RankCommand::kLoadReference:
      return learner_.LoadReference(command.load_reference().directory());
    case v1::RankCommand::kTrainStep: {
      MOERL_ASSIGN_OR_RETURN(const StepJob job, JobFrom(command.train_step(), settings_.sampling));
      return learner_.TrainStep(job).status();
    }
    case v1::RankCommand::kPassRate: {
      const v1::PassRateCommand& from = command.pass_rate();
      return learner_
          .PassRate(*settings_.held_out, environment_, from.first_index(), from.num_prompts(), from.is_greedy())
          .status();
    }
    case v1::RankCommand::kSaveState: {
      MOERL_RETURN_IF_ERROR(learner_.SaveState(command.save_state().directory()));
      return ranks_.Gather("").status();  // all are there when the leader renames the directory
    }
    case v1::RankCommand::kRestoreState:
      return DoRestoreState(command.restore_state());
    case v1::RankCommand::kExportPolicy:
      return learner_.ExportPolicy(command.export_policy().directory());
    case v1::RankCommand::kPutShard: {
      publisher_.UseEpoch(static_cast<int64_t>(command.put_shard().publisher_epoch()));
      return PutShards(static_cast<int64_t>(command.put_shard().number())).status();
    }
    case v1::RankCommand::kStop:
    case v1::RankCommand::COMMAND_NOT_SET:
      break;
  }
  return absl::OkStatus();
}

absl::Status Team::Follow() {
  while (true) {
    MOERL_ASSIGN_OR_RETURN(const std::string bytes, ranks_.Broadcast(""));
    v1::RankCommand command;
    if (!command.ParseFromString(bytes)) return absl::DataLossError("trainer: the leader's command does not parse");
    if (command.has_stop()) return absl::OkStatus();
    MOERL_RETURN_IF_ERROR(Obey(command));
  }
}

}  // namespace moerl::trainer
