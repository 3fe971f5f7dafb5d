// The sampled or greedy pass rate of the policy on prompts of its own, by the engine that the rollouts run.

#include <map>

#include "absl/strings/str_cat.h"
#include "libs/base/status_macros.h"
#include "libs/model/generator.h"
#include "services/trainer/learner.h"

namespace moerl::trainer {
namespace {

constexpr uint64_t kEvaluationSeed = 0x6d6f65726c657661;  // random numbers that training never draws
constexpr int64_t kPagesMax = 65536;
constexpr int kAttemptsMax = 8;  // 25 seconds: an environment that starts again comes back

model::SamplingParams ModelSampling(const v1::SamplingParams& from, bool is_greedy) {
  model::SamplingParams to;
  to.temperature = is_greedy ? 0.0f : from.has_temperature() ? from.temperature() : 1.0f;
  to.top_k = from.top_k();
  to.top_p = from.has_top_p() ? from.top_p() : 1.0f;
  to.min_p = from.min_p();
  to.stop_token_ids.assign(from.stop_token_ids().begin(), from.stop_token_ids().end());
  for (const v1::TokenSequence& sequence : from.stop_sequences()) {
    to.stop_sequences.emplace_back(sequence.token_ids().begin(), sequence.token_ids().end());
  }
  to.max_new_tokens = from.max_new_tokens();
  return to;
}

struct Attempt {
  rl::Prompt prompt;
  std::string episode;
  std::vector<int32_t> answer;
  bool is_truncated = false;
};

// The environment's answer; asked again while it is away.
template <typename Call>
auto AskPatiently(Call call) {
  auto answer = call();
  for (int i = 1; absl::IsUnavailable(answer.status()) && i < kAttemptsMax; ++i) {
    absl::SleepFor(absl::Milliseconds(100 << i));
    answer = call();
  }
  return answer;
}

// A verifier's failure counts as not passed: this is a measurement.
absl::StatusOr<bool> Passes(rl::Environment& environment, const Attempt& attempt, double pass_reward) {
  const std::vector<rl::Turn> transcript = {{attempt.prompt.token_ids, false, false},
                                            {attempt.answer, true, attempt.is_truncated}};
  MOERL_ASSIGN_OR_RETURN(const rl::StepOutcome outcome, AskPatiently([&] {
                           return environment.Step(attempt.episode, attempt.prompt.task, 0, transcript);
                         }));
  const auto* judgement = std::get_if<rl::Judgement>(&outcome);
  return judgement && judgement->reward >= pass_reward;
}

}  // namespace

absl::StatusOr<double> Learner::PassRate(const rl::PromptSource& source, rl::Environment& environment,
                                         uint64_t first_index, int64_t num_prompts, bool is_greedy) {
  if (source.size() > 0) num_prompts = std::min(num_prompts, static_cast<int64_t>(source.size()));
  std::map<uint64_t, Attempt> attempts;  // this rank's
  model::GeneratorOptions options;
  options.num_threads = settings_.num_threads;
  options.exchange = ranks_.exchange();
  int64_t pages = 1;
  for (int64_t i = ranks_.rank(); i < num_prompts; i += ranks_.size()) {
    Attempt& attempt = attempts[static_cast<uint64_t>(i)];
    MOERL_ASSIGN_OR_RETURN(attempt.prompt, source.Get(first_index + static_cast<uint64_t>(i)));
    if (attempt.prompt.token_ids.empty()) {
      MOERL_ASSIGN_OR_RETURN(const rl::Episode episode,
                             AskPatiently([&] { return environment.Reset(attempt.prompt.task, attempt.prompt.text); }));
      attempt.prompt.token_ids = episode.prompt;
      attempt.episode = episode.id;
    }
    const auto positions = static_cast<int64_t>(attempt.prompt.token_ids.size()) +
                           static_cast<int64_t>(settings_.lease_sampling.max_new_tokens());
    pages += positions / model::kPagePositions + 2;
  }
  options.num_pages = std::min(pages, kPagesMax);
  MOERL_ASSIGN_OR_RETURN(auto generator, model::Generator::Create(policy_->weights(), {}, options));
  for (const auto& [id, attempt] : attempts) {
    model::Request request;
    request.id = id;
    request.prompt = attempt.prompt.token_ids;
    request.samples = {{0, {}}};
    request.sampling = ModelSampling(settings_.lease_sampling, is_greedy);
    request.run_seed = settings_.config.trainer().seed() ^ kEvaluationSeed;
    request.group_id = first_index + id;
    MOERL_RETURN_IF_ERROR(generator->Add(std::move(request)));
  }
  while (true) {
    MOERL_ASSIGN_OR_RETURN(const model::StepOutput output, generator->Step());
    for (const model::SampleOutput& sample : output.samples) {
      Attempt& attempt = attempts.at(sample.request_id);
      attempt.answer.insert(attempt.answer.end(), sample.tokens.begin(), sample.tokens.end());
      attempt.is_truncated = sample.finish == model::FinishReason::kLength;
    }
    std::vector<float> busy = {generator->idle() ? 0.0f : 1.0f};
    MOERL_RETURN_IF_ERROR(ranks_.Sum(absl::MakeSpan(busy)));
    if (busy[0] == 0.0f) break;
  }
  std::vector<float> passed(1, 0.0f);
  for (const auto& [id, attempt] : attempts) {
    MOERL_ASSIGN_OR_RETURN(const bool passes, Passes(environment, attempt, settings_.config.task().pass_reward()));
    passed[0] += passes ? 1.0f : 0.0f;
  }
  MOERL_RETURN_IF_ERROR(ranks_.Sum(absl::MakeSpan(passed)));
  return passed[0] / static_cast<double>(num_prompts);
}

}  // namespace moerl::trainer
