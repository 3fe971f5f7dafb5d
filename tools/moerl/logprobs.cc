// moerl logprobs: log-probabilities of given token sequences, one JSON line each.
#include <cstdio>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "libs/base/status_macros.h"
#include "libs/model/rank_scorer.h"
#include "tools/moerl/commands.h"

namespace moerl {
namespace {

constexpr size_t kLineBytesMax = 64 << 20;

struct LogprobsOptions {
  std::string model, input;
  model::Compute compute = model::Compute::kFp32;
  int top = 0, threads = 1, ep_size = 1;
  double temperature = 1.0;
};

absl::StatusOr<std::vector<int32_t>> ReadTokens(const std::string& line, int64_t number) {
  const auto bad = [&](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("line ", number, ": ", what, "; expected {\"tokens\":[…]}"));
  };
  if (line.size() > kLineBytesMax) return bad("longer than 64 MiB");
  const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("tokens") || !json["tokens"].is_array()) return bad("no list of tokens");
  std::vector<int32_t> tokens;
  for (const auto& id : json["tokens"]) {
    if (!id.is_number_integer() || id < INT32_MIN || id > INT32_MAX) return bad("a token is no 32-bit integer");
    tokens.push_back(id.get<int32_t>());
  }
  if (tokens.empty()) return bad("no token");
  return tokens;
}

// Nine significant digits give a float back exactly.
std::string Number(float value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", static_cast<double>(value));
  return text;
}

void PrintLine(const model::ForwardResult& result, int top, const std::vector<int32_t>& top_ids,
               const std::vector<float>& top_logprobs) {
  std::string line = "{\"logprobs\":[null";
  for (size_t t = 1; t < result.logprobs.size(); ++t) absl::StrAppend(&line, ",", Number(result.logprobs[t]));
  line += ']';
  if (top > 0) {
    line += ",\"top\":[null";
    for (size_t t = 1; t < result.logprobs.size(); ++t) {
      line += ",[";
      for (int j = 0; j < top && top_ids[t * top + j] >= 0; ++j) {
        absl::StrAppend(&line, j > 0 ? "," : "", "[", top_ids[t * top + j], ",", Number(top_logprobs[t * top + j]),
                        "]");
      }
      line += ']';
    }
    line += ']';
  }
  std::puts((line + "}").c_str());
}

// One line of input and what is asked for it.
struct Scored {
  int64_t line = 0;
  std::vector<int32_t> top_ids;
  std::vector<float> top_logprobs;
};

// Scores a round of lines, one a rank, and prints them in order.
absl::Status PrintRound(const LogprobsOptions& options, const std::vector<model::PackedBatch>& batches,
                        std::vector<Scored>& lines, model::RankScorer& scorer) {
  std::vector<model::ScoreOptions> score(batches.size());
  for (size_t i = 0; i < batches.size(); ++i) {
    score[i].num_threads = options.threads;
    score[i].top_n = options.top;
    score[i].top_ids = &lines[i].top_ids;
    score[i].top_logprobs = &lines[i].top_logprobs;
    const absl::Status status = model::ValidateBatch(batches[i], scorer.config());
    if (!status.ok()) return absl::Status(status.code(), absl::StrCat("line ", lines[i].line, ": ", status.message()));
  }
  MOERL_ASSIGN_OR_RETURN(const auto results, scorer.Score(batches, score));
  for (size_t i = 0; i < results.size(); ++i) {
    PrintLine(results[i], options.top, lines[i].top_ids, lines[i].top_logprobs);
  }
  return absl::OkStatus();
}

absl::Status PrintLogprobs(const LogprobsOptions& options) {
  MOERL_ASSIGN_OR_RETURN(const model::ModelConfig config, model::LoadConfig(options.model));
  MOERL_ASSIGN_OR_RETURN(
      const auto scorer,
      model::RankScorer::Create(config, options.compute, options.ep_size, [&](const model::WeightsOptions& weights) {
        return model::Weights::Load(options.model, weights);
      }));
  std::ifstream file;
  if (options.input != "-") {
    file.open(options.input);
    if (!file) return absl::NotFoundError(absl::StrCat(options.input, ": cannot be read"));
  }
  std::istream& input = options.input == "-" ? std::cin : file;
  std::string text;
  bool more = true;
  for (int64_t number = 1; more;) {
    std::vector<model::PackedBatch> batches;
    std::vector<Scored> lines;
    for (; static_cast<int>(batches.size()) < options.ep_size && (more = !!std::getline(input, text)); ++number) {
      if (text.empty()) continue;
      model::PackedBatch batch;
      MOERL_ASSIGN_OR_RETURN(batch.tokens, ReadTokens(text, number));
      batch.offsets = {0, batch.num_tokens()};
      batch.temperature = {static_cast<float>(options.temperature)};
      batches.push_back(std::move(batch));
      lines.emplace_back().line = number;
    }
    if (!batches.empty()) MOERL_RETURN_IF_ERROR(PrintRound(options, batches, lines, *scorer));
  }
  return absl::OkStatus();
}

}  // namespace

int RunLogprobs(const Arguments& arguments) {
  Flags flags("logprobs", arguments);
  if (flags.Switch("help")) {
    std::puts(
        "usage: moerl logprobs --model DIR [--input FILE.jsonl] [--compute fp32|bf16] [--temperature T] [--top N] "
        "[--threads N] [--ep-size R]\nReads lines {\"tokens\":[…]} and prints for each {\"logprobs\":[null,…]}: of "
        "every token given "
        "those before it.\n--top N adds the N likeliest [id, log-probability] pairs at every position.\n"
        "--ep-size R spreads the experts over R ranks of this process, a line each: the same numbers for every R.");
    return 0;
  }
  LogprobsOptions options;
  options.model = flags.String("model", "");
  options.input = flags.String("input", "-");
  const auto compute = model::ParseCompute(flags.String("compute", "fp32"));
  options.top = static_cast<int>(flags.Integer("top", 0, 0, 1000));
  options.threads = static_cast<int>(flags.Integer("threads", 1, 1, 1024));
  options.ep_size = static_cast<int>(flags.Integer("ep-size", 1, 1, 1024));
  options.temperature = flags.Real("temperature", 1.0, 1e-4, 1e6);
  if (absl::Status s = flags.Finish(0, 0); !s.ok()) return UsageError(s);
  if (!compute.ok()) return UsageError(compute.status());
  if (options.model.empty()) return UsageError(absl::InvalidArgumentError("--model is required"));
  options.compute = *compute;
  const absl::Status status = PrintLogprobs(options);
  return status.ok() ? 0 : Failure(status);
}

}  // namespace moerl
