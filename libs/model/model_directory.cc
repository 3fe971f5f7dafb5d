// Making model directories: random parameters, sparse upcycling, export.
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "libs/base/env.h"
#include "libs/base/status_macros.h"
#include "libs/model/sampling.h"
#include "libs/model/weights.h"
#include "libs/tensor/math.h"

namespace moerl::model {
namespace {

// FNV-1a: a fixed function of the name, so that a tensor's random numbers do not depend on the others.
uint64_t NameHash(absl::string_view name) {
  uint64_t hash = 0xCBF29CE484222325;
  for (const char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001B3;
  return hash;
}

// Box-Muller on the counter-based generator, two numbers a pair of uniforms.
void FillNormal(uint64_t seed, absl::string_view name, float deviation, int64_t count, float* out) {
  const SampleKey key{seed, NameHash(name), 0};
  for (int64_t i = 0; i < count; i += 2) {
    const double u = 1.0 - UniformRandom(key, RandomPurpose::kInitialization, i);  // (0, 1]
    const double angle = UniformRandom(key, RandomPurpose::kInitialization, i + 1);
    const float radius = deviation * std::sqrt(-2.0f * tensor::Log(static_cast<float>(u)));
    float sin, cos;
    tensor::SinCos(static_cast<float>(angle * 6.283185307179586), &sin, &cos);
    out[i] = radius * cos;
    if (i + 1 < count) out[i + 1] = radius * sin;
  }
}

bool IsNorm(Role role) {
  return role == Role::kAttentionNorm || role == Role::kMlpNorm || role == Role::kFinalNorm || role == Role::kQNorm ||
         role == Role::kKNorm;
}

float* Floats(std::string& bytes) { return reinterpret_cast<float*>(bytes.data()); }

constexpr char kSingleFile[] = "model.safetensors", kIndexFile[] = "model.safetensors.index.json";

// Consecutive tensors, none beyond `bytes_max` together unless it is alone.
std::vector<std::vector<size_t>> SplitShards(const std::vector<TensorView>& tensors, int64_t element_bytes,
                                             int64_t bytes_max) {
  std::vector<std::vector<size_t>> shards(1);
  int64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t size =
        static_cast<int64_t>(tensors[i].bytes.size()) / FileDTypeBytes(tensors[i].dtype) * element_bytes;
    if (bytes > 0 && bytes + size > bytes_max) {
      shards.emplace_back();
      bytes = 0;
    }
    shards.back().push_back(i);
    bytes += size;
  }
  return shards;
}

}  // namespace

TensorSet RandomParameters(const ModelConfig& config, uint64_t seed) {
  TensorSet set;
  const ParameterTable table(config);
  for (const Parameter& p : table.parameters()) {
    float* values = Floats(set.Add(p.name, FileDType::kF32, p.shape()));
    if (IsNorm(p.role)) {
      std::fill(values, values + p.size(), 1.0f);
    } else if (!p.is_vector) {
      FillNormal(seed, p.name, config.initializer_range, p.size(), values);
    }
  }
  return set;
}

absl::Status WriteModelDirectory(const std::string& directory, const ModelConfig& config,
                                 absl::Span<const TensorView> tensors, Compute compute, int64_t shard_bytes_max) {
  MOERL_RETURN_IF_ERROR(ValidateConfig(config));
  const ParameterTable table(config);
  MOERL_ASSIGN_OR_RETURN(const std::vector<const TensorView*> found, MatchTensors(config, table, tensors, {}));
  std::vector<TensorView> ordered;
  ordered.reserve(found.size());
  for (const TensorView* tensor : found) ordered.push_back(*tensor);
  MOERL_RETURN_IF_ERROR(PosixEnv()->CreateDirs(directory));
  const auto shards = SplitShards(ordered, FileDTypeBytes(FileDTypeOf(compute)), shard_bytes_max);
  nlohmann::json index;  // sorted by name
  int64_t total_bytes = 0;
  for (size_t s = 0; s < shards.size(); ++s) {
    const std::string file =
        shards.size() == 1 ? kSingleFile : absl::StrFormat("model-%05d-of-%05d.safetensors", s + 1, shards.size());
    TensorSet converted;
    std::vector<float> values;
    for (const size_t i : shards[s]) {
      values.resize(table.parameters()[i].size());
      MOERL_RETURN_IF_ERROR(DecodeToFloat(ordered[i], values.data()));
      const Compute stored = table.parameters()[i].StoredAs(compute);
      std::string& bytes = converted.Add(ordered[i].name, FileDTypeOf(stored), ordered[i].shape);
      const std::string encoded = EncodeFromFloat(values, stored);
      std::memcpy(bytes.data(), encoded.data(), encoded.size());
      index["weight_map"][ordered[i].name] = file;
      total_bytes += static_cast<int64_t>(encoded.size());
    }
    MOERL_RETURN_IF_ERROR(WriteSafetensors(JoinPath(directory, file), converted.views()));
  }
  if (shards.size() > 1) {
    index["metadata"]["total_size"] = total_bytes;
    MOERL_RETURN_IF_ERROR(PosixEnv()->WriteFileDurably(JoinPath(directory, kIndexFile), index.dump(2) + "\n"));
  }
  // What an earlier model there left would be read instead.
  MOERL_RETURN_IF_ERROR(PosixEnv()->RemoveTree(JoinPath(directory, shards.size() > 1 ? kSingleFile : kIndexFile)));
  return PosixEnv()->WriteFileDurably(JoinPath(directory, "config.json"),
                                      FormatConfig(config, compute == Compute::kFp32 ? "float32" : "bfloat16"));
}

absl::Status CopyTokenizerFiles(const std::string& from, const std::string& to) {
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
                           "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
                           "chat_template.json", "generation_config.json"}) {
    const std::string path = JoinPath(from, name);
    if (!PosixEnv()->Exists(path)) continue;
    MOERL_ASSIGN_OR_RETURN(const std::string bytes, PosixEnv()->ReadFile(path));
    MOERL_RETURN_IF_ERROR(PosixEnv()->WriteFileDurably(JoinPath(to, name), bytes));
  }
  return absl::OkStatus();
}

