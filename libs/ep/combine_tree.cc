#include "libs/ep/combine_tree.h"

#include <algorithm>

#include "libs/base/check.h"

namespace moerl::ep {
namespace {

constexpr int kBlock = 512;  // columns at a time, so that the sums in progress stay in the first-level cache

// Depth of the tree over 65,536 experts, the most that u16 ids name.
constexpr int kDepthMax = 17;

struct Reduction {
  absl::Span<const TreeItem> items;
  int wire_block;
  int column;   // first of the block
  int columns;  // in the block, at most kBlock
  float scratch[kDepthMax][kBlock];

  void Load(const TreeItem& item, float* out) const {
    if (item.fp32 != nullptr) {
      Scale(item.fp32 + column, item.weight, columns, out);
    } else {
      Scale(item.bf16 + column, item.weight, columns, out);
    }
  }

  void AddItem(const TreeItem& item, float* out) const {
    if (item.fp32 != nullptr) {
      AddScaled(item.fp32 + column, item.weight, columns, out);
    } else {
      AddScaled(item.bf16 + column, item.weight, columns, out);
    }
  }

  // Sum of items[lo, hi) over the node [begin, end).
  void Sum(int begin, int end, int lo, int hi, int depth, float* out) {
    const bool rounds = end - begin >= wire_block;  // rounding twice changes nothing: the outermost node decides
    if (hi - lo == 1) {
      Load(items[lo], out);
    } else {
      int middle, split;
      while (true) {  // nodes with one child pass its value on
        middle = TreeSplit(begin, end);
        split = lo;
        while (split < hi && items[split].begin < middle) ++split;
        if (split == lo) {
          begin = middle;
        } else if (split == hi) {
          end = middle;
        } else {
          break;
        }
      }
      MOERL_CHECK(depth < kDepthMax && items[split - 1].end <= middle);
      Sum(begin, middle, lo, split, depth, out);
      if (hi - split == 1 && end - middle < wire_block) {
        AddItem(items[split], out);
      } else {
        float* right = scratch[depth];
        Sum(middle, end, split, hi, depth + 1, right);
        Add(right, columns, out);
      }
    }
    if (rounds) RoundToBf16(columns, out);
  }
};

void Maximal(int begin, int end, int lo, int hi, absl::Span<const uint16_t> ids, absl::FunctionRef<bool(int)> is_owned,
             std::vector<Subtree>* subtrees) {
  if (lo == hi) return;
  bool all = true;
  for (int i = lo; i < hi; ++i) all = all && is_owned(ids[i]);
  if (all) {
    subtrees->push_back({begin, end, lo, hi});
    return;
  }
  if (end - begin == 1) return;
  const int middle = TreeSplit(begin, end);
  int split = lo;
  while (split < hi && ids[split] < middle) ++split;
  Maximal(begin, middle, lo, split, ids, is_owned, subtrees);
  Maximal(middle, end, split, hi, ids, is_owned, subtrees);
}

}  // namespace

bool IsTreeNode(int num_experts, int begin, int end) {
  if (begin < 0 || begin >= end || end > num_experts) return false;
  int low = 0, high = num_experts;
  while (high - low > end - begin) {
    const int middle = TreeSplit(low, high);
    if (begin >= middle) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low == begin && high == end;
}

void MaximalSubtrees(int num_experts, absl::Span<const uint16_t> ids, absl::FunctionRef<bool(int)> is_owned,
                     std::vector<Subtree>* subtrees) {
  Maximal(0, num_experts, 0, static_cast<int>(ids.size()), ids, is_owned, subtrees);
}

void ReduceTree(int begin, int end, absl::Span<const TreeItem> items, int wire_block, int hidden, float* out) {
  MOERL_CHECK(!items.empty());
  Reduction reduction;
  reduction.items = items;
  reduction.wire_block = wire_block;
  for (int column = 0; column < hidden; column += kBlock) {
    reduction.column = column;
    reduction.columns = std::min(kBlock, hidden - column);
    reduction.Sum(begin, end, 0, static_cast<int>(items.size()), 0, out + column);
  }
}

}  // namespace moerl::ep
