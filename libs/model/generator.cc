#include "libs/model/generator.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "libs/base/status_macros.h"
#include "libs/model/generator_impl.h"

namespace moerl::model {

absl::Status Generator::Impl::CheckRequest(const Request& r) const {
  const ModelConfig& c = config();
  const auto bad = [&](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("request ", r.id, ": ", what));
  };
  if (by_id_.contains(r.id)) return bad("a request with this id is running");
  if (r.prompt.empty()) return bad("prompt: expected at least one token");
  if (r.samples.empty() || r.samples.size() > kSamplesPerRequestMax) {
    return bad(absl::StrCat("samples: expected 1 to ", kSamplesPerRequestMax, ", found ", r.samples.size()));
  }
  MOERL_RETURN_IF_ERROR(ValidateSamplingParams(r.sampling, c.vocab_size));
  const auto check_tokens = [&](absl::string_view field, const std::vector<int32_t>& tokens) {
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (tokens[i] < 0 || tokens[i] >= c.vocab_size) {
        return bad(absl::StrCat(field, "[", i, "]: expected an id below ", c.vocab_size, ", found ", tokens[i]));
      }
    }
    return absl::OkStatus();
  };
  MOERL_RETURN_IF_ERROR(check_tokens("prompt", r.prompt));
  const int64_t prompt = static_cast<int64_t>(r.prompt.size());
  if (prompt > c.max_position - r.sampling.max_new_tokens) {
    return bad(absl::StrCat("prompt of ", prompt, " tokens and max_new_tokens ", r.sampling.max_new_tokens,
                            " exceed the context of ", c.max_position));
  }
  absl::flat_hash_set<uint32_t> indices;
  for (const SampleStart& sample : r.samples) {
    if (!indices.insert(sample.sample_index).second) {
      return bad(absl::StrCat("samples: index ", sample.sample_index, " is given twice"));
    }
    MOERL_RETURN_IF_ERROR(check_tokens(absl::StrCat("samples[", sample.sample_index, "].tokens"), sample.tokens));
    // Whether it has stopped is for the caller to say: an environment may have written the stop token at its end.
    if (static_cast<int64_t>(sample.tokens.size()) >= r.sampling.max_new_tokens) {
      return bad(absl::StrCat("samples: index ", sample.sample_index, " is already at its end after ",
                              sample.tokens.size(), " tokens"));
    }
  }
  const int64_t pages = PagesFor(prompt + r.sampling.max_new_tokens);
  if (pages > pool_.num_pages()) {
    return absl::ResourceExhaustedError(absl::StrCat("request ", r.id, ": one sample needs ", pages,
                                                     " KV pages, the pool has ", pool_.num_pages(),
                                                     "; raise num_pages or lower max_new_tokens"));
  }
  return absl::OkStatus();
}

absl::Status Generator::Impl::Add(Request request) {
  if (static_cast<int64_t>(groups_.size()) >= options_.waiting_requests_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat("generator: ", groups_.size(), " requests are queued, the most allowed"));
  }
  MOERL_RETURN_IF_ERROR(CheckRequest(request));
  auto group = std::make_unique<Group>();
  group->samples.reserve(request.samples.size());
  const int64_t prompt = static_cast<int64_t>(request.prompt.size());
  for (SampleStart& start : request.samples) {
    Sample sample;
    sample.index = start.sample_index;
    sample.tokens = std::move(start.tokens);
    sample.reported = static_cast<int64_t>(sample.tokens.size());
    // The server that sampled the prefix reported the routes of all its inputs: everything before the last token.
    sample.next_route = sample.tokens.empty() ? 0 : prompt + sample.reported - 1;
    group->samples.push_back(std::move(sample));
  }
  load_.prompt_tokens_total += prompt * static_cast<int64_t>(group->samples.size());
  group->request = std::move(request);
  by_id_[group->request.id] = group.get();
  groups_.push_back(std::move(group));
  return absl::OkStatus();
}

void Generator::Impl::ReleasePages(std::vector<int32_t>& pages) {
  for (const int32_t page : pages) pool_.Release(page);
  pages.clear();
}

void Generator::Impl::BackToWaiting(Sample& sample) {
  ReleasePages(sample.pages);
  sample.cached = 0;
  sample.state = SampleState::kWaiting;
}

// Gives up a shared prefill; its samples wait again.
void Generator::Impl::StopPrefill(Group& group) {
  ReleasePages(group.pages);
  group.prefilling = false;
  group.cached = 0;
  for (Sample& sample : group.samples) {
    if (sample.state == SampleState::kPrompt) sample.state = SampleState::kWaiting;
  }
}

