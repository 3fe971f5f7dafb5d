#include "libs/model/training.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/base/status_macros.h"
#include "libs/model/backend.h"
#include "libs/model/backward.h"
#include "libs/model/packed_run.h"
#include "libs/model/router.h"

namespace moerl::model {

using tensor::DType;
using tensor::Mat;

namespace {

// Matrices decay; norms, biases and the value head do not.
bool Decays(const Parameter& p) { return !p.is_vector && p.role != Role::kValueHead; }

}  // namespace

class TrainerModel::Impl {
 public:
  Impl(const ModelConfig& config, const TrainerModelOptions& options, std::unique_ptr<tensor::Backend> backend)
      : config_(config),
        options_(options),
        table_(config, options.value_head),
        backend_(std::move(backend)),
        local_(MakeLocalExchange(config, options.compute, backend_.get())),
        exchange_(options.exchange != nullptr ? options.exchange : local_.get()),
        rope_(ComputeRopeFrequencies(config)),
        keep_(*backend_),
        temp_(*backend_) {
    weights_options_.compute = options.compute;
    weights_options_.with_backward = true;
    weights_options_.value_head = options.value_head;
    if (options.exchange != nullptr && config.num_experts > 0) {
      const auto experts = exchange_->local_experts();
      weights_options_.local_experts.assign(experts.begin(), experts.end());
    }
    LayOut();
  }

  const ModelConfig& config() const { return config_; }
  int64_t num_updates() const { return num_updates_; }
  std::shared_ptr<const Weights> weights() const { return weights_; }

  absl::Status SetMasters(absl::Span<const TensorView> tensors) {
    MOERL_ASSIGN_OR_RETURN(const auto found, MatchTensors(config_, table_, tensors, weights_options_));
    for (size_t i = 0; i < found.size(); ++i) {
      if (offsets_[i] >= 0 && found[i] != nullptr)
        MOERL_RETURN_IF_ERROR(DecodeToFloat(*found[i], &masters_[offsets_[i]]));
    }
    Repack();
    return absl::OkStatus();
  }

  absl::StatusOr<ForwardResult> Forward(const PackedBatch& batch);
  absl::Status Backward(const BackwardInput& input);

  absl::StatusOr<ForwardResult> Score(const PackedBatch& batch, const ScoreOptions& options) {
    return ScoreOn(engine(), rope_, batch, options, score_);
  }

  absl::Span<float> replicated_gradients() { return gradients_.subspan(0, num_replicated_); }
  absl::Span<float> expert_gradients() { return gradients_.subspan(num_replicated_); }
  void ZeroGradients() { std::fill(gradients_.begin(), gradients_.end(), 0.0f); }

  absl::Span<const float> Find(absl::Span<const float> values, absl::string_view name) const {
    const int index = table_.Find(name);
    if (index < 0 || offsets_[index] < 0) return {};
    return values.subspan(offsets_[index], table_.parameters()[index].size());
  }
  absl::Span<const float> gradient(absl::string_view name) const { return Find(gradients_, name); }
  absl::Span<const float> master(absl::string_view name) const { return Find(masters_, name); }

  std::vector<double> GradientSquares() const {
    std::vector<double> squares(offsets_.size(), 0.0);
    for (size_t i = 0; i < offsets_.size(); ++i) {
      if (offsets_[i] >= 0) squares[i] = backend_->SumSquares(&gradients_[offsets_[i]], table_.parameters()[i].size());
    }
    return squares;
  }

  StepResult ClipAndStep(const AdamWOptions& options, absl::Span<const double> given, const RouterBiasUpdate& bias);
  void MoveRouterBiases(const RouterBiasUpdate& update);
  absl::Status ForEachTensor(const std::function<absl::Status(const TensorView&)>& visit) const;
  absl::Status SaveState(const std::string& path) const;
  absl::Status RestoreState(const std::string& path);

 private:
  // Replicated parameters first, then this rank's experts, each in the order of the table.
  void LayOut() {
    const auto& parameters = table_.parameters();
    const auto& local = weights_options_.local_experts;
    offsets_.assign(parameters.size(), -1);
    int64_t size = 0;
    const auto place = [&](bool experts) {
      for (size_t i = 0; i < parameters.size(); ++i) {
        const Parameter& p = parameters[i];
        if ((p.expert >= 0) != experts) continue;
        if (experts && !local.empty() && !std::binary_search(local.begin(), local.end(), p.expert)) continue;
        offsets_[i] = size;
        size += p.size();
      }
    };
    place(false);
    num_replicated_ = size;
    place(true);
    flat_ = backend_->NewTensor(DType::kF32, {4, size});
    std::memset(flat_.raw(), 0, static_cast<size_t>(flat_.bytes()));
    float* next = flat_.data();
    for (absl::Span<float>* buffer : {&masters_, &gradients_, &m_, &v_}) {
      *buffer = {next, static_cast<size_t>(size)};
      next += size;
    }
  }

