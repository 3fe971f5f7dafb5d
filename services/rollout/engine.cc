#include "services/rollout/engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/clock.h"
#include "libs/base/status_macros.h"
#include "libs/model/training.h"
#include "services/rollout/rollout_metrics.h"

namespace moerl::rollout {
namespace {

model::Version ToModel(VersionName version) {
  return {static_cast<uint64_t>(version.epoch), static_cast<uint64_t>(version.number)};
}

// Pages that fit the budget: keys and values of every layer, in the compute type.
int64_t NumPages(const model::ModelConfig& config, model::Compute compute, int64_t bytes) {
  const int64_t element = compute == model::Compute::kBf16 ? 2 : 4;
  return bytes / (model::kPagePositions * config.num_layers * 2 * config.kv_size() * element);
}

}  // namespace

VersionName Engine::version() const {
  const model::Version version = generator_->version();
  return {static_cast<int64_t>(version.epoch), static_cast<int64_t>(version.number)};
}

absl::Status Engine::SetWeights(std::shared_ptr<const model::Weights> weights, VersionName version) {
  if (generator_ != nullptr) return generator_->SetWeights(std::move(weights), ToModel(version), options_.flip_policy);
  model::GeneratorOptions options;
  options.num_pages = NumPages(weights->config(), weights->options().compute, options_.kv_cache_bytes);
  if (options.num_pages < 1) {
    return absl::InvalidArgumentError(absl::StrCat("rollout.kv_cache_bytes: ", options_.kv_cache_bytes,
                                                   " do not hold one page of 64 positions of this model; raise it"));
  }
  options.running_samples_max = options_.running_samples_max;
  // Every running sample decodes one row a step; the rest of the step is prefill.
  options.step_tokens_max = options_.running_samples_max + options_.prefill_chunk_tokens;
  options.waiting_requests_max = options_.waiting_requests_max;
  options.num_threads = options_.num_threads;
  MOERL_ASSIGN_OR_RETURN(generator_, model::Generator::Create(std::move(weights), ToModel(version), options));
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> Engine::Add(model::Request request, SampleSink* sink) {
  if (generator_ == nullptr) return absl::FailedPreconditionError("no weights yet");
  const uint64_t id = ++last_request_id_;
  request.id = id;
  const size_t num_samples = request.samples.size();
  MOERL_RETURN_IF_ERROR(generator_->Add(std::move(request)));
  live_[id] = {sink, num_samples, SystemClock()->Now(), {}};
  return id;
}

void Engine::Abort(uint64_t request_id, bool tell_sink) {
  const auto live = live_.find(request_id);
  if (live == live_.end()) return;
  if (!tell_sink) live->second.sink = nullptr;
  generator_->Abort(request_id).IgnoreError();  // NOT_FOUND: its last outputs are on their way
}

absl::StatusOr<std::vector<uint64_t>> Engine::StageDigests(std::vector<int32_t> tokens) const {
  if (generator_ == nullptr) return absl::FailedPreconditionError("no weights yet");
  model::PackedBatch batch;
  batch.tokens = std::move(tokens);
  batch.offsets = {0, batch.num_tokens()};
  std::vector<uint64_t> digests;
  model::ScoreOptions options;
  options.num_threads = options_.num_threads;
  options.stage_digests = &digests;
  MOERL_RETURN_IF_ERROR(model::Score(*generator_->weights(), batch, options).status());
  return digests;
}

void Engine::MeasureStarted(absl::Span<const model::StartedSample> started, absl::Duration now) {
  for (const model::StartedSample& sample : started) {
    const auto live = live_.find(sample.request_id);
    if (live == live_.end()) continue;
    Metrics().request_queue_time_seconds.Observe(absl::ToDoubleSeconds(now - live->second.added));
  }
}

void Engine::Measure(const model::SampleOutput& sample, Live& live, absl::Duration now) {
  RolloutMetrics& metrics = Metrics();
  const double age_s = absl::ToDoubleSeconds(now - live.added);
  if (!sample.tokens.empty()) {
    const auto [last, is_first] = live.last_token.try_emplace(sample.sample_index, now);
    if (is_first) {
      metrics.time_to_first_token_seconds.Observe(age_s);
    } else {
      const double gap_s = absl::ToDoubleSeconds(now - std::exchange(last->second, now));
      metrics.inter_token_latency_seconds.Observe(gap_s / static_cast<double>(sample.tokens.size()));
    }
  }
  if (sample.finish == model::FinishReason::kNone) return;
  CountFinished(sample.finish);
  metrics.e2e_request_latency_seconds.Observe(age_s);
}

absl::Status Engine::Step() {
  const absl::Duration start = SystemClock()->Now();
  MOERL_ASSIGN_OR_RETURN(const model::StepOutput output, generator_->Step());
  const absl::Duration now = SystemClock()->Now();
  Metrics().busy_seconds_total.Add(absl::ToDoubleSeconds(now - start));
  MeasureStarted(output.started, start);
  for (const model::PromptOutput& prompt : output.prompts) {
    const auto live = live_.find(prompt.request_id);
    if (live != live_.end() && live->second.sink != nullptr) live->second.sink->OnPrompt(prompt);
  }
  for (const model::SampleOutput& sample : output.samples) {
    tokens_total_ += static_cast<int64_t>(sample.tokens.size());
    const auto live = live_.find(sample.request_id);
    if (live == live_.end()) continue;
    SampleSink* sink = live->second.sink;
    Measure(sample, live->second, now);
    if (sample.finish != model::FinishReason::kNone && --live->second.num_samples == 0) live_.erase(live);
    if (sink != nullptr) sink->OnSample(sample);
  }
  return absl::OkStatus();
}

model::GeneratorLoad Engine::load() const {
  return generator_ == nullptr ? model::GeneratorLoad{} : generator_->load();
}

}  // namespace moerl::rollout
