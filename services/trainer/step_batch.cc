#include "services/trainer/step_batch.h"

namespace moerl::trainer {

StepBatch::StepBatch(const StepJob& job, const model::ModelConfig& config, bool with_routes)
    : config_(config), with_routes_(with_routes) {
  for (const rl::Group& group : job.groups) {
    for (const rl::Sample& sample : group.samples) {
      samples_.push_back(&sample);
      groups_.push_back(&group);
      has_kept_ = has_kept_ || !sample.run.kept_counts.empty();
    }
  }
}

int64_t StepBatch::length(int64_t ordinal) const {
  return static_cast<int64_t>(group(ordinal).prompt.size() + sample(ordinal).run.size());
}

std::vector<int64_t> StepBatch::Lengths(std::span<const int64_t> ordinals) const {
  std::vector<int64_t> lengths;
  for (int64_t ordinal : ordinals) lengths.push_back(length(ordinal));
  return lengths;
}

model::PackedBatch StepBatch::Pack(std::span<const int64_t> ordinals) const {
  model::PackedBatch batch;
  batch.offsets = {0};
  if (has_kept_) batch.kept_offsets = {0};
  for (int64_t ordinal : ordinals) {
    const rl::Group& from = group(ordinal);
    const rl::TokenRun& run = sample(ordinal).run;
    batch.tokens.insert(batch.tokens.end(), from.prompt.begin(), from.prompt.end());
    batch.tokens.insert(batch.tokens.end(), run.ids.begin(), run.ids.end());
    batch.wanted.insert(batch.wanted.end(), from.prompt.size(), 0);
    batch.wanted.insert(batch.wanted.end(), run.trainable.begin(), run.trainable.end());
    batch.offsets.push_back(batch.num_tokens());
    batch.temperature.push_back(static_cast<float>(from.sampling.temperature));
    if (has_kept_) AppendKept(sample(ordinal), from.prompt.size(), batch);
    if (with_routes_) AppendRoutes(sample(ordinal), from.prompt.size(), batch);
  }
  return batch;
}

void StepBatch::AppendKept(const rl::Sample& sample, size_t num_prompt_tokens, model::PackedBatch& batch) const {
  const auto add = [&](int64_t count) { batch.kept_offsets.push_back(batch.kept_offsets.back() + count); };
  for (size_t i = 0; i < num_prompt_tokens; ++i) add(0);
  for (size_t i = 0; i < sample.run.size(); ++i) {
    add(sample.run.kept_counts.empty() ? 0 : sample.run.kept_counts[i]);
  }
  batch.kept_ids.insert(batch.kept_ids.end(), sample.run.kept_ids.begin(), sample.run.kept_ids.end());
}

// Entry t of the run's routes is where the position went that token t was drawn from, the one before it. Positions
// that nobody recorded, of the prompt but its last and of the last token, are routed freely.
void StepBatch::AppendRoutes(const rl::Sample& sample, size_t num_prompt_tokens, model::PackedBatch& batch) const {
  const auto ids = static_cast<size_t>(config_.num_moe_layers() * config_.top_k);
  const auto add_free = [&](size_t positions) {
    batch.routes.insert(batch.routes.end(), positions * ids, model::kNoRoute);
  };
  const std::string& routes = sample.run.routes;
  if (routes.empty()) return add_free(num_prompt_tokens + sample.run.size());
  add_free(num_prompt_tokens - 1);
  const size_t width = config_.num_experts <= 256 ? 1 : 2;
  for (size_t i = 0; i < sample.run.size() * ids; ++i) {
    uint16_t id = static_cast<uint8_t>(routes[i * width]);
    if (width == 2) id = static_cast<uint16_t>(id | static_cast<uint8_t>(routes[i * width + 1]) << 8);
    batch.routes.push_back(id);
  }
  add_free(1);
}

}  // namespace moerl::trainer
