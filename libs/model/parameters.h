#ifndef MOERL_LIBS_MODEL_PARAMETERS_H_
#define MOERL_LIBS_MODEL_PARAMETERS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "libs/model/config.h"

namespace moerl::model {

// What a parameter does. The same roles serve every family; only the Hugging Face names differ.
enum class Role {
  kEmbedding,      // [vocab, hidden]
  kFinalNorm,      // [hidden]
  kLmHead,         // [vocab, hidden]; absent when tied to the embedding
  kAttentionNorm,  // [hidden]
  kQ,
  kK,
  kV,  // [heads * head_dim, hidden]
  kQBias,
  kKBias,
  kVBias,
  kQNorm,
  kKNorm,  // [head_dim], or [heads * head_dim] for QkNorm::kFull
  kO,      // [hidden, heads * head_dim]
  kOBias,
  kMlpNorm,  // [hidden]
  kGate,
  kUp,    // [intermediate, hidden]: a dense layer's MLP
  kDown,  // [hidden, intermediate]
  kGateBias,
  kUpBias,
  kDownBias,
  kRouter,      // [experts, hidden]
  kRouterBias,  // [experts]: chooses, never weighs; no gradient, fp32 whatever the compute type
  kExpertGate,
  kExpertUp,    // [moe_intermediate, hidden], one of each for every expert
  kExpertDown,  // [hidden, moe_intermediate]
  kSharedGate,
  kSharedUp,      // [shared_intermediate, hidden]
  kSharedDown,    // [hidden, shared_intermediate]
  kSharedRouter,  // [1, hidden]: the sigmoid gate of the shared expert
  kValueHead,     // [1, hidden]: a critic's, in the place of kLmHead
};

struct Parameter {
  std::string name;  // Hugging Face's
  Role role = Role::kEmbedding;
  int layer = -1;              // -1: outside the layers
  int expert = -1;             // -1: replicated; otherwise it lives on the expert's rank
  int64_t rows = 1, cols = 0;  // a vector has one row
  bool is_vector = false;

  std::vector<int64_t> shape() const {
    return is_vector ? std::vector<int64_t>{cols} : std::vector<int64_t>{rows, cols};
  }
  int64_t size() const { return rows * cols; }
  // The type its values are stored, published and used in.
  Compute StoredAs(Compute compute) const { return role == Role::kRouterBias ? Compute::kFp32 : compute; }
};

// Every parameter of an architecture in one fixed order, and the precomputed name -> index table. Parameters that the
// kernels use as one matrix (q, k, v; gate, up; an expert layer's gates and ups, its downs) are neighbours. Immutable.
class ParameterTable {
 public:
  // A critic has `value_head.weight` where a policy has its (untied) head.
  explicit ParameterTable(const ModelConfig& config, bool value_head = false);

  const std::vector<Parameter>& parameters() const { return parameters_; }
  // -1 when the architecture has no parameter of that name.
  int Find(absl::string_view name) const;
  // Index of the parameter with this role; -1 when there is none.
  int Find(Role role, int layer = -1, int expert = -1) const;

 private:
  std::vector<Parameter> parameters_;
  absl::flat_hash_map<std::string, int> by_name_;
  absl::flat_hash_map<int64_t, int> by_role_;
};

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_PARAMETERS_H_
