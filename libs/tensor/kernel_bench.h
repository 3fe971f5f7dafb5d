#ifndef MOERL_LIBS_TENSOR_KERNEL_BENCH_H_
#define MOERL_LIBS_TENSOR_KERNEL_BENCH_H_

#include <vector>

#include "absl/status/statusor.h"
#include "libs/base/measurement.h"
#include "libs/tensor/dtype.h"

namespace moerl::tensor {

// Measures the CPU kernels on one thread beside limits of this machine taken in the same run: GEMM against
// multiply-adds that never leave registers, decode against reading the same bytes, grouped GEMM against dense,
// attention and the vocabulary against GEMM. About `seconds` in all (at least 1). Times are CPU time of the
// thread, best of many, so that other processes' turns do not count.
absl::StatusOr<std::vector<Measurement>> MeasureKernels(double seconds);

// y [rows, columns] fp32 = x [rows, depth] · a packed weight, for comparison with other libraries.
struct GemmShape {
  DType dtype = DType::kBf16;
  int64_t rows = 0, columns = 0, depth = 0;
};

// GFLOP/s of one shape on one thread for about `seconds`: the median of windows of a few milliseconds of CPU time.
absl::StatusOr<Measurement> MeasureGemm(const GemmShape& shape, double seconds);

}  // namespace moerl::tensor

#endif  // MOERL_LIBS_TENSOR_KERNEL_BENCH_H_
