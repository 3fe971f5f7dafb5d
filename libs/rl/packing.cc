#include "libs/rl/packing.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"

namespace moerl::rl {
namespace {

struct MicroBatchUnderWay {
  int64_t num_tokens = 0;
  std::vector<int64_t> ordinals;
};

}  // namespace

absl::StatusOr<Packing> PackSamples(std::span<const int64_t> ordinals, std::span<const int64_t> lengths,
                                    int64_t max_tokens, int32_t num_ranks) {
  MOERL_CHECK(ordinals.size() == lengths.size() && num_ranks > 0);
  std::vector<size_t> order(ordinals.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return lengths[a] != lengths[b] ? lengths[a] > lengths[b] : ordinals[a] < ordinals[b];
  });

  std::vector<int64_t> rank_tokens(static_cast<size_t>(num_ranks), 0);
  std::vector<std::vector<MicroBatchUnderWay>> ranks(static_cast<size_t>(num_ranks));
  for (size_t i : order) {
    if (lengths[i] > max_tokens) {
      return absl::InvalidArgumentError(absl::StrCat("trainer.micro_batch_tokens: ", max_tokens,
                                                     ", but sample ordinal ", ordinals[i], " has ", lengths[i],
                                                     " tokens; raise it to the longest sample"));
    }
    const auto rank =
        static_cast<size_t>(std::min_element(rank_tokens.begin(), rank_tokens.end()) - rank_tokens.begin());
    rank_tokens[rank] += lengths[i];
    auto& open = ranks[rank];
    auto fits = std::find_if(open.begin(), open.end(),
                             [&](const MicroBatchUnderWay& mb) { return mb.num_tokens + lengths[i] <= max_tokens; });
    if (fits == open.end()) fits = open.insert(open.end(), MicroBatchUnderWay{});
    fits->num_tokens += lengths[i];
    fits->ordinals.push_back(ordinals[i]);
  }

  size_t most = 0;
  for (const auto& open : ranks) most = std::max(most, open.size());
  Packing packing;
  packing.ranks.resize(ranks.size(), std::vector<std::vector<int64_t>>(most));
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (size_t m = 0; m < ranks[rank].size(); ++m) {
      packing.ranks[rank][m] = std::move(ranks[rank][m].ordinals);
      std::sort(packing.ranks[rank][m].begin(), packing.ranks[rank][m].end());
    }
  }
  return packing;
}

}  // namespace moerl::rl
