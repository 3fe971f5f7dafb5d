#include "libs/base/field_rules.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <array>
#include <charconv>
#include <cmath>
#include <limits>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "libs/base/check.h"
#include "libs/base/status_macros.h"
#include "moerl/v1/field_rules.pb.h"

namespace moerl {
namespace {

using google::protobuf::EnumValueDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// How much of an illegal value an error shows.
constexpr size_t kShownBytesMax = 60;

const v1::FieldRules& RulesOf(const FieldDescriptor& field) { return field.options().GetExtension(v1::rules); }

std::string Number(double value) {
  std::array<char, 32> digits;
  const auto format =
      std::abs(value) < 1e18 && value == std::floor(value) ? std::chars_format::fixed : std::chars_format::general;
  const char* end = std::to_chars(digits.data(), digits.data() + digits.size(), value, format).ptr;
  return std::string(digits.data(), end - digits.data());
}

struct Bounds {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool is_min_exclusive = false;

  bool Contain(double value) const { return (is_min_exclusive ? value > min : value >= min) && value <= max; }

  // "from 1 to 4", "above 0 and up to 1", "of at least 1", "of at most 4", or nothing.
  std::string ToString() const {
    const bool has_min = std::isfinite(min);
    const bool has_max = std::isfinite(max);
    if (has_min && is_min_exclusive) {
      return has_max ? absl::StrCat(" above ", Number(min), " and up to ", Number(max))
                     : absl::StrCat(" above ", Number(min));
    }
    if (has_min && has_max) return absl::StrCat(" from ", Number(min), " to ", Number(max));
    if (has_min) return absl::StrCat(" of at least ", Number(min));
    if (has_max) return absl::StrCat(" of at most ", Number(max));
    return "";
  }
};

Bounds BoundsOf(const FieldDescriptor& field) {
  const v1::FieldRules& rules = RulesOf(field);
  Bounds bounds;
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32:
      bounds.min = 0;
      bounds.max = std::numeric_limits<uint32_t>::max();
      break;
    case FieldDescriptor::CPPTYPE_UINT64:
      bounds.min = 0;
      break;
    case FieldDescriptor::CPPTYPE_INT32:
      bounds.min = std::numeric_limits<int32_t>::min();
      bounds.max = std::numeric_limits<int32_t>::max();
      break;
    default:
      break;
  }
  if (rules.has_min()) bounds.min = rules.min();
  if (rules.has_max()) bounds.max = rules.max();
  bounds.is_min_exclusive = rules.min_exclusive();
  return bounds;
}

// Bounds of the length of text or of a list: from 0 unless the rules say more.
Bounds LengthBoundsOf(const FieldDescriptor& field) {
  const v1::FieldRules& rules = RulesOf(field);
  Bounds bounds;
  if (rules.has_min()) bounds.min = rules.min();
  if (rules.has_max()) bounds.max = rules.max();
  return bounds;
}

std::string LengthText(const FieldDescriptor& field, absl::string_view unit) {
  const Bounds bounds = LengthBoundsOf(field);
  const std::string range = bounds.ToString();
  if (range.empty()) return "";
  absl::string_view words = range;
  absl::ConsumePrefix(&words, " of");
  absl::ConsumePrefix(&words, " from");
  return absl::StrCat(" of", words, " ", unit);
}

std::string EnumText(const FieldDescriptor& field, const EnumValueDescriptor& value) {
  absl::string_view name = value.name();
  const std::string prefix = EnumPrefix(field);
  absl::ConsumePrefix(&name, prefix);
  return absl::AsciiStrToLower(name);
}

std::string EnumChoices(const FieldDescriptor& field) {
  std::vector<std::string> names;
  for (int i = 0; i < field.enum_type()->value_count(); ++i) {
    const EnumValueDescriptor& value = *field.enum_type()->value(i);
    if (value.number() != 0) names.push_back(EnumText(field, value));
  }
  return absl::StrCat("one of ", absl::StrJoin(names, ", "));
}

// What one element of the field takes.
std::string DescribeElement(const FieldDescriptor& field) {
  const Bounds bounds = field.is_repeated() ? Bounds{} : BoundsOf(field);
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL:
      return "true or false";
    case FieldDescriptor::CPPTYPE_FLOAT:
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return absl::StrCat("a number", bounds.ToString());
    case FieldDescriptor::CPPTYPE_ENUM:
      return EnumChoices(field);
    case FieldDescriptor::CPPTYPE_STRING:
      if (RulesOf(field).allowed_size() > 0)
        return absl::StrCat("one of ", absl::StrJoin(RulesOf(field).allowed(), ", "));
      return absl::StrCat("text", field.is_repeated() ? "" : LengthText(field, "bytes"));
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return "a section of fields";
    default:
      return absl::StrCat("an integer", bounds.ToString());
  }
}

