#include "tools/moerl/log_tail.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace moerl {
namespace {

constexpr uint64_t kTailBytes = 64 << 10;
constexpr size_t kWordsMax = 500;

}  // namespace

std::string ReadTail(Env& env, const std::string& path, uint64_t from) {
  const auto file = env.OpenForRead(path);
  if (!file.ok()) return "";
  const uint64_t size = (*file)->Size().value_or(0);
  const uint64_t begin = std::min(size, std::max(from, size - std::min(size, kTailBytes)));
  std::string tail(size - begin, '\0');
  const absl::StatusOr<size_t> count = (*file)->Read(begin, tail.size(), tail.data());
  tail.resize(count.value_or(0));
  return tail;
}

std::string LastWords(Env& env, const std::string& log_file, uint64_t from) {
  const std::string tail = ReadTail(env, log_file, from);
  const std::vector<std::string> lines = absl::StrSplit(tail, '\n', absl::SkipWhitespace());
  for (auto line = lines.rbegin(); line != lines.rend(); ++line) {
    const nlohmann::json entry = nlohmann::json::parse(*line, nullptr, /*allow_exceptions=*/false);
    if (!entry.is_object()) {
      if (line == lines.rbegin()) return line->substr(0, kWordsMax);
      continue;
    }
    if (!entry.contains("level") || entry["level"] != "error") continue;
    std::string words = entry.value("message", "");
    for (const char* field : {"why", "reason"}) {
      if (entry.contains(field) && entry[field].is_string())
        absl::StrAppend(&words, ": ", entry[field].get<std::string>());
    }
    return words.substr(0, kWordsMax);
  }
  return "";
}

}  // namespace moerl
