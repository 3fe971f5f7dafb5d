// moerl eval: samples every held-out prompt with a model of a directory and has the task's environment judge. One
// process, the same generator and the same environments as a rollout server.
#include <cmath>
#include <cstdio>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "libs/base/config.h"
#include "libs/base/status_macros.h"
#include "libs/environment/task.h"
#include "libs/model/generator.h"
#include "libs/model/weights.h"
#include "libs/rpc/program.h"
#include "moerl/v1/config.pb.h"
#include "tools/moerl/commands.h"

namespace moerl {
namespace {

constexpr char kHelp[] =
    "usage: moerl eval CONFIG --model DIR [--num-prompts N] [--greedy] [--seed S] [--json] [--set a.b=VALUE]\n"
    "Samples one completion of each of N held-out prompts (default task.num_held_out; no more than there are) and\n"
    "prints the pass rate.\n";

struct Tally {
  int64_t num_samples = 0, num_passed = 0, num_failed = 0, num_tokens = 0;
  double reward_sum = 0, reward_square_sum = 0;

  double reward_mean() const { return reward_sum / static_cast<double>(num_samples); }
  double pass_rate() const { return static_cast<double>(num_passed) / static_cast<double>(num_samples); }
  // Of the mean reward: sqrt((E[r^2] - E[r]^2) / n).
  double reward_error() const {
    const double n = static_cast<double>(num_samples);
    return std::sqrt(std::max(0.0, reward_square_sum / n - reward_mean() * reward_mean()) / n);
  }
  double pass_rate_error() const {
    return std::sqrt(pass_rate() * (1 - pass_rate()) / static_cast<double>(num_samples));
  }
};

// A prompt's completion as it grows, and what will judge it.
struct Episode {
  rl::Prompt prompt;
  rl::Turn answer{.token_ids = {}, .is_action = true};
};

absl::Status Judge(rl::Environment& environment, const rl::OutcomeLimits& limits, double pass_reward, size_t index,
                   const Episode& episode, Tally& tally) {
  const std::vector<rl::Turn> transcript = {{.token_ids = episode.prompt.token_ids}, episode.answer};
  absl::StatusOr<rl::StepOutcome> outcome =
      environment.Step(absl::StrCat("eval-", index), episode.prompt.task, 0, transcript);
  for (int attempt = 0; absl::IsUnavailable(outcome.status()) && attempt < 20; ++attempt) {
    absl::SleepFor(absl::Milliseconds(250));
    outcome = environment.Step(absl::StrCat("eval-", index), episode.prompt.task, 0, transcript);
  }
  MOERL_RETURN_IF_ERROR(outcome.status());
  ++tally.num_samples;
  tally.num_tokens += static_cast<int64_t>(episode.answer.token_ids.size());
  const rl::StepOutcome checked = rl::CheckOutcome(*std::move(outcome), limits);
  if (const rl::Judgement* judgement = std::get_if<rl::Judgement>(&checked)) {
    tally.reward_sum += judgement->reward;
    tally.reward_square_sum += judgement->reward * judgement->reward;
    tally.num_passed += judgement->reward >= pass_reward;
  } else {
    ++tally.num_failed;
  }
  return absl::OkStatus();
}

// As the trainer's leases say it.
model::SamplingParams Sampling(const v1::Config& config, const model::ModelConfig& model, bool greedy) {
  const v1::SamplingParams& from = config.rollout().sampling();
  model::SamplingParams to;
  to.temperature = greedy ? 0.0f : from.has_temperature() ? from.temperature() : 1.0f;
  to.top_k = from.top_k();
  to.top_p = from.has_top_p() ? from.top_p() : 1.0f;
  to.min_p = from.min_p();
  to.stop_token_ids = StopTokens(config, model.eos_token_ids);
  for (const v1::TokenSequence& sequence : from.stop_sequences()) {
    to.stop_sequences.emplace_back(sequence.token_ids().begin(), sequence.token_ids().end());
  }
  to.max_new_tokens = from.max_new_tokens();
  return to;
}

// The first `count` held-out prompts, those that are text encoded by the environment.
absl::StatusOr<std::vector<Episode>> Prompts(const rl::PromptSource& source, rl::Environment& environment,
                                             int64_t count) {
  std::vector<Episode> episodes(count);
  for (int64_t i = 0; i < count; ++i) {
    rl::Prompt& prompt = episodes[i].prompt;
    MOERL_ASSIGN_OR_RETURN(prompt, source.Get(i));
    if (!prompt.token_ids.empty()) continue;
    MOERL_ASSIGN_OR_RETURN(rl::Episode episode, environment.Reset(prompt.task, prompt.text));
    prompt.token_ids = std::move(episode.prompt);
  }
  return episodes;
}

// No more pages than all episodes fill: a page of a large model is megabytes.
model::GeneratorOptions ForEpisodes(const v1::Config& config, const model::SamplingParams& sampling,
                                    const std::vector<Episode>& episodes) {
  model::GeneratorOptions options;
  int64_t pages = 0;
  for (const Episode& episode : episodes) {
    const auto positions = static_cast<int64_t>(episode.prompt.token_ids.size()) + sampling.max_new_tokens;
    pages += positions / model::kPagePositions + 2;
  }
  options.num_pages = std::min(options.num_pages, pages);
  options.num_threads = std::max(1, static_cast<int>(config.rollout().num_threads()));
  return options;
}

absl::StatusOr<Tally> Evaluate(const v1::Config& config, const std::string& directory, int64_t num_prompts, bool greedy,
                               uint64_t seed) {
  MOERL_ASSIGN_OR_RETURN(const TaskPrompts prompts, LoadPrompts(config.task()));
  if (prompts.held_out == nullptr) {
    return absl::InvalidArgumentError(
        "config: task.held_out_file: moerl eval needs held-out prompts; give a JSON-lines file");
  }
  // None counts twice.
  if (prompts.held_out->size() > 0) num_prompts = std::min<int64_t>(num_prompts, prompts.held_out->size());
  MOERL_ASSIGN_OR_RETURN(const std::shared_ptr<rl::Environment> environment,
                         MakeEnvironment(config, rpc::ChannelOptionsOf(config.server())));
  model::WeightsOptions weights_options;
  weights_options.compute =
      config.model().compute() == v1::COMPUTE_FP32 ? model::Compute::kFp32 : model::Compute::kBf16;
  MOERL_ASSIGN_OR_RETURN(const std::shared_ptr<const model::Weights> weights,
                         model::Weights::Load(directory, weights_options));
  const rl::OutcomeLimits limits = {.reward_min = config.environment().reward_min(),
                                    .reward_max = config.environment().reward_max(),
                                    .vocab_size = weights->config().vocab_size};
  const model::SamplingParams sampling = Sampling(config, weights->config(), greedy);
  MOERL_ASSIGN_OR_RETURN(std::vector<Episode> episodes, Prompts(*prompts.held_out, *environment, num_prompts));
  MOERL_ASSIGN_OR_RETURN(const std::unique_ptr<model::Generator> generator,
                         model::Generator::Create(weights, {}, ForEpisodes(config, sampling, episodes)));
  for (int64_t i = 0; i < num_prompts; ++i) {
    MOERL_RETURN_IF_ERROR(generator->Add({.id = static_cast<uint64_t>(i),
                                          .prompt = episodes[i].prompt.token_ids,
                                          .samples = {{.sample_index = 0, .tokens = {}}},
                                          .sampling = sampling,
                                          .run_seed = seed,
                                          .group_id = static_cast<uint64_t>(i)}));
  }
  Tally tally;
  while (!generator->idle()) {
    MOERL_ASSIGN_OR_RETURN(const model::StepOutput step, generator->Step());
    for (const model::SampleOutput& sample : step.samples) {
      Episode& episode = episodes[sample.request_id];
      episode.answer.token_ids.insert(episode.answer.token_ids.end(), sample.tokens.begin(), sample.tokens.end());
      if (sample.finish == model::FinishReason::kNone) continue;
      episode.answer.is_truncated = sample.finish == model::FinishReason::kLength;
      MOERL_RETURN_IF_ERROR(
          Judge(*environment, limits, config.task().pass_reward(), sample.request_id, episode, tally));
    }
  }
  return tally;
}

}  // namespace

int RunEval(const Arguments& arguments) {
  Flags flags("eval", arguments);
  if (flags.Switch("help")) {
    std::fputs(kHelp, stdout);
    return 0;
  }
  const std::string directory = flags.String("model", "");
  const int64_t num_prompts = flags.Integer("num-prompts", 0, 1, 1'000'000);
  const int64_t seed = flags.Integer("seed", 1, 0, INT64_MAX);
  const bool greedy = flags.Switch("greedy");
  const bool json = flags.Switch("json");
  const std::vector<std::string> overrides = flags.Strings("set");
  if (absl::Status status = flags.Finish(1, 1); !status.ok()) return UsageError(status);
  if (directory.empty())
    return UsageError(absl::InvalidArgumentError("moerl eval: --model DIR says which model to evaluate"));
  v1::Config config;
  if (absl::Status status = LoadConfig(flags.positional()[0], overrides, config); !status.ok())
    return UsageError(status);

  const absl::Time start = absl::Now();
  const absl::StatusOr<Tally> tally =
      Evaluate(config, directory, num_prompts > 0 ? num_prompts : config.task().num_held_out(), greedy, seed);
  if (!tally.ok()) return Failure(tally.status());
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  std::printf(json ? "{\"pass_rate\": %.6f, \"standard_error\": %.6f, \"reward_mean\": %.6f, "
                     "\"reward_standard_error\": %.6f, \"num_prompts\": %lld, \"num_failed\": %lld, "
                     "\"response_length_mean\": %.3f, \"seconds\": %.3f}\n"
                   : "pass rate %.4f ± %.4f, mean reward %.4f ± %.4f over %lld held-out prompts (%lld without a "
                     "verdict), %.1f tokens a response, %.1f s\n",
              tally->pass_rate(), tally->pass_rate_error(), tally->reward_mean(), tally->reward_error(),
              static_cast<long long>(tally->num_samples), static_cast<long long>(tally->num_failed),
              static_cast<double>(tally->num_tokens) / static_cast<double>(tally->num_samples), seconds);
  return 0;
}

}  // namespace moerl
