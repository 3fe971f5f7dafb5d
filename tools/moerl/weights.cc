// moerl weights: lists the versions that a run's weight_sync stores.
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <cstdio>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "libs/base/status_macros.h"
#include "libs/rpc/status.h"
#include "moerl/v1/weight_sync.grpc.pb.h"
#include "tools/moerl/commands.h"
#include "tools/moerl/run_target.h"

namespace moerl {
namespace {

constexpr char kUsage[] =
    "usage: moerl weights [DIRECTORY] [--address HOST:PORT] [--all]\n"
    "Lists the weight versions of the run in DIRECTORY (by default the only one in runs/), or of the weight_sync at "
    "the\n"
    "address: version, epoch of its first commit, state, bytes, leases, the first 12 digits of its root.\n"
    "Versions whose bytes were dropped to save space are listed with --all.";
constexpr absl::Duration kTimeout = absl::Seconds(5);
constexpr int kRootDigits = 12;

std::string StateName(v1::VersionState state) {
  absl::string_view name = v1::VersionState_Name(state);
  absl::ConsumePrefix(&name, "VERSION_STATE_");
  return absl::AsciiStrToLower(name);
}

absl::Status PrintVersions(const RunTarget& target, bool is_all) {
  MOERL_ASSIGN_OR_RETURN(const auto channel, rpc::MakeChannel(target.address, target.options));
  const auto stub = v1::WeightSyncService::NewStub(channel);
  const std::unique_ptr<grpc::ClientContext> context = rpc::CallContext(kTimeout);
  context->set_wait_for_ready(false);
  v1::ListVersionsResponse response;
  const grpc::Status status = stub->ListVersions(context.get(), {}, &response);
  if (!status.ok()) return rpc::FromGrpc(status, absl::StrCat("weights: weight_sync at ", target.address));
  std::string out = "version  epoch  state               bytes         leases  root\n";
  for (const v1::VersionInfo& version : response.versions()) {
    if (!is_all && version.state() == v1::VERSION_STATE_RETIRED_BY_COUNT) continue;
    absl::StrAppendFormat(&out, "%-7d  %-5d  %-18s  %-12d  %-6d  %s\n", version.version().number(),
                          version.version().epoch(), StateName(version.state()), version.num_bytes(),
                          version.num_leases(), absl::BytesToHexString(version.root()).substr(0, kRootDigits));
  }
  for (const v1::Fork& fork : response.forks()) {
    absl::StrAppend(&out, "fork: epoch ", fork.epoch(), " went on from step ", fork.step(), " with other bytes\n");
  }
  std::fputs(out.c_str(), stdout);
  return absl::OkStatus();
}

}  // namespace

int RunWeights(const Arguments& arguments) {
  Flags flags("weights", arguments);
  if (flags.Switch("help")) {
    std::puts(kUsage);
    return 0;
  }
  const std::string address = flags.String("address", "");
  const bool is_all = flags.Switch("all");
  if (absl::Status status = flags.Finish(0, 1); !status.ok()) return UsageError(status);
  const absl::StatusOr<RunTarget> target = FindRunTarget("weight-sync", address, flags.positional());
  if (!target.ok()) return Failure(target.status());
  const absl::Status status = PrintVersions(*target, is_all);
  return status.ok() ? 0 : Failure(status);
}

}  // namespace moerl
