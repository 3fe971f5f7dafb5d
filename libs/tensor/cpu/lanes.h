#ifndef MOERL_LIBS_TENSOR_CPU_LANES_H_
#define MOERL_LIBS_TENSOR_CPU_LANES_H_

#include <cstdint>

#include "libs/tensor/dtype.h"

// Every instruction set computes with the same 16 virtual lanes. A path is a header that defines, in a namespace
// of its own, F32x16 with the operations listed in simd_portable.h (the definition of each), and a .cc file
// compiled with that path's flags that includes the kernels. Nothing inline from outside that namespace may be
// called there: the linker could then take the copy with the newer instructions for all paths.
namespace moerl::tensor {

inline constexpr int kLanes = 16;

struct Full {
  static constexpr int count = kLanes;
};
struct Tail {  // the first `count` lanes, 0 .. 16; loads give 0 in the others
  int count;
};

}  // namespace moerl::tensor

#endif  // MOERL_LIBS_TENSOR_CPU_LANES_H_
