#include "libs/fabric/membership.h"

#include <algorithm>
#include <utility>

#include "libs/base/check.h"
#include "libs/fabric/mutation.h"

namespace moerl::fabric {
namespace {

using Kind = MembershipMessage::Kind;

// Branch and bound over "drop the rank with most accusations" or "keep it and drop all it is at odds with".
class SetSearch {
 public:
  SetSearch(const std::set<Accusation>& accusations, int steps_max) : steps_left_(steps_max) {
    for (const Accusation& accusation : accusations) {
      odds_[accusation.by].insert(accusation.of);
      odds_[accusation.of].insert(accusation.by);
      accused_.insert(accusation.of);
    }
  }

  std::vector<uint16_t> Run(std::set<uint16_t> ranks) {
    Branch(std::move(ranks));
    return {best_.begin(), best_.end()};
  }

 private:
  std::set<uint16_t> OddsWithin(uint16_t rank, const std::set<uint16_t>& ranks) const {
    std::set<uint16_t> odds;
    const auto found = odds_.find(rank);
    if (found == odds_.end()) return odds;
    std::set_intersection(found->second.begin(), found->second.end(), ranks.begin(), ranks.end(),
                          std::inserter(odds, odds.end()));
    return odds;
  }

  int NumAccused(const std::set<uint16_t>& ranks) const {
    return static_cast<int>(
        std::count_if(ranks.begin(), ranks.end(), [&](uint16_t rank) { return accused_.count(rank) > 0; }));
  }

  void Offer(const std::set<uint16_t>& ranks) {
    const int accused = NumAccused(ranks);
    if (ranks.size() < best_.size()) return;
    const bool is_better =
        ranks.size() > best_.size() || accused < best_accused_ || (accused == best_accused_ && ranks < best_);
    if (!is_better) return;
    best_ = ranks;
    best_accused_ = accused;
  }

  void Branch(std::set<uint16_t> ranks) {
    while (ranks.size() >= best_.size()) {
      uint16_t worst = 0;
      std::set<uint16_t> worst_odds;
      for (const uint16_t rank : ranks) {
        std::set<uint16_t> odds = OddsWithin(rank, ranks);
        const bool is_worse = odds.size() > worst_odds.size() || (!odds.empty() && odds.size() == worst_odds.size() &&
                                                                  accused_.count(rank) >= accused_.count(worst));
        if (!is_worse) continue;
        worst = rank;
        worst_odds = std::move(odds);
      }
      if (worst_odds.empty()) return Offer(ranks);
      if (steps_left_ > 0) {
        --steps_left_;
        std::set<uint16_t> kept = ranks;
        for (const uint16_t rank : worst_odds) kept.erase(rank);
        Branch(std::move(kept));
      }
      ranks.erase(worst);
    }
  }

  int steps_left_;
  std::map<uint16_t, std::set<uint16_t>> odds_;
  std::set<uint16_t> accused_;
  std::set<uint16_t> best_;
  int best_accused_ = 0;
};

template <typename Map>
std::set<uint16_t> Keys(const Map& map) {
  std::set<uint16_t> keys;
  for (const auto& [key, value] : map) keys.insert(key);
  return keys;
}

}  // namespace

std::vector<uint16_t> LargestReachableSet(absl::Span<const uint16_t> ranks, const std::set<Accusation>& accusations,
                                          int steps_max) {
  return SetSearch(accusations, steps_max).Run({ranks.begin(), ranks.end()});
}

MembershipMachine MembershipMachine::OfMember(uint64_t epoch, std::vector<Lifetime> members, int self) {
  MOERL_CHECK(self >= 0 && static_cast<size_t>(self) < members.size() && members.size() <= UINT16_MAX);
  MembershipMachine machine;
  machine.id_ = members[self].id;
  machine.contact_ = members[self].contact;
  machine.epoch_ = epoch;
  machine.rank_ = self;
  machine.members_ = std::move(members);
  return machine;
}

MembershipMachine MembershipMachine::OfJoiner(Lifetime self, std::vector<uint64_t> known) {
  MembershipMachine machine;
  machine.id_ = self.id;
  machine.contact_ = std::move(self.contact);
  machine.known_ = std::move(known);
  return machine;
}

bool MembershipMachine::HasQuorum(const std::set<uint16_t>& part) const {
  size_t total = members_.size();
  if (IsMutated(Mutation::kDeadDoNotCount)) {
    std::set<uint16_t> accused;
    for (const Accusation& accusation : accusations_) accused.insert(accusation.of);
    total -= accused.size();
  }
  if (2 * part.size() == total) return part.count(0) > 0 || IsMutated(Mutation::kHalfWithoutLowest);
  return 2 * part.size() > total;
}

bool MembershipMachine::HasLost(int rank) const {
  return accusations_.count({static_cast<uint16_t>(rank_), static_cast<uint16_t>(rank)}) > 0;
}

int MembershipMachine::Proposer() const {
  int rank = 0;
  while (HasLost(rank)) ++rank;  // ends: nobody accuses itself
  return rank;
}

int MembershipMachine::RankOf(uint64_t lifetime) const {
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    if (members_[rank].id == lifetime) return static_cast<int>(rank);
  }
  return -1;
}

