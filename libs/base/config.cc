#include "libs/base/config.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "libs/base/check.h"
#include "libs/base/env.h"
#include "libs/base/field_rules.h"
#include "libs/base/status_macros.h"
#include "libs/base/yaml_tree.h"

namespace moerl {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

constexpr size_t kNameBytesMax = 60;
// An unknown name this many edits from a known one is taken for a slip of the finger.
constexpr size_t kSlipEditsMax = 2;

absl::Status Error(const YamlPlace& place, absl::string_view path, absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("config: ", place.ToString(), ": ", path, path.empty() ? "" : ": ", what));
}

std::string Child(const std::string& path, absl::string_view name) {
  return path.empty() ? std::string(name) : absl::StrCat(path, ".", name);
}

// --- Unknown names

size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, substituted}));
    }
  }
  return row.back();
}

std::string UnknownField(const Descriptor& descriptor, absl::string_view name) {
  std::vector<std::string> known;
  std::string nearest;
  size_t nearest_edits = kSlipEditsMax + 1;
  for (int i = 0; i < descriptor.field_count(); ++i) {
    known.push_back(descriptor.field(i)->name());
    const size_t edits = EditDistance(name.substr(0, kNameBytesMax), known.back());
    if (edits < nearest_edits) nearest = known.back();
    nearest_edits = std::min(edits, nearest_edits);
  }
  return absl::StrCat("unknown field", nearest.empty() ? "" : absl::StrCat(", did you mean ", nearest, "?"),
                      nearest.empty() ? "; " : " ", "legal: ", absl::StrJoin(known, ", "));
}

// --- ${NAME}

struct Expanded {
  std::string text;
  std::string error;
};

bool IsVariableName(absl::string_view name) {
  if (name.empty() || (name[0] >= '0' && name[0] <= '9')) return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
  });
}

Expanded ExpandEnvironment(absl::string_view text, const FieldDescriptor& field) {
  Expanded out;
  size_t start;
  while ((start = text.find("${")) != absl::string_view::npos) {
    if (!TakesEnvironment(field)) {
      out.error = "expected a value written out, found ${...}; this field takes nothing from the environment";
      return out;
    }
    const size_t end = text.find('}', start);
    const absl::string_view name =
        end == absl::string_view::npos ? absl::string_view() : text.substr(start + 2, end - start - 2);
    if (!IsVariableName(name)) {
      out.error = "expected ${NAME} with the name of an environment variable, found another use of ${";
      return out;
    }
    const char* value = std::getenv(std::string(name).c_str());
    if (value == nullptr) {
      out.error = absl::StrCat("expected the environment variable ", name, " to be set, found it unset");
      return out;
    }
    absl::StrAppend(&out.text, text.substr(0, start), value);
    text.remove_prefix(end + 1);
  }
  absl::StrAppend(&out.text, text);
  return out;
}

// --- Tree to message

const char* KindName(YamlNode::Kind kind) {
  switch (kind) {
    case YamlNode::Kind::kNull:
      return "nothing";
    case YamlNode::Kind::kScalar:
      return "a single value";
    case YamlNode::Kind::kList:
      return "a list";
    case YamlNode::Kind::kMap:
      return "a section";
  }
  return "";
}

absl::Status ReadMessage(const YamlNode& node, const std::string& path, int depth, Message& message);

absl::Status ReadScalar(const YamlNode& node, const std::string& path, const FieldDescriptor& field, Message& message) {
  if (node.kind != YamlNode::Kind::kScalar) {
    return Error(node.KeyOrPlace(), path,
                 absl::StrCat("expected ", DescribeLegalValues(field), ", found ", KindName(node.kind)));
  }
  const Expanded expanded = ExpandEnvironment(node.text, field);
  if (!expanded.error.empty()) return Error(node.place, path, expanded.error);
  // Quotes around ${RANK} are there for YAML's sake and say nothing about the value.
  const bool is_quoted = node.is_quoted && expanded.text == node.text;
  const absl::Status set = SetFromText(expanded.text, is_quoted, field, message);
  return set.ok() ? set : Error(node.place, path, set.message());
}

absl::Status ReadList(const YamlNode& node, const std::string& path, int depth, const FieldDescriptor& field,
                      Message& message) {
  if (node.kind != YamlNode::Kind::kList) {
    return Error(node.KeyOrPlace(), path,
                 absl::StrCat("expected ", DescribeLegalValues(field), ", found ", KindName(node.kind)));
  }
  for (size_t i = 0; i < node.elements.size(); ++i) {
    const YamlNode& element = node.elements[i];
    const std::string element_path = absl::StrCat(path, "[", i, "]");
    if (field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      MOERL_RETURN_IF_ERROR(
          ReadMessage(element, element_path, depth, *message.GetReflection()->AddMessage(&message, &field)));
    } else {
      MOERL_RETURN_IF_ERROR(ReadScalar(element, element_path, field, message));
    }
  }
  const absl::Status length = CheckLength(message, field);
  return length.ok() ? length : Error(node.place, path, length.message());
}

