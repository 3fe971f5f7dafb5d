#ifndef MOERL_SERVICES_TRAINER_RANK_GROUP_H_
#define MOERL_SERVICES_TRAINER_RANK_GROUP_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "libs/model/expert_exchange.h"
#include "services/trainer/run_settings.h"

namespace moerl::trainer {

// The trainer's ranks as one: what they must do together. Every member makes the same calls in the same order.
// Seam between the step and the fabric: one rank needs none. Thread-compatible, used by the learner's thread.
// Errors: UNAVAILABLE names the lost rank; the group is then of no use any more and the process must end.
class RankGroup {
 public:
  virtual ~RankGroup() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Of the model's expert layers; null when this rank holds all experts.
  virtual model::ExpertExchange* exchange() = 0;

  // Rank 0's bytes, on every rank. Blocks the others until rank 0 calls, without a bound: an idle follower waits here.
  virtual absl::StatusOr<std::string> Broadcast(std::string bytes) = 0;
  // Every rank's bytes, by rank, on every rank.
  virtual absl::StatusOr<std::vector<std::string>> Gather(std::string bytes) = 0;
  // Adds up over ranks in an order fixed by the number of ranks: the same bits everywhere and every time.
  virtual absl::Status Sum(absl::Span<float> values) = 0;
};

std::unique_ptr<RankGroup> MakeSingleRank();

// The ranks of trainer.num_ranks processes, joined over the fabric; one rank needs none. Blocks until all have come.
absl::StatusOr<std::unique_ptr<RankGroup>> JoinRanks(const RunSettings& settings);

}  // namespace moerl::trainer

#endif  // MOERL_SERVICES_TRAINER_RANK_GROUP_H_
