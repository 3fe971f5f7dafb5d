#ifndef MOERL_LIBS_TENSOR_KERNEL_BENCH_H_
#define MOERL_LIBS_TENSOR_KERNEL_BENCH_H_

#include <vector>

#include "absl/status/statusor.h"
#include "libs/base/measurement.h"

namespace moerl::tensor {

// Measures the CPU kernels on one thread beside limits of this machine taken in the same run: GEMM against
// multiply-adds that never leave registers, decode against reading the same bytes, grouped GEMM against dense,
// attention and the vocabulary against GEMM. About `seconds` in all (at least 1). Times are CPU time of the
// thread, best of many, so that other processes' turns do not count.
absl::StatusOr<std::vector<Measurement>> MeasureKernels(double seconds);

}  // namespace moerl::tensor

#endif  // MOERL_LIBS_TENSOR_KERNEL_BENCH_H_