MembershipMessage MembershipMachine::NewMessage(Kind kind) const {
  MembershipMessage message;
  message.kind = kind;
  message.epoch = epoch_;
  message.from = id_;
  return message;
}

MembershipMessage MembershipMachine::Knowledge(Kind kind) const {
  MembershipMessage message = NewMessage(kind);
  message.accusations.assign(accusations_.begin(), accusations_.end());
  message.wants_epoch = wants_epoch_;
  for (const auto& [id, joiner] : joiners_) message.lifetimes.push_back({id, joiner.contact});
  return message;
}

void MembershipMachine::ToMembers(const MembershipMessage& message, Sends& sends) const {
  for (const Lifetime& member : members_) sends.push_back({member.id, message});
}

void MembershipMachine::Learn(const MembershipMessage& message) {
  for (const Accusation& accusation : message.accusations) {
    if (accusation.by < members_.size() && accusation.of < members_.size() && accusation.by != accusation.of)
      accusations_.insert(accusation);
  }
  wants_epoch_ |= message.wants_epoch;
  for (const Lifetime& joiner : message.lifetimes) {
    if (joiners_.size() >= kJoinersMax || left_out_.count(joiner.id) > 0 || RankOf(joiner.id) >= 0) continue;
    joiners_[joiner.id] = {joiner.contact, 0};
  }
}

// Hears what it says to itself, so that a member is treated like any other.
MembershipMachine::Sends MembershipMachine::Settle(Sends sends) {
  Sends out;
  for (size_t i = 0; i < sends.size(); ++i) {
    const Send send = std::move(sends[i]);  // Handle may grow the vector
    if (send.to == id_) {
      Handle(send.message, sends);
    } else {
      out.push_back(send);
    }
  }
  return out;
}

MembershipMachine::Sends MembershipMachine::OnTick() {
  Sends sends;
  if (is_evicted_) return sends;
  ++ticks_;
  if (is_joining()) {
    if (ticks_ % kJoinTicks != 1) return sends;
    MembershipMessage join = NewMessage(Kind::kJoin);
    join.lifetimes.push_back({id_, contact_});
    for (const uint64_t member : known_) sends.push_back({member, join});
    return sends;
  }
  for (auto joiner = joiners_.begin(); joiner != joiners_.end();) {
    joiner = ++joiner->second.ticks > kJoinerTicksMax ? joiners_.erase(joiner) : std::next(joiner);
  }
  if (ticks_ % kJoinTicks == 0) {
    for (const uint64_t joiner : unheard_) Welcome(joiner, sends);
  }
  if (is_settled()) return sends;
  if (ticks_ % kResendTicks == 0) ToMembers(Knowledge(Kind::kReport), sends);
  if (Proposer() == rank_) {
    ++ballot_ticks_;
    if (IsMutated(Mutation::kSilenceAccuses) && ballot_ticks_ > kBallotTicks) {
      for (size_t rank = 0; rank < members_.size(); ++rank) {
        if (promises_.count(static_cast<uint16_t>(rank)) == 0 && static_cast<int>(rank) != rank_)
          accusations_.insert({static_cast<uint16_t>(rank_), static_cast<uint16_t>(rank)});
      }
    }
    if (ballot_.round == 0 || ballot_ticks_ >= BallotTicks()) {
      StartBallot(sends);
    } else if (ballot_ticks_ % kResendTicks == 0) {
      ResendBallot(sends);
    }
  }
  return Settle(std::move(sends));
}

