#include "services/trainer/learner.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/base/status_macros.h"

namespace moerl::trainer {
namespace {

double ExplainedVariance(const StepBatch& batch, const rl::PolicyObjective& objective,
                         const std::vector<rl::SampleScores>& scores) {
  double n = 0, sum = 0, sum_squared = 0, error = 0, error_squared = 0;
  for (int64_t ordinal = 0; ordinal < batch.num_samples(); ++ordinal) {
    const auto returns = objective.returns(ordinal);
    const rl::TokenRun& run = batch.sample(ordinal).run;
    const size_t prompt = batch.group(ordinal).prompt.size();
    for (size_t i = 0; i < returns.size(); ++i) {
      if (!run.trainable[i]) continue;
      const double residual = returns[i] - scores[static_cast<size_t>(ordinal)].values[prompt + i];
      n += 1;
      sum += returns[i];
      sum_squared += returns[i] * returns[i];
      error += residual;
      error_squared += residual * residual;
    }
  }
  const double variance = sum_squared - sum * sum / std::max(1.0, n);
  return variance > 0 ? 1.0 - (error_squared - error * error / n) / variance : 0.0;
}

// One entry for each group whose samples reported a gradient, in batch order.
std::vector<TrainedGroup> DescribeTrained(const StepBatch& batch, const std::vector<rl::SampleReport>& reports) {
  std::vector<rl::SampleReport> sorted = reports;
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.ordinal < b.ordinal; });
  std::vector<TrainedGroup> trained;
  for (const rl::SampleReport& report : sorted) {
    const rl::Sample& sample = batch.sample(report.ordinal);
    if (trained.empty() || trained.back().group != sample.group_id) trained.push_back({sample.group_id, 0, 0, 0});
    TrainedGroup& group = trained.back();
    ++group.num_samples;
    group.num_tokens += report.num_tokens;
    const double reward = *sample.reward;
    uint64_t parts[3] = {group.digest, sample.run.IdsDigest(), 0};
    std::memcpy(&parts[2], &reward, sizeof(reward));
    group.digest = XXH3_64bits(parts, sizeof(parts));
  }
  return trained;
}

}  // namespace

// ---------------------------------------------------------------------------------------------- models

model::TrainerModelOptions Learner::ModelOptions(bool value_head) const {
  model::TrainerModelOptions options;
  options.compute = settings_.compute;
  options.num_threads = settings_.num_threads;
  options.recompute = settings_.config.trainer().recompute();
  options.value_head = value_head;
  options.exchange = ranks_.exchange();
  return options;
}

absl::StatusOr<std::unique_ptr<Learner>> Learner::Create(const RunSettings& settings, RankGroup& ranks) {
  auto learner = std::unique_ptr<Learner>(new Learner(settings, ranks));
  const model::TrainerModelOptions options = learner->ModelOptions(false);
  const std::string& path = settings.config.model().path();
  if (path.empty()) {
    const model::TensorSet random = model::RandomParameters(settings.model, settings.config.model().init().seed());
    MOERL_ASSIGN_OR_RETURN(learner->policy_, model::TrainerModel::Create(settings.model, random.views(), options));
  } else {
    MOERL_ASSIGN_OR_RETURN(const auto files, model::SafetensorsDirectory::Open(path));
    MOERL_ASSIGN_OR_RETURN(learner->policy_, model::TrainerModel::Create(settings.model, files->tensors(), options));
  }
  learner->kl_coefficient_ = settings.recipe.kl.coefficient;
  return learner;
}

absl::StatusOr<std::unique_ptr<model::TrainerModel>> Learner::CopyOfPolicy(bool value_head) const {
  const model::ParameterTable table(settings_.model);
  std::vector<model::TensorView> views;
  for (const model::Parameter& parameter : table.parameters()) {
    const absl::Span<const float> values = policy_->master(parameter.name);
    if (values.empty()) continue;  // an expert of another rank
    const absl::string_view bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
    views.push_back({parameter.name, model::FileDType::kF32, parameter.shape(), bytes});
  }
  return model::TrainerModel::Create(settings_.model, views, ModelOptions(value_head));
}

