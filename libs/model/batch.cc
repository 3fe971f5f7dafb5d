#include "libs/model/batch.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libs/base/status_macros.h"

namespace moerl::model {
namespace {

absl::Status Bad(absl::string_view field, int64_t index, absl::string_view expected, int64_t found) {
  return absl::InvalidArgumentError(
      absl::StrCat("batch.", field, "[", index, "]: expected ", expected, ", found ", found));
}

absl::Status BadSize(absl::string_view field, size_t expected, size_t found) {
  return absl::InvalidArgumentError(absl::StrCat("batch.", field, ": expected ", expected, " entries, found ", found));
}

absl::Status CheckOffsets(const PackedBatch& batch, const ModelConfig& config) {
  if (batch.offsets.empty()) {
    return batch.tokens.empty() ? absl::OkStatus() : absl::InvalidArgumentError("batch.offsets: empty beside tokens");
  }
  if (batch.offsets.front() != 0) return Bad("offsets", 0, "0", batch.offsets.front());
  for (size_t s = 1; s < batch.offsets.size(); ++s) {
    const int64_t length = batch.offsets[s] - batch.offsets[s - 1];
    if (batch.offsets[s] > batch.num_tokens() || length < 1 || length > config.max_position) {
      return Bad("offsets", s, absl::StrCat("1 to ", config.max_position, " more than the one before"),
                 batch.offsets[s]);
    }
  }
  if (batch.offsets.back() != batch.num_tokens()) {
    return Bad("offsets", batch.num_sequences(), absl::StrCat(batch.num_tokens(), " (the tokens)"),
               batch.offsets.back());
  }
  return absl::OkStatus();
}

absl::Status CheckKept(const PackedBatch& batch, const ModelConfig& config) {
  if (batch.kept_offsets.empty()) return absl::OkStatus();
  const size_t tokens = batch.tokens.size();
  if (batch.kept_offsets.size() != tokens + 1) return BadSize("kept_offsets", tokens + 1, batch.kept_offsets.size());
  const int64_t total = static_cast<int64_t>(batch.kept_ids.size());
  if (batch.kept_offsets.front() != 0) return Bad("kept_offsets", 0, "0", batch.kept_offsets.front());
  if (batch.kept_offsets.back() != total)
    return Bad("kept_offsets", tokens, absl::StrCat(total), batch.kept_offsets.back());
  for (size_t t = 0; t < tokens; ++t) {
    const int64_t begin = batch.kept_offsets[t], end = batch.kept_offsets[t + 1];
    if (begin > end || end > total) return Bad("kept_offsets", t + 1, "an ascending offset", end);
    if (begin == end) continue;
    int32_t previous = -1;
    for (int64_t i = begin; i < end; ++i) {
      const int32_t id = batch.kept_ids[i];
      if (id <= previous || id >= config.vocab_size) {
        return Bad("kept_ids", i, absl::StrCat("ascending ids below ", config.vocab_size), id);
      }
      previous = id;
    }
    if (!std::binary_search(&batch.kept_ids[begin], &batch.kept_ids[begin] + (end - begin), batch.tokens[t])) {
      return Bad("kept_ids", begin, absl::StrCat("a set with token ", t, "'s id ", batch.tokens[t]),
                 batch.kept_ids[begin]);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckRoutes(const PackedBatch& batch, const ModelConfig& config) {
  if (batch.routes.empty()) return absl::OkStatus();
  const size_t top_k = config.top_k, expected = batch.tokens.size() * config.num_moe_layers() * top_k;
  if (batch.routes.size() != expected) return BadSize("routes", expected, batch.routes.size());
  std::vector<uint16_t> row(top_k);
  for (size_t begin = 0; begin < expected; begin += top_k) {
    if (batch.routes[begin] == kNoRoute) continue;
    row.assign(&batch.routes[begin], &batch.routes[begin] + top_k);
    std::sort(row.begin(), row.end());
    if (row.back() >= config.num_experts || std::adjacent_find(row.begin(), row.end()) != row.end()) {
      return Bad("routes", begin, absl::StrCat(top_k, " different experts below ", config.num_experts), row.back());
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateBatch(const PackedBatch& batch, const ModelConfig& config) {
  if (batch.num_tokens() > kBatchTokensMax) return BadSize("tokens", kBatchTokensMax, batch.tokens.size());
  MOERL_RETURN_IF_ERROR(CheckOffsets(batch, config));
  for (size_t t = 0; t < batch.tokens.size(); ++t) {
    if (batch.tokens[t] < 0 || batch.tokens[t] >= config.vocab_size) {
      return Bad("tokens", t, absl::StrCat("0 to ", config.vocab_size - 1), batch.tokens[t]);
    }
  }
  if (!batch.wanted.empty() && batch.wanted.size() != batch.tokens.size()) {
    return BadSize("wanted", batch.tokens.size(), batch.wanted.size());
  }
  if (!batch.temperature.empty() && static_cast<int64_t>(batch.temperature.size()) != batch.num_sequences()) {
    return BadSize("temperature", batch.num_sequences(), batch.temperature.size());
  }
  for (size_t s = 0; s < batch.temperature.size(); ++s) {
    if (!(batch.temperature[s] >= 0 && batch.temperature[s] <= 1e6f)) {
      return absl::InvalidArgumentError(
          absl::StrCat("batch.temperature[", s, "]: expected 0 to 1e6, found ", batch.temperature[s]));
    }
  }
  MOERL_RETURN_IF_ERROR(CheckKept(batch, config));
  return CheckRoutes(batch, config);
}

}  // namespace moerl::model
