#ifndef MOERL_LIBS_MODEL_WEIGHTS_H_
#define MOERL_LIBS_MODEL_WEIGHTS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "libs/model/config.h"
#include "libs/model/parameters.h"
#include "libs/model/safetensors.h"

namespace moerl::model {

// A version of the policy is named (epoch of its first commit, number); number k is the policy after k steps.
struct Version {
  uint64_t epoch = 0;
  uint64_t number = 0;
  bool operator==(const Version&) const = default;
};

struct WeightsOptions {
  Compute compute = Compute::kBf16;
  // Experts this rank holds, ascending; empty: all of them.
  std::vector<int32_t> local_experts = {};
  // Also pack the transposes that backward needs.
  bool with_backward = false;
  // A critic: `value_head.weight` [1, hidden] instead of the vocabulary head. Zero where the tensors have none; a
  // policy's `lm_head.weight` is ignored.
  bool value_head = false;
};

struct PackedModel;  // libs/model/packed_model.h, private: the layout the kernels want

// One immutable set of all parameters (of the local experts), in the compute type, packed for the backend. Shared by
// whoever runs it through shared_ptr<const Weights>; thread-safe.
class Weights {
 public:
  ~Weights();

  // From a Hugging Face directory. Elements are converted to the compute type (nearest even). Every expected tensor
  // must be there with its shape and a floating-point type, and nothing else but what transformers also ignores
  // (`rotary_emb.inv_freq`, a tied `lm_head.weight` equal to the embedding); errors name the tensor, expected and
  // found. A NaN or an infinity is refused with the tensor's name and the element's index.
  static absl::StatusOr<std::shared_ptr<const Weights>> Load(const std::string& directory,
                                                             const WeightsOptions& options);

  // From tensors as weight sync delivers them, in any order, checked as Load does. Tensors of experts that are not
  // local are skipped when present. The bytes are not needed after the call.
  static absl::StatusOr<std::shared_ptr<const Weights>> FromTensors(const ModelConfig& config,
                                                                    absl::Span<const TensorView> tensors,
                                                                    const WeightsOptions& options);

  // From fp32 values: `values(parameter)` is called once for every parameter of the table that this rank holds. No
  // checks. `reuse`, an earlier result for the same configuration and options that nobody else holds, gives its memory
  // to this one.
  static std::shared_ptr<const Weights> FromMasters(const ModelConfig& config, const ParameterTable& table,
                                                    const WeightsOptions& options,
                                                    absl::FunctionRef<const float*(size_t parameter)> values,
                                                    std::shared_ptr<const Weights> reuse = nullptr);

  const ModelConfig& config() const { return config_; }
  const WeightsOptions& options() const { return options_; }
  const PackedModel& packed() const { return *packed_; }

 private:
  Weights() = default;
  ModelConfig config_;
  WeightsOptions options_;
  std::unique_ptr<PackedModel> packed_;
};

// Checks `tensors` against the table as Weights::Load describes, and finds the one of each parameter. Entries are null
// for experts that are not local and for a missing value head.
absl::StatusOr<std::vector<const TensorView*>> MatchTensors(const ModelConfig& config, const ParameterTable& table,
                                                            absl::Span<const TensorView> tensors,
                                                            const WeightsOptions& options);

// A set of named tensors with their bytes: what a model directory holds, and what the trainer keeps as masters.
class TensorSet {
 public:
  // The storage of a new tensor, zeroed; it must not change size. Names are the caller's to keep distinct.
  std::string& Add(absl::string_view name, FileDType dtype, std::vector<int64_t> shape);
  const std::vector<TensorView>& views() const { return views_; }

 private:
  std::vector<TensorView> views_;
  std::vector<std::unique_ptr<std::string>> storage_;
};

// Random parameters in fp32: normal(0, initializer_range) for matrices, 1 for norms, 0 for biases. Each tensor's
// numbers depend on (seed, its name) alone.
TensorSet RandomParameters(const ModelConfig& config, uint64_t seed);

// Writes config.json and model.safetensors (sharded with an index above `shard_bytes_max`) so that `transformers` loads
// them. Tensors are converted to `compute` (router biases stay fp32); they are checked against the configuration first.
// Makes the directory where it is missing and takes the place of a model that is there; synced when it returns.
absl::Status WriteModelDirectory(const std::string& directory, const ModelConfig& config,
                                 absl::Span<const TensorView> tensors, Compute compute,
                                 int64_t shard_bytes_max = int64_t{5} << 30);

// Copies what a Hugging Face directory has besides configuration and weights and a model made from it needs as well:
// tokenizer, chat template, generation defaults, by the names transformers uses. What `from` lacks is left out.
absl::Status CopyTokenizerFiles(const std::string& from, const std::string& to);

// Sparse upcycling (Komatsuzaki et al., 2022): every MLP of a dense model becomes `num_experts` copies with a router
// drawn from normal(0, initializer_range). Llama becomes Mixtral and Qwen3 becomes Qwen3-MoE. Routing weights are
// normalised, so that the new model computes what the dense one did. (Qwen2 is refused: Qwen2-MoE cannot do without a
// shared expert.)
struct UpcycleOptions {
  int64_t num_experts = 8;
  int64_t top_k = 2;
  uint64_t seed = 0;
};
struct Upcycled {
  ModelConfig config;
  TensorSet tensors;
};
absl::StatusOr<Upcycled> Upcycle(const ModelConfig& dense, absl::Span<const TensorView> tensors,
                                 const UpcycleOptions& options);

// The values of a floating-point tensor as fp32. INVALID_ARGUMENT for another type, or for a NaN or an infinity.
absl::Status DecodeToFloat(const TensorView& tensor, float* out);

// The file type that holds a compute type's values.
inline FileDType FileDTypeOf(Compute compute) { return compute == Compute::kFp32 ? FileDType::kF32 : FileDType::kBF16; }

// fp32 values as bytes of the compute type, rounded to nearest even.
std::string EncodeFromFloat(absl::Span<const float> values, Compute compute);

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_WEIGHTS_H_