absl::Status Learner::BeginReinforcement() {
  if (settings_.recipe.needs_values()) {
    MOERL_ASSIGN_OR_RETURN(critic_, CopyOfPolicy(true));
  }
  if (settings_.recipe.needs_ref_logp()) reference_ = policy_->weights();
  return absl::OkStatus();
}

absl::Status Learner::LoadReference(const std::string& directory) {
  model::WeightsOptions options;
  options.compute = settings_.compute;
  if (ranks_.exchange()) {
    const auto experts = ranks_.exchange()->local_experts();
    options.local_experts.assign(experts.begin(), experts.end());
  }
  MOERL_ASSIGN_OR_RETURN(reference_, model::Weights::Load(directory, options));
  return absl::OkStatus();
}

// ---------------------------------------------------------------------------------------------- optimizer

absl::Status Learner::Reduce(model::TrainerModel& model) {
  return ranks_.size() == 1 ? absl::OkStatus() : ranks_.Sum(model.replicated_gradients());
}

// The norm is the same to the bit for every number of ranks: squares by parameter, experts' from where they live.
absl::StatusOr<model::StepResult> Learner::OptimizerStep(model::TrainerModel& model, double learning_rate,
                                                         const model::RouterBiasUpdate& bias) {
  const v1::TrainerConfig& config = settings_.config.trainer();
  model::AdamWOptions options;
  options.learning_rate = static_cast<float>(learning_rate);
  options.beta1 = static_cast<float>(config.beta1());
  options.beta2 = static_cast<float>(config.beta2());
  options.epsilon = static_cast<float>(config.epsilon());
  options.weight_decay = static_cast<float>(config.weight_decay());
  options.max_grad_norm = static_cast<float>(config.max_grad_norm());
  if (ranks_.size() == 1) return model.ClipAndStep(options, {}, bias);

  std::vector<double> squares = model.GradientSquares();
  const std::string mine(reinterpret_cast<const char*>(squares.data()), squares.size() * sizeof(double));
  MOERL_ASSIGN_OR_RETURN(const std::vector<std::string> all, ranks_.Gather(mine));
  std::memcpy(squares.data(), all[0].data(), all[0].size());
  const model::ParameterTable table(settings_.model);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    const auto* theirs = reinterpret_cast<const double*>(all[rank].data());
    for (size_t i = 0; i < table.parameters().size(); ++i) {
      if (table.parameters()[i].expert >= 0) squares[i] += theirs[i];
    }
  }
  return model.ClipAndStep(options, squares, bias);
}

absl::StatusOr<rl::Packing> Learner::PackFor(std::span<const int64_t> ordinals,
                                             std::span<const int64_t> lengths) const {
  return rl::PackSamples(ordinals, lengths, settings_.config.trainer().micro_batch_tokens(), ranks_.size());
}

