#include "tools/moerl/run_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "absl/strings/str_cat.h"
#include "libs/base/config.h"

namespace moerl {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

v1::Config Config(const std::vector<std::string>& overrides) {
  v1::Config config;
  EXPECT_TRUE(ParseConfig("name: r\ntask: {name: reverse}", "f", overrides, config).ok());
  return config;
}

RunPlan Plan(const v1::Config& config, int num_cores) {
  std::vector<int> ports;
  for (int i = 0; i < NumPorts(config); ++i) ports.push_back(20000 + i);
  return PlanRun(config, {"/bin", "/runs/r", num_cores}, ports);
}

std::vector<std::string> Names(const RunPlan& plan) {
  std::vector<std::string> names;
  for (const auto& group : plan.members) {
    for (const MemberPlan& member : group) names.push_back(member.name);
  }
  return names;
}

TEST(RunPlan, HasTheStoreTheRanksAndTheRollouts) {
  const RunPlan plan = Plan(Config({"trainer.num_ranks=2", "rollout.num_servers=2"}), 2);
  EXPECT_THAT(Names(plan), ElementsAre("weight-sync", "trainer-0", "trainer-1", "rollout-0", "rollout-1"));
  ASSERT_EQ(plan.groups.size(), 4u);
  EXPECT_TRUE(plan.groups[0].outlives_others);
  EXPECT_TRUE(plan.groups[1].ends_run);
  EXPECT_EQ(plan.groups[1].num_members, 2);
  EXPECT_EQ(plan.trainer_address(), plan.members[1][0].address);
}

TEST(RunPlan, GivesEveryProcessItsPortsAndAllTheSamePeers) {
  const v1::Config config = Config({"trainer.num_ranks=3", "rollout.num_servers=2"});
  const RunPlan plan = Plan(config, 2);
  std::set<std::string> addresses;
  for (const auto& group : plan.members) {
    for (const MemberPlan& member : group) {
      addresses.insert(member.address);
      addresses.insert(member.metrics_address);
      EXPECT_THAT(member.command, Contains("trainer.address=" + plan.trainer_address()));
      EXPECT_THAT(member.command, Contains("weight_sync.address=" + plan.members[0][0].address));
      EXPECT_THAT(member.command, Contains("server.listen_address=" + member.address));
      EXPECT_EQ(member.log_file, "/runs/r/logs/" + member.name + ".log");
      EXPECT_THAT(member.command, Contains("/runs/r/config.yaml"));
    }
  }
  EXPECT_EQ(static_cast<int>(addresses.size()) + 1, NumPorts(config)) << "and one for the ranks' bootstrap";
  EXPECT_THAT(plan.members[1][2].command, Contains("trainer.rank=2"));
}

TEST(RunPlan, EverySettingIsOneThatTheConfigurationKnows) {
  const v1::Config config = Config({"trainer.num_ranks=2"});
  for (const auto& group : Plan(config, 2).members) {
    for (const MemberPlan& member : group) {
      std::vector<std::string> overrides;
      for (size_t i = 3; i + 1 < member.command.size(); i += 2) {
        EXPECT_EQ(member.command[i], "--set");
        overrides.push_back(member.command[i + 1]);
      }
      v1::Config read;
      const absl::Status status = ParseConfig(FormatConfig(config), "config.yaml", overrides, read);
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TEST(RunPlan, DividesTheCoresWhereTheConfigurationLeavesThemOpen) {
  const auto threads = [](const std::vector<std::string>& overrides, int cores) {
    const RunPlan plan = Plan(Config(overrides), cores);
    return std::pair(plan.members[1][0].command, plan.members[2][0].command);
  };
  const auto [sync_trainer, sync_rollout] = threads({"trainer.num_ranks=2"}, 8);
  EXPECT_THAT(sync_trainer, Contains("trainer.num_threads=4"));
  EXPECT_THAT(sync_rollout, Contains("rollout.num_threads=8"));
  const auto [async_trainer, async_rollout] = threads({"trainer.num_ranks=2", "trainer.staleness=1"}, 8);
  EXPECT_THAT(async_trainer, Contains("trainer.num_threads=2"));
  EXPECT_THAT(async_rollout, Contains("rollout.num_threads=4"));
  EXPECT_THAT(threads({"trainer.num_ranks=2"}, 1).first, Contains("trainer.num_threads=1"));
  EXPECT_THAT(threads({"trainer.num_threads=3"}, 1).first, Contains("trainer.num_threads=3"));
}

TEST(RunPlan, EndpointsNameEveryProcess) {
  const std::string json = EndpointsJson(Plan(Config({}), 2));
  EXPECT_THAT(json, HasSubstr("\"trainer\": {\n    \"address\": \"127.0.0.1:20001\""));
  EXPECT_THAT(json, HasSubstr("\"rollout-0\""));
  EXPECT_THAT(json, Not(HasSubstr("trainer-0")));
}

TEST(RunPlan, FreePortsAreDistinctAndOutsideTheEphemeralRange) {
  const std::vector<int> ports = FreePorts(20).value();
  EXPECT_EQ(std::set<int>(ports.begin(), ports.end()).size(), 20u);
  for (int port : ports) EXPECT_TRUE(port >= 20000 && port < 32000) << port;
}

}  // namespace
}  // namespace moerl
