#include <numeric>
#include <utility>

#include "libs/model/backend.h"
#include "libs/model/expert_exchange.h"
#include "libs/tensor/expert_plan.h"

namespace moerl::model {
namespace {

using tensor::ConstMat;
using tensor::Mat;

struct LocalHandle : ExpertExchange::Handle {
  tensor::ExpertPlan plan;
  std::vector<int32_t> ids;
  std::vector<float> weights;      // [tokens, top_k]
  std::vector<float> row_weights;  // [rows]
  int64_t num_tokens = 0;
};

class LocalExchange : public ExpertExchange {
 public:
  LocalExchange(const ModelConfig& config, Compute compute, tensor::Backend* backend)
      : hidden_(config.hidden_size),
        top_k_(static_cast<int>(config.top_k)),
        wire_block_(WireBlock(config, compute)),
        backend_(*backend),
        experts_(config.num_experts) {
    std::iota(experts_.begin(), experts_.end(), 0);
  }

  absl::Span<const int32_t> local_experts() const override { return experts_; }
  int num_ranks() const override { return 1; }

  absl::StatusOr<ExpertBatch> Dispatch(const void* x, Compute type, int64_t num_tokens, const int32_t* topk_ids,
                                       const float* weights) override {
    auto handle = std::make_shared<LocalHandle>();
    const int64_t slots = num_tokens * top_k_;
    handle->num_tokens = num_tokens;
    handle->ids.assign(topk_ids, topk_ids + slots);
    handle->weights.assign(weights, weights + slots);
    handle->plan = tensor::MakeExpertPlan(handle->ids, top_k_, static_cast<int>(experts_.size()));
    handle->row_weights.resize(handle->plan.token_of_row.size());
    for (int64_t i = 0; i < slots; ++i) handle->row_weights[handle->plan.row_of_slot[i]] = weights[i];
    return Gather(std::move(handle), x, type);
  }

  absl::Status Combine(const Handle& handle, const float* y, float* out) override {
    const auto& h = static_cast<const LocalHandle&>(handle);
    backend_.Combine(Rows(h, y), Plan(h), ConstMat(h.weights.data(), h.num_tokens, top_k_),
                     Mat(out, h.num_tokens, hidden_));
    return absl::OkStatus();
  }

  absl::StatusOr<ExpertBatch> DispatchAgain(const std::shared_ptr<const Handle>& handle, const void* x,
                                            Compute type) override {
    return Gather(std::static_pointer_cast<const LocalHandle>(handle), x, type);
  }

  absl::Status CombineGrad(const Handle& handle, const float* dx_rows, const float* d_weight_rows, float* dx,
                           float* d_weights) override {
    const auto& h = static_cast<const LocalHandle&>(handle);
    backend_.Combine(Rows(h, dx_rows), Plan(h), ConstMat(), Mat(dx, h.num_tokens, hidden_));
    for (size_t i = 0; i < h.ids.size(); ++i) d_weights[i] = d_weight_rows[h.plan.row_of_slot[i]];
    return absl::OkStatus();
  }

 private:
  ExpertBatch Gather(std::shared_ptr<const LocalHandle> handle, const void* x, Compute type) {
    const tensor::DType dtype = DTypeOf(type);
    const int64_t rows = static_cast<int64_t>(handle->plan.token_of_row.size());
    if (rows * hidden_ > buffer_.size()) buffer_ = backend_.NewTensor(tensor::DType::kF32, {rows * hidden_ * 2});
    if (rows > 0) {
      backend_.GatherRows(ConstMat(x, dtype, handle->num_tokens, hidden_, hidden_), handle->plan.token_of_row,
                          Mat(buffer_.raw(), dtype, rows, hidden_, hidden_));
    }
    return {buffer_.raw(), rows, handle->plan.offsets, handle->row_weights, std::move(handle)};
  }

  ConstMat Rows(const LocalHandle& h, const float* data) const {
    return ConstMat(data, static_cast<int64_t>(h.plan.token_of_row.size()), hidden_);
  }
  tensor::CombinePlan Plan(const LocalHandle& h) const {
    return {h.ids, h.plan.row_of_slot, top_k_, static_cast<int>(experts_.size()), wire_block_};
  }

  const int64_t hidden_;
  const int top_k_, wire_block_;
  tensor::Backend& backend_;
  std::vector<int32_t> experts_;
  tensor::Tensor buffer_;
};

}  // namespace

std::unique_ptr<ExpertExchange> MakeLocalExchange(const ModelConfig& config, Compute compute,
                                                  tensor::Backend* backend) {
  return std::make_unique<LocalExchange>(config, compute, backend);
}

}  // namespace moerl::model
