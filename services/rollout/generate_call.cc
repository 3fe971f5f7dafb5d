#include "services/rollout/generate_call.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace moerl::rollout {
namespace {

// A chunk and a completion for every sample fit the queue, so that what Flush sends is never refused.
size_t QueueMax(uint32_t num_samples) { return 2 * static_cast<size_t>(num_samples) + 1; }

v1::FinishReason ToProto(model::FinishReason reason) {
  switch (reason) {
    case model::FinishReason::kStop:
      return v1::FINISH_REASON_STOP;
    case model::FinishReason::kLength:
      return v1::FINISH_REASON_LENGTH;
    default:
      return v1::FINISH_REASON_ABORT;
  }
}

void AddVersion(const model::Version& version, uint32_t num_tokens, v1::TokenSpan& span) {
  if (span.versions_size() > 0) {
    v1::VersionRun& last = *span.mutable_versions(span.versions_size() - 1);
    if (last.version().epoch() == version.epoch && last.version().number() == version.number) {
      last.set_num_tokens(last.num_tokens() + num_tokens);
      return;
    }
  }
  v1::VersionRun& run = *span.add_versions();
  run.mutable_version()->set_epoch(version.epoch);
  run.mutable_version()->set_number(version.number);
  run.set_num_tokens(num_tokens);
}

}  // namespace

GenerateCall::GenerateCall(Options options, absl::AnyInvocable<void()> on_cancel)
    : ServerStream(QueueMax(options.num_samples)),
      options_(std::move(options)),
      on_cancel_(std::move(on_cancel)),
      num_unfinished_(options_.num_samples),
      num_to_complete_(options_.num_samples) {}

void GenerateCall::OnSample(const model::SampleOutput& output) {
  options_.waiting = nullptr;
  if (output.finish != model::FinishReason::kNone) --num_unfinished_;
  absl::MutexLock lock(&mutex_);
  if (!output.tokens.empty()) AppendTokens(output);
  if (output.finish != model::FinishReason::kNone) Complete(output);
  if (pending_values_ > kPendingValuesMax) {
    End(absl::ResourceExhaustedError(
        absl::StrCat("more than ", kPendingValuesMax, " values wait for this client to read them")));
    return;
  }
  if (!is_sending_) Flush();
}

void GenerateCall::OnPrompt(const model::PromptOutput& output) {
  absl::MutexLock lock(&mutex_);
  v1::GenerateChunk& chunk = PendingChunk(0);
  // The first token has none: nothing precedes it.
  if (!output.logprobs.empty())
    chunk.mutable_prompt_logprobs()->Add(output.logprobs.begin() + 1, output.logprobs.end());
  pending_values_ += static_cast<int64_t>(output.logprobs.size());
  if (!is_sending_) Flush();
}

v1::GenerateChunk& GenerateCall::PendingChunk(uint32_t sample_index) {
  std::optional<v1::GenerateChunk>& chunk = pending_[sample_index].chunk;
  if (!chunk) chunk.emplace();
  return *chunk;
}

void GenerateCall::AppendTokens(const model::SampleOutput& output) {
  v1::TokenSpan& span = *PendingChunk(output.sample_index).mutable_tokens();
  const auto num_tokens = static_cast<uint32_t>(output.tokens.size());
  span.mutable_token_ids()->Add(output.tokens.begin(), output.tokens.end());
  span.mutable_logprobs()->Add(output.logprobs.begin(), output.logprobs.end());
  AddVersion(output.version, num_tokens, span);
  if (options_.with_kept_ids) {
    for (size_t i = 0; i + 1 < output.kept_offsets.size(); ++i) {
      span.add_kept_counts(static_cast<uint32_t>(output.kept_offsets[i + 1] - output.kept_offsets[i]));
    }
    span.mutable_kept_ids()->Add(output.kept_ids.begin(), output.kept_ids.end());
  }
  if (options_.routes) {
    span.set_route_bytes(static_cast<uint32_t>(options_.routes->bytes_per_id));
    span.mutable_routes()->append(RunOf(output, options_.num_prompt_tokens, &*options_.routes).routes);
    pending_values_ += options_.routes->ids_per_token * num_tokens / 4;  // of four bytes, as the others
  }
  num_tokens_[output.sample_index] += num_tokens;
  pending_values_ += static_cast<int64_t>(num_tokens + output.kept_ids.size());
}

void GenerateCall::Complete(const model::SampleOutput& output) {
  v1::GenerateComplete complete;
  complete.set_request_id(options_.request_id);
  complete.set_finish_reason(ToProto(output.finish));
  complete.set_num_tokens(num_tokens_[output.sample_index]);
  if (output.finish == model::FinishReason::kStop && !output.tokens.empty() &&
      std::ranges::count(options_.stop_token_ids, output.tokens.back()) > 0) {
    complete.set_stop_token_id(static_cast<uint32_t>(output.tokens.back()));
  }
  pending_[output.sample_index].complete = std::move(complete);
}

void GenerateCall::Flush() {
  for (auto& [sample_index, pending] : std::exchange(pending_, {})) {
    v1::GenerateResponse response;
    response.set_sample_index(sample_index);
    if (pending.chunk) {
      *response.mutable_chunk() = *std::move(pending.chunk);
      is_sending_ |= Send(response);
    }
    if (pending.complete) {
      *response.mutable_complete() = *std::move(pending.complete);
      is_sending_ |= Send(std::move(response));
      --num_to_complete_;
    }
  }
  pending_values_ = 0;
  if (num_to_complete_ == 0) End(absl::OkStatus());
}

void GenerateCall::OnDrained() {
  absl::MutexLock lock(&mutex_);
  is_sending_ = false;
  Flush();
}

void GenerateCall::OnCancelled() { on_cancel_(); }

}  // namespace moerl::rollout
