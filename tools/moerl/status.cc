// moerl status: asks a run's trainer how it is doing. moerl top: shows it live.
#include "libs/rpc/status.h"

#include <google/protobuf/util/json_util.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "libs/base/config.h"
#include "libs/base/env.h"
#include "libs/base/status_macros.h"
#include "libs/rpc/program.h"
#include "tools/moerl/commands.h"
#include "tools/moerl/display.h"
#include "tools/moerl/trainer_watch.h"

namespace moerl {
namespace {

constexpr char kStatusUsage[] =
    "usage: moerl status [DIRECTORY] [--address HOST:PORT] [--json]\n"
    "Asks the trainer of the run in DIRECTORY (by default the only one in runs/), or the one at the address.";
constexpr char kTopUsage[] =
    "usage: moerl top [DIRECTORY] [--address HOST:PORT]\n"
    "Shows the run live, as moerl run does, until Ctrl-C; the run is not touched.";
constexpr absl::Duration kTimeout = absl::Seconds(5);
constexpr absl::Duration kRedraw = absl::Milliseconds(500);

struct Target {
  std::string name;
  std::string address;
  rpc::ChannelOptions options;
};

absl::StatusOr<std::string> OnlyRun() {
  const absl::StatusOr<std::vector<std::string>> names = PosixEnv()->List("runs");
  if (names.ok() && names->size() == 1) return JoinPath("runs", names->front());
  return absl::NotFoundError(absl::StrCat("status: one run in runs/ expected, found ", names.ok() ? names->size() : 0,
                                          "; name its directory or give --address"));
}

absl::StatusOr<Target> TargetInDirectory(const std::string& directory) {
  v1::Config config;
  MOERL_RETURN_IF_ERROR(LoadConfig(JoinPath(directory, "config.yaml"), {}, config));
  MOERL_ASSIGN_OR_RETURN(const std::string text, PosixEnv()->ReadFile(JoinPath(directory, "endpoints.json")));
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  for (const char* leader : {"trainer", "trainer-0"}) {
    if (!json.is_object() || !json.contains(leader)) continue;
    return Target{config.name(), json[leader].value("address", ""), rpc::ChannelOptionsOf(config.server())};
  }
  return absl::DataLossError(absl::StrCat("status: ", directory, "/endpoints.json names no trainer"));
}

absl::StatusOr<Target> FindTarget(const std::string& address, const std::vector<std::string>& positional) {
  if (!address.empty()) return Target{address, address, {}};
  if (!positional.empty()) return TargetInDirectory(positional[0]);
  MOERL_ASSIGN_OR_RETURN(const std::string directory, OnlyRun());
  return TargetInDirectory(directory);
}

absl::StatusOr<v1::GetStatusResponse> AskStatus(const Target& target) {
  MOERL_ASSIGN_OR_RETURN(const auto channel, rpc::MakeChannel(target.address, target.options));
  const auto stub = v1::TrainerService::NewStub(channel);
  const std::unique_ptr<grpc::ClientContext> context = rpc::CallContext(kTimeout);
  context->set_wait_for_ready(false);
  v1::GetStatusResponse response;
  const grpc::Status status = stub->GetStatus(context.get(), {}, &response);
  if (status.ok()) return response;
  return rpc::FromGrpc(status, absl::StrCat("status: the trainer at ", target.address));
}

absl::Status PrintStatus(const Target& target, bool is_json) {
  MOERL_ASSIGN_OR_RETURN(const v1::GetStatusResponse status, AskStatus(target));
  if (is_json) {
    std::string json;
    google::protobuf::util::JsonPrintOptions options;
    options.preserve_proto_field_names = true;
    options.always_print_primitive_fields = true;
    const auto printed = google::protobuf::util::MessageToJsonString(status, &json, options);
    if (!printed.ok()) return absl::InternalError(std::string(printed.message()));
    std::printf("%s\n", json.c_str());
    return absl::OkStatus();
  }
  RunView view;
  view.name = target.name;
  view.status = status;
  constexpr int kWidth = 100;
  for (const std::string& line : RenderPanel(view, kWidth)) std::printf("%s\n", line.c_str());
  return absl::OkStatus();
}

volatile std::sig_atomic_t is_interrupted = 0;

absl::Status ShowLive(const Target& target) {
  std::signal(SIGINT, [](int) { is_interrupted = 1; });
  MOERL_ASSIGN_OR_RETURN(const auto channel, rpc::MakeChannel(target.address, target.options));
  TrainerWatch watch(channel, /*after_step=*/0);
  Display display(target.name);
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
  const absl::StatusOr<Target> target = FindTarget(address, flags.positional());
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
  const absl::StatusOr<Target> target = FindTarget(address, flags.positional());
  if (!target.ok()) return Failure(target.status());
  const absl::Status status = ShowLive(*target);
  return status.ok() ? 0 : Failure(status);
}

}  // namespace moerl
