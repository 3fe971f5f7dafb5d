// The membership's state machine under a seeded world that loses, repeats and reorders its messages, kills, stops and
// wakes processes, cuts and heals links, and lets new ones in.
#include "libs/fabric/membership.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <sstream>

#include "libs/fabric/mutation.h"
#include "tests/unit/ep/seeds.h"

namespace moerl::fabric {
namespace {

using Kind = MembershipMessage::Kind;

// What must never happen, did.
struct Violation {
  std::string what;
};

template <typename... Parts>
void Need(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream what;
  ((what << parts << ' '), ...);
  throw Violation{what.str()};
}

class World {
 public:
  explicit World(uint64_t seed) : random_(seed) {
    num_nodes_ = Draw(1, 3);
    std::vector<Lifetime> members;
    for (int node = 0; node < num_nodes_; ++node) {
      for (int i = Draw(1, 3); i > 0; --i) {
        processes_.push_back({.id = next_id_++, .node = node, .is_slow = Draw(0, 5) == 0});
        members.push_back({processes_.back().id, "contact"});
      }
    }
    for (size_t rank = 0; rank < members.size(); ++rank)
      processes_[rank].machine = MembershipMachine::OfMember(1, members, static_cast<int>(rank));
    Observe(processes_[0], 0);
    loss_percent_ = std::max(0, Draw(-10, 30));
    repeat_percent_ = std::max(0, Draw(-10, 20));
  }

  void Run() {
    Steps(Draw(0, 100));
    const int num_faults = Draw(0, 4);
    for (int i = 0; i < num_faults; ++i) {
      Fault();
      Steps(Draw(0, Draw(0, 1) == 0 ? 60 : 600));
    }
    if (Draw(0, 2) > 0) WakeAll();
    if (Draw(0, 2) > 0) cut_.clear();
    loss_percent_ = repeat_percent_ = 0;
    Quieten();
    CheckEnd();
    LetJoinersIn();
  }

 private:
  struct Process {
    uint64_t id = 0;
    int node = 0;
    bool is_slow = false;  // rarely gets to run; never lost for that
    bool is_dead = false, is_stopped = false;
    uint64_t finished = 0;  // operations, of the member
    MembershipMachine machine = MembershipMachine::OfJoiner({}, {});
  };
  struct Packet {
    uint64_t from, to;
    MembershipMessage message;
  };
  struct Outcome {
    std::vector<uint64_t> members;
    uint64_t finished = 0;
  };

  int Draw(int low, int high) { return low + static_cast<int>(random_() % static_cast<uint64_t>(high - low + 1)); }
  Process& Any() { return processes_[random_() % processes_.size()]; }
  Process* Find(uint64_t id) {
    for (Process& process : processes_) {
      if (process.id == id) return &process;
    }
    return nullptr;
  }
  static bool IsUp(const Process& process) { return !process.is_dead && !process.is_stopped; }
  bool IsCut(const Process& a, const Process& b) const {
    return cut_.count({std::min(a.node, b.node), std::max(a.node, b.node)}) > 0;
  }

  // Every event of a process ends here.
  void After(Process& process, uint64_t epoch_before, MembershipMachine::Sends sends) {
    for (MembershipMachine::Send& send : sends) {
      if (Draw(0, 99) >= loss_percent_) packets_.push_back({process.id, send.to, std::move(send.message)});
    }
    Observe(process, epoch_before);
  }

  void Observe(Process& process, uint64_t epoch_before) {
    const MembershipMachine& machine = process.machine;
    for (const Accusation& accusation : machine.accusations()) {
      Need(accusation.by < machine.members().size() && accusation.of < machine.members().size(),
           "accusation of nobody");
      Need(accused_.count({machine.epoch(), machine.members()[accusation.by].id, machine.members()[accusation.of].id}) >
               0,
           "false accusation at", process.id, "in epoch", machine.epoch(), "of", accusation.of);
    }
    if (machine.epoch() == epoch_before) return;
    if (epoch_before > 0) Need(machine.epoch() == epoch_before + 1, "an epoch was skipped");
    Outcome outcome = {{}, machine.finished_before()};
    for (const Lifetime& member : machine.members()) outcome.members.push_back(member.id);
    if (!machine.is_evicted()) process.finished = outcome.finished;
    const auto [at, is_first] = outcomes_.insert({machine.epoch(), outcome});
    Need(at->second.members == outcome.members && at->second.finished == outcome.finished, "two memberships of epoch",
         machine.epoch());
    if (is_first && outcomes_.count(machine.epoch() - 1) > 0) CheckChange(machine.epoch(), outcome);
  }

