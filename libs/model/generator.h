#ifndef MOERL_LIBS_MODEL_GENERATOR_H_
#define MOERL_LIBS_MODEL_GENERATOR_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "libs/model/expert_exchange.h"
#include "libs/model/sampling.h"
#include "libs/model/weights.h"

namespace moerl::model {

inline constexpr int64_t kPagePositions = 64;
inline constexpr int kSamplesPerRequestMax = 4096;

struct GeneratorOptions {
  int64_t num_pages = 1024;           // of the KV pool; a page holds 64 positions of every layer
  int64_t running_samples_max = 256;  // samples that decode together
  int64_t step_tokens_max = 2048;     // rows of one step: decode rows first, then prefill chunks
  int64_t waiting_requests_max = 65536;
  int num_threads = 1;
  // Fill free pages with NaN, so that a read of a stale key or value shows.
  bool poison_free_pages = false;
  // Null: all experts are local. Otherwise outlives the generator; every rank of the group steps together.
  ExpertExchange* exchange = nullptr;
};

// What happens to samples that run when weights change.
enum class FlipPolicy {
  kRecompute,  // their KV is rebuilt with the new weights; later tokens are of the new version
  kFinish,     // they finish on the old weights; later requests start on the new ones
  kContinue,   // they keep the old KV and go on with the new weights
};

// One sample of a request; `tokens` are those sampled so far elsewhere (a continued sample), without the prompt.
struct SampleStart {
  uint32_t sample_index = 0;
  std::vector<int32_t> tokens = {};
};

struct Request {
  uint64_t id = 0;  // the caller's; unique among live requests
  std::vector<int32_t> prompt;
  std::vector<SampleStart> samples;  // n of them
  SamplingParams sampling;
  uint64_t run_seed = 0;
  uint64_t group_id = 0;
  bool want_routes = false;
  bool want_kept = true;  // report kept ids where filters are on
  bool want_prompt_logprobs = false;
};

enum class FinishReason { kNone, kStop, kLength, kAbort };

// What one step adds to one sample.
struct SampleOutput {
  uint64_t request_id = 0;
  uint32_t sample_index = 0;
  int64_t first_token = 0;  // index, among the sample's tokens (prompt excluded), of tokens[0]
  std::vector<int32_t> tokens = {};
  std::vector<float> logprobs;  // tempered, renormalised over the kept set: what the token was drawn from
  Version version;              // of all these tokens
  // With want_routes: expert ids of the positions first_route .. first_route + n - 1 (absolute, prompt included),
  // [n, MoE layers, top_k]. Every position is reported once, as soon as it was computed; a continued sample starts with
  // the last position of its prefix. The last token of a finished sample has none: it is never an input.
  int64_t first_route = 0;
  std::vector<uint16_t> routes;
  // With want_kept and filters: the kept ids of tokens[i] are kept_ids[kept_offsets[i] .. kept_offsets[i + 1]).
  std::vector<int32_t> kept_ids;
  std::vector<int64_t> kept_offsets;
  FinishReason finish = FinishReason::kNone;
};

// Log-probabilities of a prompt, [0] is 0 (nothing precedes it); reported once a request, at its temperature,
// unfiltered.
struct PromptOutput {
  uint64_t request_id = 0;
  Version version;
  std::vector<float> logprobs;
};

// A sample that left the queue for the first time.
struct StartedSample {
  uint64_t request_id = 0;
  uint32_t sample_index = 0;
};

struct StepOutput {
  std::vector<StartedSample> started;
  std::vector<SampleOutput> samples;
  std::vector<PromptOutput> prompts;
  int64_t num_rows = 0;  // token rows that went through the model
};

// The counters of a running engine; `total` ones only grow.
struct GeneratorLoad {
  int64_t running_samples = 0, waiting_samples = 0;
  int64_t pages_used = 0, pages_total = 0;
  int64_t prompt_tokens_total = 0;      // prompt tokens of accepted samples (n times the prompt)
  int64_t prefix_hit_tokens_total = 0;  // of those, served by a prefill shared inside the group
  int64_t prefill_tokens_total = 0, decode_tokens_total = 0;
  int64_t preemptions_total = 0, recomputed_samples_total = 0;
};

// Continuous batching over a paged KV cache. A sample's tokens and log-probabilities are a function of (weights,
// prompt, sampling parameters, key) alone, to the bit: not of what else runs, of chunking, preemption or thread count.
// Owned by one thread; no call blocks on anything but the exchange.
class Generator {
 public:
  // INVALID_ARGUMENT names an option out of range.
  static absl::StatusOr<std::unique_ptr<Generator>> Create(std::shared_ptr<const Weights> weights, Version version,
                                                           const GeneratorOptions& options);
  ~Generator();

  // Queues a request. INVALID_ARGUMENT: empty prompt, token outside the vocabulary, prompt and max_new_tokens beyond
  // the context, bad sampling parameters, a continued sample that has max_new_tokens already, duplicate ids. One that
  // ends with a stop token goes on: the caller knows whether the policy wrote it. RESOURCE_EXHAUSTED: the queue is
  // full, or one sample alone would need more pages than the pool has.
  absl::Status Add(Request request);

  // Ends the request's live samples; each gets an output with FinishReason::kAbort at the next Step. NOT_FOUND if there
  // is no such request (it may have finished).
  absl::Status Abort(uint64_t request_id);

  // Takes part in one batch: admits, prefills, decodes one token for every running sample, reports. With nothing to do
  // it returns at once with an empty output (without an exchange; with one it takes part with zero rows). Errors are
  // the exchange's; the generator is then unusable.
  absl::StatusOr<StepOutput> Step();

  // Takes effect before the next Step. INVALID_ARGUMENT when the configuration or the compute type differs, or for
  // kFinish with an exchange (its ranks would run unequal numbers of weight sets).
  absl::Status SetWeights(std::shared_ptr<const Weights> weights, Version version, FlipPolicy policy);

  bool idle() const;  // neither running, waiting nor aborted samples to report
  Version version() const;
  const std::shared_ptr<const Weights>& weights() const;
  GeneratorLoad load() const;

 private:
  class Impl;
  explicit Generator(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_GENERATOR_H_
