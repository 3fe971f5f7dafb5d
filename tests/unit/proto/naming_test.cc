// The rules of buf's category STANDARD, asserted on the descriptor set.
#include <gmock/gmock.h>
#include <google/protobuf/descriptor.pb.h>
#include <gtest/gtest.h>

#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/unit/proto/descriptor_set.h"

namespace moerl {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::EnumDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::FileDescriptor;
using google::protobuf::MethodDescriptor;
using google::protobuf::ServiceDescriptor;

bool MatchesAll(const std::string& name, const char* regex) {
  return testing::Matches(testing::MatchesRegex(regex))(name);
}
bool IsPascalCase(const std::string& name) { return MatchesAll(name, "[A-Z][A-Za-z0-9]*"); }
bool IsLowerSnakeCase(const std::string& name) { return MatchesAll(name, "[a-z][a-z0-9]*(_[a-z0-9]+)*"); }
bool IsUpperSnakeCase(const std::string& name) { return MatchesAll(name, "[A-Z][A-Z0-9]*(_[A-Z0-9]+)*"); }

// OffPolicyCorrection is OFF_POLICY_CORRECTION.
std::string UpperSnakeCase(const std::string& name) {
  std::string out;
  for (const char c : name) {
    if (absl::ascii_isupper(c) && !out.empty()) out += '_';
    out += absl::ascii_toupper(c);
  }
  return out;
}

template <typename Visit>
void ForEachMethod(Visit visit) {
  for (const FileDescriptor* file : ProtoFiles()) {
    for (int i = 0; i < file->service_count(); ++i) {
      for (int j = 0; j < file->service(i)->method_count(); ++j) visit(*file->service(i)->method(j));
    }
  }
}

TEST(ProtoNames, AllFilesOfTheDesignAreThere) {
  std::set<std::string> names;
  for (const FileDescriptor* file : ProtoFiles()) names.insert(file->name());
  for (const char* name : {"rollout", "experience", "trainer", "weight_sync", "environment", "trajectory", "config"}) {
    EXPECT_TRUE(names.contains(absl::StrCat("moerl/v1/", name, ".proto"))) << name;
  }
}

TEST(ProtoNames, FilesAreSnakeCaseAndStandInTheDirectoryOfTheirVersionedPackage) {
  for (const FileDescriptor* file : ProtoFiles()) {
    EXPECT_EQ(file->package(), "moerl.v1") << file->name();
    EXPECT_THAT(file->name(), testing::MatchesRegex("moerl/v1/[a-z][a-z0-9_]*\\.proto"));
    EXPECT_EQ(file->public_dependency_count(), 0) << file->name();
    EXPECT_EQ(file->weak_dependency_count(), 0) << file->name();
    EXPECT_EQ(file->syntax(), FileDescriptor::SYNTAX_PROTO3) << file->name();
  }
}

TEST(ProtoNames, MessagesArePascalCaseAndFieldsLowerSnakeCase) {
  ForEachMessage([](const Descriptor& message) {
    EXPECT_TRUE(IsPascalCase(message.name())) << message.full_name();
    for (int i = 0; i < message.real_oneof_decl_count(); ++i) {
      EXPECT_TRUE(IsLowerSnakeCase(message.oneof_decl(i)->name())) << message.oneof_decl(i)->full_name();
    }
  });
  ForEachField([](const FieldDescriptor& field) {
    EXPECT_TRUE(IsLowerSnakeCase(field.name())) << field.full_name();
    EXPECT_FALSE(field.is_required()) << field.full_name();
  });
}

TEST(ProtoNames, EnumsArePascalCaseAndTheirValuesPrefixedWithZeroUnspecified) {
  ForEachEnum([](const EnumDescriptor& type) {
    EXPECT_TRUE(IsPascalCase(type.name())) << type.full_name();
    EXPECT_FALSE(type.options().allow_alias()) << type.full_name();
    const std::string prefix = UpperSnakeCase(type.name()) + "_";
    EXPECT_EQ(type.value(0)->number(), 0) << type.full_name();
    EXPECT_EQ(type.value(0)->name(), prefix + "UNSPECIFIED");
    for (int i = 0; i < type.value_count(); ++i) {
      EXPECT_TRUE(IsUpperSnakeCase(type.value(i)->name())) << type.value(i)->full_name();
      EXPECT_TRUE(absl::StartsWith(type.value(i)->name(), prefix)) << type.value(i)->full_name();
    }
  });
}

TEST(ProtoNames, ServicesEndInServiceAndMethodsArePascalCase) {
  for (const FileDescriptor* file : ProtoFiles()) {
    for (int i = 0; i < file->service_count(); ++i) {
      EXPECT_TRUE(IsPascalCase(file->service(i)->name())) << file->service(i)->name();
      EXPECT_TRUE(absl::EndsWith(file->service(i)->name(), "Service")) << file->service(i)->name();
    }
  }
  ForEachMethod([](const MethodDescriptor& method) { EXPECT_TRUE(IsPascalCase(method.name())) << method.full_name(); });
}

TEST(ProtoNames, EveryMethodHasARequestAndAResponseOfItsOwnName) {
  std::set<std::string> used;
  ForEachMethod([&](const MethodDescriptor& method) {
    EXPECT_EQ(method.input_type()->name(), method.name() + "Request") << method.full_name();
    EXPECT_EQ(method.output_type()->name(), method.name() + "Response") << method.full_name();
    EXPECT_TRUE(used.insert(method.input_type()->full_name()).second) << method.input_type()->full_name();
    EXPECT_TRUE(used.insert(method.output_type()->full_name()).second) << method.output_type()->full_name();
  });
  EXPECT_FALSE(used.empty());
}

// Not of STANDARD: every method says what it does.
TEST(ProtoNames, EveryServiceIsDocumented) {
  for (const FileDescriptor* file : ProtoFiles()) {
    for (int i = 0; i < file->service_count(); ++i) {
      google::protobuf::SourceLocation location;
      ASSERT_TRUE(file->service(i)->GetSourceLocation(&location));
      EXPECT_FALSE(location.leading_comments.empty()) << file->service(i)->full_name();
    }
  }
}

TEST(ProtoNames, TheCheckersThemselvesCanFail) {
  EXPECT_FALSE(IsPascalCase("lowerCase"));
  EXPECT_FALSE(IsLowerSnakeCase("camelCase"));
  EXPECT_FALSE(IsLowerSnakeCase("trailing_"));
  EXPECT_FALSE(IsUpperSnakeCase("Mixed_CASE"));
  EXPECT_EQ(UpperSnakeCase("KlEstimator"), "KL_ESTIMATOR");
}

}  // namespace
}  // namespace moerl
