#include "libs/fabric/in_process_fabric.h"

#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "libs/base/check.h"

namespace moerl::fabric {
namespace {

// One rank's completion queue and wake-up. Written by every rank, so behind a lock.
struct Inbox {
  absl::Mutex mutex;
  std::deque<Event> events ABSL_GUARDED_BY(mutex);
  bool overflowed ABSL_GUARDED_BY(mutex) = false;
  bool woken ABSL_GUARDED_BY(mutex) = false;

  void Push(const Event& event, size_t capacity) {
    absl::MutexLock lock(&mutex);
    if (events.size() >= capacity) {
      overflowed = true;
      return;
    }
    events.push_back(event);
  }
};

struct Gather {
  std::vector<std::string> parts;
  int num_in = 0;
};

}  // namespace

struct InProcessFabric::State {
  Membership membership;  // self is unused here
  size_t completion_capacity = 0;
  std::vector<std::unique_ptr<Inbox>> inbox;

  absl::Mutex mutex;
  uint64_t next_key ABSL_GUARDED_BY(mutex) = 1;  // never reused
  // Held shared while a write copies, exclusive to end a registration: a write never lands in memory that was given up.
  absl::Mutex memory_mutex;
  std::map<uint64_t, std::pair<std::byte*, size_t>> regions ABSL_GUARDED_BY(memory_mutex);
  std::map<std::tuple<int, int, std::string>, std::vector<uint64_t>> shared ABSL_GUARDED_BY(mutex);
  std::map<std::string, Gather> gathers ABSL_GUARDED_BY(mutex);
};

namespace {

using StatePtr = std::shared_ptr<InProcessFabric::State>;

class InProcessTransport : public Transport {
 public:
  InProcessTransport(StatePtr state, int self)
      : state_(std::move(state)), membership_(state_->membership), inbox_(*state_->inbox[self]) {
    membership_.self = self;
  }
  ~InProcessTransport() override { Close(); }

  const Membership& membership() const override { return membership_; }

  absl::StatusOr<Region> Register(std::byte* base, size_t bytes) override {
    uint64_t key;
    {
      absl::MutexLock lock(&state_->mutex);
      key = state_->next_key++;
    }
    absl::MutexLock lock(&state_->memory_mutex);
    state_->regions[key] = {base, bytes};
    keys_.push_back(key);
    return Region{static_cast<int>(keys_.size()) - 1, base, bytes, RemoteRegion{0, key, bytes}};
  }

  bool Write(const WriteRequest& request) override {
    MOERL_CHECK(request.peer >= 0 && request.peer < membership_.size());
    MOERL_CHECK(request.region >= 0 && request.region < static_cast<int>(keys_.size()));
    MOERL_CHECK(request.bytes > 0 && request.bytes <= kWriteBytesMax);
    MOERL_CHECK(request.to_offset + request.bytes <= request.to.bytes);
    if (Land(request)) {
      Event arrived{Event::Kind::kArrived, request.immediate, 0};
      state_->inbox[request.peer]->Push(arrived, state_->completion_capacity);
    }
    inbox_.Push(Event{Event::Kind::kSent, 0, request.context}, state_->completion_capacity);
    return true;
  }

  size_t Poll(absl::Span<Event> events) override {
    absl::MutexLock lock(&inbox_.mutex);
    size_t n = 0;
    while (n < events.size() && !inbox_.events.empty()) {
      events[n++] = inbox_.events.front();
      inbox_.events.pop_front();
    }
    return n;
  }

  size_t completion_capacity() const override { return state_->completion_capacity; }

  void Wait(absl::Duration timeout) override {
    absl::MutexLock lock(&inbox_.mutex);
    const auto ready = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return inbox_.woken || !inbox_.events.empty(); };
    inbox_.mutex.AwaitWithTimeout(absl::Condition(&ready), timeout);
    inbox_.woken = false;
  }

  void Wake() override {
    absl::MutexLock lock(&inbox_.mutex);
    inbox_.woken = true;
  }

  absl::Status status() const override {
    absl::MutexLock lock(&inbox_.mutex);
    if (!inbox_.overflowed) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("fabric: completion queue of ", membership_.members[membership_.self].name,
                                            " overflowed its ", state_->completion_capacity,
                                            " entries; open the endpoint with a larger completion_capacity"));
  }

  void Close() override {
    absl::MutexLock lock(&state_->memory_mutex);
    for (const uint64_t key : keys_) state_->regions.erase(key);
  }