absl::StatusOr<double> Learner::SupervisedUpdate(const std::vector<rl::SupervisedExample>& examples) {
  std::vector<int64_t> ordinals(examples.size());
  std::iota(ordinals.begin(), ordinals.end(), 0);
  std::vector<int64_t> lengths;
  int64_t num_tokens = 0;
  for (const rl::SupervisedExample& example : examples) {
    lengths.push_back(static_cast<int64_t>(example.tokens.size()));
    num_tokens += std::count(example.trainable.begin(), example.trainable.end(), 1);
  }
  MOERL_ASSIGN_OR_RETURN(const rl::Packing packing, PackFor(ordinals, lengths));
  const v1::WarmStartConfig& warm = settings_.config.trainer().warm_start();
  const auto num_layers = std::max<int64_t>(1, settings_.model.num_moe_layers());
  std::vector<float> loss(1, 0.0f);
  for (const auto& micro_batch : packing.ranks[static_cast<size_t>(ranks_.rank())]) {
    model::PackedBatch batch;
    batch.offsets = {0};
    for (int64_t ordinal : micro_batch) {
      const rl::SupervisedExample& example = examples[static_cast<size_t>(ordinal)];
      batch.tokens.insert(batch.tokens.end(), example.tokens.begin(), example.tokens.end());
      batch.wanted.insert(batch.wanted.end(), example.trainable.begin(), example.trainable.end());
      batch.offsets.push_back(batch.num_tokens());
    }
    MOERL_ASSIGN_OR_RETURN(const model::ForwardResult forward, policy_->Forward(batch));
    model::BackwardInput input;
    input.d_logprobs.assign(batch.tokens.size(), 0.0f);
    for (size_t t = 0; t < batch.tokens.size(); ++t) {
      if (!batch.wanted[t]) continue;
      input.d_logprobs[t] = -1.0f / static_cast<float>(num_tokens);
      loss[0] -= forward.logprobs[t] / static_cast<float>(num_tokens);
    }
    input.d_balance_loss = static_cast<float>(warm.aux_loss_coefficient()) /
                           static_cast<float>(static_cast<int64_t>(examples.size()) * num_layers);
    MOERL_RETURN_IF_ERROR(policy_->Backward(input));
  }
  MOERL_RETURN_IF_ERROR(Reduce(*policy_));
  MOERL_RETURN_IF_ERROR(ranks_.Sum(absl::MakeSpan(loss)));
  MOERL_ASSIGN_OR_RETURN(const model::StepResult result, OptimizerStep(*policy_, warm.learning_rate()));
  if (result.skipped) return absl::InternalError(absl::StrCat("warm start: ", result.skipped_because));
  return loss[0];
}

// ---------------------------------------------------------------------------------------------- the step

absl::Status Learner::ScoreMicroBatch(const StepBatch& batch, std::span<const int64_t> ordinals, std::string& out) {
  const model::PackedBatch packed = batch.Pack(ordinals);
  const auto append = [&](const std::vector<float>& values) {
    out.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
  };
  model::ScoreOptions options;
  options.num_threads = settings_.num_threads;
  options.exchange = ranks_.exchange();
  if (settings_.recipe.needs_old_logp()) {
    MOERL_ASSIGN_OR_RETURN(const model::ForwardResult old, policy_->Score(packed, options));
    append(old.logprobs);
  }
  if (settings_.recipe.needs_ref_logp()) {
    MOERL_ASSIGN_OR_RETURN(const model::ForwardResult reference, model::Score(*reference_, packed, options));
    append(reference.logprobs);
  }
  if (settings_.recipe.needs_values()) {
    MOERL_ASSIGN_OR_RETURN(const model::ForwardResult head, critic_->Score(packed, options));
    append(ValuesBeforeTokens(head.values, packed.offsets));
  }
  return absl::OkStatus();
}

// Each rank scores its part; the objective needs all of them, since means and whitening go over the whole step.
absl::StatusOr<std::vector<rl::SampleScores>> Learner::ComputeScores(const StepBatch& batch) {
  const rl::Recipe& recipe = settings_.recipe;
  std::vector<rl::SampleScores> scores(static_cast<size_t>(batch.num_samples()));
  if (!recipe.needs_old_logp() && !recipe.needs_ref_logp() && !recipe.needs_values()) return scores;
  std::vector<int64_t> ordinals(scores.size());
  std::iota(ordinals.begin(), ordinals.end(), 0);
  MOERL_ASSIGN_OR_RETURN(const rl::Packing packing, PackFor(ordinals, batch.Lengths(ordinals)));
  std::string mine;
  for (const auto& micro_batch : packing.ranks[static_cast<size_t>(ranks_.rank())]) {
    MOERL_RETURN_IF_ERROR(ScoreMicroBatch(batch, micro_batch, mine));
  }
  MOERL_ASSIGN_OR_RETURN(const std::vector<std::string> all, ranks_.Gather(mine));
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto* from = reinterpret_cast<const float*>(all[rank].data());
    const auto take = [&](bool wanted, std::span<const int64_t> micro_batch, std::vector<float> rl::SampleScores::*to) {
      if (!wanted) return;
      for (int64_t ordinal : micro_batch) {
        const int64_t length = batch.length(ordinal);
        (scores[static_cast<size_t>(ordinal)].*to).assign(from, from + length);
        from += length;
      }
    };
    for (const auto& micro_batch : packing.ranks[rank]) {
      take(recipe.needs_old_logp(), micro_batch, &rl::SampleScores::old_logp);
      take(recipe.needs_ref_logp(), micro_batch, &rl::SampleScores::ref_logp);
      take(recipe.needs_values(), micro_batch, &rl::SampleScores::values);
    }
  }
  return scores;
}

