#include "libs/tensor/cpu/simd_portable.h"

#define MOERL_ISA portable
#include "libs/tensor/cpu/kernels.h"

namespace moerl::tensor {

const KernelTable& PortableKernels() {
  static const KernelTable table = portable::MakeTable("portable");
  return table;
}

}  // namespace moerl::tensor
