// moerl status: asks a run's trainer how it is doing. moerl top: shows it live.
#include "libs/rpc/status.h"

#include <google/protobuf/util/json_util.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <csignal>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "libs/base/status_macros.h"
#include "tools/moerl/commands.h"
#include "tools/moerl/display.h"
#include "tools/moerl/run_target.h"
#include "tools/moerl/trainer_watch.h"

namespace moerl {
namespace {

constexpr char kStatusUsage[] =
    "usage: moerl status [DIRECTORY] [--address HOST:PORT] [--json]\n"
    "Asks the trainer of the run in DIRECTORY (by default the only one in runs/), or the one at the address. Of a run\n"
    "that is not going it tells the last step.";
constexpr char kTopUsage[] =
    "usage: moerl top [DIRECTORY] [--address HOST:PORT]\n"
    "Shows the run live, as moerl run does, until Ctrl-C; the run is not touched.";
constexpr absl::Duration kTimeout = absl::Seconds(5);
constexpr absl::Duration kRedraw = absl::Milliseconds(500);
constexpr int kWidth = 100;

absl::StatusOr<v1::GetStatusResponse> AskStatus(const RunTarget& target) {
  MOERL_ASSIGN_OR_RETURN(const auto channel, rpc::MakeChannel(target.address, target.options));
  const auto stub = v1::TrainerService::NewStub(channel);
  const std::unique_ptr<grpc::ClientContext> context = rpc::CallContext(kTimeout);
  context->set_wait_for_ready(false);
  v1::GetStatusResponse response;
  const grpc::Status status = stub->GetStatus(context.get(), {}, &response);
  // A run that was stopped has given up its ports.
  if (status.ok() && !target.directory.empty() && response.run_id() != target.name) {
    return absl::NotFoundError(absl::StrCat("status: the trainer at ", target.address, " is that of run \"",
                                            response.run_id(), "\", not of \"", target.name, "\""));
  }
  if (status.ok()) return response;
  return rpc::FromGrpc(status, absl::StrCat("status: the trainer at ", target.address));
}

absl::Status PrintJson(const google::protobuf::Message& message) {
  std::string json;
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  const auto printed = google::protobuf::util::MessageToJsonString(message, &json, options);
  if (!printed.ok()) return absl::InternalError(std::string(printed.message()));
  std::printf("%s\n", json.c_str());
  return absl::OkStatus();
}

// What the run directory says of a run whose trainer does not answer.
absl::Status PrintStopped(const RunTarget& target, const absl::Status& why) {
  const std::optional<v1::StepMetrics> row = LastMetricsRow(target.directory);
  if (!row.has_value()) return why;
  std::printf("moerl %s  not running; its last step:\n%s\n", target.name.c_str(),
              RenderRow(*row, target.num_steps).c_str());
  return absl::OkStatus();
}

absl::Status PrintStatus(const RunTarget& target, bool is_json) {
  const absl::StatusOr<v1::GetStatusResponse> status = AskStatus(target);
  if (!status.ok()) {
    return is_json || target.directory.empty() ? status.status() : PrintStopped(target, status.status());
  }
  if (is_json) return PrintJson(*status);
  RunView view;
  view.name = target.name;
  view.status = *status;
  if (const auto row = LastMetricsRow(target.directory); row.has_value()) view.rows = {*row};
  for (const std::string& line : RenderPanel(view, kWidth)) std::printf("%s\n", line.c_str());
  return absl::OkStatus();
}

volatile std::sig_atomic_t is_interrupted = 0;

absl::Status ShowLive(const RunTarget& target) {
  std::signal(SIGINT, [](int) { is_interrupted = 1; });
  MOERL_ASSIGN_OR_RETURN(const auto channel, rpc::MakeChannel(target.address, target.options));
  TrainerWatch watch(channel, /*after_step=*/0);
  Display display(target.name, target.num_steps);
  if (const auto now = AskStatus(target); !now.ok()) {
    display.Notice(absl::StrCat(now.status().message(), "; waiting for it"));
  }
  while (is_interrupted == 0) {
    display.Update(watch.Status(), watch.Rows());
    absl::SleepFor(kRedraw);
  }
  return absl::OkStatus();
}

}  // namespace

int RunStatus(const Arguments& arguments) {
  Flags flags("status", arguments);
  if (flags.Switch("help")) {
    std::puts(kStatusUsage);
    return 0;
  }
  const std::string address = flags.String("address", "");
  const bool is_json = flags.Switch("json");
  if (absl::Status status = flags.Finish(0, 1); !status.ok()) return UsageError(status);
  const absl::StatusOr<RunTarget> target = FindRunTarget("trainer", address, flags.positional());
  if (!target.ok()) return Failure(target.status());
  const absl::Status status = PrintStatus(*target, is_json);
  return status.ok() ? 0 : Failure(status);
}

int RunTop(const Arguments& arguments) {
  Flags flags("top", arguments);
  if (flags.Switch("help")) {
    std::puts(kTopUsage);
    return 0;
  }
  const std::string address = flags.String("address", "");
  if (absl::Status status = flags.Finish(0, 1); !status.ok()) return UsageError(status);
  const absl::StatusOr<RunTarget> target = FindRunTarget("trainer", address, flags.positional());
  if (!target.ok()) return Failure(target.status());
  const absl::Status status = ShowLive(*target);
  return status.ok() ? 0 : Failure(status);
}

}  // namespace moerl