  void CheckChange(uint64_t epoch, const Outcome& outcome) {
    const std::vector<uint64_t>& last = outcomes_[epoch - 1].members;
    size_t num_survivors = 0;
    for (const uint64_t member : outcome.members) {
      const bool is_survivor = std::find(last.begin(), last.end(), member) != last.end();
      num_survivors += is_survivor ? 1 : 0;
      Need(is_survivor || once_member_.insert(member).second, "a lifetime came back:", member);
      // A survivor that knows already has begun again.
      if (is_survivor && Find(member)->machine.epoch() == epoch - 1)
        Need(outcome.finished <= Find(member)->finished, "operation not finished by", member);
    }
    const bool has_quorum =
        2 * num_survivors > last.size() || (2 * num_survivors == last.size() && outcome.members[0] == last[0]);
    Need(has_quorum, "no majority of", last.size());
    for (const uint64_t member : last) {
      if (std::find(outcome.members.begin(), outcome.members.end(), member) != outcome.members.end()) continue;
      const bool has_cause = std::any_of(accused_.begin(), accused_.end(), [&](const auto& accusation) {
        const auto& [in, by, of] = accusation;
        return in == epoch - 1 && (by == member || of == member);
      });
      Need(has_cause, "a live rank was put out:", member);
    }
  }

  void Deliver(size_t index) {
    std::swap(packets_[index], packets_.back());
    const Packet packet = packets_.back();
    Process* to = Find(packet.to);
    const Process& from = *Find(packet.from);
    if (to != nullptr && !to->is_dead && to->is_stopped) return;  // waits in its socket
    packets_.pop_back();
    if (to == nullptr || to->is_dead || IsCut(from, *to)) return;
    if (Draw(0, 99) < repeat_percent_) packets_.push_back(packet);
    const uint64_t epoch = to->machine.epoch();
    After(*to, epoch, to->machine.OnMessage(packet.message));
  }

  // The detector of one process looks at one peer. Beats of another epoch do not count.
  void Look(Process& process, uint64_t peer_id) {
    MembershipMachine& machine = process.machine;
    const Process& peer = *Find(peer_id);
    if (&peer == &process) return;
    const bool is_gone = peer.machine.epoch() > machine.epoch() || peer.machine.is_evicted();
    if (IsUp(peer) && !IsCut(process, peer) && !is_gone) return;
    const uint64_t epoch = machine.epoch();
    accused_.insert({epoch, process.id, peer.id});
    for (size_t rank = 0; rank < machine.members().size(); ++rank) {
      if (machine.members()[rank].id == peer_id) return After(process, epoch, machine.OnLost(static_cast<int>(rank)));
    }
  }

  void Tick(Process& process) {
    const uint64_t epoch = process.machine.epoch();
    if (process.machine.needs_ticks()) After(process, epoch, process.machine.OnTick());
  }

  bool IsMember(const Process& process) const { return !process.machine.is_joining() && !process.machine.is_evicted(); }

  void Steps(int num_steps) {
    for (int i = 0; i < num_steps; ++i) {
      const int act = Draw(0, 99);
      if (!packets_.empty() && act < 60) {
        Deliver(random_() % packets_.size());
        continue;
      }
      Process& process = Any();
      if (!IsUp(process) || (process.is_slow && Draw(0, 49) > 0)) continue;
      if (act < 75) {
        if (!IsMember(process)) continue;
        Look(process, process.machine.members()[random_() % process.machine.members().size()].id);
      } else if (act < 80) {
        FinishOperation(process);
      } else {
        Tick(process);
      }
    }
  }

