#ifndef MOERL_LIBS_MODEL_RANK_SCORER_H_
#define MOERL_LIBS_MODEL_RANK_SCORER_H_

#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "libs/model/training.h"

namespace moerl::model {

// Scores batches with the experts spread over several ranks of this process, a thread each: what a rollout or a trainer
// of that EP size computes, bit for bit, without starting one. With one rank there is no exchange. Owned by one thread.
class RankScorer {
 public:
  // Loads the weights of one rank; `options` says its compute type and experts.
  using Load = absl::FunctionRef<absl::StatusOr<std::shared_ptr<const Weights>>(const WeightsOptions& options)>;

  // INVALID_ARGUMENT for more than one rank where the model has no experts, and for more ranks than experts.
  static absl::StatusOr<std::unique_ptr<RankScorer>> Create(const ModelConfig& config, Compute compute, int num_ranks,
                                                            Load load);
  ~RankScorer();

  int num_ranks() const;
  const ModelConfig& config() const { return config_; }

  // batches[r] and options[r] are rank r's, at most num_ranks() and equally many; ranks without a batch take part with
  // zero tokens. options[r].exchange is set here. Errors of a batch name its rank.
  absl::StatusOr<std::vector<ForwardResult>> Score(absl::Span<const PackedBatch> batches,
                                                   absl::Span<const ScoreOptions> options);

 private:
  struct Rank;
  RankScorer(const ModelConfig& config, int num_ranks);

  // Runs work(rank) for all at once; the first error in rank order.
  absl::Status OnEveryRank(absl::FunctionRef<absl::Status(int rank)> work);

  const ModelConfig config_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_RANK_SCORER_H_
