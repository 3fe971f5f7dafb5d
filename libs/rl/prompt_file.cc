#include <xxhash.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "libs/base/status_macros.h"
#include "libs/rl/prompt_source.h"
#include "libs/rl/random.h"

namespace moerl::rl {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kMaxPromptFileBytes = uint64_t{4} << 30;
constexpr int64_t kMaxTokenId = 4'194'303;

// A permutation of [0, size) as a function of a key: a four-round Feistel network over the smallest even number of bits
// that holds size, walked until it falls inside (Black & Rogaway, 2002). No memory, no state; at most four times the
// work.
uint64_t Permute(uint64_t index, uint64_t size, uint64_t key) {
  int half_bits = 1;
  while ((uint64_t{1} << (2 * half_bits)) < size) ++half_bits;
  const uint64_t mask = (uint64_t{1} << half_bits) - 1;
  do {
    uint64_t left = index >> half_bits;
    uint64_t right = index & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      const uint64_t next = left ^ (Mix(key ^ Mix(right ^ (round << 60))) & mask);
      left = right;
      right = next;
    }
    index = left << half_bits | right;
  } while (index >= size);
  return index;
}

struct LineError {
  int64_t line;
  template <typename... Words>
  absl::Status operator()(const Words&... words) const {
    return absl::InvalidArgumentError(absl::StrCat("prompt file: line ", line, ": ", words...));
  }
};

absl::Status ReadTokenIds(const Json& ids, const LineError& error, std::vector<int32_t>& out) {
  if (!ids.is_array() || ids.empty()) return error("token_ids is not a list of at least one id");
  for (const Json& id : ids) {
    if (!id.is_number_integer() || id < 0 || id > kMaxTokenId) {
      return error("token_ids has ", id.dump().substr(0, 40), "; expected ids from 0 to ", kMaxTokenId);
    }
    out.push_back(id.get<int32_t>());
  }
  return absl::OkStatus();
}

// A field that must be text if it is there.
absl::Status ReadText(const Json& row, const char* field, const LineError& error, std::string& out) {
  const auto found = row.find(field);
  if (found == row.end()) return absl::OkStatus();
  if (!found->is_string()) return error(field, " is not a string");
  out = found->get<std::string>();
  return absl::OkStatus();
}

absl::StatusOr<Prompt> ParseRow(std::string_view text, std::string_view default_task, const LineError& error) {
  const Json row = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (row.is_discarded() || !row.is_object()) return error("not a JSON object");
  for (const auto& [field, value] : row.items()) {
    if (field == "task" || field == "answer" || field == "token_ids" || field == "text" || field == "solution")
      continue;
    return error("unknown field \"", field.substr(0, 80), "\"; expected task, answer, token_ids or text, solution");
  }
  Prompt prompt;
  prompt.task.name = std::string(default_task);
  MOERL_RETURN_IF_ERROR(ReadText(row, "task", error, prompt.task.name));
  MOERL_RETURN_IF_ERROR(ReadText(row, "text", error, prompt.text));
  MOERL_RETURN_IF_ERROR(ReadText(row, "solution", error, prompt.solution));
  if (prompt.task.name.empty()) return error("task is missing and the configuration names none");
  if (!row.contains("answer")) return error("answer is missing");
  prompt.task.payload = row["answer"].is_string() ? row["answer"].get<std::string>() : row["answer"].dump();
  if (row.contains("token_ids")) MOERL_RETURN_IF_ERROR(ReadTokenIds(row["token_ids"], error, prompt.token_ids));
  if (prompt.token_ids.empty() && prompt.text.empty())
    return error("neither token_ids nor text; a prompt needs one of them");
  return prompt;
}

class FileSource final : public PromptSource {
 public:
  FileSource(std::vector<Prompt> rows, uint64_t seed, std::string fingerprint)
      : rows_(std::move(rows)), seed_(seed), fingerprint_(std::move(fingerprint)) {}

  absl::StatusOr<Prompt> Get(uint64_t index) const override {
    const uint64_t pass = index / size();
    return rows_[Permute(index % size(), size(), Mix(Mix(seed_) ^ pass))];
  }
  uint64_t size() const override { return rows_.size(); }
  std::string fingerprint() const override { return fingerprint_; }

 private:
  const std::vector<Prompt> rows_;
  const uint64_t seed_;
  const std::string fingerprint_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PromptSource>> ParsePromptFile(std::string_view content, std::string_view default_task,
                                                              uint64_t seed) {
  if (content.size() > kMaxPromptFileBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("prompt file: ", content.size(), " bytes; at most ", kMaxPromptFileBytes));
  }
  std::vector<Prompt> rows;
  int64_t line = 0;
  for (std::string_view rest = content; !rest.empty();) {
    ++line;
    const size_t end = rest.find('\n');
    const std::string_view text = rest.substr(0, end);
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
    if (text.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    MOERL_ASSIGN_OR_RETURN(Prompt prompt, ParseRow(text, default_task, LineError{line}));
    rows.push_back(std::move(prompt));
  }
  if (rows.empty()) return absl::InvalidArgumentError("prompt file: no prompts; expected one JSON object a line");

  const XXH128_hash_t bytes = XXH3_128bits(content.data(), content.size());
  const std::string what =
      absl::StrFormat("file 1 %016x%016x %s %u", bytes.high64, bytes.low64, std::string(default_task), seed);
  const XXH128_hash_t hash = XXH3_128bits(what.data(), what.size());
  return std::make_unique<FileSource>(std::move(rows), seed, absl::StrFormat("%016x%016x", hash.high64, hash.low64));
}

}  // namespace moerl::rl
