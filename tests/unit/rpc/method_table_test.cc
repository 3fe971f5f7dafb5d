#include "libs/rpc/method_table.h"

#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "moerl/v1/environment.pb.h"
#include "moerl/v1/experience.pb.h"
#include "moerl/v1/rollout.pb.h"
#include "moerl/v1/trainer.pb.h"
#include "moerl/v1/weight_sync.pb.h"

namespace moerl::rpc {
namespace {

void AddMethods(const google::protobuf::FileDescriptor* file, std::set<std::string>& methods) {
  for (int s = 0; s < file->service_count(); ++s) {
    for (int m = 0; m < file->service(s)->method_count(); ++m) {
      methods.insert(absl::StrCat("/", file->service(s)->full_name(), "/", file->service(s)->method(m)->name()));
    }
  }
}

TEST(MethodTable, HasExactlyTheMethodsOfTheContracts) {
  std::set<std::string> declared, ruled;
  for (const auto* file : {v1::GenerateRequest::descriptor()->file(), v1::WorkRequest::descriptor()->file(),
                           v1::GetStatusRequest::descriptor()->file(), v1::GetManifestRequest::descriptor()->file(),
                           v1::ResetRequest::descriptor()->file()}) {
    AddMethods(file, declared);
  }
  for (const MethodRule& rule : MethodTable()) ruled.insert(std::string(rule.method));
  EXPECT_EQ(ruled, declared);
  EXPECT_TRUE(std::is_sorted(MethodTable().begin(), MethodTable().end(),
                             [](const auto& a, const auto& b) { return a.method < b.method; }));
}

TEST(MethodTable, KnowsWhichMethodsStream) {
  for (const auto* file : {v1::GenerateRequest::descriptor()->file(), v1::WorkRequest::descriptor()->file(),
                           v1::GetStatusRequest::descriptor()->file(), v1::GetManifestRequest::descriptor()->file(),
                           v1::ResetRequest::descriptor()->file()}) {
    for (int m = 0; m < file->service(0)->method_count(); ++m) {
      const auto* method = file->service(0)->method(m);
      const MethodRule* rule = FindMethod(absl::StrCat("/", file->service(0)->full_name(), "/", method->name()));
      ASSERT_NE(rule, nullptr);
      EXPECT_EQ(rule->kind == MethodKind::kUnary, !method->client_streaming() && !method->server_streaming())
          << rule->method;
    }
  }
}

TEST(MethodTable, IsWhatTheDocumentationSays) {
  std::ifstream file(MOERL_SOURCE_DIR "/docs/services.md");
  const std::string page((std::istreambuf_iterator<char>(file)), {});
  for (const MethodRule& rule : MethodTable()) {
    std::vector<absl::string_view> roles;
    for (const Role role : {Role::kClient, Role::kRollout, Role::kTrainer, Role::kWeightSync, Role::kEnvironment}) {
      if (MayCall(role, rule.method)) roles.push_back(RoleName(role));
    }
    const std::string name = absl::StrReplaceAll(rule.method, {{"/moerl.v1.", ""}, {"/", "."}});
    const std::string row = absl::StrCat("| ", name, " | ", absl::StrJoin(roles, ", "), " |\n");
    EXPECT_NE(page.find(row), std::string::npos) << row;
  }
}

TEST(MethodTable, KeepsRolesApart) {
  for (const char* publish : {"AcquirePublisher", "BeginVersion", "PutChunks", "CommitVersion", "RecordForks"}) {
    const std::string method = absl::StrCat("/moerl.v1.WeightSyncService/", publish);
    EXPECT_TRUE(MayCall(Role::kTrainer, method));
    EXPECT_FALSE(MayCall(Role::kRollout, method)) << method;
    EXPECT_FALSE(MayCall(Role::kClient, method)) << method;
  }
  EXPECT_TRUE(MayCall(Role::kRollout, "/moerl.v1.ExperienceService/Work"));
  EXPECT_FALSE(MayCall(Role::kClient, "/moerl.v1.ExperienceService/Work"));
  EXPECT_TRUE(MayCall(Role::kRollout, "/moerl.v1.WeightSyncService/FetchChunks"));
  EXPECT_FALSE(MayCall(Role::kEnvironment, "/moerl.v1.RolloutService/Generate"));
}

TEST(MethodTable, OpensHealthToAllAndUnknownMethodsToNone) {
  EXPECT_TRUE(MayCall(Role::kEnvironment, "/grpc.health.v1.Health/Check"));
  EXPECT_TRUE(MayCall(Role::kEnvironment, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"));
  EXPECT_FALSE(MayCall(Role::kTrainer, "/moerl.v1.TrainerService/NoSuchMethod"));
  EXPECT_FALSE(MayCall(Role::kTrainer, ""));
}

}  // namespace
}  // namespace moerl::rpc
