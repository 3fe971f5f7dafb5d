#ifndef MOERL_TESTS_UNIT_PROTO_DESCRIPTOR_SET_H_
#define MOERL_TESTS_UNIT_PROTO_DESCRIPTOR_SET_H_

#include <google/protobuf/descriptor.h>

#include <string>
#include <vector>

namespace moerl {

// The files of package moerl.v1 as protoc sees them, comments included, in name order. Live for ever.
const std::vector<const google::protobuf::FileDescriptor*>& ProtoFiles();

// Calls `visit` for every message of the files, nested ones too.
template <typename Visit>
void ForEachMessage(Visit visit) {
  struct Walker {
    Visit& visit;
    void Walk(const google::protobuf::Descriptor& message) {
      visit(message);
      for (int i = 0; i < message.nested_type_count(); ++i) Walk(*message.nested_type(i));
    }
  } walker{visit};
  for (const auto* file : ProtoFiles()) {
    for (int i = 0; i < file->message_type_count(); ++i) walker.Walk(*file->message_type(i));
  }
}

template <typename Visit>
void ForEachField(Visit visit) {
  ForEachMessage([&](const google::protobuf::Descriptor& message) {
    for (int i = 0; i < message.field_count(); ++i) visit(*message.field(i));
  });
}

template <typename Visit>
void ForEachEnum(Visit visit) {
  for (const auto* file : ProtoFiles()) {
    for (int i = 0; i < file->enum_type_count(); ++i) visit(*file->enum_type(i));
  }
  ForEachMessage([&](const google::protobuf::Descriptor& message) {
    for (int i = 0; i < message.enum_type_count(); ++i) visit(*message.enum_type(i));
  });
}

// Compares `text` with the committed file (path from the root of the repository), or writes it there when the
// environment variable MOERL_UPDATE_GOLDEN is set: scripts/update-golden does that.
void ExpectGolden(const std::string& text, const std::string& path);

}  // namespace moerl

#endif  // MOERL_TESTS_UNIT_PROTO_DESCRIPTOR_SET_H_
