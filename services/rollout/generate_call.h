#ifndef MOERL_SERVICES_ROLLOUT_GENERATE_CALL_H_
#define MOERL_SERVICES_ROLLOUT_GENERATE_CALL_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "libs/base/mailbox.h"
#include "libs/rpc/stream.h"
#include "moerl/v1/rollout.pb.h"
#include "services/rollout/engine.h"
#include "services/rollout/leased_group.h"

namespace moerl::rollout {

// One Generate call: turns outputs into messages, never faster than its client reads. While a message is on its way new
// tokens gather in one chunk a sample, so that a slow reader costs few messages and bounded memory.
//
// Sink methods run on the scheduler's thread; the stream's hooks on gRPC's.
class GenerateCall final : public rpc::ServerStream<v1::GenerateResponse>, public SampleSink {
 public:
  // Values (tokens, kept ids, prompt log-probabilities) that may wait for the client: about a megabyte, which is also
  // what one message may carry. A call that has more is ended with RESOURCE_EXHAUSTED.
  static constexpr int64_t kPendingValuesMax = 1 << 17;

  struct Options {
    std::string request_id;
    uint32_t num_samples = 1;
    int64_t num_prompt_tokens = 0;
    bool with_kept_ids = false;
    std::optional<RouteFormat> routes;  // set: report them
    std::vector<int32_t> stop_token_ids;
    // Counts the calls that have no token yet; held until the first one.
    std::shared_ptr<void> waiting;
  };

  // `on_cancel` runs when the client has gone away; at most once, on a thread of gRPC.
  GenerateCall(Options options, absl::AnyInvocable<void()> on_cancel);

  const std::string& request_id() const { return options_.request_id; }
  uint32_t num_unfinished() const { return num_unfinished_; }

  void OnSample(const model::SampleOutput& output) override;
  void OnPrompt(const model::PromptOutput& output) override;

 private:
  void OnDrained() override;
  void OnCancelled() override;

  v1::GenerateChunk& PendingChunk(uint32_t sample_index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AppendTokens(const model::SampleOutput& output) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Complete(const model::SampleOutput& output) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Flush() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Options options_;
  absl::AnyInvocable<void()> on_cancel_;
  uint32_t num_unfinished_;  // of the scheduler's thread

  absl::Mutex mutex_;
  bool is_sending_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t pending_values_ ABSL_GUARDED_BY(mutex_) = 0;
  // By sample: the chunk that gathers, and the completion that follows it.
  struct Pending {
    std::optional<v1::GenerateChunk> chunk;
    std::optional<v1::GenerateComplete> complete;
  };
  std::map<uint32_t, Pending> pending_ ABSL_GUARDED_BY(mutex_);
  std::map<uint32_t, uint32_t> num_tokens_ ABSL_GUARDED_BY(mutex_);
  uint32_t num_to_complete_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace moerl::rollout

#endif  // MOERL_SERVICES_ROLLOUT_GENERATE_CALL_H_