// Later ballots last longer, and never the same time on two proposers, or they would only outbid each other.
int MembershipMachine::BallotTicks() const {
  const int doublings = std::min(std::max(num_ballots_ - 1, 0), kBallotDoublingsMax);
  return (kBallotTicks << doublings) + kResendTicks * (rank_ % 16);
}

MembershipMachine::Sends MembershipMachine::OnLost(int rank) {
  Sends sends;
  if (is_evicted_ || is_joining()) return sends;
  MOERL_CHECK(rank >= 0 && rank != rank_ && static_cast<size_t>(rank) < members_.size());
  if (!accusations_.insert({static_cast<uint16_t>(rank_), static_cast<uint16_t>(rank)}).second) return sends;
  if (IsMutated(Mutation::kViewIsMembership)) {
    std::set<uint16_t> view;
    for (size_t other = 0; other < members_.size(); ++other) {
      if (!HasLost(static_cast<int>(other))) view.insert(static_cast<uint16_t>(other));
    }
    if (HasQuorum(view)) Adopt({.survivors = {view.begin(), view.end()}, .joiners = {}, .finished = finished_});
    return sends;
  }
  ToMembers(Knowledge(Kind::kReport), sends);
  return Settle(std::move(sends));
}

MembershipMachine::Sends MembershipMachine::OnWish() {
  Sends sends;
  if (is_evicted_ || is_joining() || wants_epoch_) return sends;
  wants_epoch_ = true;
  ToMembers(Knowledge(Kind::kReport), sends);
  return Settle(std::move(sends));
}

MembershipMachine::Sends MembershipMachine::OnMessage(const MembershipMessage& message) {
  Sends sends;
  if (!is_evicted_) Handle(message, sends);
  return Settle(std::move(sends));
}

void MembershipMachine::Handle(const MembershipMessage& message, Sends& sends) {
  if (is_evicted_) return;
  if (message.kind == Kind::kJoin) return OnJoin(message, sends);
  if (message.kind == Kind::kWelcome) return OnWelcome(message, sends);
  if (message.kind == Kind::kEvicted) {
    // Of the epoch before it was left out, or as a joiner that was let in and lost before it knew.
    is_evicted_ = is_joining() || message.epoch > epoch_;
    return;
  }
  if (is_joining()) return;
  if (message.epoch < epoch_) return AnswerPast(message, sends);
  if (message.epoch > epoch_) {
    // We missed the end of our epoch: what we say of it is answered with the decision.
    sends.push_back({message.from, Knowledge(Kind::kReport)});
    return;
  }
  if (RankOf(message.from) < 0) return;
  unheard_.erase(message.from);
  switch (message.kind) {
    case Kind::kReport:
      Learn(message);
      break;
    case Kind::kPrepare:
      Learn(message);
      OnPrepare(message, sends);
      break;
    case Kind::kPromise:
      Learn(message);
      OnPromise(message, sends);
      break;
    case Kind::kAccept:
      OnAccept(message, sends);
      break;
    case Kind::kAccepted:
      OnAccepted(message, sends);
      break;
    case Kind::kDecided:
      Adopt(message.decision);
      break;
    default:
      break;
  }
  Propose(sends);
}

void MembershipMachine::Propose(Sends& sends) {
  if (is_evicted_ || is_settled() || Proposer() != rank_) return;
  if (ballot_.round == 0) {
    StartBallot(sends);
  } else {
    TryAccept(sends);
  }
}

