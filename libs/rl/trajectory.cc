#include "libs/rl/trajectory.h"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"

namespace moerl::rl {
namespace {

template <typename T>
void AppendAll(std::vector<T>& to, const std::vector<T>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

template <typename T>
std::vector<T> Cut(const std::vector<T>& from, size_t begin, size_t end) {
  return {from.begin() + static_cast<ptrdiff_t>(begin), from.begin() + static_cast<ptrdiff_t>(end)};
}

size_t KeptBefore(const std::vector<int32_t>& counts, size_t token) {
  size_t sum = 0;
  for (size_t i = 0; i < token; ++i) sum += static_cast<size_t>(counts[i]);
  return sum;
}

absl::Status LengthError(const char* array, size_t found, size_t expected) {
  return absl::InvalidArgumentError(
      absl::StrCat("trajectory: ", array, " has ", found, " entries, ", expected, " tokens need as many"));
}

// What sampling kept of one token's distribution: ascending ids of the vocabulary, the token's own among them; none if
// all were kept.
bool IsKeptSet(std::span<const int32_t> ids, int32_t token, int64_t vocab_size) {
  if (ids.empty()) return true;
  return ids.front() >= 0 && ids.back() < vocab_size &&
         std::ranges::adjacent_find(ids, std::greater_equal<>()) == ids.end() && std::ranges::binary_search(ids, token);
}

absl::Status ValidateKept(const TokenRun& run, int64_t vocab_size) {
  if (run.kept_counts.empty()) {
    return run.kept_ids.empty() ? absl::OkStatus() : LengthError("kept_ids", run.kept_ids.size(), 0);
  }
  if (run.kept_counts.size() != run.size()) return LengthError("kept_counts", run.kept_counts.size(), run.size());
  size_t sum = 0;
  for (int32_t count : run.kept_counts) {
    if (count < 0) return absl::InvalidArgumentError("trajectory: kept_counts has a negative entry");
    sum += static_cast<size_t>(count);
  }
  if (sum != run.kept_ids.size()) return LengthError("kept_ids", run.kept_ids.size(), sum);
  size_t at = 0;
  for (size_t i = 0; i < run.size(); ++i) {
    const auto count = static_cast<size_t>(run.kept_counts[i]);
    if (!IsKeptSet(std::span(run.kept_ids).subspan(at, count), run.ids[i], vocab_size)) {
      return absl::InvalidArgumentError(absl::StrCat("trajectory: kept_ids of token ", i,
                                                     ": expected ascending ids in [0, ", vocab_size,
                                                     ") with the token's own, ", run.ids[i]));
    }
    at += count;
  }
  return absl::OkStatus();
}

}  // namespace

void TokenRun::Append(const TokenRun& next) {
  if (next.empty()) return;
  MOERL_CHECK(empty() || (routes.empty() == next.routes.empty() && kept_counts.empty() == next.kept_counts.empty()));
  AppendAll(ids, next.ids);
  AppendAll(logprobs, next.logprobs);
  AppendAll(versions, next.versions);
  AppendAll(trainable, next.trainable);
  routes += next.routes;
  AppendAll(kept_counts, next.kept_counts);
  AppendAll(kept_ids, next.kept_ids);
}

TokenRun TokenRun::Slice(size_t begin, size_t end) const {
  MOERL_CHECK(begin <= end && end <= size());
  if (begin == 0 && end == size()) return *this;
  TokenRun out;
  out.ids = Cut(ids, begin, end);
  out.logprobs = Cut(logprobs, begin, end);
  out.versions = Cut(versions, begin, end);
  out.trainable = Cut(trainable, begin, end);
  if (!routes.empty()) {
    const size_t bytes = routes.size() / size();
    out.routes = routes.substr(begin * bytes, (end - begin) * bytes);
  }
  if (!kept_counts.empty()) {
    out.kept_counts = Cut(kept_counts, begin, end);
    out.kept_ids = Cut(kept_ids, KeptBefore(kept_counts, begin), KeptBefore(kept_counts, end));
  }
  return out;
}

absl::Status TokenRun::Validate(int64_t vocab_size, int64_t route_bytes_per_token) const {
  if (logprobs.size() != size()) return LengthError("logprobs", logprobs.size(), size());
  if (versions.size() != size()) return LengthError("versions", versions.size(), size());
  if (trainable.size() != size()) return LengthError("trainable", trainable.size(), size());
  for (int32_t id : ids) {
    if (id >= 0 && id < vocab_size) continue;
    return absl::InvalidArgumentError(absl::StrCat("trajectory: token id ", id, " is outside [0, ", vocab_size, ")"));
  }
  for (float value : logprobs) {
    if (std::isfinite(value) && value <= 0.0f) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("trajectory: log-probability ", value, ", expected a finite number <= 0"));
  }
  const size_t expected = size() * static_cast<size_t>(route_bytes_per_token);
  if (routes.size() != expected) {
    return absl::InvalidArgumentError(absl::StrCat("trajectory: routes have ", routes.size(), " bytes, ", size(),
                                                   " tokens of ", route_bytes_per_token, " bytes need ", expected));
  }
  return ValidateKept(*this, vocab_size);
}

uint64_t TokenRun::IdsDigest() const { return XXH3_64bits(ids.data(), ids.size() * sizeof(int32_t)); }

}  // namespace moerl::rl
