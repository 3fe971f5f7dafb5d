#include "libs/model/weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "libs/base/check.h"
#include "libs/base/status_macros.h"
#include "libs/model/backend.h"
#include "libs/model/packed_model.h"

namespace moerl::model {
namespace {

bool IsFloat(FileDType dtype) {
  return dtype == FileDType::kF32 || dtype == FileDType::kBF16 || dtype == FileDType::kF16 || dtype == FileDType::kF64;
}

std::string ShapeText(absl::Span<const int64_t> shape) { return absl::StrCat("[", absl::StrJoin(shape, ","), "]"); }

float HalfToFloat(uint16_t half) {
  const int exponent = (half >> 10) & 31, mantissa = half & 1023;
  const float sign = half & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
}

// Reads element i of possibly unaligned bytes.
template <typename T>
T ElementAt(absl::string_view bytes, size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
  return value;
}

// What a directory may hold beside the parameters.
bool MayIgnore(const ModelConfig& config, const WeightsOptions& options, absl::string_view name) {
  if (absl::EndsWith(name, "rotary_emb.inv_freq")) return true;
  // GLM-4.5 ends with a layer for multi-token prediction, which transformers leaves out as well.
  if (config.family == Family::kGlm4Moe &&
      absl::StartsWith(name, absl::StrCat("model.layers.", config.num_layers, "."))) {
    return true;
  }
  return name == "lm_head.weight" && (config.tie_word_embeddings || options.value_head);
}

bool IsLocal(const WeightsOptions& options, int expert) {
  return expert < 0 || options.local_experts.empty() ||
         std::binary_search(options.local_experts.begin(), options.local_experts.end(), expert);
}

absl::Status CheckLocalExperts(const ModelConfig& config, const WeightsOptions& options) {
  int32_t previous = -1;
  for (const int32_t expert : options.local_experts) {
    if (expert <= previous || expert >= config.num_experts) {
      return absl::InvalidArgumentError(absl::StrCat("local experts: expected ascending ids below ", config.num_experts,
                                                     ", found ", expert, " after ", previous));
    }
    previous = expert;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status DecodeToFloat(const TensorView& tensor, float* out) {
  const size_t n = tensor.bytes.size() / FileDTypeBytes(tensor.dtype);
  switch (tensor.dtype) {
    case FileDType::kF32:
      std::memcpy(out, tensor.bytes.data(), n * sizeof(float));
      break;
    case FileDType::kBF16:
      for (size_t i = 0; i < n; ++i) out[i] = tensor::ToFloat(tensor::Bf16{ElementAt<uint16_t>(tensor.bytes, i)});
      break;
    case FileDType::kF16:
      for (size_t i = 0; i < n; ++i) out[i] = HalfToFloat(ElementAt<uint16_t>(tensor.bytes, i));
      break;
    case FileDType::kF64:
      for (size_t i = 0; i < n; ++i) out[i] = static_cast<float>(ElementAt<double>(tensor.bytes, i));
      break;
    default:
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor \"", tensor.name, "\": expected a floating-point type, found ", FileDTypeName(tensor.dtype)));
  }
  for (size_t i = 0; i < n; ++i) {
    if (!std::isfinite(out[i])) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor \"", tensor.name, "\": element ", i, " is ", out[i], "; weights must be finite"));
    }
  }
  return absl::OkStatus();
}

std::string EncodeFromFloat(absl::Span<const float> values, Compute compute) {
  std::string out(values.size() * tensor::SizeOf(DTypeOf(compute)), '\0');
  if (compute == Compute::kFp32) {
    std::memcpy(out.data(), values.data(), out.size());
    return out;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t bits = tensor::ToBf16(values[i]).bits;
    std::memcpy(out.data() + i * sizeof(bits), &bits, sizeof(bits));
  }
  return out;
}

