#include "libs/model/backend.h"

#include <algorithm>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "libs/tensor/cpu/cpu_backend.h"

namespace moerl::model {

absl::StatusOr<std::unique_ptr<tensor::Backend>> NewModelBackend(int num_threads) {
  tensor::CpuOptions options;
  options.threads = num_threads;
  const char* isa = std::getenv("MOERL_CPU_ISA");
  const absl::string_view name = isa == nullptr ? "best" : isa;
  if (name == "portable") {
    options.isa = tensor::CpuIsa::kPortable;
  } else if (name == "avx2") {
    options.isa = tensor::CpuIsa::kAvx2;
  } else if (name == "avx512") {
    options.isa = tensor::CpuIsa::kAvx512;
  } else if (name != "best") {
    return absl::InvalidArgumentError(
        absl::StrCat("MOERL_CPU_ISA: expected best, avx512, avx2 or portable, found \"", name, "\""));
  }
  return tensor::NewCpuBackend(options);
}

int WireBlock(const ModelConfig& config, Compute compute) {
  return compute == Compute::kFp32 ? 0 : static_cast<int>(std::max<int64_t>(1, config.num_experts / 8));
}

std::string NumericsFingerprint(const ModelConfig& config, Compute compute) {
  return absl::StrCat("cpu/", ComputeName(compute), "/wire_block=", WireBlock(config, compute),
                      "/kernels=", tensor::kKernelRevision);
}

}  // namespace moerl::model
