#ifndef MOERL_LIBS_MODEL_BACKWARD_H_
#define MOERL_LIBS_MODEL_BACKWARD_H_

#include "libs/model/transformer.h"

namespace moerl::model {

// The backward of transformer.h's blocks, private to the library. Gradients of parameters are added, in ascending token
// order.

// Where parameter gradients live: one flat fp32 buffer in the order of the table. Neighbours in the table that the
// kernels use as one matrix are one matrix here too.
class Gradients {
 public:
  // offsets[i] is the place of parameter i in `data`, -1 when this rank does not hold it.
  Gradients(const ParameterTable& table, const std::vector<int64_t>& offsets, float* data)
      : table_(table), offsets_(offsets), data_(data) {}

  float* At(Role role, int layer = -1, int expert = -1) const;
  tensor::Mat Matrix(Role role, int layer, int expert, int64_t rows, int64_t cols) const {
    return {At(role, layer, expert), rows, cols};
  }

 private:
  const ParameterTable& table_;
  const std::vector<int64_t>& offsets_;
  float* data_;
};

// dx [T, hidden] is the gradient of the block's output on entry and of its input on return. Sequences are packed.
void AttentionBackward(const Engine& engine, int layer, const Rotary& rotary, absl::Span<const int64_t> offsets,
                       const AttentionSaved& saved, const Gradients& gradients, tensor::Mat dx, Arena& temp);

// d_probs (null data: none) is the router losses' gradient with respect to probs; d_logits_extra likewise to the
// logits.
absl::Status MlpBackward(const Engine& engine, int layer, const MlpSaved& saved, tensor::ConstMat d_probs,
                         tensor::ConstMat d_logits_extra, const Gradients& gradients, tensor::Mat dx, Arena& temp);

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_BACKWARD_H_
