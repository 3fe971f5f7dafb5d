#ifndef MOERL_SERVICES_ROLLOUT_ENGINE_H_
#define MOERL_SERVICES_ROLLOUT_ENGINE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "libs/base/lineage.h"
#include "libs/model/generator.h"

namespace moerl::rollout {

// Who asked for samples, and is told about them as they grow. Called on the scheduler's thread.
class SampleSink {
 public:
  virtual ~SampleSink() = default;
  virtual void OnSample(const model::SampleOutput& output) = 0;
  virtual void OnPrompt(const model::PromptOutput& output) = 0;
};

struct EngineOptions {
  int64_t kv_cache_bytes = 0;
  int64_t running_samples_max = 0;
  int64_t prefill_chunk_tokens = 0;
  int64_t waiting_requests_max = 0;
  int num_threads = 1;
  model::FlipPolicy flip_policy = model::FlipPolicy::kRecompute;
};

// The generator, who its outputs are for, and the weights it runs. Owned by the scheduler's thread.
class Engine {
 public:
  explicit Engine(const EngineOptions& options) : options_(options) {}

  // Nothing can be sampled before the first weights.
  bool has_weights() const { return generator_ != nullptr; }
  const model::ModelConfig& model_config() const { return generator_->weights()->config(); }
  VersionName version() const;

  // Changes weights between two steps. Errors: those of Generator::Create and Generator::SetWeights.
  absl::Status SetWeights(std::shared_ptr<const model::Weights> weights, VersionName version);

  // Queues `request` (its id is set here) for `sink`, which must live until its last sample has finished or Abort.
  // Returns the id. Errors: FAILED_PRECONDITION before the first weights; those of Generator::Add.
  absl::StatusOr<uint64_t> Add(model::Request request, SampleSink* sink);

  // Ends the request; with `tell_sink` its samples end with kAbort at the next step, without it the sink hears no more.
  void Abort(uint64_t request_id, bool tell_sink);

  // What each stage of a forward over `tokens` leaves (model/stages.h), on the weights in use, beside the batch.
  // Errors: FAILED_PRECONDITION before the first weights; INVALID_ARGUMENT names a token outside the vocabulary.
  absl::StatusOr<std::vector<uint64_t>> StageDigests(std::vector<int32_t> tokens) const;

  // One step of the batch; its outputs go to their sinks. Errors are fatal: the engine is then unusable.
  absl::Status Step();

  bool idle() const { return generator_ == nullptr || generator_->idle(); }
  model::GeneratorLoad load() const;
  // Tokens sampled so far.
  int64_t tokens_total() const { return tokens_total_; }

 private:
  struct Live {
    SampleSink* sink = nullptr;
    size_t num_samples = 0;  // that have not finished
    absl::Duration added;
    std::unordered_map<uint32_t, absl::Duration> last_token;  // by sample: when it came
  };

  void MeasureStarted(absl::Span<const model::StartedSample> started, absl::Duration now);
  static void Measure(const model::SampleOutput& sample, Live& live, absl::Duration now);

  const EngineOptions options_;
  std::unique_ptr<model::Generator> generator_;
  uint64_t last_request_id_ = 0;
  int64_t tokens_total_ = 0;
  std::unordered_map<uint64_t, Live> live_;
};

}  // namespace moerl::rollout

#endif  // MOERL_SERVICES_ROLLOUT_ENGINE_H_