absl::Status Generator::Impl::Abort(uint64_t request_id) {
  const auto it = by_id_.find(request_id);
  if (it == by_id_.end())
    return absl::NotFoundError(absl::StrCat("request ", request_id, " is not here; it may have finished"));
  Group& group = *it->second;
  StopPrefill(group);
  for (Sample& sample : group.samples) {
    if (sample.state == SampleState::kDone) continue;
    ReleasePages(sample.pages);
    SampleOutput output;
    output.request_id = request_id;
    output.sample_index = sample.index;
    output.first_token = sample.reported;
    output.version = group.weights != nullptr ? group.version : version_;
    output.finish = FinishReason::kAbort;
    aborted_.push_back(std::move(output));
  }
  by_id_.erase(it);
  groups_.erase(std::find_if(groups_.begin(), groups_.end(), [&](const auto& g) { return g.get() == &group; }));
  return absl::OkStatus();
}

absl::Status Generator::Impl::SetWeights(std::shared_ptr<const Weights> weights, Version version, FlipPolicy policy) {
  if (!(weights->config() == config()) || weights->options().compute != weights_->options().compute ||
      weights->packed().local_experts != weights_->packed().local_experts) {
    return absl::InvalidArgumentError("generator: new weights differ in configuration, compute type or local experts");
  }
  if (policy == FlipPolicy::kFinish && options_.exchange != nullptr) {
    return absl::InvalidArgumentError("generator: policy finish needs all experts local; use recompute or continue");
  }
  for (const auto& group : groups_) {
    if (policy == FlipPolicy::kFinish) continue;
    if (policy == FlipPolicy::kContinue) {
      group->mixed_kv = group->mixed_kv || group->weights != nullptr;
    } else {
      StopPrefill(*group);
      group->mixed_kv = false;
      for (Sample& sample : group->samples) {
        if (sample.state != SampleState::kRunning) continue;
        BackToWaiting(sample);
        ++load_.recomputed_samples_total;
      }
    }
    if (group->weights != nullptr) {
      group->weights = weights;
      group->version = version;
    }
  }
  weights_ = std::move(weights);
  version_ = version;
  return absl::OkStatus();
}

// ---- the public face
// ----------------------------------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<Generator>> Generator::Create(std::shared_ptr<const Weights> weights, Version version,
                                                             const GeneratorOptions& options) {
  const auto check = [](absl::string_view name, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("generator: ", name, ": expected ", low, " to ", high, ", found ", value));
  };
  MOERL_RETURN_IF_ERROR(check("num_pages", options.num_pages, 1, int64_t{1} << 30));
  MOERL_RETURN_IF_ERROR(check("running_samples_max", options.running_samples_max, 1, 1 << 20));
  MOERL_RETURN_IF_ERROR(check("step_tokens_max", options.step_tokens_max, options.running_samples_max, 1 << 24));
  MOERL_RETURN_IF_ERROR(check("waiting_requests_max", options.waiting_requests_max, 1, 1 << 30));
  if (options.exchange != nullptr && weights->config().num_moe_layers() > 0) {
    const std::vector<int32_t>& held = weights->packed().local_experts;
    const absl::Span<const int32_t> local = options.exchange->local_experts();
    if (!std::equal(held.begin(), held.end(), local.begin(), local.end())) {
      return absl::InvalidArgumentError(absl::StrCat("generator: the weights hold ", held.size(),
                                                     " experts, others than the exchange's ", local.size(),
                                                     " of this rank"));
    }
  }
  if (weights->options().value_head) return absl::InvalidArgumentError("generator: a critic has no vocabulary head");
  MOERL_ASSIGN_OR_RETURN(std::unique_ptr<tensor::Backend> backend, NewModelBackend(options.num_threads));
  auto impl = std::make_unique<Impl>(std::move(weights), version, options, std::move(backend));
  return std::unique_ptr<Generator>(new Generator(std::move(impl)));
}

Generator::Generator(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Generator::~Generator() = default;

absl::Status Generator::Add(Request request) { return impl_->Add(std::move(request)); }
absl::Status Generator::Abort(uint64_t request_id) { return impl_->Abort(request_id); }
absl::StatusOr<StepOutput> Generator::Step() { return impl_->Step(); }
absl::Status Generator::SetWeights(std::shared_ptr<const Weights> weights, Version version, FlipPolicy policy) {
  return impl_->SetWeights(std::move(weights), version, policy);
}
bool Generator::idle() const { return impl_->idle(); }
Version Generator::version() const { return impl_->version(); }
const std::shared_ptr<const Weights>& Generator::weights() const { return impl_->weights(); }
GeneratorLoad Generator::load() const { return impl_->load(); }

}  // namespace moerl::model