absl::StatusOr<StepReport> Learner::TrainStep(const StepJob& job) {
  const StepBatch batch(job, settings_.model, settings_.recipe.routing_replay);
  MOERL_ASSIGN_OR_RETURN(const std::vector<rl::SampleScores> scores, ComputeScores(batch));
  rl::StepContext context;
  context.version = job.version;
  context.kl_coefficient = kl_coefficient_;
  context.trainer_temperature = settings_.sampling.temperature == 0.0 ? 1.0 : settings_.sampling.temperature;
  context.renormalises_kept_ids = true;
  MOERL_ASSIGN_OR_RETURN(const rl::PolicyObjective objective,
                         rl::PolicyObjective::Create(settings_.recipe, job.groups, scores, context));
  StepReport report;
  report.stats = objective.stats();
  report.learning_rate = settings_.LearningRate(job.step);
  for (int32_t update = 0; update < objective.num_updates(); ++update) {
    MOERL_RETURN_IF_ERROR(RunUpdate(job, batch, objective, update, report));
  }
  if (settings_.recipe.needs_values()) report.explained_variance = ExplainedVariance(batch, objective, scores);
  const rl::KlConfig& kl = settings_.recipe.kl;
  if (kl.target > 0) {
    kl_coefficient_ =
        rl::AdaptKlCoefficient(kl_coefficient_, report.first.kl_ref, batch.num_samples(), kl.target, kl.horizon);
  }
  return report;
}

// Every rank runs the whole sequence: its experts are spread over them.
absl::StatusOr<MismatchTrace> Learner::TraceMismatch(const StepBatch& batch, const Mismatch& mismatch) {
  MismatchTrace trace;
  const std::vector<int32_t>& ids = batch.sample(mismatch.ordinal).run.ids;
  trace.tokens = batch.group(mismatch.ordinal).prompt;
  trace.tokens.insert(trace.tokens.end(), ids.begin(), ids.begin() + mismatch.token + 1);
  model::PackedBatch packed;
  packed.tokens = trace.tokens;
  packed.offsets = {0, packed.num_tokens()};
  model::ScoreOptions options;
  options.num_threads = settings_.num_threads;
  options.exchange = ranks_.exchange();
  options.stage_digests = &trace.stage_digests;
  MOERL_RETURN_IF_ERROR(policy_->Score(packed, options).status());
  return trace;
}

