#ifndef MOERL_TESTS_UNIT_EP_ORACLE_H_
#define MOERL_TESTS_UNIT_EP_ORACLE_H_

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "libs/ep/combine_tree.h"

// The serial oracle: the combine tree and its partials, written the slow obvious way, for all ranks at once.
namespace moerl::ep::oracle {

struct Leaf {
  int expert;
  float weight;
  const float* y;
};

// Column `column` of the tree sum over [begin, end).
inline std::optional<float> Sum(int begin, int end, const std::vector<Leaf>& leaves, int wire_block, int column) {
  std::optional<float> value;
  if (end - begin == 1) {
    for (const Leaf& leaf : leaves) {
      if (leaf.expert == begin) value = leaf.weight * leaf.y[column];
    }
  } else {
    const bool is_empty =
        std::none_of(leaves.begin(), leaves.end(), [&](const Leaf& l) { return l.expert >= begin && l.expert < end; });
    if (is_empty) return std::nullopt;
    const int middle = begin + (end - begin + 1) / 2;
    const std::optional<float> left = Sum(begin, middle, leaves, wire_block, column);
    const std::optional<float> right = Sum(middle, end, leaves, wire_block, column);
    value = !left ? right : !right ? left : std::optional<float>(*left + *right);
  }
  if (value && end - begin >= wire_block) value = FloatFromBf16(Bf16FromFloat(*value));
  return value;
}

// How many maximal subtrees the experts of `node` make of a token's.
inline int NumPartials(int begin, int end, const std::vector<int>& experts, const std::vector<int>& node_of_expert,
                       int node) {
  int num = 0, num_here = 0;
  for (const int e : experts) {
    if (e < begin || e >= end) continue;
    ++num;
    num_here += node_of_expert[e] == node;
  }
  if (num == 0) return 0;
  if (num == num_here) return 1;
  if (end - begin == 1) return 0;
  const int middle = begin + (end - begin + 1) / 2;
  return NumPartials(begin, middle, experts, node_of_expert, node) +
         NumPartials(middle, end, experts, node_of_expert, node);
}

}  // namespace moerl::ep::oracle

#endif  // MOERL_TESTS_UNIT_EP_ORACLE_H_
