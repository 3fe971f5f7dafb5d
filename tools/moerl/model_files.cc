// moerl init, export, upcycle: making model directories.
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "libs/base/status_macros.h"
#include "libs/model/weights.h"
#include "tools/moerl/commands.h"

namespace moerl {
namespace {

// DIR itself, or the directory of DIR/config.json.
absl::StatusOr<model::ModelConfig> ConfigAt(std::string path) {
  const std::string kName = "/config.json";
  if (path.size() > kName.size() && path.compare(path.size() - kName.size(), kName.size(), kName) == 0) {
    path.resize(path.size() - kName.size());
  } else if (path == "config.json") {
    path = ".";
  }
  return model::LoadConfig(path);
}

absl::Status Init(const std::string& config_path, uint64_t seed, const std::string& out, model::Compute compute) {
  MOERL_ASSIGN_OR_RETURN(const model::ModelConfig config, ConfigAt(config_path));
  MOERL_RETURN_IF_ERROR(
      model::WriteModelDirectory(out, config, model::RandomParameters(config, seed).views(), compute));
  std::printf("%s: %lld parameters, %lld active a token\n", out.c_str(),
              static_cast<long long>(config.num_parameters()), static_cast<long long>(config.num_active_parameters()));
  return absl::OkStatus();
}

absl::Status Export(const std::string& from, const std::string& out, model::Compute compute, int64_t shard_bytes) {
  MOERL_ASSIGN_OR_RETURN(const model::ModelConfig config, model::LoadConfig(from));
  MOERL_ASSIGN_OR_RETURN(const auto files, model::SafetensorsDirectory::Open(from));
  MOERL_RETURN_IF_ERROR(model::WriteModelDirectory(out, config, files->tensors(), compute, shard_bytes));
  return model::CopyTokenizerFiles(from, out);
}

absl::Status UpcycleModel(const std::string& from, const std::string& out, const model::UpcycleOptions& options,
                          model::Compute compute) {
  MOERL_ASSIGN_OR_RETURN(const model::ModelConfig config, model::LoadConfig(from));
  MOERL_ASSIGN_OR_RETURN(const auto files, model::SafetensorsDirectory::Open(from));
  MOERL_ASSIGN_OR_RETURN(const model::Upcycled moe, model::Upcycle(config, files->tensors(), options));
  MOERL_RETURN_IF_ERROR(model::WriteModelDirectory(out, moe.config, moe.tensors.views(), compute));
  return model::CopyTokenizerFiles(from, out);
}

// The required ones among string options.
absl::Status Require(std::initializer_list<std::pair<const char*, const std::string&>> options) {
  for (const auto& [name, value] : options) {
    if (value.empty()) return absl::InvalidArgumentError(absl::StrCat("--", name, " is required"));
  }
  return absl::OkStatus();
}

int Done(const absl::Status& status) { return status.ok() ? 0 : Failure(status); }

}  // namespace

int RunInit(const Arguments& arguments) {
  Flags flags("init", arguments);
  if (flags.Switch("help")) {
    std::puts(
        "usage: moerl init --config FILE --out DIR [--seed N] [--compute bf16|fp32]\nMakes a model directory with "
        "random weights; the same seed gives the same bytes.");
    return 0;
  }
  const std::string config = flags.String("config", ""), out = flags.String("out", "");
  const uint64_t seed = static_cast<uint64_t>(flags.Integer("seed", 0, 0, INT64_MAX));
  const auto compute = model::ParseCompute(flags.String("compute", "bf16"));
  if (absl::Status s = flags.Finish(0, 0); !s.ok()) return UsageError(s);
  if (absl::Status s = Require({{"config", config}, {"out", out}}); !s.ok()) return UsageError(s);
  if (!compute.ok()) return UsageError(compute.status());
  return Done(Init(config, seed, out, *compute));
}

int RunExport(const Arguments& arguments) {
  Flags flags("export", arguments);
  if (flags.Switch("help")) {
    std::puts(
        "usage: moerl export --model DIR --out DIR [--compute bf16|fp32] [--shard-mib N]\nWrites a model directory "
        "again, with its tokenizer, for transformers or for moerl.");
    return 0;
  }
  const std::string from = flags.String("model", ""), out = flags.String("out", "");
  const auto compute = model::ParseCompute(flags.String("compute", "bf16"));
  const int64_t shard_mib = flags.Integer("shard-mib", 5120, 1, int64_t{1} << 20);
  if (absl::Status s = flags.Finish(0, 0); !s.ok()) return UsageError(s);
  if (absl::Status s = Require({{"model", from}, {"out", out}}); !s.ok()) return UsageError(s);
  if (!compute.ok()) return UsageError(compute.status());
  return Done(Export(from, out, *compute, shard_mib << 20));
}

int RunUpcycle(const Arguments& arguments) {
  Flags flags("upcycle", arguments);
  if (flags.Switch("help")) {
    std::puts(
        "usage: moerl upcycle --model DIR --out DIR [--experts N] [--top-k K] [--seed N] [--compute bf16|fp32]\nMakes "
        "an MoE whose experts are copies of the MLPs of a dense Llama or Qwen3.");
    return 0;
  }
  const std::string from = flags.String("model", ""), out = flags.String("out", "");
  model::UpcycleOptions options;
  options.num_experts = flags.Integer("experts", options.num_experts, 1, 65535);
  options.top_k = flags.Integer("top-k", options.top_k, 1, 64);
  options.seed = static_cast<uint64_t>(flags.Integer("seed", 0, 0, INT64_MAX));
  const auto compute = model::ParseCompute(flags.String("compute", "bf16"));
  if (absl::Status s = flags.Finish(0, 0); !s.ok()) return UsageError(s);
  if (absl::Status s = Require({{"model", from}, {"out", out}}); !s.ok()) return UsageError(s);
  if (!compute.ok()) return UsageError(compute.status());
  return Done(UpcycleModel(from, out, options, *compute));
}

}  // namespace moerl
