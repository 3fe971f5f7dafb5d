#include "services/trainer/micro_batch.h"

#include <cstring>
#include <type_traits>

#include "libs/base/check.h"
#include "libs/base/status_macros.h"

namespace moerl::trainer {
namespace {

static_assert(std::is_trivially_copyable_v<rl::SampleReport>);

template <typename T>
void Put(std::string& out, const std::vector<T>& values) {
  const uint64_t count = values.size();
  out.append(reinterpret_cast<const char*>(&count), sizeof(count));
  out.append(reinterpret_cast<const char*>(values.data()), count * sizeof(T));
}

template <typename T>
std::vector<T> Take(const std::string& in, size_t& at) {
  uint64_t count = 0;
  MOERL_CHECK(at + sizeof(count) <= in.size());
  std::memcpy(&count, in.data() + at, sizeof(count));
  at += sizeof(count);
  MOERL_CHECK(count <= (in.size() - at) / sizeof(T));
  std::vector<T> values(count);
  if (count > 0) std::memcpy(values.data(), in.data() + at, count * sizeof(T));
  at += count * sizeof(T);
  return values;
}

// At the first update the policy's weights are those of the job's version: the same bits are expected.
void FindMismatch(const StepJob& job, const StepBatch& batch, std::span<const int64_t> ordinals,
                  const model::PackedBatch& packed, const std::vector<float>& logprobs, UpdatePart& part) {
  for (size_t s = 0; s < ordinals.size(); ++s) {
    if (part.mismatch && part.mismatch->ordinal < ordinals[s]) continue;
    const rl::TokenRun& run = batch.sample(ordinals[s]).run;
    const size_t first = static_cast<size_t>(packed.offsets[s]) + batch.group(ordinals[s]).prompt.size();
    for (size_t i = 0; i < run.size(); ++i) {
      if (!run.trainable[i] || run.versions[i] != job.version || logprobs[first + i] == run.logprobs[i]) continue;
      part.mismatch = Mismatch{ordinals[s], static_cast<int64_t>(i), logprobs[first + i], run.logprobs[i]};
      break;
    }
  }
}

}  // namespace

std::string UpdatePart::Encode() const {
  std::string out;
  Put(out, reports);
  Put(out, expert_tokens);
  Put(out, mismatch ? std::vector<Mismatch>{*mismatch} : std::vector<Mismatch>{});
  Put(out, std::vector<char>(failure.begin(), failure.end()));
  return out;
}

UpdatePart UpdatePart::Decode(const std::string& bytes) {
  UpdatePart part;
  size_t at = 0;
  part.reports = Take<rl::SampleReport>(bytes, at);
  part.expert_tokens = Take<int64_t>(bytes, at);
  const auto mismatch = Take<Mismatch>(bytes, at);
  if (!mismatch.empty()) part.mismatch = mismatch.front();
  const auto failure = Take<char>(bytes, at);
  part.failure.assign(failure.begin(), failure.end());
  return part;
}

std::vector<float> ValuesBeforeTokens(const std::vector<float>& head, std::span<const int64_t> offsets) {
  std::vector<float> before(head.size(), 0.0f);
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    for (int64_t t = offsets[s] + 1; t < offsets[s + 1]; ++t) {
      before[static_cast<size_t>(t)] = head[static_cast<size_t>(t - 1)];
    }
  }
  return before;
}

std::vector<float> GradientsOfHead(const std::vector<float>& gradients, std::span<const int64_t> offsets) {
  std::vector<float> head(gradients.size(), 0.0f);
  if (gradients.empty()) return head;
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    for (int64_t t = offsets[s] + 1; t < offsets[s + 1]; ++t) {
      head[static_cast<size_t>(t - 1)] = gradients[static_cast<size_t>(t)];
    }
  }
  return head;
}

absl::Status RunMicroBatch(model::TrainerModel& policy, model::TrainerModel* critic, const StepJob& job,
                           const StepBatch& batch, const rl::PolicyObjective& objective, int32_t update,
                           std::span<const int64_t> ordinals, const RouterLossScale& scale, UpdatePart& part) {
  const model::PackedBatch packed = batch.Pack(ordinals);
  MOERL_ASSIGN_OR_RETURN(const model::ForwardResult forward, policy.Forward(packed));
  std::vector<float> values;
  if (critic) {
    MOERL_ASSIGN_OR_RETURN(const model::ForwardResult head, critic->Forward(packed));
    values = ValuesBeforeTokens(head.values, packed.offsets);
  }
  if (update == 0) FindMismatch(job, batch, ordinals, packed, forward.logprobs, part);

  model::BackwardInput to_policy;
  model::BackwardInput to_critic;
  auto loss = objective.Evaluate(update, {ordinals, packed.offsets, forward.logprobs, values, forward.entropy});
  if (loss.ok()) {
    to_policy.d_logprobs = std::move(loss->grad_logp);
    to_policy.d_entropy = std::move(loss->grad_entropy);
    to_policy.d_balance_loss = scale.balance;
    to_policy.d_z_loss = scale.z;
    to_critic.d_values = GradientsOfHead(loss->grad_values, packed.offsets);
    part.reports.insert(part.reports.end(), loss->reports.begin(), loss->reports.end());
  } else if (part.failure.empty()) {
    part.failure = std::string(loss.status().message());
  }
  part.expert_tokens.resize(forward.expert_tokens.size());
  for (size_t i = 0; i < forward.expert_tokens.size(); ++i) part.expert_tokens[i] += forward.expert_tokens[i];
  MOERL_RETURN_IF_ERROR(policy.Backward(to_policy));
  return critic ? critic->Backward(to_critic) : absl::OkStatus();
}

}  // namespace moerl::trainer