absl::Status ReadField(const YamlNode& node, const std::string& path, int depth, const FieldDescriptor& field,
                       Message& message) {
  if (field.is_repeated()) return ReadList(node, path, depth, field, message);
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
    return ReadMessage(node, path, depth, *message.GetReflection()->MutableMessage(&message, &field));
  }
  return ReadScalar(node, path, field, message);
}

// A field that is not given: its default, or an error when it must be given.
absl::Status ReadAbsent(const YamlPlace& place, const std::string& path, int depth, const FieldDescriptor& field,
                        Message& message) {
  if (IsRequired(field)) {
    return Error(place, path,
                 absl::StrCat("expected ", DescribeLegalValues(field), ", found nothing; it must be given"));
  }
  if (field.is_repeated()) return absl::OkStatus();
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
    if (depth > 0) return absl::OkStatus();
    YamlNode empty;
    empty.place = place;
    return ReadMessage(empty, path, depth + 1, *message.GetReflection()->MutableMessage(&message, &field));
  }
  const std::string text = DefaultOf(field);
  if (text.empty()) return absl::OkStatus();
  absl::Status set = SetFromText(text, /*is_quoted=*/false, field, message);
  MOERL_CHECK(set.ok());  // a default of the schema is legal there: config_test reads them all
  return set;
}

absl::Status ReadMessage(const YamlNode& node, const std::string& path, int depth, Message& message) {
  const Descriptor& descriptor = *message.GetDescriptor();
  if (node.kind != YamlNode::Kind::kMap && node.kind != YamlNode::Kind::kNull) {
    return Error(node.KeyOrPlace(), path, absl::StrCat("expected a section of fields, found ", KindName(node.kind)));
  }
  std::vector<bool> is_given(descriptor.field_count(), false);
  for (const auto& [name, child] : node.entries) {
    const FieldDescriptor* field = descriptor.FindFieldByName(name);
    if (field == nullptr) {
      return Error(child.key_place, Child(path, Shorten(name)), UnknownField(descriptor, name));
    }
    is_given[field->index()] = true;
    MOERL_RETURN_IF_ERROR(ReadField(child, Child(path, name), depth + 1, *field, message));
  }
  for (int i = 0; i < descriptor.field_count(); ++i) {
    const FieldDescriptor& field = *descriptor.field(i);
    if (!is_given[i])
      MOERL_RETURN_IF_ERROR(ReadAbsent(node.KeyOrPlace(), Child(path, field.name()), depth, field, message));
  }
  return absl::OkStatus();
}

// --- Overrides

absl::Status ApplyOverride(const std::string& override_text, YamlNode& root) {
  const std::string source = absl::StrCat("--set ", Shorten(override_text));
  const size_t equals = override_text.find('=');
  if (equals == std::string::npos || equals == 0) {
    return Error({source}, "", "expected section.field=value, found no field or no '='");
  }
  absl::StatusOr<YamlNode> value =
      ParseYaml(absl::string_view(override_text).substr(equals + 1), source, /*has_lines=*/false);
  if (!value.ok()) return absl::InvalidArgumentError(absl::StrCat("config: ", value.status().message()));
  YamlNode* node = &root;
  for (absl::string_view name : absl::StrSplit(absl::string_view(override_text).substr(0, equals), '.')) {
    if (node->kind != YamlNode::Kind::kMap && node->kind != YamlNode::Kind::kNull) {
      return Error({source}, "",
                   absl::StrCat("expected a section before .", name, ", found ", KindName(node->kind), " at ",
                                node->place.ToString()));
    }
    node->kind = YamlNode::Kind::kMap;
    YamlNode* child = node->Find(name);
    if (child == nullptr) {
      node->entries.push_back({std::string(name), YamlNode{}});
      child = &node->entries.back().value;
      child->place = child->key_place = {source};
    }
    node = child;
  }
  *node = *std::move(value);
  node->key_place = {source};
  return absl::OkStatus();
}

// --- Message to text

void FormatMessage(const Message& message, const std::string& indent, std::string& out);

bool HasValue(const Message& message, const FieldDescriptor& field) {
  if (field.is_repeated()) return message.GetReflection()->FieldSize(message, &field) > 0;
  const bool is_always_written = !field.has_presence() && field.cpp_type() != FieldDescriptor::CPPTYPE_ENUM;
  return is_always_written || message.GetReflection()->HasField(message, &field);
}

