// What a learner keeps on disk: masters and moments by rank, and the policy for others to load.

#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "libs/base/env.h"
#include "libs/base/status_macros.h"
#include "services/trainer/learner.h"

namespace moerl::trainer {
namespace {

std::string StatePath(const std::string& directory, const char* what, int rank) {
  return JoinPath(directory, absl::StrFormat("%s_%04d.safetensors", what, rank));
}

// The expert that a tensor of a state file belongs to, -1 for none: state names end in the parameter's own name.
int ExpertOf(const model::ParameterTable& table, const std::string& name) {
  for (size_t at = 0; at < name.size(); ++at) {
    const int index = table.Find(absl::string_view(name).substr(at));
    if (index >= 0) return table.parameters()[static_cast<size_t>(index)].expert;
  }
  return -1;
}

// Joins what `num_ranks` ranks wrote into one file with this rank's experts.
absl::Status Reshard(const model::ModelConfig& config, const std::string& directory, const char* what, int num_ranks,
                     const std::set<int>& local_experts, const std::string& to) {
  const model::ParameterTable table(config);
  std::vector<std::unique_ptr<model::SafetensorsFile>> files;
  std::vector<model::TensorView> views;
  std::set<std::string> taken;
  for (int rank = 0; rank < num_ranks; ++rank) {
    MOERL_ASSIGN_OR_RETURN(auto file, model::SafetensorsFile::Open(StatePath(directory, what, rank)));
    for (const model::TensorView& view : file->tensors()) {
      const int expert = ExpertOf(table, view.name);
      if (expert >= 0 && !local_experts.empty() && !local_experts.contains(expert)) continue;
      if (taken.insert(view.name).second) views.push_back(view);
    }
    files.push_back(std::move(file));
  }
  return model::WriteSafetensors(to, views);
}

}  // namespace

absl::Status Learner::SaveState(const std::string& directory) const {
  MOERL_RETURN_IF_ERROR(policy_->SaveState(StatePath(directory, "policy", ranks_.rank())));
  if (!critic_) return absl::OkStatus();
  return critic_->SaveState(StatePath(directory, "critic", ranks_.rank()));
}

absl::Status Learner::RestoreState(const std::string& directory, int num_ranks_saved) {
  if (settings_.recipe.needs_values() && !critic_) {
    MOERL_ASSIGN_OR_RETURN(critic_, CopyOfPolicy(true));
  }
  std::set<int> local;
  if (ranks_.exchange()) {
    for (int32_t expert : ranks_.exchange()->local_experts()) local.insert(expert);
  }
  const auto restore = [&](model::TrainerModel& model, const char* what) -> absl::Status {
    if (num_ranks_saved == ranks_.size()) return model.RestoreState(StatePath(directory, what, ranks_.rank()));
    const std::string joined = StatePath(settings_.config.trainer().run_directory(), what, ranks_.rank());
    MOERL_RETURN_IF_ERROR(Reshard(settings_.model, directory, what, num_ranks_saved, local, joined));
    MOERL_RETURN_IF_ERROR(model.RestoreState(joined));
    return PosixEnv()->Remove(joined);
  };
  MOERL_RETURN_IF_ERROR(restore(*policy_, "policy"));
  return critic_ ? restore(*critic_, "critic") : absl::OkStatus();
}

absl::Status Learner::ExportPolicy(const std::string& directory) const {
  MOERL_RETURN_IF_ERROR(WritePolicy(directory));
  const std::string& source = settings_.config.model().path();
  if (source.empty() || ranks_.rank() != 0) return absl::OkStatus();
  return model::CopyTokenizerFiles(source, directory);
}

absl::Status Learner::WritePolicy(const std::string& directory) const {
  const std::string part = StatePath(settings_.RunPath("checkpoints"), "export", ranks_.rank());
  model::TensorSet mine;
  const model::ParameterTable table(settings_.model);
  MOERL_RETURN_IF_ERROR(policy_->ForEachTensor([&](const model::TensorView& view) {
    const int index = table.Find(view.name);
    const bool is_expert = index >= 0 && table.parameters()[static_cast<size_t>(index)].expert >= 0;
    if (is_expert || ranks_.rank() == 0)
      mine.Add(view.name, view.dtype, view.shape).assign(view.bytes.data(), view.bytes.size());
    return absl::OkStatus();
  }));
  if (ranks_.size() == 1)
    return model::WriteModelDirectory(directory, settings_.model, mine.views(), settings_.compute);
  // Ranks share the checkpoints' disk (only that, on Kubernetes): the experts of others come to rank 0 through files.
  if (ranks_.rank() != 0) MOERL_RETURN_IF_ERROR(model::WriteSafetensors(part, mine.views()));
  MOERL_ASSIGN_OR_RETURN(const auto barrier, ranks_.Gather(""));
  if (ranks_.rank() != 0) return absl::OkStatus();
  std::vector<model::TensorView> views = mine.views();
  std::vector<std::unique_ptr<model::SafetensorsFile>> files;
  for (int rank = 1; rank < ranks_.size(); ++rank) {
    const std::string path = StatePath(settings_.RunPath("checkpoints"), "export", rank);
    MOERL_ASSIGN_OR_RETURN(auto file, model::SafetensorsFile::Open(path));
    views.insert(views.end(), file->tensors().begin(), file->tensors().end());
    files.push_back(std::move(file));
    MOERL_RETURN_IF_ERROR(PosixEnv()->Remove(path));  // stays readable while mapped
  }
  return model::WriteModelDirectory(directory, settings_.model, views, settings_.compute);
}

}  // namespace moerl::trainer