void MembershipMachine::StartBallot(Sends& sends) {
  ballot_ = {std::max(ballot_.round, promised_.round) + 1, static_cast<uint16_t>(rank_)};
  ballot_ticks_ = 0;
  ++num_ballots_;
  promises_.clear();
  acceptances_.clear();
  proposal_.reset();
  ResendBallot(sends);
}

void MembershipMachine::ResendBallot(Sends& sends) const {
  MembershipMessage message = Knowledge(proposal_ ? Kind::kAccept : Kind::kPrepare);
  message.ballot = ballot_;
  if (proposal_) message.decision = *proposal_;
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    const bool has_answered = proposal_ ? acceptances_.count(static_cast<uint16_t>(rank)) > 0
                                        : promises_.count(static_cast<uint16_t>(rank)) > 0;
    if (!has_answered) sends.push_back({members_[rank].id, message});
  }
}

void MembershipMachine::TryAccept(Sends& sends) {
  if (proposal_ || !HasQuorum(Keys(promises_))) return;
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    const bool is_waited_for = promises_.count(static_cast<uint16_t>(rank)) == 0 && !HasLost(static_cast<int>(rank));
    if (is_waited_for && !IsMutated(Mutation::kHasty)) return;
  }
  proposal_ = Choose();
  if (proposal_) ResendBallot(sends);
}

// Nothing where no set of the promised has a quorum: the vote then waits for a later ballot.
std::optional<Decision> MembershipMachine::Choose() const {
  const Promise* highest = nullptr;
  for (const auto& [rank, promise] : promises_) {
    if (promise.accepted.round > 0 && (highest == nullptr || promise.accepted > highest->accepted)) highest = &promise;
  }
  if (highest != nullptr) return highest->decision;

  std::set<uint16_t> promised = Keys(promises_);
  const auto largest = [&] {
    return LargestReachableSet(std::vector<uint16_t>(promised.begin(), promised.end()), accusations_,
                               kSetSearchStepsMax);
  };
  Decision decision;
  decision.survivors = largest();
  const auto has_quorum = [&] { return HasQuorum({decision.survivors.begin(), decision.survivors.end()}); };
  if (!has_quorum()) {
    // An exact half may do with rank 0 in it.
    for (const Accusation& accusation : accusations_) {
      if (accusation.by == 0) promised.erase(accusation.of);
      if (accusation.of == 0) promised.erase(accusation.by);
    }
    decision.survivors = largest();
    if (!has_quorum()) return std::nullopt;
  }
  decision.finished = UINT64_MAX;
  for (const uint16_t rank : decision.survivors)
    decision.finished = std::min(decision.finished, promises_.at(rank).finished);
  if (IsMutated(Mutation::kFinishedOfProposer)) decision.finished = finished_;
  for (const auto& [id, joiner] : joiners_) decision.joiners.push_back({id, joiner.contact});
  return decision;
}

void MembershipMachine::OnPrepare(const MembershipMessage& message, Sends& sends) {
  if (message.ballot < promised_) return;
  promised_ = message.ballot;
  MembershipMessage promise = Knowledge(Kind::kPromise);
  promise.ballot = message.ballot;
  promise.finished = finished_;
  if (!IsMutated(Mutation::kForgetAccepted)) {
    promise.accepted = accepted_;
    promise.decision = accepted_decision_;
  }
  sends.push_back({message.from, std::move(promise)});
}

void MembershipMachine::OnPromise(const MembershipMessage& message, Sends& sends) {
  if (message.ballot != ballot_) return;
  promises_[static_cast<uint16_t>(RankOf(message.from))] = {message.accepted, message.decision, message.finished};
  TryAccept(sends);
}

void MembershipMachine::OnAccept(const MembershipMessage& message, Sends& sends) {
  Learn(message);
  if (message.ballot < promised_) return;
  promised_ = accepted_ = message.ballot;
  accepted_decision_ = message.decision;
  MembershipMessage accepted = NewMessage(Kind::kAccepted);
  accepted.ballot = message.ballot;
  sends.push_back({message.from, std::move(accepted)});
}

