#ifndef MOERL_LIBS_EP_EXPERT_MAP_H_
#define MOERL_LIBS_EP_EXPERT_MAP_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "libs/fabric/transport.h"

namespace moerl::ep {

// Which rank holds which expert. The same on every rank. Immutable.
class ExpertMap {
 public:
  // owner[e] is the dense rank of expert e: any map, also uneven, also ranks without experts.
  // INVALID_ARGUMENT: no expert, more than 65,536, or an owner outside the membership (the index is named).
  static absl::StatusOr<ExpertMap> Create(const fabric::Membership& membership, std::vector<int> owner);

  // The default: nodes, and ranks inside a node, take the combine tree's own splits, so that a rank's and a node's
  // experts are subtrees and every token comes back as one partial a node. Even for powers of two.
  static absl::StatusOr<ExpertMap> Aligned(const fabric::Membership& membership, int num_experts);

  int num_experts() const { return static_cast<int>(owner_.size()); }
  int owner(int expert) const { return owner_[expert]; }
  int node(int expert) const { return node_[expert]; }
  int local_index(int expert) const { return local_index_[expert]; }  // among its owner's experts, ascending
  const std::vector<int>& experts_of_rank(int rank) const { return of_rank_[rank]; }  // ascending
  const std::vector<int>& experts_of_node(int node) const { return of_node_[node]; }  // ascending
  int max_experts_of_rank() const;
  int max_experts_of_node() const;
  uint64_t digest() const;  // of the owners, to compare between ranks

 private:
  std::vector<int> owner_, node_, local_index_;
  std::vector<std::vector<int>> of_rank_, of_node_;
};

}  // namespace moerl::ep

#endif  // MOERL_LIBS_EP_EXPERT_MAP_H_
