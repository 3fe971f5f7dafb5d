// Ranks are killed and stopped in the middle of dispatch and of combine. Every survivor gets an error that names the
// rank, its node, the operation and its counts; the survivors go on in a new epoch, a replacement comes in, and a rank
// that is woken afterwards finds itself left out and changes nothing. --seeds=N: each fault N times.
#include <gtest/gtest.h>
#include <signal.h>

#include <iostream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/integration/membership/fault_times.h"
#include "tests/integration/membership/ranks.h"
#include "tests/unit/ep/seeds.h"

namespace moerl {
namespace {

struct Fault {
  const char* name;
  const char* provider;
  std::vector<int> node_of;
  int signal;
  Phase phase;
};

void ExpectNames(const std::string& error, int64_t victim, int node, Phase phase) {
  EXPECT_TRUE(absl::StrContains(error, "UNAVAILABLE")) << error;
  EXPECT_TRUE(absl::StrContains(error, absl::StrCat("lost rank ", victim, " (host-", node, ", node "))) << error;
  EXPECT_TRUE(absl::StrContains(error, phase == Phase::kDispatch ? "dispatch " : "combine ")) << error;
  EXPECT_TRUE(NamesCounts(error)) << error;
}

class Faults : public testing::TestWithParam<Fault> {
 protected:
  // Takes member `index` away and expects what must follow.
  void Lose(const Fault& fault, Ranks& ranks, size_t index, FaultTimes& times) {
    const int victim = members_[index], node = nodes_[index];
    ASSERT_TRUE(ranks.Halt(victim, members_, fault.phase));
    const int64_t epoch = ranks[victim].epoch, rank = ranks[victim].rank;
    members_.erase(members_.begin() + static_cast<ptrdiff_t>(index));
    nodes_.erase(nodes_.begin() + static_cast<ptrdiff_t>(index));
    const int64_t lost_at = NowNs();
    ranks.Signal(victim, fault.signal);
    ASSERT_TRUE(ranks.AwaitRunningAfter(epoch, members_, absl::Seconds(10))) << ranks[members_[0]].reform_error;
    for (const int survivor : members_) {
      ExpectNames(ranks[survivor].error, rank, node, fault.phase);
      times.AddLoss(lost_at, ranks[survivor]);
    }
    EXPECT_EQ(ranks[members_[0]].epoch, epoch + 1);
    if (fault.signal == SIGSTOP) Wake(ranks, victim);
    lost_node_ = node;
  }

  // Woken, it changes nothing (every result is checked) and learns that it is out.
  void Wake(Ranks& ranks, int victim) {
    const int64_t epoch = ranks[members_[0]].epoch;
    ranks[victim].may_go = true;
    ranks.Signal(victim, SIGCONT);
    EXPECT_TRUE(ranks.Await([&] { return ranks[victim].state == RankState::kEvicted; }, absl::Seconds(5)))
        << ranks[victim].error << ranks[victim].reform_error;
    const int64_t before = ranks[members_[0]].num_operations;
    EXPECT_TRUE(ranks.Await([&] { return ranks[members_[0]].num_operations > before + 3; }, absl::Seconds(5)));
    for (const int survivor : members_) EXPECT_EQ(ranks[survivor].epoch, epoch) << ranks[survivor].error;
  }

  void Replace(Ranks& ranks, FaultTimes& times) {
    const int64_t epoch = ranks[members_[0]].epoch;
    const int joiner = ranks.Join(lost_node_, members_[0]);
    members_.push_back(joiner);
    nodes_.push_back(lost_node_);
    ASSERT_TRUE(ranks.AwaitRunningAfter(epoch, members_, absl::Seconds(10))) << ranks[joiner].error;
    times.AddJoin(ranks[joiner]);
  }

  std::vector<int> members_, nodes_;  // by rank
  int lost_node_ = 0;
};

TEST_P(Faults, AreNamedAndTheOthersGoOn) {
  const Fault& fault = GetParam();
  Ranks ranks({fault.provider, fault.node_of, {}});
  for (int slot = 0; slot < ranks.size(); ++slot) members_.push_back(slot);
  nodes_ = fault.node_of;
  ASSERT_TRUE(ranks.AwaitRunning(members_, ranks.size(), absl::Seconds(30)));
  FaultTimes times(fault.name);
  const ep::SeedRange seeds = ep::Seeds(3);
  for (uint64_t seed = seeds.first; seed < seeds.last && !HasFatalFailure(); ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    absl::SleepFor(absl::Milliseconds(150));  // an epoch's first beats have more time
    Lose(fault, ranks, seed % members_.size(), times);
    if (seed == seeds.first) std::cout << ranks[members_[0]].error << std::endl;
    if (!HasFatalFailure()) Replace(ranks, times);
  }
  times.Print();
  EXPECT_EQ(ranks.Finish(), 0);
}

INSTANTIATE_TEST_SUITE_P(
    Each, Faults,
    testing::Values(Fault{"KillInTheNodeInDispatch", "shm", {0, 0, 0}, SIGKILL, Phase::kDispatch},
                    Fault{"KillInTheNodeInCombine", "shm", {0, 0, 0}, SIGKILL, Phase::kCombine},
                    Fault{"StopInTheNodeInDispatch", "shm", {0, 0, 0}, SIGSTOP, Phase::kDispatch},
                    Fault{"StopInTheNodeInCombine", "shm", {0, 0, 0}, SIGSTOP, Phase::kCombine},
                    Fault{"KillBetweenNodesInDispatch", "net", {0, 1, 2}, SIGKILL, Phase::kDispatch},
                    Fault{"KillBetweenNodesInCombine", "tcp", {0, 1, 2}, SIGKILL, Phase::kCombine},
                    Fault{"StopBetweenNodesInDispatch", "net", {0, 1, 2}, SIGSTOP, Phase::kDispatch},
                    Fault{"StopBetweenNodesInCombine", "net", {0, 1, 2}, SIGSTOP, Phase::kCombine}),
    [](const testing::TestParamInfo<Fault>& info) { return info.param.name; });

TEST(LastRank, GoesOnAloneWhereItIsTheLowestOfTwo) {
  Ranks ranks({"shm", {0, 0}, {}});
  ASSERT_TRUE(ranks.AwaitRunning({0, 1}, 2, absl::Seconds(30)));
  ranks.Signal(1, SIGKILL);
  EXPECT_TRUE(ranks.AwaitRunning({0}, 1, absl::Seconds(10)));
  EXPECT_EQ(ranks.Finish(), 0);
}

TEST(LastRank, StopsWhereItIsNot) {
  Ranks ranks({"shm", {0, 0}, {}});
  ASSERT_TRUE(ranks.AwaitRunning({0, 1}, 2, absl::Seconds(30)));
  ranks.Signal(0, SIGKILL);
  EXPECT_TRUE(ranks.Await([&] { return ranks[1].state == RankState::kNoMajority; }, absl::Seconds(10)));
  EXPECT_TRUE(absl::StrContains(ranks[1].reform_error, "rank 0")) << ranks[1].reform_error;
  EXPECT_EQ(ranks.Finish(), 0);
}

}  // namespace
}  // namespace moerl