void MembershipMachine::OnAccepted(const MembershipMessage& message, Sends& sends) {
  if (message.ballot != ballot_ || !proposal_) return;
  acceptances_.insert(static_cast<uint16_t>(RankOf(message.from)));
  if (!HasQuorum(acceptances_)) return;
  MembershipMessage decided = NewMessage(Kind::kDecided);
  decided.decision = *proposal_;
  ToMembers(decided, sends);
  Adopt(decided.decision);
  for (const uint64_t joiner : unheard_) Welcome(joiner, sends);
}

void MembershipMachine::OnJoin(const MembershipMessage& message, Sends& sends) {
  if (is_joining() || message.lifetimes.size() != 1 || message.lifetimes[0].id != message.from) return;
  if (left_out_.count(message.from) > 0) {
    sends.push_back({message.from, NewMessage(Kind::kEvicted)});
    return;
  }
  if (RankOf(message.from) >= 0) return Welcome(message.from, sends);
  Learn(message);
  ToMembers(Knowledge(Kind::kReport), sends);
}

void MembershipMachine::Welcome(uint64_t lifetime, Sends& sends) const {
  MembershipMessage welcome = NewMessage(Kind::kWelcome);
  welcome.lifetimes = members_;
  welcome.finished = finished_before_;
  sends.push_back({lifetime, std::move(welcome)});
}

void MembershipMachine::OnWelcome(const MembershipMessage& message, Sends& sends) {
  for (size_t rank = 0; is_joining() && rank < message.lifetimes.size(); ++rank) {
    if (message.lifetimes[rank].id != id_) continue;
    rank_ = static_cast<int>(rank);
    epoch_ = message.epoch;
    members_ = message.lifetimes;
    finished_ = finished_before_ = message.finished;
    break;
  }
  if (RankOf(message.from) >= 0) sends.push_back({message.from, Knowledge(Kind::kReport)});  // heard
}

// A member of our epoch promised in the last one, so it is at most one decision behind; whoever is further back has
// been left out.
void MembershipMachine::AnswerPast(const MembershipMessage& message, Sends& sends) const {
  if (message.kind != Kind::kReport && message.kind != Kind::kPrepare && message.kind != Kind::kAccept) return;
  MembershipMessage answer = NewMessage(Kind::kEvicted);
  if (message.epoch + 1 == epoch_ && !last_decision_.survivors.empty()) {
    answer.kind = Kind::kDecided;
    answer.epoch = message.epoch;
    answer.decision = last_decision_;
  } else if (RankOf(message.from) >= 0) {
    return;  // joined into this epoch: an older answer would be wrong
  }
  sends.push_back({message.from, std::move(answer)});
}

void MembershipMachine::Adopt(Decision decision) {
  std::vector<Lifetime> members;
  int rank = -1;
  for (const uint16_t survivor : decision.survivors) {
    if (survivor >= members_.size()) return;  // not of this cluster
    if (survivor == rank_) rank = static_cast<int>(members.size());
    members.push_back(members_[survivor]);
  }
  members.insert(members.end(), decision.joiners.begin(), decision.joiners.end());
  for (const Lifetime& member : members_) left_out_.insert(member.id);
  for (const Lifetime& member : members) {
    left_out_.erase(member.id);
    joiners_.erase(member.id);
  }
  is_evicted_ = rank < 0;
  ++epoch_;
  members_ = std::move(members);
  rank_ = rank;
  finished_ = finished_before_ = decision.finished;
  last_decision_ = std::move(decision);

  if (!IsMutated(Mutation::kAccusationsStay)) accusations_.clear();
  wants_epoch_ = false;
  promised_ = accepted_ = ballot_ = {};
  num_ballots_ = ballot_ticks_ = 0;
  promises_.clear();
  acceptances_.clear();
  proposal_.reset();
  unheard_.clear();
  for (const Lifetime& joiner : last_decision_.joiners) unheard_.insert(joiner.id);
}

}  // namespace moerl::fabric
