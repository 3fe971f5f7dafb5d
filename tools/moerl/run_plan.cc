#include "tools/moerl/run_plan.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/base/env.h"

namespace moerl {
namespace {

constexpr int kPortMin = 20000;
constexpr int kPortEnd = 32000;  // Linux gives 32768 and up to outgoing connections
constexpr char kHost[] = "127.0.0.1:";

// Takes the ports one after the other.
class PortTaker {
 public:
  explicit PortTaker(const std::vector<int>& ports) : ports_(ports) {}
  std::string Take() {
    MOERL_CHECK(next_ < ports_.size());
    return absl::StrCat(kHost, ports_[next_++]);
  }

 private:
  const std::vector<int>& ports_;
  size_t next_ = 0;
};

struct Shared {
  std::string trainer_address;
  std::string weight_sync_address;
  std::string bootstrap_address;
};

class Planner {
 public:
  Planner(const v1::Config& config, const RunPlace& place, const std::vector<int>& ports)
      : config_(config), place_(place), ports_(ports) {}

  RunPlan Plan() {
    const std::string weight_sync = ports_.Take();
    const std::string trainer = ports_.Take();
    shared_ = {trainer, weight_sync, ports_.Take()};
    AddWeightSync();
    AddTrainer();
    for (uint32_t i = 0; i < config_.rollout().num_servers(); ++i) AddRollout(i);
    return std::move(plan_);
  }

 private:
  std::string InRun(const std::string& name) const { return JoinPath(place_.directory, name); }

  MemberPlan Member(const std::string& name, const std::string& program, const std::string& address,
                    std::vector<std::string> settings) {
    MemberPlan member;
    member.name = name;
    member.log_file = InRun(absl::StrCat("logs/", name, ".log"));
    member.address = address;
    member.metrics_address = ports_.Take();
    settings.push_back("server.listen_address=" + member.address);
    settings.push_back("server.metrics_address=" + member.metrics_address);
    settings.push_back("trainer.address=" + shared_.trainer_address);
    settings.push_back("weight_sync.address=" + shared_.weight_sync_address);
    member.command = {JoinPath(place_.programs, program), "--config", InRun("config.yaml")};
    for (const std::string& setting : settings) {
      member.command.push_back("--set");
      member.command.push_back(setting);
    }
    return member;
  }

  void AddWeightSync() {
    GroupSpec spec;
    spec.name = "weight-sync";
    spec.outlives_others = true;
    plan_.groups.push_back(spec);
    plan_.members.push_back({Member(spec.name, "moerl-weight-sync", shared_.weight_sync_address,
                                    {"weight_sync.store_directory=" + InRun("store")})});
  }

  void AddTrainer() {
    const int num_ranks = static_cast<int>(config_.trainer().num_ranks());
    GroupSpec spec;
    spec.name = "trainer";
    spec.num_members = num_ranks;
    spec.ends_run = true;
    plan_.groups.push_back(spec);
    plan_.members.emplace_back();
    for (int rank = 0; rank < num_ranks; ++rank) {
      const std::string name = num_ranks == 1 ? "trainer" : absl::StrCat("trainer-", rank);
      plan_.members.back().push_back(
          Member(name, "moerl-trainer", rank == 0 ? shared_.trainer_address : ports_.Take(),
                 {absl::StrCat("trainer.rank=", rank), "fabric.bootstrap_address=" + shared_.bootstrap_address,
                  absl::StrCat("trainer.num_threads=", Threads(config_.trainer().num_threads(), num_ranks))}));
    }
  }

  void AddRollout(uint32_t index) {
    GroupSpec spec;
    spec.name = absl::StrCat("rollout-", index);
    plan_.groups.push_back(spec);
    const std::string address = ports_.Take();
    const int num_servers = static_cast<int>(config_.rollout().num_servers());
    plan_.members.push_back(
        {Member(spec.name, "moerl-rollout", address,
                {"rollout.address=" + address, "rollout.worker=" + spec.name,
                 absl::StrCat("rollout.num_threads=", Threads(config_.rollout().num_threads(), num_servers))})});
  }

  // Threads of one of `num_processes` of a side.
  int Threads(uint32_t configured, int num_processes) const {
    if (configured > 0) return static_cast<int>(configured);
    const int of_side = config_.trainer().staleness() == 0 ? place_.num_cores : place_.num_cores / 2;
    return std::max(1, of_side / num_processes);
  }

  const v1::Config& config_;
  const RunPlace& place_;
  PortTaker ports_;
  Shared shared_;
  RunPlan plan_;
};

bool IsFree(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool is_free = bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  close(fd);
  return is_free;
}

}  // namespace

const std::string& RunPlan::trainer_address() const {
  for (size_t group = 0; group < groups.size(); ++group) {
    if (groups[group].ends_run) return members[group][0].address;
  }
  MOERL_CHECK(false);
  return groups[0].name;
}

RunPlan PlanRun(const v1::Config& config, const RunPlace& place, const std::vector<int>& ports) {
  return Planner(config, place, ports).Plan();
}

int NumPorts(const v1::Config& config) {
  // gRPC and metrics of each process, and the ranks' bootstrap.
  return 2 * static_cast<int>(1 + config.trainer().num_ranks() + config.rollout().num_servers()) + 1;
}

absl::StatusOr<std::vector<int>> FreePorts(int count) {
  // Runs that start at the same time begin their search at different places.
  constexpr int kRange = kPortEnd - kPortMin;
  const int start = static_cast<int>(static_cast<int64_t>(getpid()) * 131 % kRange);
  std::vector<int> ports;
  for (int i = 0; i < kRange && static_cast<int>(ports.size()) < count; ++i) {
    const int port = kPortMin + (start + i) % kRange;
    if (IsFree(port)) ports.push_back(port);
  }
  if (static_cast<int>(ports.size()) == count) return ports;
  return absl::ResourceExhaustedError(absl::StrCat("run: ", count, " free ports from ", kPortMin, " to ", kPortEnd - 1,
                                                   " expected, found ", ports.size()));
}

std::string EndpointsJson(const RunPlan& plan) {
  nlohmann::ordered_json json;
  for (const std::vector<MemberPlan>& group : plan.members) {
    for (const MemberPlan& member : group) {
      json[member.name] = {{"address", member.address}, {"metrics", member.metrics_address}};
    }
  }
  return json.dump(2) + "\n";
}

}  // namespace moerl
