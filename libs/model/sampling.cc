#include "libs/model/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "libs/tensor/math.h"

namespace moerl::model {
namespace {

uint32_t Low(uint64_t x) { return static_cast<uint32_t>(x); }
uint32_t High(uint64_t x) { return static_cast<uint32_t>(x >> 32); }

}  // namespace

PhiloxBlock Philox(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0], b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(a)};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

absl::Status ValidateSamplingParams(const SamplingParams& p, int64_t vocab_size) {
  const auto bad = [](absl::string_view field, absl::string_view legal, auto found) {
    return absl::InvalidArgumentError(absl::StrCat("sampling.", field, ": expected ", legal, ", found ", found));
  };
  if (!(p.temperature >= 0 && p.temperature <= 1e6f)) return bad("temperature", "0 to 1e6", p.temperature);
  if (p.temperature > 0 && p.temperature < 1e-4f)
    return bad("temperature", "0 (greedy) or at least 1e-4", p.temperature);
  if (p.top_k < 0) return bad("top_k", "0 (all) or more", p.top_k);
  if (!(p.top_p > 0 && p.top_p <= 1)) return bad("top_p", "a number in (0, 1]", p.top_p);
  if (!(p.min_p >= 0 && p.min_p < 1)) return bad("min_p", "a number in [0, 1)", p.min_p);
  if (p.max_new_tokens < 1) return bad("max_new_tokens", "at least 1", p.max_new_tokens);
  if (p.stop_token_ids.size() > kStopTokensMax)
    return bad("stop_token_ids", "at most 1024 ids", p.stop_token_ids.size());
  if (p.stop_sequences.size() > kStopSequencesMax) return bad("stop_sequences", "at most 64", p.stop_sequences.size());
  for (const int32_t id : p.stop_token_ids) {
    if (id < 0 || id >= vocab_size) return bad("stop_token_ids", absl::StrCat("ids below ", vocab_size), id);
  }
  for (const auto& sequence : p.stop_sequences) {
    if (sequence.empty()) return bad("stop_sequences", "non-empty sequences", "an empty one");
  }
  return absl::OkStatus();
}

double UniformRandom(const SampleKey& key, RandomPurpose purpose, uint64_t position) {
  const uint32_t use = static_cast<uint32_t>(purpose);
  const PhiloxBlock derived =
      Philox({Low(key.group_id), High(key.group_id), key.sample_index, use}, Low(key.run_seed), High(key.run_seed));
  const PhiloxBlock bits = Philox({Low(position), High(position), derived[2], derived[3]}, derived[0], derived[1]);
  const uint64_t mantissa = ((uint64_t{bits[0]} << 32) | bits[1]) >> 11;
  return static_cast<double>(mantissa) * 0x1.0p-53;
}

int32_t GreedyId(absl::Span<const float> z) {
  return static_cast<int32_t>(std::max_element(z.begin(), z.end()) - z.begin());
}

std::vector<int32_t> KeptIdsOf(absl::Span<const float> z, const SamplingParams& params) {
  std::vector<int32_t> ids(z.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto likelier = [&](int32_t a, int32_t b) { return z[a] != z[b] ? z[a] > z[b] : a < b; };
  if (params.top_k > 0 && params.top_k < static_cast<int64_t>(ids.size())) {
    std::nth_element(ids.begin(), ids.begin() + (params.top_k - 1), ids.end(), likelier);
    ids.resize(params.top_k);
  }
  const float max = z[*std::min_element(ids.begin(), ids.end(), likelier)];
  if (params.top_p < 1.0f) {
    std::sort(ids.begin(), ids.end(), likelier);
    double total = 0;
    for (const int32_t id : ids) total += tensor::Exp(z[id] - max);
    const double wanted = static_cast<double>(params.top_p) * total;
    double sum = 0;
    size_t kept = 0;
    while (kept < ids.size() && (kept == 0 || sum < wanted)) sum += tensor::Exp(z[ids[kept++]] - max);
    ids.resize(kept);
  }
  if (params.min_p > 0) {
    ids.erase(
        std::remove_if(ids.begin(), ids.end(), [&](int32_t id) { return tensor::Exp(z[id] - max) < params.min_p; }),
        ids.end());
  }
  std::sort(ids.begin(), ids.end());
  return ids;
}

// The first id whose running sum of probabilities passes u: first the block of ids, then the id in it.
int32_t DrawId(absl::Span<const float> z, absl::Span<const int32_t> kept, float max, float log_sum, double u) {
  const size_t n = kept.empty() ? z.size() : kept.size();
  const double wanted = u * static_cast<double>(tensor::Exp(log_sum));
  constexpr size_t kBlock = 256;
  float p[kBlock];
  const auto fill = [&](size_t begin) {  // e^(z - max) of a block, zeros past the end
    const size_t count = std::min(kBlock, n - begin);
    for (size_t i = 0; i < count; ++i) p[i] = z[kept.empty() ? begin + i : kept[begin + i]];
    tensor::ExpShifted(p, static_cast<int64_t>(count), max, p);
    std::fill(p + count, p + kBlock, 0.0f);
  };
  double before = 0, block_before = 0;  // sums before the block at hand and before the chosen one
  size_t block = 0;                     // the last with a sum
  for (size_t begin = 0; begin < n && before <= wanted; begin += kBlock) {
    fill(begin);
    double sums[4] = {};
    for (size_t i = 0; i < kBlock; ++i) sums[i % 4] += p[i];
    const double sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    if (sum > 0) {
      block = begin;
      block_before = before;
    }
    before += sum;
  }
  fill(block);
  double sum = block_before;
  size_t last = 0;  // rounding may leave the sum a little below `wanted`
  for (size_t i = 0; i < kBlock; ++i) {
    if (p[i] > 0) last = i;
    sum += p[i];
    if (sum > wanted) break;
  }
  const size_t at = block + last;
  return kept.empty() ? static_cast<int32_t>(at) : kept[at];
}

}  // namespace moerl::model
