// moerl-weight-sync: stores and distributes weight versions.
#include <optional>
#include <thread>
#include <utility>

#include "absl/synchronization/notification.h"
#include "libs/base/clock.h"
#include "libs/base/env.h"
#include "libs/base/log.h"
#include "libs/base/machine.h"
#include "libs/base/metrics.h"
#include "libs/rpc/program.h"
#include "services/weight_sync/service.h"

namespace {

constexpr absl::Duration kTickInterval = absl::Seconds(1);

// When this process first saw the newest READY version.
void ShowNewest(const moerl::VersionsNow& now) {
  static moerl::Gauge& number =
      moerl::GetGauge("moerl_weight_sync_newest_version", "Number of the newest READY version; -1 before any.");
  static moerl::Gauge& since =
      moerl::GetGauge("moerl_weight_sync_newest_version_timestamp_seconds",
                      "When it became READY (at the latest), in seconds since the Unix epoch.");
  static std::optional<moerl::VersionName> last;
  number.Set(now.latest ? static_cast<double>(now.latest->number) : -1);
  if (now.latest != last || since.Value() == 0) since.Set(absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));
  last = now.latest;
}

void ShowUse(const moerl::StoreUse& use) {
  constexpr absl::string_view kVersions = "moerl_weight_sync_versions";
  constexpr absl::string_view kHelp = "Versions in the catalogue, by state.";
  moerl::GetGauge(kVersions, kHelp, {{"state", "ready"}}).Set(use.num_ready);
  moerl::GetGauge(kVersions, kHelp, {{"state", "staging"}}).Set(use.num_staging);
  moerl::GetGauge(kVersions, kHelp, {{"state", "retired"}}).Set(use.num_retired);
  moerl::GetGauge("moerl_weight_sync_leases", "Leases held on versions.").Set(use.num_leases);
  moerl::GetGauge("moerl_weight_sync_store_bytes", "Chunk bytes on disk.").Set(static_cast<double>(use.chunk_bytes));
}

}  // namespace

int main(int argc, char** argv) {
  const auto program =
      moerl::rpc::Program::Start(argc, argv, {.name = "moerl-weight-sync", .port = 7200, .metrics_port = 8200});
  const moerl::v1::WeightSyncConfig& config = program->config().weight_sync();
  auto store = moerl::Store::Open({.directory = config.store_directory(),
                                   .bytes_max = config.store_bytes_max(),
                                   .versions_kept = static_cast<int>(config.versions_kept())},
                                  moerl::PosixEnv(), moerl::SystemClock());
  if (!store.ok()) moerl::rpc::ExitUnstarted("store not opened", store.status());
  moerl::WatchDisk("store", config.store_directory());
  moerl::GetGauge("moerl_weight_sync_store_bytes_max", "Chunk bytes the store may hold.")
      .Set(static_cast<double>(config.store_bytes_max()));
  moerl::WeightSyncService service(*std::move(store));
  moerl::rpc::Server& server = program->Serve({&service});
  server.OnDrain([&service] { service.EndWatches(); });
  server.SetReady(true);

  absl::Notification is_over;
  std::thread ticker([&] {
    while (!is_over.WaitForNotificationWithTimeout(kTickInterval)) {
      const absl::Status status = service.store().Tick();
      ShowUse(service.store().Use());
      ShowNewest(service.store().Now());
      if (status.ok()) continue;
      moerl::LogError("store", {{"status", status.ToString()}});
      if (absl::IsDataLoss(status)) program->RequestStop(1);  // the next process finds what was durable
    }
  });
  const int exit_code = program->Finish();
  is_over.Notify();
  ticker.join();
  return exit_code;
}
