// Ranks are killed and stopped in the middle of dispatch and of combine. Every survivor gets an error that names the
// rank, its node, the operation and its counts; the survivors go on in a new epoch, a woken rank finds itself left out,
// and a replacement comes in.
#include <gtest/gtest.h>
#include <signal.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/integration/membership/ranks.h"
#include "tests/unit/ep/seeds.h"

namespace moerl {
namespace {

struct Fault {
  const char* name;
  const char* provider;
  std::vector<int> node_of;
  int victim;
  int signal;
  Phase phase;
};

class Faults : public testing::TestWithParam<Fault> {};

std::vector<int> AllBut(int num_ranks, int victim) {
  std::vector<int> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (rank != victim) ranks.push_back(rank);
  }
  return ranks;
}

void ExpectNames(const std::string& error, int victim, int node, Phase phase) {
  EXPECT_TRUE(absl::StrContains(error, "UNAVAILABLE")) << error;
  EXPECT_TRUE(absl::StrContains(error, absl::StrCat("lost rank ", victim, " (node ", node))) << error;
  EXPECT_TRUE(absl::StrContains(error, phase == Phase::kDispatch ? "dispatch " : "combine ")) << error;
  EXPECT_TRUE(NamesCounts(error)) << error;
}

TEST_P(Faults, AreNamedAndTheOthersGoOn) {
  const Fault& fault = GetParam();
  const int num_ranks = static_cast<int>(fault.node_of.size());
  const std::vector<int> survivors = AllBut(num_ranks, fault.victim);
  std::vector<double> detect_ms, reform_ms;
  const ep::SeedRange seeds = ep::Seeds(1);
  for (uint64_t seed = seeds.first; seed < seeds.last; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    Ranks ranks({fault.provider, fault.node_of, {}});
    ASSERT_TRUE(ranks.AwaitRunning(AllBut(num_ranks, -1), num_ranks, absl::Seconds(30)));
    absl::SleepFor(absl::Milliseconds(150));  // an epoch's first beats have more time
    ASSERT_TRUE(ranks.Halt(fault.victim, fault.phase));
    const int64_t epoch = ranks[survivors[0]].epoch;
    const int64_t lost_at = NowNs();
    ranks.Signal(fault.victim, fault.signal);
    ASSERT_TRUE(ranks.AwaitRunning(survivors, num_ranks - 1, absl::Seconds(10))) << ranks[survivors[0]].reform_error;
    for (const int rank : survivors) {
      ExpectNames(ranks[rank].error, fault.victim, fault.node_of[fault.victim], fault.phase);
      EXPECT_EQ(ranks[rank].epoch, epoch + 1);
      detect_ms.push_back(static_cast<double>(ranks[rank].error_at_ns - lost_at) * 1e-6);
      reform_ms.push_back(static_cast<double>(ranks[rank].running_at_ns - ranks[rank].error_at_ns) * 1e-6);
      EXPECT_LT(detect_ms.back(), 1000);
      EXPECT_LT(reform_ms.back(), 2000);
    }
    if (seed == seeds.first) std::cout << ranks[survivors[0]].error << std::endl;

    if (fault.signal == SIGSTOP) {
      // Woken, it changes nothing (every result is checked) and learns that it is out.
      ranks[fault.victim].may_go = true;
      ranks.Signal(fault.victim, SIGCONT);
      EXPECT_TRUE(ranks.Await([&] { return ranks[fault.victim].state == RankState::kEvicted; }, absl::Seconds(5)))
          << ranks[fault.victim].error << ranks[fault.victim].reform_error;
      const int64_t before = ranks[survivors[0]].num_operations;
      EXPECT_TRUE(ranks.Await([&] { return ranks[survivors[0]].num_operations > before + 3; }, absl::Seconds(5)));
      for (const int rank : survivors) EXPECT_EQ(ranks[rank].epoch, epoch + 1) << ranks[rank].error;
    }
    EXPECT_EQ(ranks.Finish(), 0);
  }
  PrintTimes(fault.name, detect_ms, reform_ms);
}

INSTANTIATE_TEST_SUITE_P(
    Each, Faults,
    testing::Values(Fault{"KillInTheNodeInDispatch", "shm", {0, 0, 0}, 1, SIGKILL, Phase::kDispatch},
                    Fault{"KillInTheNodeInCombine", "shm", {0, 0, 0}, 0, SIGKILL, Phase::kCombine},
                    Fault{"StopInTheNodeInDispatch", "shm", {0, 0, 0}, 0, SIGSTOP, Phase::kDispatch},
                    Fault{"StopInTheNodeInCombine", "shm", {0, 0, 0}, 2, SIGSTOP, Phase::kCombine},
                    Fault{"KillBetweenNodesInDispatch", "net", {0, 1, 2}, 1, SIGKILL, Phase::kDispatch},
                    Fault{"KillBetweenNodesInCombine", "tcp", {0, 1, 2}, 0, SIGKILL, Phase::kCombine},
                    Fault{"StopBetweenNodesInDispatch", "net", {0, 0, 1, 1}, 3, SIGSTOP, Phase::kDispatch},
                    Fault{"StopBetweenNodesInCombine", "net", {0, 1, 2}, 0, SIGSTOP, Phase::kCombine}),
    [](const testing::TestParamInfo<Fault>& info) { return info.param.name; });

TEST(Replacement, ComesInAfterALoss) {
  Ranks ranks({"net", {0, 0, 1}, {}});
  ASSERT_TRUE(ranks.AwaitRunning({0, 1, 2}, 3, absl::Seconds(30)));
  ranks.Signal(0, SIGKILL);  // whom the others had found each other by
  ASSERT_TRUE(ranks.AwaitRunning({1, 2}, 2, absl::Seconds(10)));
  const int64_t asked_at = NowNs();
  const int joiner = ranks.Join(0, 2);
  ASSERT_TRUE(ranks.AwaitRunning({1, 2, joiner}, 3, absl::Seconds(10))) << ranks[joiner].error;
  EXPECT_EQ(ranks[joiner].rank, 2);
  const double join_ms = static_cast<double>(ranks[joiner].running_at_ns - asked_at) * 1e-6;
  EXPECT_LT(join_ms, 2000);
  std::printf("{\"bench\":\"membership\",\"fault\":\"none\",\"join_ms\":%.1f}\n", join_ms);
  EXPECT_EQ(ranks.Finish(), 0);
}

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
