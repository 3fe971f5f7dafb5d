#ifndef MOERL_SERVICES_ROLLOUT_WEIGHT_FOLLOWER_H_
#define MOERL_SERVICES_ROLLOUT_WEIGHT_FOLLOWER_H_

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"
#include "libs/base/lineage.h"
#include "libs/model/weights.h"
#include "libs/weights/reader.h"

namespace grpc {
class Channel;
}

namespace moerl::rollout {

// Weights ready to run, and the forks known when they were.
struct WeightUpdate {
  std::vector<Fork> forks;
  VersionName version;
  std::shared_ptr<const model::Weights> weights;  // null: only the forks are new
};

// Follows weight_sync: fetches and verifies each new version (libs/weights), packs it for the engine on a thread of its
// own, and hands it over. A version that cannot be run is said in the log and left out; the one in use stays.
class WeightFollower {
 public:
  struct Options {
    std::string directory;  // where chunks are kept; empty: memory
    std::string holder;
    model::Compute compute = model::Compute::kBf16;
  };

  // `on_update` runs on the follower's thread.
  WeightFollower(std::shared_ptr<grpc::Channel> channel, const Options& options,
                 absl::AnyInvocable<void(WeightUpdate)> on_update);
  ~WeightFollower();

 private:
  void Run();
  void Follow(const weights::Readable& readable);

  const Options options_;
  absl::AnyInvocable<void(WeightUpdate)> on_update_;
  absl::Mutex mutex_;
  bool has_changed_ ABSL_GUARDED_BY(mutex_) = true;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Fork> forks_;             // of the follower's thread
  std::optional<VersionName> handled_;  // likewise: the last version looked at
  std::unique_ptr<weights::Reader> reader_;
  std::thread thread_;
};

// The model of a version that weight_sync delivered. Errors name what does not fit.
absl::StatusOr<std::shared_ptr<const model::Weights>> PackVersion(const weights::LocalVersion& version,
                                                                  model::Compute compute);

}  // namespace moerl::rollout

#endif  // MOERL_SERVICES_ROLLOUT_WEIGHT_FOLLOWER_H_
