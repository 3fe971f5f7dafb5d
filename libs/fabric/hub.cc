#include "libs/fabric/hub.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"

namespace moerl::fabric {
namespace {

constexpr absl::Duration kSleepMax = absl::Milliseconds(5);     // bounds how late a loss or a deadline is seen
constexpr absl::Duration kIdleMax = absl::Milliseconds(100);    // of the progress thread, woken by events
constexpr absl::Duration kCheckPeriod = absl::Milliseconds(2);  // between looks at the failure detector

}  // namespace

Hub::Hub(Endpoint endpoint, Options options)
    : endpoint_(std::move(endpoint)), transport_(endpoint_.transport.get()), options_(options) {
  notify_.resize(membership().size());
  if (options_.progress_thread) thread_ = std::thread([this] { RunProgressThread(); });
}

Hub::~Hub() {
  if (thread_.joinable()) {
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
    }
    transport_->Wake();
    thread_.join();
  }
  transport_->Close();
  if (endpoint_.node_memory) endpoint_.node_memory->Close();
}

absl::StatusOr<uint32_t> Hub::AddSlots(SlotClient* client, uint32_t count) {
  const size_t first = slots_.size();
  if (first + count > kSlotsMax) {
    return absl::ResourceExhaustedError(absl::StrCat("fabric: ", first + count, " slots on one endpoint, at most ",
                                                     kSlotsMax,
                                                     " fit an immediate; use fewer buffers or fewer slots a peer"));
  }
  if (2 * (first + count) > transport_->completion_capacity()) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "fabric: ", first + count, " slots need a completion queue of ", 2 * (first + count), ", the endpoint has ",
        transport_->completion_capacity(), "; open it with a larger one or use fewer slots"));
  }
  for (uint32_t i = 0; i < count; ++i) slots_.push_back({client, i});
  return static_cast<uint32_t>(first);
}

// The numbers are not used again in this epoch: a late write must not find a new owner.
void Hub::RemoveSlots(uint32_t first, uint32_t count) {
  for (uint32_t i = first; i < first + count; ++i) slots_[i].client = nullptr;
}

uint32_t Hub::AddSender(SlotClient* client) {
  senders_.push_back(client);
  return static_cast<uint32_t>(senders_.size() - 1);
}

void Hub::RemoveSender(uint32_t sender) { senders_[sender] = nullptr; }

void Hub::RemoveMover(Mover* mover) {
  movers_.erase(std::remove(movers_.begin(), movers_.end(), mover), movers_.end());
}

bool Hub::PollOnce() {
  std::array<Event, 32> events;
  const size_t n = transport_->Poll(absl::MakeSpan(events));
  for (size_t i = 0; i < n; ++i) {
    const Event& event = events[i];
    if (event.kind == Event::Kind::kSent) {
      SlotClient* client = senders_[event.context >> 32];
      if (client != nullptr) client->OnSent(static_cast<uint32_t>(event.context));
      continue;
    }
    if (event.immediate >> 24 != (membership().epoch & 0xff)) continue;  // a stranger's or an older epoch's
    const uint32_t number = event.immediate & 0xffffff;
    if (number >= slots_.size()) {
      Fail(absl::InternalError(
          absl::StrCat("fabric: ", name_of(self()), " got an immediate for slot ", number, " of ", slots_.size())));
      return true;
    }
    if (slots_[number].client != nullptr) slots_[number].client->OnArrived(slots_[number].index);
  }
  return n > 0;
}

bool Hub::Progress() {
  if (!failure_.ok()) return false;
  bool moved = PollOnce();
  for (size_t i = 0; i < movers_.size(); ++i) moved |= movers_[i]->Move();
  NotifyMarked();
  if (absl::Status status = transport_->status(); !status.ok()) Fail(std::move(status));
  return moved;
}

void Hub::MarkNotify(int rank) {
  if (notify_[rank]) return;
  notify_[rank] = true;
  to_notify_.push_back(rank);
}

void Hub::NotifyMarked() {
  for (const int rank : to_notify_) {
    notify_[rank] = false;
    node_memory().Notify(rank);
  }
  to_notify_.clear();
}

void Hub::Fail(absl::Status status) {
  if (failure_.ok()) failure_ = std::move(status);
}

void Hub::Kick() {
  if (thread_.joinable()) transport_->Wake();
}

void Hub::RunProgressThread() {
  absl::Time idle_since = absl::InfiniteFuture();
  while (true) {
    bool moved;
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) return;
      moved = Progress();
    }
    if (moved) {
      idle_since = absl::InfiniteFuture();
      continue;
    }
    const absl::Time now = absl::Now();
    if (idle_since == absl::InfiniteFuture()) idle_since = now;
    if (now - idle_since < options_.spin) continue;
    transport_->Wait(kIdleMax);
  }
}

absl::Status Hub::Await(absl::FunctionRef<bool()> done, absl::FunctionRef<Missing()> missing) {
  const absl::Time start = absl::Now();
  absl::Time last_moved = start, last_checked = start;
  Kick();
  while (true) {
    bool moved = false;
    {
      absl::MutexLock lock(&mutex_);
      if (!thread_.joinable()) moved = Progress();
      if (!failure_.ok()) return failure_;
      if (done()) return absl::OkStatus();
      const absl::Time now = absl::Now();
      if (now - last_checked >= kCheckPeriod) {
        last_checked = now;
        if (absl::Status status = CheckPeers(missing, now - start); !status.ok()) {
          Fail(status);
          return status;
        }
      }
      if (thread_.joinable()) {
        const auto ready = [&] { return !failure_.ok() || done(); };
        mutex_.AwaitWithTimeout(absl::Condition(&ready), kSleepMax);
        continue;
      }
    }
    if (moved) {
      last_moved = absl::Now();
    } else if (absl::Now() - last_moved >= options_.spin) {
      transport_->Wait(kSleepMax);
    }
  }
}

absl::Status Hub::CheckPeers(absl::FunctionRef<Missing()> missing, absl::Duration waited) {
  const PeerWatch* watch = endpoint_.watch.get();
  if (watch != nullptr) {
    for (int rank = 0; rank < membership().size(); ++rank) {
      std::string reason;
      if (rank == self() || watch->state(rank, &reason) != PeerState::kLost) continue;
      return absl::UnavailableError(
          absl::StrCat("ep: lost ", name_of(rank), " (", reason, ") during ", missing().what));
    }
    if (std::string reason; watch->HasEnded(&reason)) {
      return absl::UnavailableError(
          absl::StrCat("ep: epoch ", membership().epoch, " has ended (", reason, ") during ", missing().what));
    }
  }
  if (waited < options_.timeout) return absl::OkStatus();
  const Missing who = missing();
  const auto is_alive = [&](int rank) { return watch != nullptr && watch->state(rank, nullptr) == PeerState::kAlive; };
  const bool all_alive = std::all_of(who.ranks.begin(), who.ranks.end(), is_alive);
  if (watch != nullptr && all_alive && waited < options_.stall_timeout) return absl::OkStatus();
  return absl::DeadlineExceededError(absl::StrCat("ep: no progress on ", who.what, " within ",
                                                  absl::FormatDuration(absl::Trunc(waited, absl::Milliseconds(1)))));
}

}  // namespace moerl::fabric
