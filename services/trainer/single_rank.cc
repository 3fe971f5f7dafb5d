#include "services/trainer/rank_group.h"

namespace moerl::trainer {
namespace {

class SingleRank final : public RankGroup {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  model::ExpertExchange* exchange() override { return nullptr; }
  absl::StatusOr<std::string> Broadcast(std::string bytes) override { return bytes; }
  absl::StatusOr<std::vector<std::string>> Gather(std::string bytes) override {
    return std::vector<std::string>{std::move(bytes)};
  }
  absl::Status Sum(absl::Span<float>) override { return absl::OkStatus(); }
};

}  // namespace

std::unique_ptr<RankGroup> MakeSingleRank() { return std::make_unique<SingleRank>(); }

}  // namespace moerl::trainer
