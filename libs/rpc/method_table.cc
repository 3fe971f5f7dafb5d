#include "libs/rpc/method_table.h"

#include <algorithm>

#include "absl/strings/match.h"

namespace moerl::rpc {
namespace {

constexpr unsigned Bit(Role role) { return 1u << static_cast<unsigned>(role); }
constexpr unsigned kClient = Bit(Role::kClient);
constexpr unsigned kRollout = Bit(Role::kRollout);
constexpr unsigned kTrainer = Bit(Role::kTrainer);
constexpr unsigned kReaders = kClient | kRollout | kTrainer;

constexpr MethodRule kTable[] = {
    {"/moerl.v1.EnvironmentService/Reset", kReaders, false},
    {"/moerl.v1.EnvironmentService/Step", kReaders, false},
    {"/moerl.v1.ExperienceService/Work", kRollout, true},
    {"/moerl.v1.RolloutService/Abort", kClient | kTrainer, false},
    {"/moerl.v1.RolloutService/Drain", kClient | kTrainer, false},
    {"/moerl.v1.RolloutService/Generate", kClient | kTrainer, false},
    {"/moerl.v1.RolloutService/GetLoad", kClient | kTrainer, false},
    {"/moerl.v1.RolloutService/GetModelInfo", kClient | kTrainer, false},
    {"/moerl.v1.TrainerService/GetStatus", kClient, false},
    {"/moerl.v1.TrainerService/Pause", kClient, false},
    {"/moerl.v1.TrainerService/Resume", kClient, false},
    {"/moerl.v1.TrainerService/SaveCheckpoint", kClient, false},
    {"/moerl.v1.TrainerService/SetStaleness", kClient, false},
    {"/moerl.v1.TrainerService/WatchMetrics", kClient, true},
    {"/moerl.v1.WeightSyncService/AcquireLease", kReaders, false},
    {"/moerl.v1.WeightSyncService/AcquirePublisher", kTrainer, false},
    {"/moerl.v1.WeightSyncService/BeginVersion", kTrainer, false},
    {"/moerl.v1.WeightSyncService/CommitVersion", kTrainer, false},
    {"/moerl.v1.WeightSyncService/FetchChunks", kReaders, false},
    {"/moerl.v1.WeightSyncService/GetManifest", kReaders, false},
    {"/moerl.v1.WeightSyncService/ListVersions", kReaders, false},
    {"/moerl.v1.WeightSyncService/PutChunks", kTrainer, false},
    {"/moerl.v1.WeightSyncService/RecordForks", kTrainer, false},
    {"/moerl.v1.WeightSyncService/ReleaseLease", kReaders, false},
    {"/moerl.v1.WeightSyncService/WatchVersions", kReaders, true},
};

}  // namespace

absl::Span<const MethodRule> MethodTable() { return kTable; }

const MethodRule* FindMethod(absl::string_view method) {
  const auto* row = std::lower_bound(std::begin(kTable), std::end(kTable), method,
                                     [](const MethodRule& rule, absl::string_view name) { return rule.method < name; });
  return row != std::end(kTable) && row->method == method ? row : nullptr;
}

bool IsFrameMethod(absl::string_view method) {
  return absl::StartsWith(method, "/grpc.health.v1.Health/") || absl::StartsWith(method, "/grpc.reflection.");
}

bool MayCall(Role role, absl::string_view method) {
  if (IsFrameMethod(method)) return true;
  const MethodRule* rule = FindMethod(method);
  return rule != nullptr && (rule->roles & Bit(role)) != 0;
}

}  // namespace moerl::rpc
