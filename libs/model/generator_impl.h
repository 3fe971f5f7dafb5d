#ifndef MOERL_LIBS_MODEL_GENERATOR_IMPL_H_
#define MOERL_LIBS_MODEL_GENERATOR_IMPL_H_

#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "libs/model/backend.h"
#include "libs/model/generator.h"
#include "libs/model/step_run.h"

namespace moerl::model {

// The generator's state, private to the library. generator.cc takes requests and weights in, generator_schedule.cc
// decides who gets places and pages, generator_step.cc runs the rows and reports.

// A request's samples move WAITING -> PROMPT -> RUNNING -> DONE. While in PROMPT they wait for the prefill that their
// group shares; losing their pages (preemption, weights that change) puts them back to WAITING with the tokens they
// have.
enum class SampleState { kWaiting, kPrompt, kRunning, kDone };

struct Sample {
  uint32_t index = 0;
  SampleState state = SampleState::kWaiting;
  std::vector<int32_t> tokens;  // so far, without the prompt
  std::vector<int32_t> pages;
  int64_t cached = 0;            // positions in the KV cache, prompt included
  uint64_t admitted = 0;         // order of admission: the youngest is preempted first
  int64_t next_route = 0;        // first position whose routes were not reported
  std::vector<uint16_t> routes;  // computed, waiting for the next output
  int64_t reported = 0;          // tokens of `tokens` that outputs have carried
};

struct Group {
  Request request;
  std::vector<Sample> samples;
  std::shared_ptr<const Weights> weights;  // null until first admitted
  Version version;
  bool mixed_kv = false;  // went on with old pages under new weights
  // The shared prefill of the prompt, while `prefilling`.
  bool prefilling = false;
  uint64_t admitted = 0;
  std::vector<int32_t> pages;
  int64_t cached = 0;
  std::vector<uint16_t> routes;
  std::vector<float> prompt_logprobs;
  bool prompt_reported = false;

  int64_t prompt_size() const { return static_cast<int64_t>(request.prompt.size()); }
  bool done() const {
    return std::all_of(samples.begin(), samples.end(), [](const Sample& s) { return s.state == SampleState::kDone; });
  }
};

// Why a sample with these tokens is at its end; kNone when it is not.
FinishReason FinishOf(const std::vector<int32_t>& tokens, const SamplingParams& sampling);

class Generator::Impl {
 public:
  Impl(std::shared_ptr<const Weights> weights, Version version, const GeneratorOptions& options,
       std::unique_ptr<tensor::Backend> backend)
      : options_(options),
        weights_(std::move(weights)),
        version_(version),
        backend_(std::move(backend)),
        local_(MakeLocalExchange(config(), weights_->options().compute, backend_.get())),
        exchange_(options.exchange != nullptr ? options.exchange : local_.get()),
        rope_(ComputeRopeFrequencies(config())),
        pool_(config(), DTypeOf(weights_->options().compute), options.num_pages, options.poison_free_pages, *backend_),
        arena_(*backend_) {
    load_.pages_total = options.num_pages;
  }

  const ModelConfig& config() const { return weights_->config(); }
  Version version() const { return version_; }
  const std::shared_ptr<const Weights>& weights() const { return weights_; }
  bool idle() const { return groups_.empty() && aborted_.empty(); }

  GeneratorLoad load() const {
    GeneratorLoad load = load_;
    load.pages_used = pool_.num_used();
    for (const auto& group : groups_) {
      for (const Sample& sample : group->samples) {
        if (sample.state == SampleState::kDone) continue;
        ++(sample.state == SampleState::kWaiting ? load.waiting_samples : load.running_samples);
      }
    }
    return load;
  }

  absl::Status Add(Request request);
  absl::Status Abort(uint64_t request_id);
  absl::StatusOr<StepOutput> Step();
  absl::Status SetWeights(std::shared_ptr<const Weights> weights, Version version, FlipPolicy policy);

 private:
  // One sequence's part in this step: a sample's, or (sample null) the shared prompt's.
  struct Work {
    Group* group = nullptr;
    Sample* sample = nullptr;
    int64_t count = 0;
    bool completes = false;  // its last row gives the next token
  };

  absl::Status CheckRequest(const Request& request) const;
  void Admit();
  bool AdmitGroup(Group& group);
  bool Reserve(Group& group, Sample* sample, std::vector<int32_t>& pages, int64_t positions);
  bool PreemptYoungerThan(uint64_t admitted);
  std::vector<Work> PlanStep();
  void TakeRows(Group& group, Sample* sample, int64_t uncached, int64_t budget_left, std::vector<Work>* work,
                int64_t* used);
  absl::Status RunWork(absl::Span<const Work> work, StepOutput* output);
  void NoteRoutes(const Work& work, const StepRows& rows, int64_t row_begin);
  void NotePromptLogProbs(const Engine& engine, const Work& work, const StepRows& rows, int64_t row_begin);
  void Fork(Group& group);
  void Emit(Group& group, Sample& sample, int32_t id, float logprob, const std::vector<int32_t>& kept,
            StepOutput* output);
  void ReleasePages(std::vector<int32_t>& pages);
  void BackToWaiting(Sample& sample);
  void StopPrefill(Group& group);

  GeneratorOptions options_;
  std::shared_ptr<const Weights> weights_;
  Version version_;
  const std::unique_ptr<tensor::Backend> backend_;
  const std::unique_ptr<ExpertExchange> local_;
  ExpertExchange* const exchange_;
  const RopeFrequencies rope_;
  KvPool pool_;
  Arena arena_;
  std::deque<std::unique_ptr<Group>> groups_;  // in order of arrival
  absl::flat_hash_map<uint64_t, Group*> by_id_;
  std::vector<SampleOutput> aborted_;
  std::vector<StartedSample> started_;  // since the last step's output
  uint64_t admissions_ = 0;
  GeneratorLoad load_;
};

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_GENERATOR_IMPL_H_
