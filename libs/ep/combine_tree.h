#ifndef MOERL_LIBS_EP_COMBINE_TREE_H_
#define MOERL_LIBS_EP_COMBINE_TREE_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "libs/ep/row_math.h"

// The combine tree: the one order in which a token's expert outputs are added, on one rank or on many.
//
// A binary tree over the expert ids [0, num_experts): a node [a, b) splits at a + ceil((b - a) / 2), its leaves are
// single experts. A node's value is left + right in fp32; an absent expert is skipped, never added as zero. A node that
// covers at least `wire_block` experts is rounded to bf16, so that it can cross a link as bf16 without changing bits.
// A leaf is weight * y in fp32.
//
// Any set of disjoint intervals whose values are themselves tree sums can take the place of their leaves: whoever holds
// all chosen experts of an interval adds it up, and the bits of the root stay the same.
namespace moerl::ep {

// `wire_block` that rounds nowhere.
inline constexpr int kNoWireBlock = std::numeric_limits<int>::max();

constexpr int TreeSplit(int begin, int end) { return begin + (end - begin + 1) / 2; }

// Whether [begin, end) is a node of the tree over [0, num_experts).
bool IsTreeNode(int num_experts, int begin, int end);

// An interval of the tree and which of a row's ids (ascending) lie in it: ids[first_id .. last_id).
struct Subtree {
  int begin = 0, end = 0;
  int first_id = 0, last_id = 0;
};

// Appends the maximal subtrees of a row: the largest tree intervals in which every chosen expert of the row is owned.
// `ids` ascending and distinct, all of the row's.
void MaximalSubtrees(int num_experts, absl::Span<const uint16_t> ids, absl::FunctionRef<bool(int expert)> is_owned,
                     std::vector<Subtree>* subtrees);

// A value that takes part in a sum: an expert's output (a leaf, times weight) or a partial (weight 1).
struct TreeItem {
  int begin = 0, end = 0;
  const float* fp32 = nullptr;  // one of the two is set
  const uint16_t* bf16 = nullptr;
  float weight = 1.0f;
};

// out[0..hidden) = the tree sum over the node [begin, end) of `items` (at least one, ascending, disjoint, inside the
// node). `out` must not overlap the items.
void ReduceTree(int begin, int end, absl::Span<const TreeItem> items, int wire_block, int hidden, float* out);

}  // namespace moerl::ep

#endif  // MOERL_LIBS_EP_COMBINE_TREE_H_
