// moerl-trainer: one rank of the trainer. Rank 0 leads: it keeps the ledger and serves; the others compute.

#include <thread>

#include "absl/synchronization/notification.h"
#include "libs/base/log.h"
#include "libs/base/machine.h"
#include "libs/environment/task.h"
#include "libs/rpc/program.h"
#include "services/trainer/services.h"

namespace {

// weight_sync may start late, restart, or be full for a while: nothing is lost by waiting, and work goes on meanwhile.
constexpr absl::Duration kPublishPatience = absl::Minutes(30);

using moerl::LogError;
using namespace moerl::trainer;

template <typename T>
T OrExit(absl::StatusOr<T> value) {
  if (!value.ok()) moerl::rpc::ExitUnstarted("the trainer cannot start", value.status());
  return *std::move(value);
}

int Lead(moerl::rpc::Program& program, const RunSettings& settings, RankGroup& ranks, Team& team, Learner& learner,
         moerl::weights::Publisher& publisher, moerl::rl::Environment& environment) {
  Leader leader(settings, ranks, team, learner, publisher, environment,
                [&](int exit_code) { program.RequestStop(exit_code); });
  ExperienceService experience(leader);
  TrainerService trainer(leader);
  moerl::rpc::Server& server = program.Serve({&experience, &trainer});
  experience.set_server(&server);
  leader.set_on_serving([&server] { server.SetReady(true); });
  leader.Start();
  return program.Finish([&](absl::Time deadline) { leader.Stop(deadline); });
}

// Computes what the leader says until it says stop; a lost rank, the leader's too, ends this one.
int FollowLeader(moerl::rpc::Program& program, Team& team) {
  // No services of its own: health and metrics, which probes ask of every rank.
  program.Serve({}).SetReady(true);
  absl::Notification is_over;
  std::thread follower([&] {
    const absl::Status status = team.Follow();
    if (!status.ok()) {
      LogError("the trainer ends", {{"why", status.ToString()}});
      std::_Exit(absl::IsUnavailable(status) ? Leader::kExitLostRank : Leader::kExitFailed);
    }
    is_over.Notify();
    if (program.config().trainer().exit_when_done()) program.RequestStop(0);
  });
  const int exit_code = program.Finish([&](absl::Time deadline) {
    if (!is_over.WaitForNotificationWithDeadline(deadline)) std::_Exit(0);
  });
  follower.join();
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  const auto program =
      moerl::rpc::Program::Start(argc, argv, {.name = "moerl-trainer", .port = 7100, .metrics_port = 8100});
  const RunSettings settings = OrExit(ResolveRunSettings(program->config()));
  moerl::WatchDisk("run", program->config().trainer().run_directory());
  moerl::WatchDisk("checkpoints", settings.RunPath("checkpoints"));
  const std::unique_ptr<RankGroup> ranks = OrExit(JoinRanks(settings));
  const std::unique_ptr<Learner> learner = OrExit(Learner::Create(settings, *ranks));
  const auto channel =
      OrExit(moerl::rpc::MakeChannel(program->config().weight_sync().address(), program->channel_options()));
  moerl::weights::Publisher publisher(
      channel, {.chunk_bytes = program->config().weight_sync().chunk_bytes(), .patience = kPublishPatience});
  const auto environment = OrExit(moerl::MakeEnvironment(program->config(), program->channel_options()));
  Team team(settings, *ranks, *learner, publisher, *environment);
  if (ranks->rank() != 0) return FollowLeader(*program, team);
  return Lead(*program, settings, *ranks, team, *learner, publisher, *environment);
}
