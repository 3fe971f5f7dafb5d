#ifndef MOERL_LIBS_EP_COMBINE_TREE_H_
#define MOERL_LIBS_EP_COMBINE_TREE_H_

#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "absl/types/span.h"

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

// An interval of the tree and which of a row's ids (ascending) lie in it: ids[first_id .. last_id).
struct Subtree {
  int begin = 0, end = 0;
  int first_id = 0, last_id = 0;
};

// Appends the maximal subtrees of a row: the largest tree intervals in which every chosen expert of the row is owned.
// `ids` ascending and distinct, all of the row's; is_owned[i] belongs to ids[i].
void MaximalSubtrees(int num_experts, absl::Span<const uint16_t> ids, absl::Span<const bool> is_owned,
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

// Rounds to nearest, ties to even; a NaN stays a quiet NaN.
inline uint16_t Bf16FromFloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline float FloatFromBf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

}  // namespace moerl::ep

#endif  // MOERL_LIBS_EP_COMBINE_TREE_H_
