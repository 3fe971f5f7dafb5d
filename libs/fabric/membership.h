#ifndef MOERL_LIBS_FABRIC_MEMBERSHIP_H_
#define MOERL_LIBS_FABRIC_MEMBERSHIP_H_

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/types/span.h"

namespace moerl::fabric {

// One lifetime of a process in a cluster. `id` is never used twice; who comes back comes with a new one. `contact` says
// how to reach it, opaque to the membership.
struct Lifetime {
  uint64_t id = 0;
  std::string contact;
  friend bool operator==(const Lifetime&, const Lifetime&) = default;
};

// "Rank `by` has lost rank `of`", both of the epoch it is said in.
struct Accusation {
  uint16_t by = 0;
  uint16_t of = 0;
  friend auto operator<=>(const Accusation&, const Accusation&) = default;
};

struct Ballot {
  uint32_t round = 0;  // 0: none yet
  uint16_t proposer = 0;
  friend auto operator<=>(const Ballot&, const Ballot&) = default;
};

// What one epoch's members decide about the next: it has the survivors, in their order, then the joiners.
struct Decision {
  std::vector<uint16_t> survivors;  // ranks of the deciding epoch, ascending
  std::vector<Lifetime> joiners;
  uint64_t finished = 0;  // the last operation that every survivor had finished when it voted; callers redo from there
  friend bool operator==(const Decision&, const Decision&) = default;
};

// What members say to each other. May be lost, repeated, reordered and late.
struct MembershipMessage {
  enum class Kind : uint8_t {
    kReport,    // what I know of losses, wishes and joiners
    kPrepare,   // phase 1 of `ballot`
    kPromise,   // its answer, with what I accepted before, if anything
    kAccept,    // phase 2: accept `decision` in `ballot`
    kAccepted,  // its answer
    kDecided,   // `decision` ends `epoch`
    kJoin,      // lifetime `from` at lifetimes[0].contact wants to come in
    kWelcome,   // you are in `epoch`, whose members are `lifetimes`
    kEvicted,   // you are in no epoch any more
  };
  Kind kind = Kind::kReport;
  uint64_t epoch = 0;
  uint64_t from = 0;  // lifetime of the sender
  Ballot ballot;
  std::vector<Accusation> accusations;
  bool wants_epoch = false;
  uint64_t finished = 0;
  std::vector<Lifetime> lifetimes;  // report, promise: joiners; join: the sender; welcome: the members
  Ballot accepted;                  // promise: the ballot `decision` was accepted in; round 0: none was
  Decision decision;
};

// The membership of a cluster as one member (or one who wants to be) sees it: one decision an epoch, made by a vote of
// its members (single-decree Paxos: Lamport, "Paxos Made Simple", 2001), so that no two sides ever go on.
//
//   - An observation is never a membership. Accusations and wishes only start a vote.
//   - A new epoch needs more than half of the last one's members, dead ones included in the total; an exact half only
//     with the last epoch's rank 0.
//   - The lowest rank that a member has not lost proposes. It waits for the promise of every member that its own
//     detector does not accuse: silence is no vote to leave.
//   - It proposes the largest set of promised ranks none of which accuses another; among equals the one with the fewest
//     accused ranks, then with the lowest ranks. Everyone who waits to join comes in with it.
//   - Accusations end with their epoch; ballots back off. An accusation is not withdrawn within its epoch.
//
// A pure state machine: events in, what to send out; no clock, no thread, no randomness. Thread-compatible. Whoever
// drives it calls OnTick every tick while needs_ticks(), sends what comes back (any of it may be lost), and looks at
// epoch() and is_evicted() after every event.
class MembershipMachine {
 public:
  static constexpr int kJoinersMax = 256;           // that wait at once; more are not heard
  static constexpr int kJoinerTicksMax = 400;       // since its last kJoin; then a joiner is forgotten
  static constexpr int kResendTicks = 5;            // reports, and the messages of a ballot
  static constexpr int kJoinTicks = 20;             // between the kJoin of one who waits
  static constexpr int kBallotTicks = 20;           // of the first ballot; doubles with each of the next
  static constexpr int kBallotDoublingsMax = 5;     // the longest ballot is 640 ticks
  static constexpr int kSetSearchStepsMax = 20000;  // exact search for the largest set, then greedy

  struct Send {
    uint64_t to = 0;  // lifetime
    MembershipMessage message;
  };
  using Sends = std::vector<Send>;

  // A member of `epoch` with the dense rank `self`.
  static MembershipMachine OfMember(uint64_t epoch, std::vector<Lifetime> members, int self);
  // Somebody new who knows some members' lifetimes (ids may be made up: they only come back in Send::to).
  static MembershipMachine OfJoiner(Lifetime self, std::vector<uint64_t> known);

