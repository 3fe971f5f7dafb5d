#ifndef MOERL_LIBS_WEIGHTS_PUBLISHER_H_
#define MOERL_LIBS_WEIGHTS_PUBLISHER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "libs/base/lineage.h"
#include "libs/weights/manifest.h"

namespace grpc {
class Channel;
}

namespace moerl::weights {

struct PublisherOptions {
  uint32_t chunk_bytes = kChunkBytesMax;  // the same for the life of a run: roots depend on it
  // How long one operation is tried again while weight_sync is away, busy or full. A publish that is given up can be
  // repeated later: what was put is not sent twice.
  absl::Duration patience = absl::Seconds(30);
};

// How a trainer publishes. Its leader acquires, repeats the forks, begins and commits; each rank puts its own tensors:
//
//   leader: epoch = Acquire(run_id); RecordForks(all forks of the ledger)      once, at the start
//   leader: Begin(number, R, bytes)             others wait for it
//   all:    shard = PutShard(number, rank, tensors)     gather the R shards at the leader
//   leader: Commit(number, shards, …)
//
// Every operation may be repeated with the same arguments, after any failure, by this process or the next: it is then
// a no-op or goes on where it stopped. Blocking; thread-safe.
//
// Errors: when `patience` is over that of the last attempt: UNAVAILABLE, DEADLINE_EXCEEDED, DATA_LOSS of what came over
// damaged, RESOURCE_EXHAUSTED of a store that is busy or full. FAILED_PRECONDITION, never retried here: this publisher
// is fenced (its process must end), or the version is not begun any more (begin it again), or was committed with other
// bytes.
class Publisher {
 public:
  explicit Publisher(std::shared_ptr<grpc::Channel> channel, const PublisherOptions& options = {});
  ~Publisher();

  // Fences every earlier publisher of this store. Returns this one's epoch, and uses it from now on.
  absl::StatusOr<int64_t> Acquire(const std::string& run_id);
  // For ranks other than the leader.
  void UseEpoch(int64_t epoch);

  absl::Status RecordForks(std::span<const Fork> forks);

  // `bytes` of all shards together: refused with RESOURCE_EXHAUSTED when the store cannot take them.
  absl::Status Begin(int64_t number, int num_shards, uint64_t bytes);

  // Sends what the store lacks of `tensors`, which must stay alive and unchanged until it returns. On return all of it
  // is on the store's disk. The result names the tensors and chunks, for Commit.
  absl::StatusOr<std::string> PutShard(int64_t number, int shard, std::span<const TensorView> tensors);

  struct Committed {
    VersionName name;  // of its first commit
    Digest root;
    bool was_ready = false;
  };
  // Makes the version visible to readers.
  absl::StatusOr<Committed> Commit(int64_t number, std::span<const std::string> shards,
                                   const std::string& model_config_json, const std::string& numerics_fingerprint);

  // Begin, PutShard and Commit of a trainer of one rank.
  absl::StatusOr<Committed> Publish(int64_t number, std::span<const TensorView> tensors,
                                    const std::string& model_config_json, const std::string& numerics_fingerprint);

  // The version that readers run now; none yet: NOT_FOUND.
  absl::StatusOr<VersionName> LatestReady();

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace moerl::weights

#endif  // MOERL_LIBS_WEIGHTS_PUBLISHER_H_
