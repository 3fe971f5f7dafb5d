#include "libs/fabric/voter.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "libs/base/status_macros.h"
#include "libs/fabric/control_message.h"
#include "libs/fabric/prompt_thread.h"

namespace moerl::fabric {

Voter::Voter(Options options, Sockets sockets, MembershipMachine machine)
    : options_(std::move(options)),
      sockets_(std::move(sockets)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      machine_(std::move(machine)) {}

absl::StatusOr<std::unique_ptr<Voter>> Voter::OfMember(Options options, Sockets sockets, uint64_t epoch,
                                                       std::vector<Lifetime> members, int self) {
  std::unique_ptr<Voter> voter(
      new Voter(std::move(options), std::move(sockets), MembershipMachine::OfMember(epoch, std::move(members), self)));
  MOERL_RETURN_IF_ERROR(voter->Begin());
  voter->thread_ = std::thread([raw = voter.get()] { raw->Run(); });
  return voter;
}

absl::StatusOr<std::unique_ptr<Voter>> Voter::OfJoiner(Options options, Sockets sockets, Lifetime self,
                                                       const std::vector<std::string>& known) {
  std::map<uint64_t, std::string> addresses;
  std::vector<uint64_t> ids;
  for (const std::string& address : known) {
    MOERL_ASSIGN_OR_RETURN(addresses[ids.size()], DatagramAddress(address));
    ids.push_back(ids.size());
  }
  std::unique_ptr<Voter> voter(
      new Voter(std::move(options), std::move(sockets), MembershipMachine::OfJoiner(std::move(self), std::move(ids))));
  voter->addresses_ = std::move(addresses);
  voter->thread_ = std::thread([raw = voter.get()] { raw->Run(); });
  return voter;
}

Voter::~Voter() {
  is_stopping_ = true;
  Wake();
  if (thread_.joinable()) thread_.join();
  if (current_.state && current_.state->detector()) current_.state->detector()->Stop();
}

void Voter::Wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
}

Voter::Current Voter::current() const {
  absl::MutexLock lock(&mutex_);
  return current_;
}

void Voter::Wish(uint64_t epoch) {
  wished_epoch_ = epoch;
  Wake();
}

void Voter::SetFinished(uint64_t operation) { finished_ = operation; }

absl::StatusOr<Voter::Current> Voter::AwaitEpochAfter(uint64_t last, absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  const auto has_news = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return !failure_.ok() || (current_.state && current_.state->number() != last);
  };
  mutex_.AwaitWithDeadline(absl::Condition(&has_news), deadline);
  if (!failure_.ok()) return failure_;
  if (has_news()) return current_;
  if (!current_.state)
    return absl::UnavailableError("fabric: no member of the cluster lets this process in; is it running?");
  std::vector<std::string> lost;
  const Membership& membership = current_.state->membership();
  for (int rank = 0; rank < membership.size(); ++rank) {
    std::string reason;
    if (current_.state->state(rank, &reason) == PeerState::kLost)
      lost.push_back(absl::StrCat(membership.members[rank].name, ": ", reason));
  }
  return absl::UnavailableError(
      absl::StrCat("fabric: epoch ", last, " of ", membership.size(),
                   " ranks has no successor: it takes more than half of them, or ",
                   "exactly half with rank 0; lost: ", lost.empty() ? "none" : absl::StrJoin(lost, "; ")));
}

// Makes the machine's epoch the current one.
absl::Status Voter::Begin() {
  MOERL_ASSIGN_OR_RETURN(std::vector<Contact> contacts, ContactsOf(machine_.members()));
  auto state = std::make_shared<EpochState>(MembershipOf(machine_.epoch(), contacts, machine_.rank()));
  MOERL_ASSIGN_OR_RETURN(
      std::unique_ptr<Detector> detector,
      Detector::Start(sockets_.page, machine_.rank(), WatchedPeersOf(contacts, machine_.rank()),
                      sockets_.heartbeats.get(), machine_.epoch(), options_.detector, [this, raw = state.get()] {
                        raw->Wake();
                        Wake();
                      }));
  state->set_detector(std::move(detector));
  is_told_.assign(contacts.size(), false);
  for (size_t rank = 0; rank < contacts.size(); ++rank) {
    MOERL_ASSIGN_OR_RETURN(addresses_[machine_.members()[rank].id], DatagramAddress(contacts[rank].control_address));
  }
  Wake();  // a peer may have been lost before set_detector
  absl::MutexLock lock(&mutex_);
  current_ = {std::move(state), std::move(contacts), machine_.finished_before()};
  return absl::OkStatus();
}

void Voter::Run() {
  RunPromptly();
  absl::Time next_tick = absl::Now();
  while (!is_stopping_) {
    pollfd polled[2] = {{.fd = sockets_.control.get(), .events = POLLIN, .revents = 0},
                        {.fd = wake_.get(), .events = POLLIN, .revents = 0}};
    timespec left = {};
    if (machine_.needs_ticks()) left = absl::ToTimespec(std::max(next_tick - absl::Now(), absl::ZeroDuration()));
    ppoll(polled, 2, machine_.needs_ticks() ? &left : nullptr, nullptr);
    uint64_t woken = 0;
    [[maybe_unused]] const ssize_t got = read(wake_.get(), &woken, sizeof(woken));
    TakeRequests();
    Receive();
    if (machine_.needs_ticks() && absl::Now() >= next_tick) {
      next_tick = absl::Now() + options_.tick;
      Apply(machine_.OnTick());
    }
  }
}

