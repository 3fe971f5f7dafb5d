// moerl generate: samples continuations of a prompt of token ids, one JSON line each.
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "libs/base/status_macros.h"
#include "libs/model/generator.h"
#include "tools/moerl/commands.h"

namespace moerl {
namespace {

struct GenerateOptions {
  std::string model;
  model::Compute compute = model::Compute::kBf16;
  int threads = 1;
  model::Request request;
};

absl::StatusOr<std::vector<int32_t>> ParseIds(absl::string_view option, absl::string_view text) {
  std::vector<int32_t> ids;
  for (const absl::string_view part : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    int32_t id;
    if (!absl::SimpleAtoi(part, &id)) {
      return absl::InvalidArgumentError(absl::StrCat("--", option, ": expected ids like 1,2,3, found \"", part, "\""));
    }
    ids.push_back(id);
  }
  return ids;
}

const char* FinishName(model::FinishReason finish) {
  return finish == model::FinishReason::kStop ? "stop" : finish == model::FinishReason::kLength ? "length" : "abort";
}

absl::Status PrintSamples(const GenerateOptions& options) {
  model::WeightsOptions weights_options;
  weights_options.compute = options.compute;
  MOERL_ASSIGN_OR_RETURN(const auto weights, model::Weights::Load(options.model, weights_options));
  const model::Request& request = options.request;
  const int64_t samples = static_cast<int64_t>(request.samples.size());
  model::GeneratorOptions generator_options;
  generator_options.num_threads = options.threads;
  generator_options.running_samples_max = samples;
  generator_options.step_tokens_max = std::max<int64_t>(samples, 2048);
  const int64_t positions = static_cast<int64_t>(request.prompt.size()) + request.sampling.max_new_tokens;
  generator_options.num_pages = samples * (positions / model::kPagePositions + 2);
  MOERL_ASSIGN_OR_RETURN(const auto generator, model::Generator::Create(weights, {0, 0}, generator_options));
  MOERL_RETURN_IF_ERROR(generator->Add(request));
  struct Sample {
    std::vector<int32_t> tokens;
    std::vector<double> logprobs;  // a float's value, so that JSON gives it back exactly
    model::FinishReason finish = model::FinishReason::kNone;
  };
  std::map<uint32_t, Sample> all;
  while (!generator->idle()) {
    MOERL_ASSIGN_OR_RETURN(const model::StepOutput output, generator->Step());
    for (const model::SampleOutput& s : output.samples) {
      Sample& sample = all[s.sample_index];
      sample.tokens.insert(sample.tokens.end(), s.tokens.begin(), s.tokens.end());
      sample.logprobs.insert(sample.logprobs.end(), s.logprobs.begin(), s.logprobs.end());
      sample.finish = s.finish;
    }
  }
  for (const auto& [index, sample] : all) {
    nlohmann::ordered_json line;
    line["sample"] = index;
    line["tokens"] = sample.tokens;
    line["logprobs"] = sample.logprobs;
    line["finish"] = FinishName(sample.finish);
    std::puts(line.dump().c_str());
  }
  return absl::OkStatus();
}

}  // namespace

int RunGenerate(const Arguments& arguments) {
  Flags flags("generate", arguments);
  if (flags.Switch("help")) {
    std::puts(
        "usage: moerl generate --model DIR --tokens 1,2,3 [--n N] [--max-new-tokens N] [--temperature T] [--top-k K] "
        "[--top-p P]\n       [--min-p P] [--stop 0,1] [--seed N] [--compute bf16|fp32] [--threads N]\nPrints a line "
        "{\"sample\",\"tokens\",\"logprobs\",\"finish\"} for each of N samples.");
    return 0;
  }
  GenerateOptions options;
  options.model = flags.String("model", "");
  const auto compute = model::ParseCompute(flags.String("compute", "bf16"));
  options.threads = static_cast<int>(flags.Integer("threads", 1, 1, 1024));
  const auto prompt = ParseIds("tokens", flags.String("tokens", ""));
  const auto stop = ParseIds("stop", flags.String("stop", ""));
  const int64_t n = flags.Integer("n", 1, 1, model::kSamplesPerRequestMax);
  model::SamplingParams& sampling = options.request.sampling;
  sampling.max_new_tokens = flags.Integer("max-new-tokens", 64, 1, INT32_MAX);
  sampling.temperature = static_cast<float>(flags.Real("temperature", 1.0, 0, 1e6));
  sampling.top_k = flags.Integer("top-k", 0, 0, INT32_MAX);
  sampling.top_p = static_cast<float>(flags.Real("top-p", 1.0, 0, 1));
  sampling.min_p = static_cast<float>(flags.Real("min-p", 0.0, 0, 1));
  options.request.run_seed = static_cast<uint64_t>(flags.Integer("seed", 0, 0, INT64_MAX));
  if (absl::Status s = flags.Finish(0, 0); !s.ok()) return UsageError(s);
  for (const absl::Status& s : {compute.status(), prompt.status(), stop.status()}) {
    if (!s.ok()) return UsageError(s);
  }
  if (options.model.empty()) return UsageError(absl::InvalidArgumentError("--model is required"));
  options.compute = *compute;
  options.request.prompt = *prompt;
  sampling.stop_token_ids = *stop;
  for (int64_t i = 0; i < n; ++i) options.request.samples.push_back({static_cast<uint32_t>(i), {}});
  const absl::Status status = PrintSamples(options);
  return status.ok() ? 0 : Failure(status);
}

}  // namespace moerl