absl::StatusOr<std::vector<const TensorView*>> MatchTensors(const ModelConfig& config, const ParameterTable& table,
                                                            absl::Span<const TensorView> tensors,
                                                            const WeightsOptions& options) {
  MOERL_RETURN_IF_ERROR(CheckLocalExperts(config, options));
  const std::vector<Parameter>& parameters = table.parameters();
  std::vector<const TensorView*> found(parameters.size(), nullptr);
  const TensorView* tied_head = nullptr;
  for (const TensorView& tensor : tensors) {
    const int index = table.Find(tensor.name);
    if (index < 0) {
      if (tensor.name == "lm_head.weight" && !options.value_head) tied_head = &tensor;
      if (MayIgnore(config, options, tensor.name)) continue;
      return absl::InvalidArgumentError(absl::StrCat("tensor \"", tensor.name, "\" is not a parameter of this ",
                                                     ModelType(config.family),
                                                     " model; check that config.json belongs to it"));
    }
    const Parameter& p = parameters[index];
    if (found[index] != nullptr)
      return absl::InvalidArgumentError(absl::StrCat("tensor \"", p.name, "\" is given twice"));
    if (tensor.shape != p.shape()) {
      return absl::InvalidArgumentError(absl::StrCat("tensor \"", p.name, "\": expected shape ", ShapeText(p.shape()),
                                                     ", found ", ShapeText(tensor.shape)));
    }
    if (!IsFloat(tensor.dtype) ||
        static_cast<int64_t>(tensor.bytes.size()) != p.size() * FileDTypeBytes(tensor.dtype)) {
      return absl::InvalidArgumentError(absl::StrCat("tensor \"", p.name, "\": expected ", p.size(),
                                                     " floating-point elements, found ", tensor.bytes.size(),
                                                     " bytes of ", FileDTypeName(tensor.dtype)));
    }
    found[index] = &tensor;
  }
  int64_t missing = 0;
  const Parameter* first = nullptr;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& p = parameters[i];
    if (!IsLocal(options, p.expert)) found[i] = nullptr;
    if (found[i] != nullptr || !IsLocal(options, p.expert) || p.role == Role::kValueHead) continue;
    if (missing++ == 0) first = &p;
  }
  if (missing > 0) {
    return absl::InvalidArgumentError(absl::StrCat("tensor \"", first->name, "\" ", ShapeText(first->shape()),
                                                   " is missing",
                                                   missing > 1 ? absl::StrCat(", and ", missing - 1, " more") : ""));
  }
  const TensorView& embedding = *found[table.Find(Role::kEmbedding)];
  if (tied_head != nullptr && (tied_head->dtype != embedding.dtype || tied_head->bytes != embedding.bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor \"lm_head.weight\" is another than \"", embedding.name,
                     "\", but config.json says tie_word_embeddings; set it to false to use the head"));
  }
  return found;
}

Weights::~Weights() = default;

absl::StatusOr<std::shared_ptr<const Weights>> Weights::FromTensors(const ModelConfig& config,
                                                                    absl::Span<const TensorView> tensors,
                                                                    const WeightsOptions& options) {
  MOERL_RETURN_IF_ERROR(ValidateConfig(config));
  const ParameterTable table(config, options.value_head);
  MOERL_ASSIGN_OR_RETURN(const std::vector<const TensorView*> found, MatchTensors(config, table, tensors, options));
  MOERL_ASSIGN_OR_RETURN(std::unique_ptr<tensor::Backend> backend, NewModelBackend(1));
  std::shared_ptr<Weights> weights(new Weights);
  weights->config_ = config;
  weights->options_ = options;
  weights->packed_ = std::make_unique<PackedModel>(config, options, *backend);
  std::vector<float> values;
  for (size_t i = 0; i < found.size(); ++i) {
    const Parameter& p = table.parameters()[i];
    if (!IsLocal(options, p.expert)) continue;
    values.assign(p.size(), 0.0f);
    if (found[i] != nullptr) MOERL_RETURN_IF_ERROR(DecodeToFloat(*found[i], values.data()));
    weights->packed_->Put(p, values.data(), *backend);
  }
  return weights;
}

absl::StatusOr<std::shared_ptr<const Weights>> Weights::Load(const std::string& directory,
                                                             const WeightsOptions& options) {
  MOERL_ASSIGN_OR_RETURN(const ModelConfig config, LoadConfig(directory));
  MOERL_ASSIGN_OR_RETURN(const std::unique_ptr<SafetensorsDirectory> files, SafetensorsDirectory::Open(directory));
  auto weights = FromTensors(config, files->tensors(), options);
  if (weights.ok()) return weights;
  return absl::Status(weights.status().code(), absl::StrCat(directory, ": ", weights.status().message()));
}

std::shared_ptr<const Weights> Weights::FromMasters(const ModelConfig& config, const ParameterTable& table,
                                                    const WeightsOptions& options,
                                                    absl::FunctionRef<const float*(size_t)> values,
                                                    std::shared_ptr<const Weights> reuse) {
  auto backend = NewModelBackend(1);
  MOERL_CHECK(backend.ok());
  std::shared_ptr<Weights> weights;
  if (reuse != nullptr && reuse.use_count() == 1) {
    // What follows comes after the last reads of whoever let it go: every change of the count acquires and releases.
    std::shared_ptr<const Weights>(reuse).reset();
    weights = std::const_pointer_cast<Weights>(std::move(reuse));
  } else {
    weights.reset(new Weights);
    weights->config_ = config;
    weights->options_ = options;
    weights->packed_ = std::make_unique<PackedModel>(config, options, **backend);
  }
  for (size_t i = 0; i < table.parameters().size(); ++i) {
    const Parameter& p = table.parameters()[i];
    if (IsLocal(options, p.expert)) weights->packed_->Put(p, values(i), **backend);
  }
  return weights;
}

std::string& TensorSet::Add(absl::string_view name, FileDType dtype, std::vector<int64_t> shape) {
  int64_t bytes = FileDTypeBytes(dtype);
  for (const int64_t dim : shape) bytes *= dim;
  storage_.push_back(std::make_unique<std::string>(bytes, '\0'));
  views_.push_back({std::string(name), dtype, std::move(shape), absl::string_view(*storage_.back())});
  return *storage_.back();
}

}  // namespace moerl::model