std::string Shown(absl::string_view text) {
  std::string shown = absl::Utf8SafeCHexEscape(text.substr(0, kShownBytesMax));
  if (text.size() > kShownBytesMax) absl::StrAppend(&shown, "... (", text.size(), " bytes)");
  return absl::StrCat("\"", shown, "\"");
}

absl::Status Illegal(const FieldDescriptor& field, absl::string_view found) {
  return absl::InvalidArgumentError(absl::StrCat("expected ", DescribeElement(field), ", found ", found));
}

// A plain decimal integer; 1e6, 0x10, 1_000 and " 1" are none.
template <typename T>
bool ParseInteger(absl::string_view text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

template <typename T>
absl::StatusOr<T> IntegerFrom(absl::string_view text, bool is_quoted, const FieldDescriptor& field) {
  T value = 0;
  const bool is_legal = !is_quoted && ParseInteger(text, value) &&
                        (field.is_repeated() || BoundsOf(field).Contain(static_cast<double>(value)));
  if (!is_legal) return Illegal(field, is_quoted || text.size() > kShownBytesMax ? Shown(text) : std::string(text));
  return value;
}

absl::StatusOr<double> RealFrom(absl::string_view text, bool is_quoted, const FieldDescriptor& field) {
  double value = 0;
  const bool is_legal = !is_quoted && absl::SimpleAtod(text, &value) && std::isfinite(value) &&
                        (field.is_repeated() || BoundsOf(field).Contain(value));
  if (!is_legal) return Illegal(field, is_quoted || text.size() > kShownBytesMax ? Shown(text) : std::string(text));
  return value;
}

bool IsLegalText(absl::string_view text, const FieldDescriptor& field) {
  const v1::FieldRules& rules = RulesOf(field);
  if (rules.allowed_size() > 0) {
    for (const std::string& allowed : rules.allowed()) {
      if (text == allowed) return true;
    }
    return false;
  }
  return field.is_repeated() || LengthBoundsOf(field).Contain(static_cast<double>(text.size()));
}

// Sets or adds: `SET_OR_ADD(UInt32, value)`.
#define MOERL_SET_OR_ADD(Type, value) \
  (field.is_repeated() ? reflection.Add##Type(&message, &field, value) : reflection.Set##Type(&message, &field, value))

}  // namespace

std::string EnumPrefix(const FieldDescriptor& field) {
  // The zero value is PREFIX_UNSPECIFIED, by the naming rules.
  absl::string_view zero = field.enum_type()->value(0)->name();
  absl::ConsumeSuffix(&zero, "UNSPECIFIED");
  return std::string(zero);
}

std::string DescribeLegalValues(const FieldDescriptor& field) {
  if (!field.is_repeated()) return DescribeElement(field);
  return absl::StrCat("a list", LengthText(field, "elements"), ", each ", DescribeElement(field));
}

std::string DefaultOf(const FieldDescriptor& field) { return RulesOf(field).default_(); }
bool IsRequired(const FieldDescriptor& field) { return RulesOf(field).required(); }
bool TakesEnvironment(const FieldDescriptor& field) { return RulesOf(field).from_environment(); }
bool IsFixed(const FieldDescriptor& field) { return RulesOf(field).fixed(); }

absl::Status SetFromText(absl::string_view text, bool is_quoted, const FieldDescriptor& field, Message& message) {
  const Reflection& reflection = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL: {
      if (is_quoted || (text != "true" && text != "false")) return Illegal(field, Shown(text));
      MOERL_SET_OR_ADD(Bool, text == "true");
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_UINT32: {
      MOERL_ASSIGN_OR_RETURN(const uint32_t value, IntegerFrom<uint32_t>(text, is_quoted, field));
      MOERL_SET_OR_ADD(UInt32, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_UINT64: {
      MOERL_ASSIGN_OR_RETURN(const uint64_t value, IntegerFrom<uint64_t>(text, is_quoted, field));
      MOERL_SET_OR_ADD(UInt64, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_INT32: {
      MOERL_ASSIGN_OR_RETURN(const int32_t value, IntegerFrom<int32_t>(text, is_quoted, field));
      MOERL_SET_OR_ADD(Int32, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_INT64: {
      MOERL_ASSIGN_OR_RETURN(const int64_t value, IntegerFrom<int64_t>(text, is_quoted, field));
      MOERL_SET_OR_ADD(Int64, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_FLOAT: {
      MOERL_ASSIGN_OR_RETURN(const double value, RealFrom(text, is_quoted, field));
      MOERL_SET_OR_ADD(Float, static_cast<float>(value));
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_DOUBLE: {
      MOERL_ASSIGN_OR_RETURN(const double value, RealFrom(text, is_quoted, field));
      MOERL_SET_OR_ADD(Double, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_ENUM: {
      const std::string name = EnumPrefix(field) + absl::AsciiStrToUpper(text);
      const EnumValueDescriptor* value = field.enum_type()->FindValueByName(name);
      if (value == nullptr || value->number() == 0 || absl::AsciiStrToLower(text) != text) {
        return Illegal(field, Shown(text));
      }
      MOERL_SET_OR_ADD(Enum, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_STRING: {
      if (!IsLegalText(text, field)) return Illegal(field, Shown(text));
      MOERL_SET_OR_ADD(String, std::string(text));
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_MESSAGE:
      break;
  }
  return Illegal(field, Shown(text));
}

#undef MOERL_SET_OR_ADD

absl::Status CheckLength(const Message& message, const FieldDescriptor& field) {
  const int size = message.GetReflection()->FieldSize(message, &field);
  if (LengthBoundsOf(field).Contain(size)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("expected ", DescribeLegalValues(field), ", found ", size, " elements"));
}

namespace {

// A double-quoted YAML scalar.
std::string YamlQuoted(absl::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      absl::StrAppendFormat(&out, "\\x%02x", static_cast<unsigned char>(c));
    } else {
      out += c;
    }
  }
  return out + '"';
}

}  // namespace

std::string TextOf(const Message& message, const FieldDescriptor& field, int index) {
  const Reflection& reflection = *message.GetReflection();
#define MOERL_GET(Type) \
  (index < 0 ? reflection.Get##Type(message, &field) : reflection.GetRepeated##Type(message, &field, index))
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL:
      return MOERL_GET(Bool) ? "true" : "false";
    case FieldDescriptor::CPPTYPE_UINT32:
      return absl::StrCat(MOERL_GET(UInt32));
    case FieldDescriptor::CPPTYPE_UINT64:
      return absl::StrCat(MOERL_GET(UInt64));
    case FieldDescriptor::CPPTYPE_INT32:
      return absl::StrCat(MOERL_GET(Int32));
    case FieldDescriptor::CPPTYPE_INT64:
      return absl::StrCat(MOERL_GET(Int64));
    case FieldDescriptor::CPPTYPE_FLOAT:
      return Number(MOERL_GET(Float));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return Number(MOERL_GET(Double));
    case FieldDescriptor::CPPTYPE_ENUM:
      return EnumText(field, *MOERL_GET(Enum));
    case FieldDescriptor::CPPTYPE_STRING:
      return YamlQuoted(MOERL_GET(String));
    case FieldDescriptor::CPPTYPE_MESSAGE:
      break;
  }
#undef MOERL_GET
  MOERL_CHECK(field.cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE);
  return "";
}

namespace {

absl::Status CheckMessage(const Message& message, const std::string& path);

std::string PathOf(const std::string& path, const FieldDescriptor& field) {
  return path.empty() ? field.name() : absl::StrCat(path, ".", field.name());
}

absl::Status At(const std::string& path, const FieldDescriptor& field, absl::string_view found) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": expected ", DescribeLegalValues(field), ", found ", found));
}

absl::Status CheckList(const Message& message, const FieldDescriptor& field, const std::string& path) {
  const Reflection& reflection = *message.GetReflection();
  if (const absl::Status length = CheckLength(message, field); !length.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", length.message()));
  }
  if (field.cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) return absl::OkStatus();
  for (int i = 0; i < reflection.FieldSize(message, &field); ++i) {
    MOERL_RETURN_IF_ERROR(
        CheckMessage(reflection.GetRepeatedMessage(message, &field, i), absl::StrCat(path, "[", i, "]")));
  }
  return absl::OkStatus();
}

double NumberOf(const Message& message, const FieldDescriptor& field) {
  const Reflection& reflection = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32:
      return reflection.GetUInt32(message, &field);
    case FieldDescriptor::CPPTYPE_UINT64:
      return static_cast<double>(reflection.GetUInt64(message, &field));
    case FieldDescriptor::CPPTYPE_INT32:
      return reflection.GetInt32(message, &field);
    case FieldDescriptor::CPPTYPE_INT64:
      return static_cast<double>(reflection.GetInt64(message, &field));
    case FieldDescriptor::CPPTYPE_FLOAT:
      return reflection.GetFloat(message, &field);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return reflection.GetDouble(message, &field);
    default:
      return 0;
  }
}

absl::Status CheckValue(const Message& message, const FieldDescriptor& field, const std::string& path) {
  const Reflection& reflection = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL:
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return absl::OkStatus();
    case FieldDescriptor::CPPTYPE_ENUM: {
      const int number = reflection.GetEnumValue(message, &field);
      if (field.enum_type()->FindValueByNumber(number) != nullptr) return absl::OkStatus();
      return At(path, field, absl::StrCat(number));
    }
    case FieldDescriptor::CPPTYPE_STRING: {
      const std::string text = reflection.GetString(message, &field);
      if (IsLegalText(text, field)) return absl::OkStatus();
      return At(path, field,
                field.type() == FieldDescriptor::TYPE_BYTES ? absl::StrCat(text.size(), " bytes") : Shown(text));
    }
    default: {
      const double value = NumberOf(message, field);
      // A comparison with NaN is false: NaN is never legal where there are bounds.
      if (BoundsOf(field).Contain(value)) return absl::OkStatus();
      return At(path, field, Number(value));
    }
  }
}

absl::Status CheckField(const Message& message, const FieldDescriptor& field, const std::string& path) {
  if (field.is_repeated()) return CheckList(message, field, path);
  const Reflection& reflection = *message.GetReflection();
  const bool is_given = reflection.HasField(message, &field);
  if (!is_given) {
    if (IsRequired(field)) return At(path, field, "nothing");
    if (field.has_presence() || !DefaultOf(field).empty()) return absl::OkStatus();
  }
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
    return CheckMessage(reflection.GetMessage(message, &field), path);
  }
  return CheckValue(message, field, path);
}

absl::Status CheckMessage(const Message& message, const std::string& path) {
  const google::protobuf::Descriptor& descriptor = *message.GetDescriptor();
  for (int i = 0; i < descriptor.field_count(); ++i) {
    const FieldDescriptor& field = *descriptor.field(i);
    MOERL_RETURN_IF_ERROR(CheckField(message, field, PathOf(path, field)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckRules(const Message& message) { return CheckMessage(message, ""); }

}  // namespace moerl