void FormatList(const Message& message, const FieldDescriptor& field, const std::string& indent, std::string& out) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  for (int i = 0; i < reflection.FieldSize(message, &field); ++i) {
    if (field.cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) {
      absl::StrAppend(&out, indent, "- ", TextOf(message, field, i), "\n");
      continue;
    }
    absl::StrAppend(&out, indent, "-\n");
    FormatMessage(reflection.GetRepeatedMessage(message, &field, i), indent + "  ", out);
  }
}

void FormatMessage(const Message& message, const std::string& indent, std::string& out) {
  const Descriptor& descriptor = *message.GetDescriptor();
  for (int i = 0; i < descriptor.field_count(); ++i) {
    const FieldDescriptor& field = *descriptor.field(i);
    if (!HasValue(message, field)) continue;
    if (field.is_repeated()) {
      absl::StrAppend(&out, indent, field.name(), ":\n");
      FormatList(message, field, indent + "  ", out);
    } else if (field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      absl::StrAppend(&out, indent, field.name(), ":\n");
      FormatMessage(message.GetReflection()->GetMessage(message, &field), indent + "  ", out);
    } else {
      absl::StrAppend(&out, indent, field.name(), ": ", TextOf(message, field), "\n");
    }
  }
}

// --- Two messages

std::string ValueText(const Message& message, const FieldDescriptor& field) {
  if (!HasValue(message, field)) return "not given";
  if (!field.is_repeated()) return field.message_type() != nullptr ? "given" : TextOf(message, field);
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  std::vector<std::string> elements;
  elements.reserve(reflection.FieldSize(message, &field));
  for (int i = 0; i < reflection.FieldSize(message, &field); ++i) {
    elements.push_back(
        field.message_type() == nullptr
            ? TextOf(message, field, i)
            : absl::StrCat("{", reflection.GetRepeatedMessage(message, &field, i).ShortDebugString(), "}"));
  }
  return absl::StrCat("[", absl::StrJoin(elements, ", "), "]");
}

void CompareMessages(const Message& was, const Message& now, const std::string& path, bool is_fixed,
                     std::vector<ConfigChange>& changes) {
  const Descriptor& descriptor = *was.GetDescriptor();
  for (int i = 0; i < descriptor.field_count(); ++i) {
    const FieldDescriptor& field = *descriptor.field(i);
    const std::string field_path = Child(path, field.name());
    const bool is_field_fixed = is_fixed || IsFixed(field);
    ConfigChange change = {field_path, ValueText(was, field), ValueText(now, field), is_field_fixed};
    if (change.was != change.now) {
      changes.push_back(std::move(change));
    } else if (field.message_type() != nullptr && !field.is_repeated()) {
      CompareMessages(was.GetReflection()->GetMessage(was, &field), now.GetReflection()->GetMessage(now, &field),
                      field_path, is_field_fixed, changes);
    }
  }
}

}  // namespace

absl::Status LoadConfig(const std::string& path, const std::vector<std::string>& overrides, Message& config) {
  const absl::StatusOr<std::string> text = PosixEnv()->ReadFile(path, kYamlBytesMax);
  if (absl::IsResourceExhausted(text.status())) {
    return Error({path}, "",
                 absl::StrCat("at most ", kYamlBytesMax, " bytes expected, found ",
                              PosixEnv()->FileSize(path).value_or(kYamlBytesMax + 1)));
  }
  if (!text.ok()) return absl::Status(text.status().code(), absl::StrCat("config: ", text.status().message()));
  return ParseConfig(*text, path, overrides, config);
}

absl::Status ParseConfig(absl::string_view text, const std::string& source, const std::vector<std::string>& overrides,
                         Message& config) {
  absl::StatusOr<YamlNode> root = ParseYaml(text, source);
  if (!root.ok()) return absl::InvalidArgumentError(absl::StrCat("config: ", root.status().message()));
  for (const std::string& override_text : overrides) MOERL_RETURN_IF_ERROR(ApplyOverride(override_text, *root));
  config.Clear();
  return ReadMessage(*root, "", /*depth=*/0, config);
}

std::string FormatConfig(const Message& config) {
  std::string out;
  FormatMessage(config, "", out);
  return out;
}

std::vector<ConfigChange> CompareConfigs(const Message& was, const Message& now) {
  MOERL_CHECK(was.GetDescriptor() == now.GetDescriptor());
  std::vector<ConfigChange> changes;
  CompareMessages(was, now, "", /*is_fixed=*/false, changes);
  return changes;
}

absl::Status CheckFixedFields(const Message& was, const Message& now) {
  std::vector<std::string> changed;
  for (const ConfigChange& change : CompareConfigs(was, now)) {
    if (change.is_fixed) changed.push_back(absl::StrCat(change.path, " was ", change.was, ", now ", change.now));
  }
  return changed.empty() ? absl::OkStatus() : absl::FailedPreconditionError(absl::StrJoin(changed, "; "));
}

}  // namespace moerl
