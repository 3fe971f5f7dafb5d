#ifndef MOERL_LIBS_MODEL_SAMPLING_H_
#define MOERL_LIBS_MODEL_SAMPLING_H_

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace moerl::model {

// How one token is drawn. z = logit / temperature in fp32; temperature 0 is greedy (ties to the lowest id), with
// log-probabilities at temperature 1. Filters apply to the tempered distribution in the order top-k, top-p, min-p, each
// to what the one before kept, renormalised; each keeps at least one token; ties go to the lowest id. Greedy ignores
// them.
struct SamplingParams {
  float temperature = 1.0f;  // >= 0
  int64_t top_k = 0;         // 0: all
  float top_p = 1.0f;        // (0, 1]: the smallest set of the most likely tokens whose probability reaches top_p
  float min_p = 0.0f;        // [0, 1): drop tokens less likely than min_p times the likeliest
  std::vector<int32_t> stop_token_ids;               // end the sample; the token is part of it
  std::vector<std::vector<int32_t>> stop_sequences;  // end the sample when its tokens (without the prompt) end in one
  int64_t max_new_tokens = 256;                      // over the whole sample, tokens of a continued prefix included

  bool filters() const { return temperature > 0 && (top_k > 0 || top_p < 1.0f || min_p > 0.0f); }
  // What logits are divided by.
  float divisor() const { return temperature > 0 ? temperature : 1.0f; }
};

inline constexpr int kStopSequencesMax = 64;
inline constexpr int kStopTokensMax = 1024;

// INVALID_ARGUMENT names the field, its value and the legal range.
absl::Status ValidateSamplingParams(const SamplingParams& params, int64_t vocab_size);

// Keys the counter-based generator; with the absolute position it determines the random number, nothing else does.
struct SampleKey {
  uint64_t run_seed = 0;
  uint64_t group_id = 0;
  uint32_t sample_index = 0;
};

// What a random number is for; part of the key.
enum class RandomPurpose : uint32_t { kSampling = 1, kInitialization = 2, kTask = 3 };

// Philox4x32-10 (Salmon et al., 2011): counter and key to 128 random bits.
using PhiloxBlock = std::array<uint32_t, 4>;
PhiloxBlock Philox(PhiloxBlock counter, uint32_t key0, uint32_t key1);

// Philox keyed by (run seed, purpose, group id, sample index) at a position: a number in [0, 1) with 53 bits.
double UniformRandom(const SampleKey& key, RandomPurpose purpose, uint64_t position);

// The ids that the filters of `params` keep, ascending. z [vocab] is logit / divisor.
std::vector<int32_t> KeptIdsOf(absl::Span<const float> z, const SamplingParams& params);

// The likeliest id, the lowest on a tie.
int32_t GreedyId(absl::Span<const float> z);

// The id where the cumulative probability, in ascending id over `kept` (empty: all), passes u in [0, 1). `max` is the
// largest z among them and `log_sum` the logarithm of their sum of exp(z - max).
int32_t DrawId(absl::Span<const float> z, absl::Span<const int32_t> kept, float max, float log_sum, double u);

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_SAMPLING_H_
