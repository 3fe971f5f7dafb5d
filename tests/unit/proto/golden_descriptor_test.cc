// A text of all that the wire depends on, one line each. It is committed, so that every change of a contract shows in
// review; scripts/update-golden writes it anew.
#include <google/protobuf/descriptor.pb.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "tests/unit/proto/descriptor_set.h"

namespace moerl {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::EnumDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::ServiceDescriptor;

std::string TypeOf(const FieldDescriptor& field) {
  if (field.message_type() != nullptr) return field.message_type()->full_name();
  if (field.enum_type() != nullptr) return field.enum_type()->full_name();
  return field.type_name();
}

std::string Cardinality(const FieldDescriptor& field) {
  if (field.is_repeated()) return "repeated ";
  if (field.real_containing_oneof() != nullptr) return absl::StrCat("oneof ", field.containing_oneof()->name(), " ");
  return field.has_optional_keyword() ? "optional " : "";
}

void AppendMessage(const Descriptor& message, std::string& out) {
  absl::StrAppend(&out, "message ", message.full_name(), "\n");
  for (int i = 0; i < message.field_count(); ++i) {
    const FieldDescriptor& field = *message.field(i);
    absl::StrAppend(&out, "  ", field.number(), " ", Cardinality(field), TypeOf(field), " ", field.name(), "\n");
  }
  for (int i = 0; i < message.reserved_range_count(); ++i) {
    absl::StrAppend(&out, "  reserved ", message.reserved_range(i)->start, "..", message.reserved_range(i)->end - 1,
                    "\n");
  }
}

void AppendEnum(const EnumDescriptor& type, std::string& out) {
  absl::StrAppend(&out, "enum ", type.full_name(), "\n");
  for (int i = 0; i < type.value_count(); ++i) {
    absl::StrAppend(&out, "  ", type.value(i)->number(), " ", type.value(i)->name(), "\n");
  }
}

void AppendService(const ServiceDescriptor& service, std::string& out) {
  absl::StrAppend(&out, "service ", service.full_name(), "\n");
  for (int i = 0; i < service.method_count(); ++i) {
    const auto& method = *service.method(i);
    absl::StrAppend(&out, "  ", method.name(), "(", method.client_streaming() ? "stream " : "",
                    method.input_type()->name(), ") ", method.server_streaming() ? "stream " : "",
                    method.output_type()->name(), "\n");
  }
}

TEST(GoldenDescriptor, ShowsEveryChangeOfAContract) {
  std::string out;
  for (const auto* file : ProtoFiles()) {
    for (int i = 0; i < file->service_count(); ++i) AppendService(*file->service(i), out);
    for (int i = 0; i < file->extension_count(); ++i) {
      absl::StrAppend(&out, "extension ", file->extension(i)->full_name(), " ", file->extension(i)->number(), "\n");
    }
  }
  ForEachEnum([&](const EnumDescriptor& type) { AppendEnum(type, out); });
  ForEachMessage([&](const Descriptor& message) { AppendMessage(message, out); });
  ExpectGolden(out, "tests/golden/descriptor.txt");
}

}  // namespace
}  // namespace moerl
