#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "libs/base/env.h"
#include "libs/base/log.h"
#include "libs/base/status_macros.h"
#include "libs/collective/fabric_collective.h"
#include "libs/ep/group.h"
#include "libs/fabric/cluster.h"
#include "libs/model/ep_exchange.h"
#include "services/trainer/rank_group.h"

namespace moerl::trainer {
namespace {

constexpr size_t kTokenBytesMin = 16;

// The secret that keeps strangers out; none without a file.
absl::StatusOr<std::string> ReadToken(const std::string& file) {
  if (file.empty()) return std::string();
  MOERL_ASSIGN_OR_RETURN(std::string token, PosixEnv()->ReadFile(file));
  if (token.size() >= kTokenBytesMin) return token;
  return absl::InvalidArgumentError(absl::StrCat("fabric.token_file: ", file, " holds ", token.size(),
                                                 " bytes, expected a secret of at least ", kTokenBytesMin,
                                                 "; write one, as with openssl rand -hex 32"));
}

class FabricRanks final : public RankGroup {
 public:
  FabricRanks(fabric::Endpoint endpoint, const ep::Group::Options& options) : group_(std::move(endpoint), options) {}

  absl::Status Open(const RunSettings& settings) {
    MOERL_ASSIGN_OR_RETURN(collective_, collective::FabricCollective::Create(&group_.hub(), {}));
    if (settings.model.num_moe_layers() == 0) return absl::OkStatus();
    MOERL_ASSIGN_OR_RETURN(ep::ExpertMap map,
                           ep::ExpertMap::Aligned(group_.membership(), static_cast<int>(settings.model.num_experts)));
    MOERL_ASSIGN_OR_RETURN(exchange_, model::MakeEpExchange(settings.model, settings.compute, &group_, std::move(map)));
    return absl::OkStatus();
  }

  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  model::ExpertExchange* exchange() override { return exchange_.get(); }

  // Over the control connections: who waits here sleeps, outside any collective and its deadlines.
  absl::StatusOr<std::string> Broadcast(std::string bytes) override {
    MOERL_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                           group_.hub().exchange()->AllGather("command", std::move(bytes), absl::InfiniteDuration()));
    return all[0];
  }

  absl::StatusOr<std::vector<std::string>> Gather(std::string bytes) override {
    const auto mine = static_cast<int64_t>(bytes.size());
    std::vector<int64_t> sizes(static_cast<size_t>(size()), 0);
    const std::vector<int64_t> eight(sizes.size(), sizeof(int64_t));
    MOERL_RETURN_IF_ERROR(collective_->AllGather(&mine, eight, sizes.data()));
    int64_t total = 0;
    for (int64_t one : sizes) total += one;
    std::string all(static_cast<size_t>(total), '\0');
    MOERL_RETURN_IF_ERROR(collective_->AllGather(bytes.data(), sizes, all.data()));
    std::vector<std::string> parts;
    size_t at = 0;
    for (int64_t one : sizes) {
      parts.push_back(all.substr(at, static_cast<size_t>(one)));
      at += static_cast<size_t>(one);
    }
    return parts;
  }

  absl::Status Sum(absl::Span<float> values) override {
    return collective_->AllReduce(collective::Element::kFloat, collective::Reduction::kSum, values.data(),
                                  static_cast<int64_t>(values.size()));
  }

 private:
  ep::Group group_;
  std::unique_ptr<collective::Collective> collective_;
  std::unique_ptr<model::ExpertExchange> exchange_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<RankGroup>> JoinRanks(const RunSettings& settings) {
  const v1::TrainerConfig& trainer = settings.config.trainer();
  const v1::FabricConfig& config = settings.config.fabric();
  if (trainer.num_ranks() == 1) return MakeSingleRank();
  fabric::ClusterOptions options;
  options.bootstrap.address = config.bootstrap_address();
  options.bootstrap.rank = static_cast<int>(trainer.rank());
  options.bootstrap.num_ranks = static_cast<int>(trainer.num_ranks());
  options.bootstrap.cluster_id = absl::StrCat("trainer-", settings.config.name());
  MOERL_ASSIGN_OR_RETURN(options.bootstrap.token, ReadToken(config.token_file()));
  options.provider = config.provider();
  options.local_address = config.local_address();
  options.name = absl::StrCat("trainer-", trainer.rank());
  options.detector = {absl::Milliseconds(config.heartbeat_interval_ms()),
                      absl::Milliseconds(config.heartbeat_timeout_ms())};
  MOERL_ASSIGN_OR_RETURN(fabric::JoinedCluster cluster, fabric::JoinCluster(options));
  LogInfo("trainer ranks have joined",
          {{"rank", trainer.rank()}, {"ranks", trainer.num_ranks()}, {"provider", cluster.provider}});
  ep::Group::Options group;
  group.timeout = absl::Milliseconds(config.operation_timeout_ms());
  group.stall_timeout = absl::Milliseconds(config.stall_timeout_ms());
  if (std::thread::hardware_concurrency() <= trainer.num_ranks()) group.spin = absl::ZeroDuration();
  auto ranks = std::make_unique<FabricRanks>(std::move(cluster.endpoint), group);
  MOERL_RETURN_IF_ERROR(ranks->Open(settings));
  return ranks;
}

}  // namespace moerl::trainer
