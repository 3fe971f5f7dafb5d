#include "libs/model/ep_exchange.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libs/base/status_macros.h"
#include "libs/model/backend.h"

namespace moerl::model {
namespace {

struct EpHandle : ExpertExchange::Handle {
  ep::Handle route;
};

ep::RowType RowTypeOf(Compute type) { return type == Compute::kFp32 ? ep::RowType::kFp32 : ep::RowType::kBf16; }

class EpExchange : public ExpertExchange {
 public:
  EpExchange(const ModelConfig& config, Compute compute, ep::Group* group, std::unique_ptr<ep::Buffer> buffer)
      : num_ranks_(group->size()), top_k_(static_cast<int>(config.top_k)), buffer_(std::move(buffer)) {
    const int wire_block = WireBlock(config, compute);
    wire_block_ = wire_block == 0 ? ep::kNoWireBlock : wire_block;
    const std::vector<int>& experts = buffer_->map().experts_of_rank(group->rank());
    experts_.assign(experts.begin(), experts.end());
  }

  absl::Span<const int32_t> local_experts() const override { return experts_; }
  int num_ranks() const override { return num_ranks_; }

  absl::StatusOr<ExpertBatch> Dispatch(const void* x, Compute type, int64_t num_tokens, const int32_t* topk_ids,
                                       const float* weights) override {
    auto handle = std::make_shared<EpHandle>();
    MOERL_ASSIGN_OR_RETURN(
        dispatched_, buffer_->Dispatch({x, RowTypeOf(type), /*to_fp8=*/false, num_tokens, top_k_, topk_ids, weights}));
    handle->route = dispatched_.handle;
    return Batch(std::move(handle));
  }

  absl::StatusOr<ExpertBatch> DispatchAgain(const std::shared_ptr<const Handle>& handle, const void* x,
                                            Compute type) override {
    MOERL_ASSIGN_OR_RETURN(dispatched_, buffer_->Dispatch(RouteOf(*handle), x, RowTypeOf(type)));
    return Batch(std::static_pointer_cast<const EpHandle>(handle));
  }

  absl::Status Combine(const Handle& handle, const float* y, float* out) override {
    ep::CombineInput input;
    input.handle = RouteOf(handle);
    input.rows = y;
    input.wire_block = wire_block_;
    input.out = out;
    return buffer_->Combine(input);
  }

  absl::Status CombineGrad(const Handle& handle, const float* dx_rows, const float* d_weight_rows, float* dx,
                           float* d_weights) override {
    ep::CombineInput input;
    input.handle = RouteOf(handle);
    input.rows = dx_rows;
    input.is_weighted = false;
    input.wire_block = wire_block_;
    input.has_scalars = true;
    input.scalars = d_weight_rows;
    input.out = dx;
    input.scalars_out = d_weights;
    return buffer_->Combine(input);
  }

 private:
  static const ep::Handle& RouteOf(const Handle& handle) { return static_cast<const EpHandle&>(handle).route; }

  ExpertBatch Batch(std::shared_ptr<const EpHandle> handle) const {
    return {dispatched_.x, dispatched_.num_rows, dispatched_.offsets, dispatched_.weights, std::move(handle)};
  }

  const int num_ranks_, top_k_;
  int wire_block_;
  std::vector<int32_t> experts_;
  std::unique_ptr<ep::Buffer> buffer_;
  ep::Dispatched dispatched_;  // of the last dispatch: its rows are the caller's until the next
};

}  // namespace

absl::StatusOr<std::unique_ptr<ExpertExchange>> MakeEpExchange(const ModelConfig& config, Compute compute,
                                                               ep::Group* group, ep::ExpertMap map) {
  if (map.num_experts() != config.num_experts) {
    return absl::InvalidArgumentError(absl::StrCat("model: the expert map places ", map.num_experts(),
                                                   " experts, the model has ", config.num_experts));
  }
  for (int rank = 0; rank < group->size(); ++rank) {
    if (!map.experts_of_rank(rank).empty()) continue;
    return absl::InvalidArgumentError(absl::StrCat("model: rank ", rank, " of ", group->size(), " holds none of the ",
                                                   config.num_experts, " experts; use fewer ranks or another map"));
  }
  ep::BufferOptions options;
  options.hidden = static_cast<int>(config.hidden_size);
  options.top_k_max = static_cast<int>(config.top_k);
  MOERL_ASSIGN_OR_RETURN(std::unique_ptr<ep::Buffer> buffer, ep::Buffer::Create(group, std::move(map), options));
  return std::make_unique<EpExchange>(config, compute, group, std::move(buffer));
}

}  // namespace moerl::model
