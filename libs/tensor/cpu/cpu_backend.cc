#include "libs/tensor/cpu/cpu_backend.h"

#include "absl/strings/str_cat.h"
#include "libs/tensor/cpu/backend_impl.h"

namespace moerl::tensor {
namespace {

constexpr int kMaxThreads = 1024;

const char* IsaName(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kBest:
      return "best";
    case CpuIsa::kPortable:
      return "portable";
    case CpuIsa::kAvx2:
      return "avx2";
    case CpuIsa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

const KernelTable& KernelsOf(CpuIsa isa) {
#if defined(MOERL_HAVE_X86_KERNELS)
  const bool best = isa == CpuIsa::kBest;
  if (isa == CpuIsa::kAvx512 || (best && CpuHas(CpuIsa::kAvx512))) return Avx512Kernels();
  if (isa == CpuIsa::kAvx2 || (best && CpuHas(CpuIsa::kAvx2))) return Avx2Kernels();
#endif
  (void)isa;
  return PortableKernels();
}

}  // namespace

const KernelTable& BestKernels() { return KernelsOf(CpuIsa::kBest); }

bool CpuHas(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kBest:
    case CpuIsa::kPortable:
      return true;
#if defined(MOERL_HAVE_X86_KERNELS)
    case CpuIsa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case CpuIsa::kAvx512:
      return CpuHas(CpuIsa::kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512bf16");
#else
    case CpuIsa::kAvx2:
    case CpuIsa::kAvx512:
      return false;
#endif
  }
  return false;
}

absl::StatusOr<std::unique_ptr<Backend>> NewCpuBackend(const CpuOptions& options) {
  if (options.threads < 1 || options.threads > kMaxThreads) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor: ", options.threads, " threads asked for; use 1 to ", kMaxThreads));
  }
  if (!CpuHas(options.isa)) {
    return absl::FailedPreconditionError(absl::StrCat("tensor: instruction set ", IsaName(options.isa),
                                                      " asked for, this processor lacks it; use best"));
  }
  return std::make_unique<CpuBackend>(KernelsOf(options.isa), options.threads);
}

}  // namespace moerl::tensor