  // Nobody finishes an operation that a member has not begun.
  void FinishOperation(Process& process) {
    if (!IsMember(process) || !process.machine.is_settled()) return;
    for (const Lifetime& member : process.machine.members()) {
      const Process& other = *Find(member.id);
      if (other.machine.epoch() != process.machine.epoch() || other.finished < process.finished) return;
    }
    process.machine.SetFinished(++process.finished);
  }

  void Fault() {
    switch (Draw(0, 8)) {
      case 0:
        Any().is_dead = true;
        break;
      case 1:
      case 2:
        Any().is_stopped = true;
        break;
      case 3: {
        const int node = Draw(0, num_nodes_ - 1);
        for (Process& process : processes_) process.is_dead |= process.node == node && Draw(0, 3) > 0;
        break;
      }
      case 4: {
        const int a = Draw(0, num_nodes_ - 1), b = Draw(0, num_nodes_ - 1);
        if (a != b) cut_.insert({std::min(a, b), std::max(a, b)});
        break;
      }
      case 5: {  // one node from all others
        const int alone = Draw(0, num_nodes_ - 1);
        for (int b = 0; b < num_nodes_; ++b) {
          if (b != alone) cut_.insert({std::min(alone, b), std::max(alone, b)});
        }
        break;
      }
      case 6:
        WakeAll();
        break;
      case 7: {
        Process& wisher = Any();
        const uint64_t epoch = wisher.machine.epoch();
        if (IsUp(wisher)) After(wisher, epoch, wisher.machine.OnWish());
        break;
      }
      default: {
        const uint64_t known = Any().id;
        processes_.push_back({.id = next_id_++, .node = Draw(0, num_nodes_ - 1)});
        processes_.back().machine = MembershipMachine::OfJoiner({processes_.back().id, "contact"}, {known});
        break;
      }
    }
  }

  void WakeAll() {
    for (Process& process : processes_) process.is_stopped = false;
  }

  // All that is going to happen without new faults.
  void Quieten() {
    for (int round = 0; round < 150; ++round) {
      bool needs_more = false;
      for (size_t i = 0; i < processes_.size(); ++i) {
        Process& process = processes_[i];
        if (!IsUp(process)) continue;
        for (int ticks = 0; ticks < 20; ++ticks) Tick(process);
        if (IsMember(process)) {
          const std::vector<Lifetime> members = process.machine.members();
          for (const Lifetime& member : members) {
            if (IsMember(process)) Look(process, member.id);
          }
        }
        needs_more |= IsMember(process) && !process.machine.is_settled();
      }
      std::shuffle(packets_.begin(), packets_.end(), random_);
      const size_t limit = packets_.size() * 50 + 1000;
      for (size_t i = 0; i < limit && !packets_.empty(); ++i) Deliver(random_() % packets_.size());
      if (!needs_more && round > 10) return;
    }
  }

  std::vector<Process*> Running() {
    std::vector<Process*> running;
    for (Process& process : processes_) {
      if (IsUp(process) && IsMember(process) && process.machine.is_settled()) running.push_back(&process);
    }
    return running;
  }

  void CheckEnd() {
    const std::vector<Process*> running = Running();
    for (const Process* process : running) {
      Need(process->machine.epoch() == running[0]->machine.epoch(), "two sides go on");
      Need(process->machine.members() == running[0]->machine.members(), "two sides go on");
    }
    if (!running.empty()) {
      Need(running.size() == running[0]->machine.members().size(), "a live member did not follow");
      Need(running[0]->machine.epoch() == outcomes_.rbegin()->first, "a running side is not the newest");
    }
    CheckThatAQuorumGoesOn();
    for (const Process& process : processes_) {
      if (!IsUp(process) || process.machine.is_joining() || process.machine.is_evicted()) continue;
      const bool is_running = process.machine.is_settled();
      Need(is_running || !process.machine.accusations().empty() || process.machine.wants_epoch(),
           "stopped without cause");
      const bool reaches_running =
          std::any_of(running.begin(), running.end(), [&](const Process* other) { return !IsCut(process, *other); });
      Need(is_running || !reaches_running, process.id, "was left out and does not know it");
    }
  }