  Sends OnTick();
  // The own detector lost `rank` of epoch(). Final until the epoch ends.
  Sends OnLost(int rank);
  // A new epoch is wanted although nobody is lost: to take joiners in, or because this one could not be set up.
  Sends OnWish();
  Sends OnMessage(const MembershipMessage& message);
  void SetFinished(uint64_t operation) { finished_ = operation; }

  bool is_joining() const { return rank_ < 0 && !is_evicted_; }
  // Left out by a decision, or refused as a lifetime that had been left out. Final.
  bool is_evicted() const { return is_evicted_; }
  // False while a vote is wanted or going on: the epoch's operations are then to end.
  bool is_settled() const { return accusations_.empty() && !wants_epoch_; }
  bool needs_ticks() const {
    return !is_evicted_ && (is_joining() || !is_settled() || !joiners_.empty() || !unheard_.empty());
  }

  uint64_t epoch() const { return epoch_; }
  int rank() const { return rank_; }
  const std::vector<Lifetime>& members() const { return members_; }
  const std::set<Accusation>& accusations() const { return accusations_; }
  bool wants_epoch() const { return wants_epoch_; }
  size_t num_joiners() const { return joiners_.size(); }
  // Of the decision that began epoch().
  uint64_t finished_before() const { return finished_before_; }
  const Decision& last_decision() const { return last_decision_; }

 private:
  struct Joiner {
    std::string contact;
    int ticks = 0;  // since its last kJoin
  };

  bool HasQuorum(const std::set<uint16_t>& part) const;
  bool HasLost(int rank) const;
  int Proposer() const;
  int RankOf(uint64_t lifetime) const;
  MembershipMessage NewMessage(MembershipMessage::Kind kind) const;
  MembershipMessage Knowledge(MembershipMessage::Kind kind) const;
  void ToMembers(const MembershipMessage& message, Sends& sends) const;
  void Learn(const MembershipMessage& message);
  Sends Settle(Sends sends);

  void Handle(const MembershipMessage& message, Sends& sends);
  void Propose(Sends& sends);
  void StartBallot(Sends& sends);
  void ResendBallot(Sends& sends) const;
  void TryAccept(Sends& sends);
  std::optional<Decision> Choose() const;
  int BallotTicks() const;
  void OnPrepare(const MembershipMessage& message, Sends& sends);
  void OnPromise(const MembershipMessage& message, Sends& sends);
  void OnAccept(const MembershipMessage& message, Sends& sends);
  void OnAccepted(const MembershipMessage& message, Sends& sends);
  void OnJoin(const MembershipMessage& message, Sends& sends);
  void OnWelcome(const MembershipMessage& message, Sends& sends);
  void Welcome(uint64_t lifetime, Sends& sends) const;
  void AnswerPast(const MembershipMessage& message, Sends& sends) const;
  void Adopt(Decision decision);

  uint64_t id_ = 0;
  std::string contact_;
  std::vector<uint64_t> known_;  // a joiner's
  uint64_t epoch_ = 0;
  int rank_ = -1;
  std::vector<Lifetime> members_;
  bool is_evicted_ = false;
  uint64_t finished_ = 0;
  uint64_t finished_before_ = 0;
  Decision last_decision_;       // that ended epoch_ - 1
  std::set<uint64_t> left_out_;  // lifetimes that were members and are no more

  // Of this epoch.
  std::set<Accusation> accusations_;
  bool wants_epoch_ = false;
  std::map<uint64_t, Joiner> joiners_;
  std::set<uint64_t> unheard_;  // members that came in with this epoch and may not know it yet
  int ticks_ = 0;
  // Acceptor.
  Ballot promised_;
  Ballot accepted_;
  Decision accepted_decision_;
  // Proposer.
  struct Promise {
    Ballot accepted;
    Decision decision;
    uint64_t finished = 0;
  };
  Ballot ballot_;  // round 0: none started
  int num_ballots_ = 0;
  int ballot_ticks_ = 0;
  std::map<uint16_t, Promise> promises_;
  std::set<uint16_t> acceptances_;
  std::optional<Decision> proposal_;
};

// The largest subset of `ranks` in which nobody accuses anybody; among equals the one with the fewest of `accused`,
// then the lexicographically lowest. Exact up to `steps_max` branches, good beyond.
std::vector<uint16_t> LargestReachableSet(absl::Span<const uint16_t> ranks, const std::set<Accusation>& accusations,
                                          int steps_max);

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_MEMBERSHIP_H_
