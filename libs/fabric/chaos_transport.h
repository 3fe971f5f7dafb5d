#ifndef MOERL_LIBS_FABRIC_CHAOS_TRANSPORT_H_
#define MOERL_LIBS_FABRIC_CHAOS_TRANSPORT_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "libs/fabric/transport.h"

namespace moerl::fabric {

// Makes an orderly transport as unordered as Transport's contract allows, reproducibly from a seed: no local provider
// reorders, so without this a bug that relies on order cannot show.
//
// A write is held back; at random moments (1) its source is read, (2) its local completion is reported, (3) its
// fragments become visible in random order, (4) its immediate arrives. (2) may come before (3) or after (4), and
// writes overtake each other freely. A write to a cut peer stays in flight for ever; its local completion still comes.
//
// The transport beneath must deliver in order (every local provider does): the fragments are separate writes there.
// They carry `kFragmentImmediate`, which the decorator on the other side drops: all ranks of an epoch wear one.
class ChaosTransport : public Transport {
 public:
  // No receiver's slot has this number: slot numbers are below 2^24 - 1.
  static constexpr uint32_t kFragmentImmediate = 0xffffffff;

  struct Options {
    uint64_t seed = 1;
    int fragments_max = 3;           // parts a write is split into, at most
    int hold_percent = 50;           // chance that one move of a Poll is skipped: the higher, the slower and wilder
    int moves_per_poll = 4;          // transitions tried in one Poll
    size_t in_flight_max = 256;      // Write returns false beyond
    size_t completion_capacity = 0;  // events that may wait in Poll's queue; 0 for the base transport's
  };

  ChaosTransport(std::unique_ptr<Transport> base, Options options);
  ~ChaosTransport() override;

  // The link to `peer` drops everything from now on (until Heal): what is in flight stays there.
  void Cut(int peer) { cut_.insert(peer); }
  void Heal(int peer) { cut_.erase(peer); }

  // Tries one random transition of one write in flight; false when none was possible. Poll calls it; a test calls it
  // to let the writes of a stopped rank go on.
  bool Advance();
  size_t num_in_flight() const { return flight_.size(); }

  const Membership& membership() const override { return base_->membership(); }
  absl::StatusOr<Region> Register(std::byte* base, size_t bytes) override { return base_->Register(base, bytes); }
  bool Write(const WriteRequest& request) override;
  size_t Poll(absl::Span<Event> events) override;
  size_t completion_capacity() const override;
  void Wait(absl::Duration timeout) override;
  void Wake() override { base_->Wake(); }
  absl::Status status() const override;
  void Close() override { base_->Close(); }

 private:
  struct InFlight;

  bool Move(InFlight& write);
  bool ReadSource(InFlight& write);
  bool PostFragment(InFlight& write, size_t fragment, uint32_t immediate);
  void DrainBase();
  void Report(const Event& event);

  std::unique_ptr<Transport> base_;
  const Options options_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<InFlight>> flight_;
  struct Snapshot;  // registered copies of sources, reused
  std::vector<std::unique_ptr<Snapshot>> snapshots_;
  std::deque<Event> ready_;
  bool overflowed_ = false;
  std::set<int> cut_;
};

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_CHAOS_TRANSPORT_H_
