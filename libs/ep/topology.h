#ifndef MOERL_LIBS_EP_TOPOLOGY_H_
#define MOERL_LIBS_EP_TOPOLOGY_H_

#include <vector>

#include "libs/fabric/transport.h"

namespace moerl::ep {

// Who forwards for whom, derived from the membership; the same on every rank. Ranks are dense indices.
//
// A token of rank a for node n goes to proxy(a, n): the rank of n with a's local index, modulo n's rank count where
// nodes are uneven. The proxy fans out inside its node, and sends the node's partial sums back to a.
class Topology {
 public:
  explicit Topology(const fabric::Membership& membership);

  int size() const { return static_cast<int>(node_of_.size()); }
  int self() const { return self_; }
  int num_nodes() const { return static_cast<int>(ranks_of_node_.size()); }
  int node() const { return node_of_[self_]; }
  int node_of(int rank) const { return node_of_[rank]; }
  int local_index(int rank) const { return local_index_[rank]; }
  const std::vector<int>& ranks_of_node(int node) const { return ranks_of_node_[node]; }
  const std::vector<int>& local_ranks() const { return ranks_of_node_[node()]; }
  int proxy(int rank, int node) const {
    const std::vector<int>& there = ranks_of_node_[node];
    return there[local_index_[rank] % there.size()];
  }
  // Ranks of other nodes that this rank forwards for, ascending.
  const std::vector<int>& in_peers() const { return in_peers_; }

 private:
  int self_;
  std::vector<int> node_of_, local_index_;
  std::vector<std::vector<int>> ranks_of_node_;
  std::vector<int> in_peers_;
};

inline Topology::Topology(const fabric::Membership& membership) : self_(membership.self) {
  for (int rank = 0; rank < membership.size(); ++rank) {
    const int node = membership.node_of(rank);
    if (node >= static_cast<int>(ranks_of_node_.size())) ranks_of_node_.resize(node + 1);
    node_of_.push_back(node);
    local_index_.push_back(static_cast<int>(ranks_of_node_[node].size()));
    ranks_of_node_[node].push_back(rank);
  }
  for (int rank = 0; rank < size(); ++rank) {
    if (node_of(rank) != node() && proxy(rank, node()) == self_) in_peers_.push_back(rank);
  }
}

}  // namespace moerl::ep

#endif  // MOERL_LIBS_EP_TOPOLOGY_H_
