#include "tools/moerl/supervision.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <random>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace moerl {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using Kind = Action::Kind;

constexpr int kStore = 0, kTrainer = 1, kRollout = 2;

ExitStatus Code(int code) { return {.code = code, .signal = std::nullopt}; }
ExitStatus Killed() { return {.code = std::nullopt, .signal = SIGKILL}; }

absl::Time At(double seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

Supervision MakeSupervision() {
  return Supervision({{.name = "weight-sync", .num_members = 1, .ends_run = false, .outlives_others = true},
                      {.name = "trainer", .num_members = 2, .ends_run = true, .outlives_others = false},
                      {.name = "rollout-0", .num_members = 1, .ends_run = false, .outlives_others = false}},
                     {});
}

// "start 1.0" and so on, without notices' texts.
std::vector<std::string> Short(const Actions& actions) {
  std::vector<std::string> out;
  for (const Action& action : actions) {
    const std::string who = absl::StrCat(" ", action.group, ".", action.member);
    switch (action.kind) {
      case Kind::kStart:
        out.push_back("start" + who);
        break;
      case Kind::kTerminate:
        out.push_back("term" + who);
        break;
      case Kind::kKill:
        out.push_back("kill" + who);
        break;
      case Kind::kNotice:
        out.push_back("notice");
        break;
      case Kind::kFinish:
        out.push_back(absl::StrCat("finish ", action.exit_code));
        break;
    }
  }
  return out;
}

TEST(Supervision, StartsEveryoneAtOnce) {
  Supervision supervision = MakeSupervision();
  EXPECT_THAT(Short(supervision.Begin(At(0))), ElementsAre("start 0.0", "start 1.0", "start 1.1", "start 2.0"));
  EXPECT_EQ(supervision.WakeTime(), absl::InfiniteFuture());
}

TEST(Supervision, ARolloutThatDiesIsStartedAgainAlone) {
  Supervision supervision = MakeSupervision();
  supervision.Begin(At(0));
  const Actions actions = supervision.OnExit(kRollout, 0, Killed(), At(100));
  EXPECT_THAT(Short(actions), ElementsAre("notice"));
  EXPECT_EQ(actions[0].text, "rollout-0 ended: signal 9 (Killed); starting rollout-0 again in 100ms");
  EXPECT_THAT(Short(supervision.OnTime(At(100.05))), IsEmpty());
  EXPECT_EQ(supervision.WakeTime(), At(100.1));
  EXPECT_THAT(Short(supervision.OnTime(At(100.1))), ElementsAre("start 2.0"));
}

TEST(Supervision, ALostRankTakesItsGroupDownAndTheGroupComesBackWhole) {
  Supervision supervision = MakeSupervision();
  supervision.Begin(At(0));
  EXPECT_THAT(Short(supervision.OnExit(kTrainer, 1, Code(75), At(100))), ElementsAre("kill 1.0"));
  EXPECT_THAT(Short(supervision.OnExit(kTrainer, 0, Killed(), At(100.01))), ElementsAre("notice"));
  EXPECT_THAT(Short(supervision.OnTime(At(101))), ElementsAre("start 1.0", "start 1.1"));
}

TEST(Supervision, TheRunIsDoneWhenEveryRankExitsWithZero) {
  Supervision supervision = MakeSupervision();
  supervision.Begin(At(0));
  EXPECT_THAT(Short(supervision.OnExit(kTrainer, 1, Code(0), At(50))), IsEmpty());
  EXPECT_THAT(Short(supervision.OnExit(kTrainer, 0, Code(0), At(50))), ElementsAre("term 2.0"));
  EXPECT_THAT(Short(supervision.OnExit(kRollout, 0, Code(0), At(51))), ElementsAre("term 0.0"));
  EXPECT_THAT(Short(supervision.OnExit(kStore, 0, Code(0), At(52))), ElementsAre("finish 0"));
}

TEST(Supervision, ARankThatDiesAfterAnotherIsDoneRestartsBoth) {
  Supervision supervision = MakeSupervision();
  supervision.Begin(At(0));
  supervision.OnExit(kTrainer, 1, Code(0), At(50));
  EXPECT_THAT(Short(supervision.OnExit(kTrainer, 0, Killed(), At(50))), ElementsAre("notice"));
  EXPECT_THAT(Short(supervision.OnTime(At(60))), ElementsAre("start 1.0", "start 1.1"));
}

TEST(Supervision, ARefusedConfigurationIsNotTriedAgain) {
  Supervision supervision = MakeSupervision();
  supervision.Begin(At(0));
  EXPECT_THAT(Short(supervision.OnExit(kRollout, 0, Code(2), At(0.1))), ElementsAre("term 1.0", "term 1.1"));
  supervision.OnExit(kTrainer, 0, Code(0), At(0.2));
  EXPECT_THAT(Short(supervision.OnExit(kTrainer, 1, Code(0), At(0.2))), ElementsAre("term 0.0"));
  EXPECT_THAT(Short(supervision.OnExit(kStore, 0, Code(0), At(0.3))), ElementsAre("finish 2"));
}

TEST(Supervision, BacksOffAndGivesUpOnAProgramThatNeverStays) {
  Supervision supervision = MakeSupervision();
  supervision.Begin(At(0));
  double now = 0;
  std::vector<double> waits;
  for (int i = 0; i < 9; ++i) {
    EXPECT_THAT(Short(supervision.OnExit(kRollout, 0, Code(1), At(now))), ElementsAre("notice"));
    waits.push_back(absl::ToDoubleSeconds(supervision.WakeTime() - At(now)));
    now += waits.back();
    EXPECT_THAT(Short(supervision.OnTime(At(now))), ElementsAre("start 2.0"));
  }
  EXPECT_THAT(waits, ElementsAre(0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5));
  EXPECT_THAT(Short(supervision.OnExit(kRollout, 0, Code(1), At(now))), ElementsAre("term 1.0", "term 1.1"));
}

TEST(Supervision, ALongLifeForgivesEarlierDeaths) {
  Supervision supervision = MakeSupervision();
  supervision.Begin(At(0));
  double now = 0;
  for (int i = 0; i < 100; ++i) {
    now += i % 9 == 8 ? 6 : 0.01;
    EXPECT_THAT(Short(supervision.OnExit(kRollout, 0, Killed(), At(now))), ElementsAre("notice"));
    now = absl::ToDoubleSeconds(supervision.WakeTime() - absl::UnixEpoch());
    supervision.OnTime(At(now));
  }
}

TEST(Supervision, StopTerminatesThenKillsAndTheStoreGoesLast) {
  Supervision supervision = MakeSupervision();
  supervision.Begin(At(0));
  EXPECT_THAT(Short(supervision.Stop(130, "stopped", At(10))), ElementsAre("term 1.0", "term 1.1", "term 2.0"));
  EXPECT_THAT(Short(supervision.OnExit(kTrainer, 0, Code(0), At(11))), IsEmpty());
  EXPECT_THAT(Short(supervision.OnExit(kRollout, 0, Code(0), At(11))), IsEmpty());
  EXPECT_EQ(supervision.WakeTime(), At(32));
  EXPECT_THAT(Short(supervision.OnTime(At(32))), ElementsAre("kill 1.1"));
  EXPECT_THAT(Short(supervision.OnExit(kTrainer, 1, Killed(), At(32))), ElementsAre("term 0.0"));
  EXPECT_THAT(Short(supervision.OnTime(At(54))), ElementsAre("kill 0.0"));
  EXPECT_THAT(Short(supervision.OnExit(kStore, 0, Killed(), At(54))), ElementsAre("finish 130"));
}

TEST(Supervision, ASecondStopKillsAtOnce) {
  Supervision supervision = MakeSupervision();
  supervision.Begin(At(0));
  supervision.Stop(130, "stopped", At(10));
  EXPECT_THAT(Short(supervision.Stop(130, "stopped", At(10.5))),
              ElementsAre("kill 0.0", "kill 1.0", "kill 1.1", "kill 2.0"));
}

TEST(Supervision, AStopDuringABackoffStartsNothing) {
  Supervision supervision = MakeSupervision();
  supervision.Begin(At(0));
  supervision.OnExit(kRollout, 0, Killed(), At(100));
  supervision.Stop(143, "stopped", At(100.05));
  EXPECT_THAT(Short(supervision.OnTime(At(101))), IsEmpty());
}

// Random deaths, stops and delays: processes are started only when they do not run, signalled only when they do, and
// once a stop is asked for the run finishes with nothing left running.
TEST(Supervision, KeepsItsAccountUnderRandomDeaths) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    std::mt19937_64 random(seed);
    Supervision supervision = MakeSupervision();
    std::set<std::pair<int, int>> running;
    bool is_finished = false;
    double now = 0;
    const auto apply = [&](const Actions& actions) {
      for (const Action& action : actions) {
        const std::pair<int, int> who(action.group, action.member);
        if (action.kind == Kind::kStart) {
          EXPECT_TRUE(running.insert(who).second) << "seed " << seed;
        }
        if (action.kind == Kind::kTerminate || action.kind == Kind::kKill) {
          EXPECT_TRUE(running.contains(who)) << "seed " << seed;
        }
        if (action.kind == Kind::kFinish) {
          EXPECT_FALSE(is_finished) << "seed " << seed;
          is_finished = true;
        }
      }
    };
    apply(supervision.Begin(At(now)));
    for (int i = 0; i < 300 && !is_finished; ++i) {
      now += static_cast<double>(random() % 1000) / 300;
      if (i == 200) apply(supervision.Stop(130, "stopped", At(now)));
      apply(supervision.OnTime(At(now)));
      if (running.empty() || random() % 3 == 0) continue;
      const auto victim = *std::next(running.begin(), random() % running.size());
      running.erase(victim);
      const ExitStatus status = random() % 4 == 0 ? Code(0) : random() % 2 == 0 ? Code(75) : Killed();
      apply(supervision.OnExit(victim.first, victim.second, status, At(now)));
    }
    EXPECT_TRUE(is_finished) << "seed " << seed;
    EXPECT_TRUE(running.empty()) << "seed " << seed;
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace moerl
