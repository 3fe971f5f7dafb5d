#include "libs/tensor/cpu/simd_avx2.h"

#define MOERL_ISA avx2
#include "libs/tensor/cpu/kernels.h"

namespace moerl::tensor {

const KernelTable& Avx2Kernels() {
  static const KernelTable table = avx2::MakeTable("avx2");
  return table;
}

}  // namespace moerl::tensor
