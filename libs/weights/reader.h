#ifndef MOERL_LIBS_WEIGHTS_READER_H_
#define MOERL_LIBS_WEIGHTS_READER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "libs/base/lineage.h"
#include "libs/weights/staging.h"

namespace grpc {
class Channel;
}

namespace moerl::weights {

struct ReaderOptions {
  // Where versions are kept, made where missing; a restarted process goes on there at chunk grain. One reader a
  // directory. Empty: in memory.
  std::string directory = {};
  // Who takes leases: pod or host.
  std::string holder = "reader";
  // What the server may have on its way to this reader; at least two chunks of the largest size.
  uint64_t credit_bytes = 8 << 20;
  // A version of which more is missing is leased while it is fetched; less is sooner fetched than leased.
  uint64_t lease_bytes_min = 64 << 20;
  // Says whether this process can run a version, before a byte of it is fetched: its configuration, its numerics. What
  // it refuses is not asked for again; the version in use stays.
  std::function<absl::Status(const Manifest&)> check = nullptr;
  // Called on the reader's thread after Now() has changed. Must not block, nor call the reader's destructor.
  std::function<void()> on_change = nullptr;
};

// What to sample from.
struct Readable {
  // Null: nothing yet, or the version in use was left behind by a fork and its successor is still on its way. Then no
  // token may be sampled.
  std::shared_ptr<const LocalVersion> version;
  std::vector<Fork> forks;
  // The version that weight_sync names as latest, and why it is not `version`; OK while there is nothing to say.
  VersionName latest;
  absl::Status status;
};

struct ReaderStats {
  uint64_t fetched_bytes = 0;
  int64_t num_versions = 0;                          // taken into use
  int64_t num_verify_failures = 0;                   // chunks or manifests received damaged
  absl::Duration last_stage = absl::ZeroDuration();  // from hearing of the last version to having it
};

// Keeps the newest version of the weights at hand: watches, fetches beside, verifies whole, hands over. On any failure
// the version in use stays, and it tries again. Moves down when a fork leaves its version behind. Thread-safe; one
// thread, asleep when nothing changes.
class Reader {
 public:
  Reader(std::shared_ptr<grpc::Channel> channel, ReaderOptions options);
  // Ends what is under way. Versions handed over live on.
  ~Reader();

  Readable Now() const;
  ReaderStats Stats() const;
  // Waits until there is a version to sample from. Errors: DEADLINE_EXCEEDED, saying what it waits for.
  absl::Status WaitReady(absl::Duration timeout) const;

 private:
  struct Impl;
  const std::shared_ptr<Impl> impl_;
};

}  // namespace moerl::weights

#endif  // MOERL_LIBS_WEIGHTS_READER_H_
