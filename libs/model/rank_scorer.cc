#include "libs/model/rank_scorer.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/base/status_macros.h"
#include "libs/fabric/in_process_fabric.h"
#include "libs/model/ep_exchange.h"

namespace moerl::model {

struct RankScorer::Rank {
  std::unique_ptr<ep::Group> group;          // null where there is one rank
  std::unique_ptr<ExpertExchange> exchange;  // likewise
  std::shared_ptr<const Weights> weights;
};

RankScorer::RankScorer(const ModelConfig& config, int num_ranks) : config_(config) {
  for (int rank = 0; rank < num_ranks; ++rank) ranks_.push_back(std::make_unique<Rank>());
}
RankScorer::~RankScorer() = default;

int RankScorer::num_ranks() const { return static_cast<int>(ranks_.size()); }

absl::StatusOr<std::unique_ptr<RankScorer>> RankScorer::Create(const ModelConfig& config, Compute compute,
                                                               int num_ranks, Load load) {
  if (num_ranks < 1 || (num_ranks > 1 && num_ranks > config.num_experts)) {
    return absl::InvalidArgumentError(absl::StrCat("model: expected 1 to ", std::max<int64_t>(config.num_experts, 1),
                                                   " ranks, an expert each at least, found ", num_ranks, " ranks for ",
                                                   config.num_experts, " experts"));
  }
  std::unique_ptr<RankScorer> scorer(new RankScorer(config, num_ranks));
  WeightsOptions options;
  options.compute = compute;
  if (num_ranks == 1) {
    MOERL_ASSIGN_OR_RETURN(scorer->ranks_[0]->weights, load(options));
    return scorer;
  }
  fabric::InProcessFabric fabric({.node_of = std::vector<int>(num_ranks, 0)});
  for (int rank = 0; rank < num_ranks; ++rank) {
    ep::Group::Options group_options;
    group_options.spin = absl::ZeroDuration();
    scorer->ranks_[rank]->group = std::make_unique<ep::Group>(fabric.Open(rank), group_options);
  }
  MOERL_RETURN_IF_ERROR(scorer->OnEveryRank([&](int index) -> absl::Status {
    Rank& rank = *scorer->ranks_[index];
    MOERL_ASSIGN_OR_RETURN(auto map,
                           ep::ExpertMap::Aligned(rank.group->membership(), static_cast<int>(config.num_experts)));
    MOERL_ASSIGN_OR_RETURN(rank.exchange, MakeEpExchange(config, compute, rank.group.get(), std::move(map)));
    return absl::OkStatus();
  }));
  for (const auto& rank : scorer->ranks_) {
    options.local_experts.assign(rank->exchange->local_experts().begin(), rank->exchange->local_experts().end());
    MOERL_ASSIGN_OR_RETURN(rank->weights, load(options));
  }
  return scorer;
}

absl::Status RankScorer::OnEveryRank(absl::FunctionRef<absl::Status(int rank)> work) {
  std::vector<absl::Status> results(ranks_.size());
  std::vector<std::thread> threads;
  for (int rank = 1; rank < num_ranks(); ++rank) {
    threads.emplace_back([&, rank] { results[rank] = work(rank); });
  }
  results[0] = work(0);
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& result : results) MOERL_RETURN_IF_ERROR(result);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<ForwardResult>> RankScorer::Score(absl::Span<const PackedBatch> batches,
                                                             absl::Span<const ScoreOptions> options) {
  MOERL_CHECK(batches.size() <= ranks_.size() && options.size() == batches.size());
  // Before anyone enters the first layer: a rank that stopped there would leave the others waiting.
  for (size_t r = 0; r < batches.size(); ++r) {
    const absl::Status status = ValidateBatch(batches[r], config_);
    if (!status.ok()) return absl::Status(status.code(), absl::StrCat("rank ", r, ": ", status.message()));
  }
  PackedBatch nothing;
  nothing.offsets = {0};
  std::vector<ForwardResult> results(batches.size());
  MOERL_RETURN_IF_ERROR(OnEveryRank([&](int index) -> absl::Status {
    const bool has_work = index < static_cast<int>(batches.size());
    ScoreOptions own = has_work ? options[index] : ScoreOptions();
    own.exchange = ranks_[index]->exchange.get();
    MOERL_ASSIGN_OR_RETURN(ForwardResult result,
                           model::Score(*ranks_[index]->weights, has_work ? batches[index] : nothing, own));
    if (has_work) results[index] = std::move(result);
    return absl::OkStatus();
  }));
  return results;
}

}  // namespace moerl::model