  void Repack() {
    const auto master = [&](size_t i) -> const float* { return &masters_[offsets_[i]]; };
    weights_ = Weights::FromMasters(config_, table_, weights_options_, master, std::move(weights_));
  }

  Engine engine() { return MakeEngine(*weights_, *backend_, *exchange_); }

  absl::Status Recompute(const Engine& e, int layer, const Rotary& rotary, LayerSaved& saved);

  // A forward pass that waits for its backward.
  struct Pending {
    std::shared_ptr<const Weights> weights;  // those it ran on
    PackedPlan plan;
    Rotary rotary;
    std::vector<LayerSaved> layers;
    HeadSaved head;
    ValueSaved value;
  };

  const ModelConfig config_;
  const TrainerModelOptions options_;
  WeightsOptions weights_options_;
  const ParameterTable table_;
  const std::unique_ptr<tensor::Backend> backend_;
  const std::unique_ptr<ExpertExchange> local_;
  ExpertExchange* const exchange_;
  const RopeFrequencies rope_;

  std::vector<int64_t> offsets_;  // of each parameter in the flat buffers, -1: not on this rank
  int64_t num_replicated_ = 0;
  tensor::Tensor flat_;  // [4, parameters of this rank]: the buffers that follow
  absl::Span<float> masters_, gradients_, m_, v_;
  int64_t num_updates_ = 0;
  std::shared_ptr<const Weights> weights_;

