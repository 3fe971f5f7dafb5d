#ifndef MOERL_LIBS_TENSOR_CPU_CPU_BACKEND_H_
#define MOERL_LIBS_TENSOR_CPU_CPU_BACKEND_H_

#include <memory>

#include "absl/status/statusor.h"
#include "libs/tensor/backend.h"

namespace moerl::tensor {

// Which instructions the kernels use. All give the same bits.
enum class CpuIsa { kBest, kPortable, kAvx2, kAvx512 };

struct CpuOptions {
  int threads = 1;             // 1 .. 1024, the calling thread included
  CpuIsa isa = CpuIsa::kBest;  // the best this processor has
};

// INVALID_ARGUMENT when the thread count is out of range, FAILED_PRECONDITION when the processor lacks the ISA.
absl::StatusOr<std::unique_ptr<Backend>> NewCpuBackend(const CpuOptions& options);

// Whether this processor can run the path; kPortable and kBest always.
bool CpuHas(CpuIsa isa);

}  // namespace moerl::tensor

#endif  // MOERL_LIBS_TENSOR_CPU_CPU_BACKEND_H_