  // Those members of the newest epoch that all reach each other and whom nobody up has lost, if they have a quorum.
  void CheckThatAQuorumGoesOn() {
    const auto& [epoch, outcome] = *outcomes_.rbegin();
    std::vector<Process*> sound;
    for (const uint64_t id : outcome.members) {
      const bool is_accused = std::any_of(accused_.begin(), accused_.end(), [&](const auto& accusation) {
        return std::get<0>(accusation) == epoch && std::get<2>(accusation) == id &&
               IsUp(*Find(std::get<1>(accusation)));
      });
      if (!IsUp(*Find(id)) || is_accused) continue;
      sound.push_back(Find(id));
    }
    for (const Process* a : sound) {
      for (const Process* b : sound) {
        if (IsCut(*a, *b)) return;
      }
    }
    const size_t total = outcome.members.size();
    const bool has_quorum =
        2 * sound.size() > total || (2 * sound.size() == total && !sound.empty() && sound[0]->id == outcome.members[0]);
    if (!has_quorum) return;
    for (const Process* process : sound)
      Need(IsMember(*process) && process->machine.epoch() == epoch && process->machine.is_settled(), "survivor",
           process->id, "did not go on in epoch", epoch);
  }

  // Whoever wants in and reaches everybody is in after the next vote.
  void LetJoinersIn() {
    if (!cut_.empty() || Running().empty()) return;
    Process& asker = *Running()[0];
    for (Process& process : processes_) {
      if (!process.machine.is_joining() || process.machine.is_evicted() || !IsUp(process)) continue;
      process.machine = MembershipMachine::OfJoiner({process.id, "contact"}, {asker.id});
    }
    Quieten();
    if (!IsMember(asker) || !asker.machine.is_settled()) return;
    const uint64_t epoch = asker.machine.epoch();
    After(asker, epoch, asker.machine.OnWish());
    Quieten();
    CheckEnd();
    for (const Process& process : processes_)
      Need(!IsUp(process) || !process.machine.is_joining(), "was not let in:", process.id);
  }

