#include "libs/tensor/cpu/combine_program.h"

#include "libs/base/check.h"

namespace moerl::tensor {
namespace {

struct Builder {
  const int32_t* ids;
  int wire_block;
  CombineProgram program;

  void Push(int8_t step) { program.steps[program.length++] = step; }

  // The node [a, b), whose experts are ids[begin] .. ids[end - 1].
  void Node(int a, int b, int begin, int end) {
    if (begin == end) return;
    if (end - begin == 1) {
      Push(static_cast<int8_t>(begin));  // alone it passes every node below; rounding twice is rounding once
    } else {
      const int middle = a + (b - a + 1) / 2;
      int split = begin;
      while (split < end && ids[split] < middle) ++split;
      Node(a, middle, begin, split);
      Node(middle, b, split, end);
      if (split != begin && split != end) Push(CombineProgram::kAdd);
    }
    const bool is_rounded = program.steps[program.length - 1] == CombineProgram::kRound;
    if (wire_block > 0 && b - a >= wire_block && !is_rounded) Push(CombineProgram::kRound);
  }
};

}  // namespace

CombineProgram MakeCombineProgram(const int32_t* ids, int count, int num_experts, int wire_block) {
  MOERL_CHECK(count >= 0 && count <= kMaxTopK);
  for (int i = 0; i < count; ++i) MOERL_CHECK(ids[i] >= (i == 0 ? 0 : ids[i - 1] + 1) && ids[i] < num_experts);
  Builder builder{ids, wire_block, {}};
  builder.Node(0, num_experts, 0, count);
  return builder.program;
}

}  // namespace moerl::tensor
