#include "libs/fabric/chaos_transport.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"

namespace moerl::fabric {

// A copy of one write's bytes in registered memory. Free when `in_use` is false and no base write reads it.
struct ChaosTransport::Snapshot {
  std::unique_ptr<std::byte[]> memory;
  Region region;
  bool in_use = false;
  int num_unsent = 0;
};

struct ChaosTransport::InFlight {
  WriteRequest request;
  int snapshot = -1;           // -1 until the source has been read
  std::vector<size_t> cuts;    // fragment i is [cuts[i], cuts[i + 1])
  std::vector<size_t> unseen;  // fragments not visible yet
  bool is_sent = false;        // local completion reported
  bool is_arrived = false;
};

ChaosTransport::ChaosTransport(std::unique_ptr<Transport> base, Options options)
    : base_(std::move(base)), options_(options), random_(options.seed) {}

ChaosTransport::~ChaosTransport() { Close(); }

bool ChaosTransport::Write(const WriteRequest& request) {
  MOERL_CHECK(request.immediate != kFragmentImmediate);
  if (flight_.size() >= options_.in_flight_max) return false;
  auto write = std::make_unique<InFlight>();
  write->request = request;
  flight_.push_back(std::move(write));
  return true;
}

size_t ChaosTransport::Poll(absl::Span<Event> events) {
  DrainBase();
  for (int i = 0; i < options_.moves_per_poll; ++i) {
    if (static_cast<int>(random_() % 100) >= options_.hold_percent) Advance();
  }
  DrainBase();
  size_t n = 0;
  while (n < events.size() && !ready_.empty()) {
    events[n++] = ready_.front();
    ready_.pop_front();
  }
  return n;
}

bool ChaosTransport::Advance() {
  if (flight_.empty()) return false;
  const size_t start = random_() % flight_.size();
  for (size_t i = 0; i < flight_.size(); ++i) {
    const size_t at = (start + i) % flight_.size();
    if (!Move(*flight_[at])) continue;
    if (flight_[at]->is_sent && flight_[at]->is_arrived) {
      snapshots_[flight_[at]->snapshot]->in_use = false;
      flight_.erase(flight_.begin() + at);
    }
    return true;
  }
  return false;
}

// One random legal transition of `write`; false when it has none (its link is cut, or the base has no room).
bool ChaosTransport::Move(InFlight& write) {
  if (write.snapshot < 0) return ReadSource(write);
  enum Step { kReport, kFragment, kImmediate };
  std::array<Step, 3> steps;
  size_t n = 0;
  if (!write.is_sent) steps[n++] = kReport;
  if (!cut_.contains(write.request.peer)) {
    if (!write.unseen.empty()) {
      steps[n++] = kFragment;
    } else if (!write.is_arrived) {
      steps[n++] = kImmediate;
    }
  }
  if (n == 0) return false;
  switch (steps[random_() % n]) {
    case kReport:
      write.is_sent = true;
      Report(Event{Event::Kind::kSent, 0, write.request.context});
      return true;
    case kFragment: {
      const size_t pick = random_() % write.unseen.size();
      if (!PostFragment(write, write.unseen[pick], kFragmentImmediate)) return false;
      write.unseen.erase(write.unseen.begin() + pick);
      return true;
    }
    case kImmediate:  // the last fragment again, now with the immediate: the base keeps order
      write.is_arrived = PostFragment(write, write.cuts.size() - 2, write.request.immediate);
      return write.is_arrived;
  }
  return false;
}

bool ChaosTransport::ReadSource(InFlight& write) {
  const size_t bytes = write.request.bytes;
  const auto fits = [bytes](const std::unique_ptr<Snapshot>& s) {
    return !s->in_use && s->num_unsent == 0 && s->region.bytes >= bytes;
  };
  auto snapshot = std::find_if(snapshots_.begin(), snapshots_.end(), fits);
  if (snapshot == snapshots_.end()) {
    auto fresh = std::make_unique<Snapshot>();
    fresh->memory = std::make_unique<std::byte[]>(bytes);
    const absl::StatusOr<Region> region = base_->Register(fresh->memory.get(), bytes);
    MOERL_CHECK(region.ok());
    fresh->region = *region;
    snapshot = snapshots_.insert(snapshots_.end(), std::move(fresh));
  }
  write.snapshot = static_cast<int>(snapshot - snapshots_.begin());
  (*snapshot)->in_use = true;
  std::memcpy((*snapshot)->memory.get(), write.request.source, bytes);
  const size_t fragments = 1 + random_() % std::min<size_t>(options_.fragments_max, bytes);
  write.cuts = {0, bytes};
  for (size_t i = 1; i < fragments; ++i) write.cuts.push_back(1 + random_() % bytes);
  std::sort(write.cuts.begin(), write.cuts.end());
  write.cuts.erase(std::unique(write.cuts.begin(), write.cuts.end()), write.cuts.end());
  for (size_t i = 0; i + 1 < write.cuts.size(); ++i) write.unseen.push_back(i);
  return true;
}

bool ChaosTransport::PostFragment(InFlight& write, size_t fragment, uint32_t immediate) {
  Snapshot& snapshot = *snapshots_[write.snapshot];
  WriteRequest request = write.request;
  request.region = snapshot.region.id;
  request.source = snapshot.memory.get() + write.cuts[fragment];
  request.to_offset += write.cuts[fragment];
  request.bytes = write.cuts[fragment + 1] - write.cuts[fragment];
  request.immediate = immediate;
  request.context = static_cast<uint64_t>(write.snapshot);
  if (!base_->Write(request)) return false;
  ++snapshot.num_unsent;
  return true;
}

void ChaosTransport::DrainBase() {
  std::array<Event, 64> events;
  while (const size_t n = base_->Poll(absl::MakeSpan(events))) {
    for (size_t i = 0; i < n; ++i) {
      if (events[i].kind == Event::Kind::kSent) {
        --snapshots_[events[i].context]->num_unsent;
      } else if (events[i].immediate != kFragmentImmediate) {
        Report(events[i]);
      }
    }
  }
}

// Events of different writes are unordered too.
void ChaosTransport::Report(const Event& event) {
  if (ready_.size() >= completion_capacity()) {
    overflowed_ = true;
    return;
  }
  ready_.insert(ready_.begin() + random_() % (ready_.size() + 1), event);
}

size_t ChaosTransport::completion_capacity() const {
  return options_.completion_capacity != 0 ? options_.completion_capacity : base_->completion_capacity();
}

void ChaosTransport::Wait(absl::Duration timeout) {
  const bool has_moves = !flight_.empty() || !ready_.empty();
  base_->Wait(has_moves ? std::min(timeout, absl::Microseconds(20)) : timeout);
}

absl::Status ChaosTransport::status() const {
  if (!overflowed_) return base_->status();
  return absl::InternalError(absl::StrCat("fabric: completion queue overflowed its ", completion_capacity(),
                                          " entries; open the endpoint with a larger completion_capacity"));
}

}  // namespace moerl::fabric