  std::mt19937_64 random_;
  int num_nodes_ = 1;
  std::vector<Process> processes_;
  std::vector<Packet> packets_;
  std::set<std::pair<int, int>> cut_;  // nodes, lower first
  uint64_t next_id_ = 100;
  int loss_percent_ = 0, repeat_percent_ = 0;
  std::set<std::tuple<uint64_t, uint64_t, uint64_t>> accused_;  // epoch, by, of: true when it was said
  std::map<uint64_t, Outcome> outcomes_;
  std::set<uint64_t> once_member_;
};

// The first violation of `seed`; empty: none.
std::string RunSeed(uint64_t seed) {
  try {
    World(seed).Run();
  } catch (const Violation& violation) {
    return violation.what;
  }
  return "";
}

TEST(Membership, NeverSplitsNeverHangsAndNamesOnlyTheLost) {
  const ep::SeedRange seeds = ep::Seeds(400);
  for (uint64_t seed = seeds.first; seed < seeds.last; ++seed) EXPECT_EQ(RunSeed(seed), "") << "seed " << seed;
}

#ifdef MOERL_FAILPOINTS
struct Mistake {
  const char* name;
  Mutation mutation;
};

class Mistakes : public testing::TestWithParam<Mistake> {};

TEST_P(Mistakes, AreCaught) {
  constexpr uint64_t kSeedsMax = 20000;
  active_mutation = GetParam().mutation;
  std::string what;
  uint64_t seed = 0;
  while (what.empty() && seed < kSeedsMax) what = RunSeed(seed++);
  active_mutation = Mutation::kNone;
  EXPECT_NE(what, "") << "not caught in " << kSeedsMax << " seeds";
  std::cout << GetParam().name << ": seed " << seed - 1 << ": " << what << std::endl;
}

INSTANTIATE_TEST_SUITE_P(All, Mistakes,
                         testing::Values(Mistake{"HalfWithoutLowest", Mutation::kHalfWithoutLowest},
                                         Mistake{"ViewIsMembership", Mutation::kViewIsMembership},
                                         Mistake{"Hasty", Mutation::kHasty},
                                         Mistake{"SilenceAccuses", Mutation::kSilenceAccuses},
                                         Mistake{"ForgetAccepted", Mutation::kForgetAccepted},

                                         Mistake{"AccusationsStay", Mutation::kAccusationsStay},
                                         Mistake{"DeadDoNotCount", Mutation::kDeadDoNotCount},
                                         Mistake{"FinishedOfProposer", Mutation::kFinishedOfProposer}),
                         [](const testing::TestParamInfo<Mistake>& info) { return info.param.name; });
#endif

TEST(LargestReachableSet, IsTheBestOfAllSubsets) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 2000; ++round) {
    const uint16_t n = static_cast<uint16_t>(1 + random() % 8);
    std::set<Accusation> accusations;
    for (size_t i = random() % (2 * n); i > 0; --i) {
      const uint16_t by = static_cast<uint16_t>(random() % n), of = static_cast<uint16_t>(random() % n);
      if (by != of) accusations.insert({by, of});
    }
    std::vector<uint16_t> ranks, best;
    for (uint16_t rank = 0; rank < n; ++rank) ranks.push_back(rank);
    std::tuple<int, int, std::vector<uint16_t>> best_score = {1, 0, {}};
    for (uint32_t mask = 1; mask < (1u << n); ++mask) {
      std::vector<uint16_t> set;
      for (const uint16_t rank : ranks) {
        if (mask >> rank & 1) set.push_back(rank);
      }
      int num_accused = 0;
      bool is_at_odds = false;
      for (const uint16_t rank : set) {
        num_accused += std::any_of(accusations.begin(), accusations.end(),
                                   [&](const Accusation& accusation) { return accusation.of == rank; });
      }
      for (const Accusation& accusation : accusations)
        is_at_odds |= (mask >> accusation.by & 1) && (mask >> accusation.of & 1);
      if (is_at_odds) continue;
      const std::tuple<int, int, std::vector<uint16_t>> score = {-static_cast<int>(set.size()), num_accused, set};
      if (score < best_score) best_score = score;
    }
    EXPECT_EQ(LargestReachableSet(ranks, accusations, 20000), std::get<2>(best_score)) << "round " << round;
  }
}

TEST(LargestReachableSet, TwoSidesOfManyRanksAreFoundAtOnce) {
  std::vector<uint16_t> ranks;
  std::set<Accusation> accusations;
  for (uint16_t rank = 0; rank < 200; ++rank) ranks.push_back(rank);
  for (uint16_t a = 0; a < 90; ++a) {
    for (uint16_t b = 90; b < 200; ++b) accusations.insert({a, b});
  }
  EXPECT_EQ(LargestReachableSet(ranks, accusations, 20000).size(), 110u);
}

TEST(Membership, HundredsOfRanksLoseANodeInOneBallot) {
  std::vector<Lifetime> members;
  for (uint64_t rank = 0; rank < 300; ++rank) members.push_back({rank, ""});
  std::vector<MembershipMachine> machines;
  for (int rank = 0; rank < 300; ++rank) machines.push_back(MembershipMachine::OfMember(7, members, rank));
  std::vector<MembershipMachine::Send> sends;
  const auto take = [&](MembershipMachine::Sends more) { sends.insert(sends.end(), more.begin(), more.end()); };
  for (int lost = 0; lost < 8; ++lost) take(machines[8].OnLost(lost));
  while (!sends.empty()) {
    const MembershipMachine::Send send = sends.back();
    sends.pop_back();
    if (send.to >= 8) take(machines[send.to].OnMessage(send.message));
  }
  EXPECT_EQ(machines[299].epoch(), 8u);
  EXPECT_EQ(machines[299].members().size(), 292u);
  EXPECT_EQ(machines[299].rank(), 291);
}

}  // namespace
}  // namespace moerl::fabric