  std::unique_ptr<Pending> pending_;
  Arena keep_, temp_;
  Arena score_{*backend_};
};

absl::StatusOr<ForwardResult> TrainerModel::Impl::Forward(const PackedBatch& batch) {
  pending_.reset();
  MOERL_RETURN_IF_ERROR(ValidateBatch(batch, config_));
  keep_.Reset();
  temp_.Reset();
  auto pending = std::make_unique<Pending>();
  pending->weights = weights_;
  pending->plan = MakePackedPlan(batch, config_);
  const Engine e = engine();
  const int64_t rows = pending->plan.num_tokens();
  ForwardResult result = EmptyResult(config_, rows, /*entropy=*/true, options_.value_head, /*routes=*/true);
  pending->rotary = MakeRotary(e, pending->plan.positions, rope_.inverse, rope_.attention_factor, keep_);
  Mat x = keep_.Take(DType::kF32, rows, config_.hidden_size);
  const KeepForBackward what = options_.recompute ? KeepForBackward::kLayerInputs : KeepForBackward::kEverything;
  MOERL_RETURN_IF_ERROR(RunLayers(e, pending->plan, pending->rotary, what, keep_, temp_, pending->layers, x,
                                  /*want_routes=*/true, &result));
  if (options_.value_head) {
    ValueForward(e, x, keep_, &pending->value, &result);
  } else {
    HeadForward(e, pending->plan.head, x, /*want_entropy=*/true, keep_, &pending->head, &result);
  }
  pending_ = std::move(pending);
  return result;
}

absl::Status TrainerModel::Impl::Recompute(const Engine& e, int layer, const Rotary& rotary, LayerSaved& saved) {
  Mat x = temp_.Take(DType::kF32, saved.x.rows, saved.x.cols);
  if (x.rows > 0) e.backend.Cast(saved.x, x);
  const auto attend = [&](tensor::ConstMat q, tensor::ConstMat k, tensor::ConstMat v, Mat out,
                          tensor::RowStats* stats) { AttendPacked(e, pending_->plan.offsets, q, k, v, out, stats); };
  AttentionForward(e, layer, rotary, attend, x, temp_, temp_, &saved.attention);
  return MlpForward(e, layer, Routing::kAgain, true, x, temp_, temp_, &saved.mlp);
}

absl::Status TrainerModel::Impl::Backward(const BackwardInput& input) {
  if (pending_ == nullptr) return absl::FailedPreconditionError("training: Backward without a Forward before it");
  const int64_t rows = pending_->plan.num_tokens();
  for (const auto* d : {&input.d_logprobs, &input.d_entropy, &input.d_values}) {
    if (!d->empty() && static_cast<int64_t>(d->size()) != rows) {
      return absl::InvalidArgumentError(
          absl::StrCat("training: expected gradients of ", rows, " tokens, found ", d->size()));
    }
  }
  const Engine e = MakeEngine(*pending_->weights, *backend_, *exchange_);
  const Gradients g(table_, offsets_, gradients_.data());
  const int64_t hidden = config_.hidden_size;
  temp_.Reset();
  Mat dx = temp_.Take(DType::kF32, rows, hidden);
  if (rows > 0) backend_->Zero(dx);
  Arena::Mark mark = temp_.mark();
  if (options_.value_head) {
    ValueBackward(e, pending_->value, input.d_values, g.Matrix(Role::kValueHead, -1, -1, 1, hidden),
                  g.At(Role::kFinalNorm), dx, temp_);
  } else if (!input.d_logprobs.empty() || !input.d_entropy.empty()) {
    const Role head = config_.tie_word_embeddings ? Role::kEmbedding : Role::kLmHead;
    HeadBackward(e, pending_->plan.head, pending_->head, input.d_logprobs, input.d_entropy,
                 g.Matrix(head, -1, -1, config_.vocab_size, hidden), g.At(Role::kFinalNorm), dx, temp_);
  }
  for (int layer = static_cast<int>(config_.num_layers) - 1; layer >= 0; --layer) {
    temp_.Rewind(mark);
    LayerSaved& saved = pending_->layers[layer];
    if (options_.recompute) MOERL_RETURN_IF_ERROR(Recompute(e, layer, pending_->rotary, saved));
    RouterLossGradients router;
    if (config_.layer_has_experts[layer]) {
      router = RouterLossBackward(e, pending_->plan.offsets, saved.mlp, input.d_balance_loss, input.d_z_loss, temp_);
    }
    MOERL_RETURN_IF_ERROR(MlpBackward(e, layer, saved.mlp, router.d_probs, router.d_logits, g, dx, temp_));
    AttentionBackward(e, layer, pending_->rotary, pending_->plan.offsets, saved.attention, g, dx, temp_);
  }
  if (rows > 0) {
    backend_->EmbedBackward(dx, pending_->plan.tokens, g.Matrix(Role::kEmbedding, -1, -1, config_.vocab_size, hidden));
  }
  pending_.reset();
  return absl::OkStatus();
}

// Integers decide the sign, so that every rank moves its copy alike.
void TrainerModel::Impl::MoveRouterBiases(const RouterBiasUpdate& update) {
  if (update.rate == 0) return;
  const int64_t experts = config_.num_experts;
  MOERL_CHECK(config_.has_router_bias &&
              static_cast<int64_t>(update.expert_tokens.size()) == config_.num_moe_layers() * experts);
  int64_t moe_layer = 0;
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    if (!config_.layer_has_experts[layer]) continue;
    float* bias = &masters_[offsets_[table_.Find(Role::kRouterBias, layer)]];
    const absl::Span<const int64_t> loads = update.expert_tokens.subspan(moe_layer++ * experts, experts);
    int64_t total = 0;
    for (const int64_t load : loads) total += load;
    for (int64_t i = 0; i < experts; ++i) {
      if (loads[i] * experts < total) bias[i] += update.rate;
      if (loads[i] * experts > total) bias[i] -= update.rate;
    }
  }
}

StepResult TrainerModel::Impl::ClipAndStep(const AdamWOptions& options, absl::Span<const double> given,
                                           const RouterBiasUpdate& bias) {
  const std::vector<double> own = given.empty() ? GradientSquares() : std::vector<double>();
  const absl::Span<const double> squares = given.empty() ? absl::MakeConstSpan(own) : given;
  MOERL_CHECK(squares.size() == offsets_.size());
  StepResult result;
  pending_.reset();
  double sum = 0;
  for (size_t i = 0; i < squares.size(); ++i) {
    sum += squares[i];
    if (result.skipped || std::isfinite(squares[i])) continue;
    result.skipped = true;
    result.skipped_because = absl::StrCat("gradient of \"", table_.parameters()[i].name, "\" is not finite");
  }
  result.grad_norm = std::sqrt(sum);
  if (result.skipped) {
    ZeroGradients();
    return result;
  }
  tensor::AdamWOptions adam;
  adam.lr = options.learning_rate;
  adam.beta1 = options.beta1;
  adam.beta2 = options.beta2;
  adam.eps = options.epsilon;
  adam.step = ++num_updates_;
  if (options.max_grad_norm > 0 && result.grad_norm > options.max_grad_norm) {
    adam.grad_scale = static_cast<float>(options.max_grad_norm / (result.grad_norm + 1e-6));
  }
  for (size_t i = 0; i < offsets_.size(); ++i) {
    if (offsets_[i] < 0 || table_.parameters()[i].role == Role::kRouterBias) continue;
    const int64_t at = offsets_[i];
    adam.weight_decay = Decays(table_.parameters()[i]) ? options.weight_decay : 0.0f;
    backend_->AdamW(adam, &gradients_[at], table_.parameters()[i].size(), &masters_[at], &m_[at], &v_[at]);
  }
  MoveRouterBiases(bias);
  ZeroGradients();
  Repack();
  return result;
}

