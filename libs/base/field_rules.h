#ifndef MOERL_LIBS_BASE_FIELD_RULES_H_
#define MOERL_LIBS_BASE_FIELD_RULES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace google::protobuf {
class FieldDescriptor;
class Message;
}  // namespace google::protobuf

// The ranges written in proto/moerl/v1 as (rules) options, read by reflection. Any thread.
namespace moerl {

// Checks every field of `message`, and of the messages in it, against its rules. A number, string or list
// without presence that is zero or empty stands for its default, where it has one, and passes.
// INVALID_ARGUMENT with one line: "sampling.top_p: expected a number above 0 and up to 1, found 1.5".
// The first illegal field in the order of the descriptor is named.
absl::Status CheckRules(const google::protobuf::Message& message);

// What the field takes, as in "an integer from 1 to 4096", "one of bf16, fp32", "true or false",
// "text of 1 to 63 bytes".
std::string DescribeLegalValues(const google::protobuf::FieldDescriptor& field);

// The default the rules give to the field, as text; empty when they give none.
std::string DefaultOf(const google::protobuf::FieldDescriptor& field);

// Whether the rules say that the field must be given, that it may come from the environment, and that it, with all in
// it, stays what it was when a run began.
bool IsRequired(const google::protobuf::FieldDescriptor& field);
bool TakesEnvironment(const google::protobuf::FieldDescriptor& field);
bool IsFixed(const google::protobuf::FieldDescriptor& field);

// Enum values are written in configuration in lower case without their prefix: COMPUTE_BF16 is "bf16".
std::string EnumPrefix(const google::protobuf::FieldDescriptor& field);

// Sets a singular field, or adds to a repeated one, the value that `text` spells, after checking it
// against the rules of the field. `is_quoted` text is not a number or a boolean. Not for messages.
// INVALID_ARGUMENT: "expected an integer from 1 to 4096, found "many"", without the field's name.
absl::Status SetFromText(absl::string_view text, bool is_quoted, const google::protobuf::FieldDescriptor& field,
                         google::protobuf::Message& message);

// Checks the number of elements of a repeated field: "expected a list of 1 to 64 elements, ..., found 65 elements".
absl::Status CheckLength(const google::protobuf::Message& message, const google::protobuf::FieldDescriptor& field);

// The inverse of SetFromText for a scalar field (element `index` of a repeated one); text is quoted as
// YAML wants it.
std::string TextOf(const google::protobuf::Message& message, const google::protobuf::FieldDescriptor& field,
                   int index = -1);

}  // namespace moerl

#endif  // MOERL_LIBS_BASE_FIELD_RULES_H_
