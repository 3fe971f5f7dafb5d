// moerl-rollout: samples completions, for callers of Generate and for the trainer.
#include <grpcpp/channel.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "libs/base/machine.h"
#include "libs/environment/task.h"
#include "libs/rpc/program.h"
#include "services/rollout/service.h"

namespace moerl::rollout {
namespace {

constexpr int kBuiltinJudgeThreads = 1;  // the built-in checkers take microseconds

std::shared_ptr<grpc::Channel> ChannelTo(const std::string& address, const rpc::Program& program) {
  absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = rpc::MakeChannel(address, program.channel_options());
  if (!channel.ok()) rpc::ExitUnstarted("cannot make a channel", channel.status());
  return *std::move(channel);
}

model::FlipPolicy PolicyOf(v1::WeightFlip flip) {
  if (flip == v1::WEIGHT_FLIP_FINISH) return model::FlipPolicy::kFinish;
  if (flip == v1::WEIGHT_FLIP_CONTINUE) return model::FlipPolicy::kContinue;
  return model::FlipPolicy::kRecompute;
}

model::Compute ComputeOf(const v1::Config& config) {
  return config.model().compute() == v1::COMPUTE_FP32 ? model::Compute::kFp32 : model::Compute::kBf16;
}

int NumThreads(uint32_t configured) {
  return configured > 0 ? static_cast<int>(configured) : std::max(1u, std::thread::hardware_concurrency());
}

std::string WorkerName(const v1::RolloutConfig& config) {
  if (!config.worker().empty()) return config.worker();
  char host[256] = "host";
  gethostname(host, sizeof(host) - 1);
  return absl::StrCat(host, ":", config.address().substr(config.address().rfind(':') + 1));
}

EngineOptions EngineOptionsOf(const v1::RolloutConfig& config) {
  return {.kv_cache_bytes = static_cast<int64_t>(config.kv_cache_bytes()),
          .running_samples_max = config.num_slots(),
          .prefill_chunk_tokens = config.prefill_chunk_tokens(),
          .waiting_requests_max = static_cast<int64_t>(config.queue_max()) + config.num_slots(),
          .num_threads = NumThreads(config.num_threads()),
          .flip_policy = PolicyOf(config.weight_flip())};
}

SchedulerOptions SchedulerOptionsOf(const rpc::Program& program, const std::string& worker) {
  const v1::Config& config = program.config();
  SchedulerOptions options;
  options.engine = EngineOptionsOf(config.rollout());
  options.generate_queue_max = config.rollout().queue_max();
  options.leases.worker.name = worker;
  options.leases.worker.incarnation = absl::ToUnixNanos(absl::Now());
  options.leases.worker.num_slots = config.rollout().num_slots();
  options.leases.worker.progress_every_tokens = config.rollout().progress_every_tokens();
  options.leases.turns_max = config.environment().turns_max();
  options.leases.reward_min = config.environment().reward_min();
  options.leases.reward_max = config.environment().reward_max();
  if (config.rollout().pull_leases()) {
    options.work_stub = [channel = ChannelTo(config.trainer().address(), program)] {
      return v1::ExperienceService::NewStub(channel);
    };
  }
  return options;
}

// Null when no leases are taken: Generate judges nothing.
std::unique_ptr<Judge> MakeJudge(const rpc::Program& program) {
  const v1::Config& config = program.config();
  if (!config.rollout().pull_leases()) return nullptr;
  absl::StatusOr<std::shared_ptr<rl::Environment>> environment = MakeEnvironment(config, program.channel_options());
  if (!environment.ok()) rpc::ExitUnstarted("cannot judge samples", environment.status());
  const bool is_builtin = config.environment().address().empty();
  return std::make_unique<Judge>(
      *std::move(environment), is_builtin ? kBuiltinJudgeThreads : static_cast<int>(config.environment().calls_max()));
}

// A server that takes no leases and has a model of its own serves that; every other one follows weight_sync.
bool IsStandalone(const v1::Config& config) {
  return !config.rollout().pull_leases() && !config.model().path().empty();
}

WeightUpdate LoadWeights(const v1::Config& config) {
  model::WeightsOptions options;
  options.compute = ComputeOf(config);
  absl::StatusOr<std::shared_ptr<const model::Weights>> weights = model::Weights::Load(config.model().path(), options);
  if (!weights.ok()) rpc::ExitUnstarted("cannot load model.path", weights.status());
  return {{}, {}, *std::move(weights)};
}

int Main(int argc, char** argv) {
  auto program = rpc::Program::Start(argc, argv, {.name = "moerl-rollout", .port = 7400, .metrics_port = 8400});
  const v1::Config& config = program->config();
  const std::string worker = WorkerName(config.rollout());
  const std::unique_ptr<Judge> judge = MakeJudge(*program);
  Scheduler scheduler(SchedulerOptionsOf(*program, worker), judge.get(),
                      [&program](const absl::Status&) { program->RequestStop(1); });
  Service service(&scheduler);
  rpc::Server& server = program->Serve({&service});
  server.OnDrain([&scheduler] { scheduler.BeginDrain(); });
  service.SetServer(&server);
  scheduler.set_on_ready([&server] { server.SetReady(true); });

  std::unique_ptr<WeightFollower> follower;
  if (IsStandalone(config)) {
    scheduler.OnWeights(LoadWeights(config));
  } else {
    if (!config.rollout().cache_directory().empty()) WatchDisk("cache", config.rollout().cache_directory());
    follower = std::make_unique<WeightFollower>(
        ChannelTo(config.weight_sync().address(), *program),
        WeightFollower::Options{config.rollout().cache_directory(), worker, ComputeOf(config)},
        [&scheduler](WeightUpdate update) { scheduler.OnWeights(std::move(update)); });
  }
  const int exit_code = program->Finish([&scheduler](absl::Time deadline) { scheduler.WaitDrained(deadline); });
  follower.reset();
  scheduler.Stop();
  return exit_code;
}

}  // namespace
}  // namespace moerl::rollout

int main(int argc, char** argv) { return moerl::rollout::Main(argc, argv); }
