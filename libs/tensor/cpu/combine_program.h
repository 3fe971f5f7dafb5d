#ifndef MOERL_LIBS_TENSOR_CPU_COMBINE_PROGRAM_H_
#define MOERL_LIBS_TENSOR_CPU_COMBINE_PROGRAM_H_

#include <cstdint>

namespace moerl::tensor {

inline constexpr int kMaxTopK = 64;
inline constexpr int kMaxTreeDepth = 32;  // the tree over 2^31 experts

// The combine tree of one token as steps on a stack, in post-order: push leaf i (0 ..), add the two on top, or
// round the top to bf16.
struct CombineProgram {
  static constexpr int8_t kAdd = -1;
  static constexpr int8_t kRound = -2;
  int length = 0;
  int8_t steps[3 * kMaxTopK];
};

// ids: the token's experts, ascending, count <= kMaxTopK. The tree's leaves are 0 .. num_experts - 1; it splits
// [a, b) at a + ceil((b - a) / 2). Nodes that cover at least wire_block experts are rounded, none if it is 0.
CombineProgram MakeCombineProgram(const int32_t* ids, int count, int num_experts, int wire_block);

}  // namespace moerl::tensor

#endif  // MOERL_LIBS_TENSOR_CPU_COMBINE_PROGRAM_H_
