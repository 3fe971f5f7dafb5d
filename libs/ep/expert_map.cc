#include "libs/ep/expert_map.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "libs/ep/combine_tree.h"

namespace moerl::ep {
namespace {

// Gives the experts [begin, end) to the parts [first, last) as the tree splits them.
void Spread(int begin, int end, int first, int last, std::vector<std::pair<int, int>>* ranges) {
  if (last - first == 1) {
    (*ranges)[first] = {begin, end};
    return;
  }
  const int middle = TreeSplit(begin, end), part = TreeSplit(first, last);
  Spread(begin, middle, first, part, ranges);
  Spread(middle, end, part, last, ranges);
}

}  // namespace

absl::StatusOr<ExpertMap> ExpertMap::Create(const fabric::Membership& membership, std::vector<int> owner) {
  constexpr int kExpertsMax = 1 << 16;
  if (owner.empty() || owner.size() > kExpertsMax) {
    return absl::InvalidArgumentError(absl::StrCat("ep: ", owner.size(), " experts, expected 1 to ", kExpertsMax));
  }
  ExpertMap map;
  map.of_rank_.resize(membership.size());
  for (int rank = 0; rank < membership.size(); ++rank) {
    map.of_node_.resize(std::max<size_t>(map.of_node_.size(), membership.node_of(rank) + 1));
  }
  for (size_t expert = 0; expert < owner.size(); ++expert) {
    const int rank = owner[expert];
    if (rank < 0 || rank >= membership.size()) {
      return absl::InvalidArgumentError(absl::StrCat("ep: expert ", expert, " is given to rank ", rank,
                                                     ", the group has ranks 0 to ", membership.size() - 1));
    }
    map.node_.push_back(membership.node_of(rank));
    map.local_index_.push_back(static_cast<int>(map.of_rank_[rank].size()));
    map.of_rank_[rank].push_back(static_cast<int>(expert));
    map.of_node_[map.node_.back()].push_back(static_cast<int>(expert));
  }
  map.owner_ = std::move(owner);
  return map;
}

absl::StatusOr<ExpertMap> ExpertMap::Aligned(const fabric::Membership& membership, int num_experts) {
  std::vector<std::vector<int>> ranks_of_node;
  for (int rank = 0; rank < membership.size(); ++rank) {
    const size_t node = membership.node_of(rank);
    ranks_of_node.resize(std::max(ranks_of_node.size(), node + 1));
    ranks_of_node[node].push_back(rank);
  }
  std::vector<int> owner(std::max(num_experts, 0));
  std::vector<std::pair<int, int>> nodes(ranks_of_node.size());
  Spread(0, num_experts, 0, static_cast<int>(nodes.size()), &nodes);
  for (size_t node = 0; node < nodes.size(); ++node) {
    std::vector<std::pair<int, int>> ranks(ranks_of_node[node].size());
    Spread(nodes[node].first, nodes[node].second, 0, static_cast<int>(ranks.size()), &ranks);
    for (size_t i = 0; i < ranks.size(); ++i) {
      for (int e = ranks[i].first; e < ranks[i].second; ++e) owner[e] = ranks_of_node[node][i];
    }
  }
  return Create(membership, std::move(owner));
}

int ExpertMap::max_experts_of_rank() const {
  size_t most = 0;
  for (const std::vector<int>& experts : of_rank_) most = std::max(most, experts.size());
  return static_cast<int>(most);
}

int ExpertMap::max_experts_of_node() const {
  size_t most = 0;
  for (const std::vector<int>& experts : of_node_) most = std::max(most, experts.size());
  return static_cast<int>(most);
}

uint64_t ExpertMap::digest() const {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const int rank : owner_) hash = (hash ^ static_cast<uint64_t>(rank)) * 0x100000001b3u;
  return hash;
}

}  // namespace moerl::ep