namespace {

absl::StatusOr<ModelConfig> UpcycledConfig(const ModelConfig& dense, const UpcycleOptions& options) {
  ModelConfig config = dense;
  switch (dense.family) {
    case Family::kLlama:
      if (dense.qkv_bias || dense.o_bias || dense.mlp_bias) {
        return absl::InvalidArgumentError("upcycle: a Llama with attention or MLP biases has no Mixtral counterpart");
      }
      config.family = Family::kMixtral;
      break;
    case Family::kQwen3:
      config.family = Family::kQwen3Moe;
      break;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("upcycle: expected a dense llama or qwen3 model, found ", ModelType(dense.family)));
  }
  config.num_experts = options.num_experts;
  config.top_k = options.top_k;
  config.moe_intermediate_size = dense.intermediate_size;
  config.intermediate_size = 0;
  config.norm_topk_prob = true;
  config.layer_has_experts.assign(config.num_layers, true);
  MOERL_RETURN_IF_ERROR(ValidateConfig(config));
  return config;
}

Role DenseRole(Role role) {
  if (role == Role::kExpertGate) return Role::kGate;
  if (role == Role::kExpertUp) return Role::kUp;
  return role == Role::kExpertDown ? Role::kDown : role;
}

}  // namespace

absl::StatusOr<Upcycled> Upcycle(const ModelConfig& dense, absl::Span<const TensorView> tensors,
                                 const UpcycleOptions& options) {
  Upcycled out;
  MOERL_ASSIGN_OR_RETURN(out.config, UpcycledConfig(dense, options));
  const ParameterTable from(dense), to(out.config);
  MOERL_ASSIGN_OR_RETURN(const std::vector<const TensorView*> found, MatchTensors(dense, from, tensors, {}));
  for (const Parameter& p : to.parameters()) {
    float* values = Floats(out.tensors.Add(p.name, FileDType::kF32, p.shape()));
    if (p.role == Role::kRouter) {
      FillNormal(options.seed, p.name, out.config.initializer_range, p.size(), values);
      continue;
    }
    MOERL_RETURN_IF_ERROR(DecodeToFloat(*found[from.Find(DenseRole(p.role), p.layer)], values));
  }
  return out;
}

}  // namespace moerl::model
