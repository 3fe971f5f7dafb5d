#ifndef MOERL_LIBS_RL_PROMPT_SOURCE_H_
#define MOERL_LIBS_RL_PROMPT_SOURCE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "libs/rl/environment.h"

// Where prompts come from. A prompt is a function of (source, index) and nothing else: a resumed run asks for the next
// index and gets what it would have got.
namespace moerl::rl {

struct Prompt {
  Task task;
  std::vector<int32_t> token_ids;  // empty where text must first be encoded (Environment::Reset)
  std::string text;                // of the prompt, where known
  std::string solution;            // one right answer as text, where known: for supervised examples
};

// Thread-safe, immutable.
class PromptSource {
 public:
  virtual ~PromptSource() = default;
  // Any index; a finite source starts again, in another order.
  virtual absl::StatusOr<Prompt> Get(uint64_t index) const = 0;
  // Prompts before the source repeats itself; 0 if it does not.
  virtual uint64_t size() const = 0;
  // Changes when any prompt would; 32 hexadecimal digits, kept in checkpoints and compared on resume.
  virtual std::string fingerprint() const = 0;
};

// Which of the three disjoint parts of a synthetic task's problems. A problem belongs to a part by a hash of its own
// text, whatever the seed: what is held out is never trained on, by no seed and in no step.
enum class Split { kTrain, kWarmStart, kHeldOut };

// A synthetic task by name (reverse, sort, countdown), encoded with CharTokenizer behind its begin-of-sequence token.
//   reverse    "abcdefgh="  → "hgfedcba"     8 letters of 14
//   sort       "518203="    → "012358"       6 digits
//   countdown  "3,7,2:19="  → "3*7-2"        3 numbers of 1–9, each used once, + − * and parentheses; other answers
//   count
// NOT_FOUND lists the names there are.
absl::StatusOr<std::unique_ptr<PromptSource>> MakeSyntheticSource(std::string_view task, uint64_t seed, Split split);

// JSON lines, one prompt each:
//   {"task": "gsm8k", "answer": "72", "token_ids": [..]}      or "text": "…" for an environment that encodes it
// "answer" is the payload: a string, or any other JSON value, which is passed on as JSON text. "task" may be left out
// where `default_task` names it; "solution" is optional. Rows are shuffled anew in each pass, by (seed, pass).
// INVALID_ARGUMENT names the line and the field. `content` is the file's bytes, at most 4 GiB.
absl::StatusOr<std::unique_ptr<PromptSource>> ParsePromptFile(std::string_view content, std::string_view default_task,
                                                              uint64_t seed);

// FAILED_PRECONDITION when a checkpoint was made with other prompts than `source` has.
absl::Status CheckFingerprint(const PromptSource& source, std::string_view expected);

// A prompt and its solution, to learn from by imitation: tokens = prompt + solution + end of sequence, trainable after
// the prompt. FAILED_PRECONDITION if the prompt has no solution or no tokens.
struct SupervisedExample {
  std::vector<int32_t> tokens;
  std::vector<uint8_t> trainable;  // [T]
};
absl::StatusOr<SupervisedExample> MakeSupervisedExample(const Prompt& prompt, const TokenCodec& codec,
                                                        int32_t end_of_sequence);

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_PROMPT_SOURCE_H_