absl::Status Learner::RunUpdate(const StepJob& job, const StepBatch& batch, const rl::PolicyObjective& objective,
                                int32_t update, StepReport& report) {
  const std::vector<int64_t> ordinals = objective.UpdateOrdinals(update);
  MOERL_ASSIGN_OR_RETURN(const rl::Packing packing, PackFor(ordinals, batch.Lengths(ordinals)));
  const v1::AlgorithmConfig& algorithm = settings_.config.algorithm();
  const rl::UpdateCounts& counts = objective.update_counts(update);
  const auto num_layers = static_cast<double>(std::max<int64_t>(1, settings_.model.num_moe_layers()));
  int64_t num_tokens = 0;
  for (int64_t ordinal : ordinals) num_tokens += batch.length(ordinal);
  RouterLossScale scale;
  scale.balance = static_cast<float>(algorithm.aux_loss_coefficient() /
                                     (static_cast<double>(std::max<size_t>(1, ordinals.size())) * num_layers));
  scale.z = static_cast<float>(algorithm.z_loss_coefficient() /
                               (static_cast<double>(std::max<int64_t>(1, num_tokens)) * num_layers));
  UpdatePart mine;
  for (const auto& micro_batch : packing.ranks[static_cast<size_t>(ranks_.rank())]) {
    MOERL_RETURN_IF_ERROR(
        RunMicroBatch(*policy_, critic_.get(), job, batch, objective, update, micro_batch, scale, mine));
  }

  MOERL_ASSIGN_OR_RETURN(const std::vector<std::string> encoded, ranks_.Gather(mine.Encode()));
  UpdatePart all;
  for (const std::string& bytes : encoded) {
    const UpdatePart part = UpdatePart::Decode(bytes);
    all.reports.insert(all.reports.end(), part.reports.begin(), part.reports.end());
    all.expert_tokens.resize(std::max(all.expert_tokens.size(), part.expert_tokens.size()));
    for (size_t i = 0; i < part.expert_tokens.size(); ++i) all.expert_tokens[i] += part.expert_tokens[i];
    if (part.mismatch && (!all.mismatch || part.mismatch->ordinal < all.mismatch->ordinal))
      all.mismatch = part.mismatch;
    if (all.failure.empty()) all.failure = part.failure;
  }
  report.last = rl::Summarize(all.reports);
  if (update == 0) {
    report.first = report.last;
    report.mismatch = all.mismatch;
    if (all.mismatch) {
      MOERL_ASSIGN_OR_RETURN(report.mismatch_trace, TraceMismatch(batch, *all.mismatch));
    }
    report.expert_load =
        rl::DescribeExpertLoad(all.expert_tokens, static_cast<int32_t>(settings_.model.num_moe_layers()),
                               static_cast<int32_t>(settings_.model.num_experts));
  }
  if (update < settings_.recipe.num_mini_batches) {
    const std::vector<TrainedGroup> trained = DescribeTrained(batch, all.reports);
    report.trained.insert(report.trained.end(), trained.begin(), trained.end());
  }
  if (counts.num_tokens == 0 && all.failure.empty()) all.failure = "no trainable token in the update";
  if (!all.failure.empty()) {
    report.is_skipped = true;
    report.skipped_because = all.failure;
    policy_->ZeroGradients();
    if (critic_) critic_->ZeroGradients();
    return absl::OkStatus();
  }
  MOERL_RETURN_IF_ERROR(Reduce(*policy_));
  const model::RouterBiasUpdate bias{static_cast<float>(algorithm.router_bias_update_rate()), all.expert_tokens};
  MOERL_ASSIGN_OR_RETURN(const model::StepResult step, OptimizerStep(*policy_, report.learning_rate, bias));
  report.grad_norm = step.grad_norm;
  report.is_skipped = report.is_skipped || step.skipped;
  if (step.skipped) report.skipped_because = step.skipped_because;
  if (!critic_) return absl::OkStatus();
  MOERL_RETURN_IF_ERROR(Reduce(*critic_));
  const double ratio = algorithm.has_critic_learning_rate()
                           ? algorithm.critic_learning_rate() / settings_.config.trainer().learning_rate()
                           : 1.0;
  MOERL_ASSIGN_OR_RETURN(const model::StepResult critic_step, OptimizerStep(*critic_, report.learning_rate * ratio));
  report.is_skipped = report.is_skipped || critic_step.skipped;
  if (critic_step.skipped) report.skipped_because = critic_step.skipped_because;
  return absl::OkStatus();
}

}  // namespace moerl::trainer
