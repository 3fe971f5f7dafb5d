#ifndef MOERL_LIBS_TENSOR_PACKED_WEIGHT_H_
#define MOERL_LIBS_TENSOR_PACKED_WEIGHT_H_

#include <cstdint>

#include "libs/tensor/tensor.h"

namespace moerl::tensor {

// `groups` weight matrices W of [n, k] (one for a linear layer, one an expert for a group of experts), in the
// layout that one backend's GEMM reads. Made by Backend::NewPacked, filled by Backend::Pack, opaque to callers.
struct PackedWeight {
  DType dtype = DType::kF32;
  int64_t groups = 0;
  int64_t n = 0;      // outputs
  int64_t k = 0;      // inputs
  Tensor forward;     // for y = x Wᵀ
  Tensor transposed;  // for x = y W (input gradients); empty where only inference is done
};

}  // namespace moerl::tensor

#endif  // MOERL_LIBS_TENSOR_PACKED_WEIGHT_H_