void Voter::TakeRequests() {
  machine_.SetFinished(finished_);
  // Read before the losses: who wishes because of one has it told first, so that the others' errors name it.
  const uint64_t wished_epoch = wished_epoch_;
  TakeLosses();
  if (wished_epoch == machine_.epoch() && !machine_.is_joining()) Apply(machine_.OnWish());
}

void Voter::TakeLosses() {
  if (machine_.is_joining() || machine_.is_evicted()) return;
  const std::shared_ptr<EpochState> state = current().state;
  for (int rank = 0; rank < state->membership().size() && state->number() == machine_.epoch(); ++rank) {
    if (is_told_[rank] || state->detector()->state(rank, nullptr) != PeerState::kLost) continue;
    is_told_[rank] = true;
    Apply(machine_.OnLost(rank));
  }
}

void Voter::Receive() {
  std::string buffer(kControlBytesMax, '\0');
  for (;;) {  // bounded by what the socket's buffer holds
    sockaddr_storage from = {};
    socklen_t from_size = sizeof(from);
    const ssize_t got = recvfrom(sockets_.control.get(), buffer.data(), buffer.size(), MSG_DONTWAIT,
                                 reinterpret_cast<sockaddr*>(&from), &from_size);
    if (got < 0) return;
    const absl::StatusOr<MembershipMessage> message =
        DecodeControl(absl::string_view(buffer.data(), static_cast<size_t>(got)), options_.cluster_id, options_.token);
    if (!message.ok()) continue;  // strangers are not heard
    addresses_[message->from] = std::string(reinterpret_cast<const char*>(&from), from_size);
    // Joiners that others tell of are answered too.
    for (const Lifetime& lifetime : message->lifetimes) {
      const absl::StatusOr<Contact> contact = DecodeContact(lifetime.contact);
      if (!contact.ok()) continue;
      if (absl::StatusOr<std::string> address = DatagramAddress(contact->control_address); address.ok())
        addresses_[lifetime.id] = *std::move(address);
    }
    Apply(machine_.OnMessage(*message));
  }
}

void Voter::Apply(const MembershipMachine::Sends& sends) {
  for (const MembershipMachine::Send& send : sends) {
    const auto address = addresses_.find(send.to);
    const absl::StatusOr<std::string> datagram = EncodeControl(send.message, options_.cluster_id, options_.token);
    if (address == addresses_.end() || !datagram.ok()) continue;
    sendto(sockets_.control.get(), datagram->data(), datagram->size(), MSG_DONTWAIT | MSG_NOSIGNAL,
           reinterpret_cast<const sockaddr*>(address->second.data()), static_cast<socklen_t>(address->second.size()));
  }
  num_joiners_ = machine_.num_joiners();
  Publish();
}

void Voter::Publish() {
  const std::shared_ptr<EpochState> state = current().state;
  if (state && !machine_.is_evicted() && state->number() == machine_.epoch()) return EndUnsettled();
  if (!state && machine_.is_joining()) return;
  if (machine_.is_evicted()) {
    const std::string reason = "this rank was left out by the others: it was lost to them";
    if (state) state->End(reason);
    absl::MutexLock lock(&mutex_);
    if (failure_.ok())
      failure_ = absl::FailedPreconditionError(absl::StrCat("fabric: ", reason, "; join again as a new one"));
    return;
  }
  if (state) {
    std::vector<bool> survives(state->membership().size());
    for (const uint16_t rank : machine_.last_decision().survivors) survives[rank] = true;
    for (size_t rank = 0; rank < survives.size(); ++rank) {
      if (!survives[rank]) state->Lose(static_cast<int>(rank), absl::StrCat("left out of epoch ", machine_.epoch()));
    }
    state->End(absl::StrCat("epoch ", machine_.epoch(), " has begun"));
    state->detector()->Stop();  // the next one reads the same socket
  }
  finished_ = machine_.finished_before();
  const absl::Status begun = Begin();
  if (begun.ok()) return;
  absl::MutexLock lock(&mutex_);
  failure_ = begun;
}

// A vote has begun: nobody finishes the epoch's operations any more.
void Voter::EndUnsettled() {
  if (machine_.is_settled()) return;
  const std::shared_ptr<EpochState> state = current().state;
  const std::vector<Member>& members = state->membership().members;
  std::string reason = "a new epoch was asked for";
  for (const Accusation& accusation : machine_.accusations()) {
    reason = absl::StrCat(members[accusation.by].name, " has lost ", members[accusation.of].name);
    if (accusation.of != machine_.rank() && accusation.by != machine_.rank())
      state->Lose(accusation.of, absl::StrCat("lost to ", members[accusation.by].name));
  }
  state->End(std::move(reason));
}

}  // namespace moerl::fabric
