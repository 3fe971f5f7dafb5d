#include "libs/tensor/cpu/simd_avx512.h"

#define MOERL_ISA avx512
#include "libs/tensor/cpu/kernels.h"

namespace moerl::tensor {

const KernelTable& Avx512Kernels() {
  static const KernelTable table = avx512::MakeTable("avx512");
  return table;
}

}  // namespace moerl::tensor
