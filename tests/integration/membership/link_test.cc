// Nodes are network namespaces on a bridge; a link is set down in the middle of dispatch and of combine. Exactly one
// side goes on. Needs root.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/integration/membership/fault_times.h"
#include "tests/integration/membership/ranks.h"
#include "tests/unit/ep/seeds.h"

namespace moerl {
namespace {

// A network of `num_nodes` namespaces. Gone with the object; what a killed run left is removed by the next one.
class Network {
 public:
  static constexpr const char* kPrefix = "mbl";

  explicit Network(int num_nodes) : num_nodes_(num_nodes) {
    if (geteuid() != 0 || !Do("ip link show")) {
      std::cout << "skipped: network namespaces need root and iproute2" << std::endl;
      std::exit(77);
    }
    RemoveStale();
    Need(absl::StrCat("ip link add ", Bridge(), " type bridge"));
    Need(absl::StrCat("ip link set ", Bridge(), " up"));
    for (int node = 0; node < num_nodes; ++node) {
      Need(absl::StrCat("ip netns add ", Namespace(node)));
      Need(absl::StrCat("ip link add ", Outer(node), " type veth peer name eth0 netns ", Namespace(node)));
      Need(absl::StrCat("ip link set ", Outer(node), " master ", Bridge(), " up"));
      In(node, absl::StrCat("ip addr add ", Address(node), "/24 dev eth0"));
      In(node, "ip link set eth0 up");
      In(node, "ip link set lo up");
    }
  }
  ~Network() { Remove(getpid()); }

  std::vector<std::string> Namespaces() const {
    std::vector<std::string> names;
    for (int node = 0; node < num_nodes_; ++node) names.push_back(Namespace(node));
    return names;
  }
  static std::string Address(int node) { return absl::StrCat("10.231.", getpid() % 200, ".", node + 1); }
  void Set(int node, bool up) { Need(absl::StrCat("ip link set ", Outer(node), up ? " up" : " down")); }

 private:
  static bool Do(const std::string& command) {
    return std::system(absl::StrCat(command, " >/dev/null 2>&1").c_str()) == 0;
  }
  static void Need(const std::string& command) { EXPECT_EQ(std::system(command.c_str()), 0) << command; }
  // Not by `ip -n`, which remounts / and so fails where that is no mount point, as in a chroot.
  static void In(int node, const std::string& command) {
    Need(absl::StrCat("nsenter --net=/run/netns/", Namespace(node), " ", command));
  }
  static std::string Bridge() { return absl::StrCat(kPrefix, getpid()); }
  static std::string Outer(int node) { return absl::StrCat(kPrefix, getpid(), "n", node); }
  static std::string Namespace(int node) { return absl::StrCat(kPrefix, "-", getpid(), "-", node); }

  static void Remove(int pid) {
    for (int node = 0; node < 8; ++node) {
      if (!Do(absl::StrCat("ip netns del ", kPrefix, "-", pid, "-", node))) break;
    }
    Do(absl::StrCat("ip link del ", kPrefix, pid));
  }
  // Those whose process is gone.
  static void RemoveStale() {
    Do(absl::StrCat("for name in $(ip netns list | grep -o '^", kPrefix, "-[0-9]*-[0-9]*'); do pid=${name#", kPrefix,
                    "-}; pid=${pid%-*}; kill -0 $pid || { ip netns del $name; ip link del ", kPrefix, "$pid; }; done"));
  }

  const int num_nodes_;
};

Network& ThreeNodes() {
  static Network network(3);
  return network;
}

struct Cut {
  const char* name;
  const char* provider;
  std::vector<int> node_of;
  int node;  // whose link goes down
  Phase phase;
};

class Cuts : public testing::TestWithParam<Cut> {};

TEST_P(Cuts, LeaveExactlyOneSideRunning) {
  const Cut& cut = GetParam();
  Network& network = ThreeNodes();
  Ranks ranks({cut.provider, cut.node_of, network.Namespaces(), Network::Address(0)});
  std::vector<int> going_on, left;
  for (int rank = 0; rank < ranks.size(); ++rank) (cut.node_of[rank] == cut.node ? left : going_on).push_back(rank);
  const size_t num_left = left.size();
  FaultTimes times(cut.name);
  const ep::SeedRange seeds = ep::Seeds(1);
  for (uint64_t seed = seeds.first; seed < seeds.last && !HasFatalFailure(); ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    std::vector<int> all = going_on;
    all.insert(all.end(), left.begin(), left.end());
    ASSERT_TRUE(ranks.AwaitRunning(all, static_cast<int>(all.size()), absl::Seconds(30)));
    absl::SleepFor(absl::Milliseconds(150));  // an epoch's first beats have more time
    ASSERT_TRUE(ranks.Halt(left[0], all, cut.phase));
    const int64_t epoch = ranks[going_on[0]].epoch, lost_at = NowNs();
    network.Set(cut.node, false);
    ranks[left[0]].may_go = true;
    ASSERT_TRUE(ranks.AwaitRunningAfter(epoch, going_on, absl::Seconds(10))) << ranks[going_on[0]].reform_error;
    for (const int rank : left) {
      EXPECT_TRUE(ranks.Await([&] { return ranks[rank].state == RankState::kNoMajority; }, absl::Seconds(10)));
      EXPECT_TRUE(absl::StrContains(ranks[rank].reform_error, "has no successor")) << ranks[rank].reform_error;
    }
    for (const int rank : all) {
      const std::string error = ranks[rank].error;
      EXPECT_TRUE(absl::StrContains(error, "UNAVAILABLE")) << error;
      EXPECT_TRUE(absl::StrContains(error, "lost rank ") && absl::StrContains(error, "(host-")) << error;
      EXPECT_TRUE(NamesCounts(error)) << error;
      times.AddLoss(lost_at, ranks[rank]);
    }
    // The link comes back: those left behind learn it, those who went on do not notice.
    const int64_t next_epoch = ranks[going_on[0]].epoch;
    network.Set(cut.node, true);
    for (const int rank : left) {
      EXPECT_TRUE(ranks.Await([&] { return ranks[rank].state == RankState::kEvicted; }, absl::Seconds(10)))
          << ranks[rank].reform_error;
    }
    EXPECT_EQ(ranks[going_on[0]].epoch, next_epoch);
    EXPECT_TRUE(ranks[going_on[0]].state == RankState::kRunning);
    // Others take their places for the next time.
    left.clear();
    while (seed + 1 < seeds.last && left.size() < num_left) {
      left.push_back(ranks.Join(cut.node, going_on[0]));
      ASSERT_TRUE(ranks.Await([&] { return ranks[left.back()].num_operations > 0; }, absl::Seconds(10)));
      times.AddJoin(ranks[left.back()]);
    }
  }
  times.Print();
  EXPECT_EQ(ranks.Finish(), 0);
}

INSTANTIATE_TEST_SUITE_P(Each, Cuts,
                         testing::Values(Cut{"DownTheMiddleInDispatch", "net", {0, 0, 1, 1}, 1, Phase::kDispatch},
                                         Cut{"OneOfThreeInCombine", "tcp", {0, 1, 2}, 2, Phase::kCombine}),
                         [](const testing::TestParamInfo<Cut>& info) { return info.param.name; });

}  // namespace
}  // namespace moerl
