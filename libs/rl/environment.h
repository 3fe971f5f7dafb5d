#ifndef MOERL_LIBS_RL_ENVIRONMENT_H_
#define MOERL_LIBS_RL_ENVIRONMENT_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"

// Turns a task into a prompt and judges what the policy answers; the same calls as moerl.v1.EnvironmentService, for
// built-in tasks in process and for a client of a served one.
namespace moerl::rl {

// What the environment that judges a sample needs to know. The payload belongs to the environment.
struct Task {
  std::string name;
  std::string payload;
};

// Tokens that one side wrote. A transcript is a list of turns: the prompt, then answers and observations alternating.
// It only ever grows, and it is tokens: nothing is decoded and encoded again on the way.
struct Turn {
  std::vector<int32_t> token_ids;
  bool is_action = false;     // written by the policy
  bool is_truncated = false;  // an action that ended by its token budget
};

struct Episode {
  std::string id;
  std::vector<int32_t> prompt;
};

struct Judgement {
  std::vector<int32_t> observation;  // what the policy sees next; empty when done
  double reward = 0.0;               // of this turn; a sample's reward is the sum over its turns
  bool is_done = true;
};

// Why there is no reward. Each drops the group, whole; none is ever a reward of zero. Names as in trajectory.proto.
enum class FailureReason { kVerifierTimeout, kVerifierError, kRewardOutOfRange, kBadObservation, kBadPrompt };
std::string_view FailureReasonName(FailureReason reason);

struct Failure {
  FailureReason reason = FailureReason::kVerifierError;
  std::string detail;
};

using StepOutcome = std::variant<Judgement, Failure>;

// Thread-safe. UNAVAILABLE (and only that) means try again; every expected bad end of a verifier is a Failure.
class Environment {
 public:
  virtual ~Environment() = default;

  // Begins an episode: the prompt of a task. `text` is what to encode where the environment owns the tokenizer.
  virtual absl::StatusOr<Episode> Reset(const Task& task, std::string_view text) = 0;

  // One turn. Idempotent: the same episode and turn give the same answer; an environment that does not know the episode
  // replays the transcript. A single-turn verifier is one Step.
  virtual absl::StatusOr<StepOutcome> Step(std::string_view episode_id, const Task& task, uint32_t turn_index,
                                           std::span<const Turn> transcript) = 0;
};

// What a caller must be able to rely on before an outcome enters a sample: a finite reward within [reward_min,
// reward_max] and observation ids within [0, vocab_size); anything else becomes a Failure.
struct OutcomeLimits {
  double reward_min = -1.0;
  double reward_max = 1.0;
  int64_t vocab_size = 0;
};
StepOutcome CheckOutcome(StepOutcome outcome, const OutcomeLimits& limits);

// Turns tokens into text for checkers, and for synthetic tasks text into tokens. Thread-safe.
class TokenCodec {
 public:
  virtual ~TokenCodec() = default;
  virtual int32_t vocab_size() const = 0;
  // Total: special tokens (end of sequence among them) give no text, an id that means nothing gives U+FFFD.
  virtual std::string Decode(std::span<const int32_t> ids) const = 0;
  // UNIMPLEMENTED where text cannot be encoded here (tokenizer.json: an environment that owns it must).
  virtual absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text) const = 0;
};

// The built-in tasks: the task's name chooses the checker (checker.h), the payload is its answer. One turn: the last
// action is decoded and judged. `codec` is shared, never null.
std::unique_ptr<Environment> MakeBuiltinEnvironment(std::shared_ptr<const TokenCodec> codec);

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_ENVIRONMENT_H_
