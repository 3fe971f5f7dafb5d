#ifndef MOERL_LIBS_MODEL_BACKEND_H_
#define MOERL_LIBS_MODEL_BACKEND_H_

#include <memory>

#include "absl/status/statusor.h"
#include "libs/model/config.h"
#include "libs/tensor/backend.h"

namespace moerl::model {

// The backend that models run on. MOERL_CPU_ISA (best, avx512, avx2, portable) narrows the instructions used; the bits
// stay the same. INVALID_ARGUMENT for a thread count or name out of range, FAILED_PRECONDITION when the processor lacks
// it.
absl::StatusOr<std::unique_ptr<tensor::Backend>> NewModelBackend(int num_threads);

inline tensor::DType DTypeOf(Compute compute) {
  return compute == Compute::kFp32 ? tensor::DType::kF32 : tensor::DType::kBf16;
}

// Tree nodes over at least this many experts are rounded to bf16 in bf16 compute; 0: none are.
int WireBlock(const ModelConfig& config, Compute compute);

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_BACKEND_H_