absl::Status TrainerModel::Impl::ForEachTensor(const std::function<absl::Status(const TensorView&)>& visit) const {
  for (size_t i = 0; i < offsets_.size(); ++i) {
    if (offsets_[i] < 0) continue;
    const Parameter& p = table_.parameters()[i];
    const Compute stored = p.StoredAs(options_.compute);
    const std::string bytes = EncodeFromFloat(masters_.subspan(offsets_[i], p.size()), stored);
    MOERL_RETURN_IF_ERROR(visit(TensorView{p.name, FileDTypeOf(stored), p.shape(), bytes}));
  }
  return absl::OkStatus();
}

namespace {

constexpr absl::string_view kUpdatesName = "num_updates";
constexpr absl::string_view kMasterPrefix = "master.", kFirstPrefix = "adam_m.", kSecondPrefix = "adam_v.";

}  // namespace

absl::Status TrainerModel::Impl::SaveState(const std::string& path) const {
  std::vector<TensorView> views;
  for (const auto& [prefix, buffer] :
       {std::make_pair(kMasterPrefix, &masters_), {kFirstPrefix, &m_}, {kSecondPrefix, &v_}}) {
    for (size_t i = 0; i < offsets_.size(); ++i) {
      if (offsets_[i] < 0) continue;
      const Parameter& p = table_.parameters()[i];
      views.push_back(
          {absl::StrCat(prefix, p.name), FileDType::kF32, p.shape(),
           absl::string_view(reinterpret_cast<const char*>(&(*buffer)[offsets_[i]]), p.size() * sizeof(float))});
    }
  }
  views.push_back({std::string(kUpdatesName),
                   FileDType::kI64,
                   {1},
                   absl::string_view(reinterpret_cast<const char*>(&num_updates_), sizeof(num_updates_))});
  return WriteSafetensors(path, views);
}

absl::Status TrainerModel::Impl::RestoreState(const std::string& path) {
  MOERL_ASSIGN_OR_RETURN(const std::unique_ptr<SafetensorsFile> file, SafetensorsFile::Open(path));
  absl::flat_hash_map<absl::string_view, const TensorView*> found;
  for (const TensorView& view : file->tensors()) found[view.name] = &view;
  std::vector<std::pair<const TensorView*, void*>> copies;
  const auto expect = [&](const std::string& name, FileDType dtype, const std::vector<int64_t>& shape, void* to) {
    const auto it = found.find(name);
    if (it == found.end()) return absl::InvalidArgumentError(absl::StrCat(path, ": tensor \"", name, "\" is missing"));
    if (it->second->dtype != dtype || it->second->shape != shape) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": tensor \"", name, "\" has another type or shape"));
    }
    copies.emplace_back(it->second, to);
    return absl::OkStatus();
  };
  for (const auto& [prefix, buffer] :
       {std::make_pair(kMasterPrefix, &masters_), {kFirstPrefix, &m_}, {kSecondPrefix, &v_}}) {
    for (size_t i = 0; i < offsets_.size(); ++i) {
      if (offsets_[i] < 0) continue;
      const Parameter& p = table_.parameters()[i];
      MOERL_RETURN_IF_ERROR(expect(absl::StrCat(prefix, p.name), FileDType::kF32, p.shape(), &(*buffer)[offsets_[i]]));
    }
  }
  MOERL_RETURN_IF_ERROR(expect(std::string(kUpdatesName), FileDType::kI64, {1}, &num_updates_));
  if (copies.size() != file->tensors().size()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": holds ", file->tensors().size(), " tensors, expected ",
                                                   copies.size(), "; it belongs to another model or rank"));
  }
  for (const auto& [view, to] : copies) {
    std::memcpy(to, view->bytes.data(), view->bytes.size());
    file->Forget(*view);
  }
  pending_.reset();
  ZeroGradients();
  Repack();
  return absl::OkStatus();
}