 private:
  // Copies the bytes to where the request points; false when that region is no longer registered.
  bool Land(const WriteRequest& request) {
    absl::ReaderMutexLock lock(&state_->memory_mutex);
    const auto region = state_->regions.find(request.to.key);
    if (region == state_->regions.end()) return false;
    MOERL_CHECK(request.to_offset + request.bytes <= region->second.second);
    std::memcpy(region->second.first + request.to_offset, request.source, request.bytes);
    return true;
  }

  StatePtr state_;
  Membership membership_;
  Inbox& inbox_;
  std::vector<uint64_t> keys_;
};

class InProcessNodeMemory : public NodeMemory {
 public:
  InProcessNodeMemory(StatePtr state, int self) : state_(std::move(state)), self_(self) {}

  absl::StatusOr<absl::Span<std::byte>> Map(int producer, int consumer, std::string_view name, size_t bytes) override {
    const Membership& all = state_->membership;
    MOERL_CHECK(producer == self_ || consumer == self_);
    MOERL_CHECK(all.node_of(producer) == all.node_of(consumer));
    constexpr size_t kPage = 4096;
    absl::MutexLock lock(&state_->mutex);
    std::vector<uint64_t>& block = state_->shared[{producer, consumer, std::string(name)}];
    const size_t words = (bytes + 7) / 8 + kPage / 8;
    if (block.empty()) block.resize(words);
    if (block.size() != words) {
      return absl::FailedPreconditionError(
          absl::StrCat("fabric: shared memory \"", std::string(name), "\" from ", all.members[producer].name, " to ",
                       all.members[consumer].name, ": ", bytes, " bytes asked for, the other side has ",
                       (block.size() - kPage / 8) * 8, "; give all ranks the same options"));
    }
    const uintptr_t raw = reinterpret_cast<uintptr_t>(block.data());
    return absl::Span<std::byte>(reinterpret_cast<std::byte*>((raw + kPage - 1) / kPage * kPage), bytes);
  }

  void Notify(int peer) override {
    Inbox& inbox = *state_->inbox[peer];
    absl::MutexLock lock(&inbox.mutex);
    inbox.woken = true;
  }

  void Close() override {}  // the blocks belong to the fabric's state and go with its last endpoint

 private:
  StatePtr state_;
  const int self_;
};

class InProcessExchange : public Exchange {
 public:
  InProcessExchange(StatePtr state, int self) : state_(std::move(state)), self_(self) {}

  absl::StatusOr<std::vector<std::string>> AllGather(std::string_view name, std::string mine,
                                                     absl::Duration timeout) override {
    const int size = state_->membership.size();
    // Rounds are numbered, so that a name may come again.
    const std::string key = absl::StrCat(num_rounds_++, "/", std::string(name));
    absl::MutexLock lock(&state_->mutex);
    Gather& gather = state_->gathers[key];
    gather.parts.resize(size);
    gather.parts[self_] = std::move(mine);
    ++gather.num_in;
    const auto complete = [&gather, size] { return gather.num_in == size; };
    if (!state_->mutex.AwaitWithTimeout(absl::Condition(&complete), timeout)) {
      return absl::DeadlineExceededError(absl::StrCat("fabric: exchange \"", std::string(name), "\": ", gather.num_in,
                                                      " of ", size, " ranks came within ",
                                                      absl::FormatDuration(timeout)));
    }
    return gather.parts;
  }

 private:
  StatePtr state_;
  const int self_;
  uint64_t num_rounds_ = 0;
};

}  // namespace

InProcessFabric::InProcessFabric(Options options) : state_(std::make_shared<State>()) {
  state_->membership.epoch = options.epoch;
  state_->completion_capacity = options.completion_capacity;
  for (size_t rank = 0; rank < options.node_of.size(); ++rank) {
    const int node = options.node_of[rank];
    state_->membership.members.push_back({node, absl::StrCat("rank ", rank, " (node ", node, ", in process)")});
    state_->inbox.push_back(std::make_unique<Inbox>());
  }
}

InProcessFabric::~InProcessFabric() = default;

int InProcessFabric::size() const { return state_->membership.size(); }

void InProcessFabric::set_decorator(Decorator decorator) { decorator_ = std::move(decorator); }

Endpoint InProcessFabric::Open(int rank) {
  MOERL_CHECK(rank >= 0 && rank < size());
  Endpoint endpoint;
  endpoint.transport = std::make_unique<InProcessTransport>(state_, rank);
  if (decorator_) endpoint.transport = decorator_(rank, std::move(endpoint.transport));
  endpoint.node_memory = std::make_unique<InProcessNodeMemory>(state_, rank);
  endpoint.exchange = std::make_unique<InProcessExchange>(state_, rank);
  return endpoint;
}

}  // namespace moerl::fabric
