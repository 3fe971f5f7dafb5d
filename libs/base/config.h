#ifndef MOERL_LIBS_BASE_CONFIG_H_
#define MOERL_LIBS_BASE_CONFIG_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace google::protobuf {
class Message;
}  // namespace google::protobuf

// Configuration: YAML read into a message by reflection, under the rules written in its .proto.
//
//   v1::Config config;
//   absl::Status status = LoadConfig("run.yaml", {"trainer.num_ranks=2"}, config);
//   if (!status.ok()) { std::cerr << status.message() << "\n"; return 2; }
//
// Every failure is INVALID_ARGUMENT (NOT_FOUND and the like where the file cannot be read) with one line:
//   config: run.yaml:14: trainer.num_ranks: expected an integer from 1 to 4096, found "many"
//
// What is refused: unknown fields, wrong types, values out of range, fields that must be given and are not,
// duplicate keys, anchors, aliases, tags, several documents, bad YAML, files over 1 MiB, nesting over 32.
//
// Fields that are not given get the default of their rules. Sections at the top level are always there;
// messages further down only when they are given (has_tls() says whether TLS was asked for).
//
// In fields whose rules say from_environment, ${NAME} stands for the environment variable NAME, which must
// be set; in other fields it is refused.
namespace moerl {

// Reads the file, applies the overrides in order (each "a.b=VALUE", VALUE in YAML, as given to --set; a later
// one wins) and replaces the contents of `config`, which are unspecified after a failure. Any thread.
absl::Status LoadConfig(const std::string& path, const std::vector<std::string>& overrides,
                        google::protobuf::Message& config);

// The same for text; `source` stands for the file's name in errors.
absl::Status ParseConfig(absl::string_view text, const std::string& source, const std::vector<std::string>& overrides,
                         google::protobuf::Message& config);

// The message as YAML, every field that has a value written out: ParseConfig of it gives an equal message.
std::string FormatConfig(const google::protobuf::Message& config);

// A field in which two configurations differ.
struct ConfigChange {
  std::string path;       // "trainer.num_steps"; the section where only one of them has it
  std::string was, now;   // as YAML writes them, or "not given"
  bool is_fixed = false;  // the field's rules, or those of a section around it, say fixed
};

// In the order of the schema. Both are of one message type.
std::vector<ConfigChange> CompareConfigs(const google::protobuf::Message& was, const google::protobuf::Message& now);

// FAILED_PRECONDITION where fixed fields differ: algorithm.name was "ppo", now "grpo"; trainer.seed was 1, now 2.
absl::Status CheckFixedFields(const google::protobuf::Message& was, const google::protobuf::Message& now);

}  // namespace moerl

#endif  // MOERL_LIBS_BASE_CONFIG_H_
