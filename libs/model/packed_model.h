#ifndef MOERL_LIBS_MODEL_PACKED_MODEL_H_
#define MOERL_LIBS_MODEL_PACKED_MODEL_H_

#include <vector>

#include "libs/model/parameters.h"
#include "libs/model/weights.h"
#include "libs/tensor/backend.h"

namespace moerl::model {

// Private to the library: parameters in the layouts that the kernels read. Matrices that share their input are one
// packed weight (q, k, v; gate, up). Vectors are fp32, rounded to the compute type first.
struct PackedLayer {
  std::vector<float> attention_norm, mlp_norm, q_norm, k_norm;
  std::vector<float> qkv_bias, o_bias, gate_up_bias, down_bias;
  tensor::PackedWeight qkv, o;
  tensor::PackedWeight gate_up, down;                // a dense layer's
  tensor::PackedWeight router;                       // [experts, hidden]
  std::vector<float> router_bias;                    // [experts], never rounded; empty: none
  tensor::PackedWeight expert_gate_up, expert_down;  // one group a local expert
  tensor::PackedWeight shared_gate_up, shared_down, shared_router;
};

struct PackedModel {
  tensor::Tensor embedding;   // [vocab, hidden] in the compute type
  tensor::PackedWeight head;  // [vocab, hidden]: lm_head, or the embedding again when tied; absent in a critic
  tensor::PackedWeight value_head;
  std::vector<float> final_norm;
  std::vector<PackedLayer> layers;
  std::vector<int32_t> local_experts;

  PackedModel(const ModelConfig& config, const WeightsOptions& options, tensor::Backend& backend);

  // Stores one parameter from its fp32 values, row-major.
  void Put(const Parameter& parameter, const float* values, tensor::Backend& backend);

  // Position of an expert among the local ones; -1 when it lives elsewhere.
  int LocalExpert(int expert) const { return local_index_[expert]; }

 private:
  ModelConfig config_;
  tensor::DType dtype_;
  std::vector<int> local_index_;
};

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_PACKED_MODEL_H_