// ---- the public face
// ----------------------------------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<TrainerModel>> TrainerModel::Create(const ModelConfig& config,
                                                                   absl::Span<const TensorView> tensors,
                                                                   const TrainerModelOptions& options) {
  MOERL_RETURN_IF_ERROR(ValidateConfig(config));
  if (options.exchange != nullptr && config.num_moe_layers() > 0 && options.exchange->local_experts().empty()) {
    return absl::InvalidArgumentError("training: this rank holds no expert; use at most as many ranks as experts");
  }
  MOERL_ASSIGN_OR_RETURN(std::unique_ptr<tensor::Backend> backend, NewModelBackend(options.num_threads));
  auto impl = std::make_unique<Impl>(config, options, std::move(backend));
  MOERL_RETURN_IF_ERROR(impl->SetMasters(tensors));
  return std::unique_ptr<TrainerModel>(new TrainerModel(std::move(impl)));
}

TrainerModel::TrainerModel(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TrainerModel::~TrainerModel() = default;

const ModelConfig& TrainerModel::config() const { return impl_->config(); }
absl::StatusOr<ForwardResult> TrainerModel::Forward(const PackedBatch& batch) { return impl_->Forward(batch); }
absl::StatusOr<ForwardResult> TrainerModel::Score(const PackedBatch& batch, const ScoreOptions& options) {
  return impl_->Score(batch, options);
}
absl::Status TrainerModel::Backward(const BackwardInput& input) { return impl_->Backward(input); }
absl::Span<float> TrainerModel::replicated_gradients() { return impl_->replicated_gradients(); }
absl::Span<float> TrainerModel::expert_gradients() { return impl_->expert_gradients(); }
void TrainerModel::ZeroGradients() { impl_->ZeroGradients(); }
absl::Span<const float> TrainerModel::gradient(absl::string_view name) const { return impl_->gradient(name); }
absl::Span<const float> TrainerModel::master(absl::string_view name) const { return impl_->master(name); }
std::vector<double> TrainerModel::GradientSquares() const { return impl_->GradientSquares(); }
StepResult TrainerModel::ClipAndStep(const AdamWOptions& options, absl::Span<const double> squares,
                                     const RouterBiasUpdate& bias) {
  return impl_->ClipAndStep(options, squares, bias);
}
std::shared_ptr<const Weights> TrainerModel::weights() const { return impl_->weights(); }
absl::Status TrainerModel::ForEachTensor(const std::function<absl::Status(const TensorView&)>& visit) const {
  return impl_->ForEachTensor(visit);
}
absl::Status TrainerModel::SaveState(const std::string& path) const { return impl_->SaveState(path); }
absl::Status TrainerModel::RestoreState(const std::string& path) { return impl_->RestoreState(path); }
int64_t TrainerModel::num_updates() const { return impl_->num_updates(); }

int64_t ActivationBytes(const ModelConfig& c, const TrainerModelOptions& options, int64_t num_tokens) {
  const int64_t h = c.hidden_size, e = tensor::SizeOf(DTypeOf(options.compute));
  if (options.recompute) return num_tokens * c.num_layers * h * 4;
  const int64_t qkv = c.q_size() + 2 * c.kv_size();
  // Input, its norm, q k v and the output, softmax statistics; for QK-norm the projections as well.
  int64_t attention = 4 * (h + 1) + e * (h + qkv + c.q_size()) + 8 * c.num_heads;
  if (c.qk_norm != QkNorm::kNone) attention += 4 * qkv;
  const auto mlp = [&](int64_t width) { return width * (8 + e); };  // gate and up, their product
  int64_t dense = 4 * (h + 1) + e * h + mlp(c.intermediate_size);
  int64_t moe = 4 * (h + 1) + e * h + 8 * c.num_experts + c.top_k * (h * (4 + e) + mlp(c.moe_intermediate_size));
  if (c.shared_expert_intermediate_size > 0) moe += 4 * h + mlp(c.shared_expert_intermediate_size);
  const int64_t moe_layers = c.num_moe_layers();
  return num_tokens * (c.num_layers * attention + (c.num_layers - moe_layers) * dense + moe_layers * moe);
}

}  // namespace moerl::model
