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
    {"/moerl.v1.EnvironmentService/Reset", kReaders, MethodKind::kUnary},
    {"/moerl.v1.EnvironmentService/Step", kReaders, MethodKind::kUnary},
    {"/moerl.v1.ExperienceService/Work", kRollout, MethodKind::kSubscription},
    {"/moerl.v1.RolloutService/Abort", kClient | kTrainer, MethodKind::kUnary},
    {"/moerl.v1.RolloutService/Drain", kClient | kTrainer, MethodKind::kUnary},
    {"/moerl.v1.RolloutService/Generate", kClient | kTrainer, MethodKind::kStream},
    {"/moerl.v1.RolloutService/GetLoad", kClient | kTrainer, MethodKind::kUnary},
    {"/moerl.v1.RolloutService/GetModelInfo", kClient | kTrainer, MethodKind::kUnary},
    {"/moerl.v1.TrainerService/GetStatus", kClient, MethodKind::kUnary},
    {"/moerl.v1.TrainerService/Pause", kClient, MethodKind::kUnary},
    {"/moerl.v1.TrainerService/Resume", kClient, MethodKind::kUnary},
    {"/moerl.v1.TrainerService/SaveCheckpoint", kClient, MethodKind::kUnary},
    {"/moerl.v1.TrainerService/SetStaleness", kClient, MethodKind::kUnary},
    {"/moerl.v1.TrainerService/WatchMetrics", kClient, MethodKind::kSubscription},
    {"/moerl.v1.WeightSyncService/AcquireLease", kReaders, MethodKind::kUnary},
    {"/moerl.v1.WeightSyncService/AcquirePublisher", kTrainer, MethodKind::kUnary},
    {"/moerl.v1.WeightSyncService/BeginVersion", kTrainer, MethodKind::kUnary},
    {"/moerl.v1.WeightSyncService/CommitVersion", kTrainer, MethodKind::kUnary},
    {"/moerl.v1.WeightSyncService/FetchChunks", kReaders, MethodKind::kStream},
    {"/moerl.v1.WeightSyncService/GetManifest", kReaders, MethodKind::kUnary},
    {"/moerl.v1.WeightSyncService/ListVersions", kReaders, MethodKind::kUnary},
    {"/moerl.v1.WeightSyncService/PutChunks", kTrainer, MethodKind::kStream},
    {"/moerl.v1.WeightSyncService/RecordForks", kTrainer, MethodKind::kUnary},
    {"/moerl.v1.WeightSyncService/ReleaseLease", kReaders, MethodKind::kUnary},
    {"/moerl.v1.WeightSyncService/WatchVersions", kReaders, MethodKind::kSubscription},
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
