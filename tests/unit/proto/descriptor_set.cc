#include "tests/unit/proto/descriptor_set.h"

#include <google/protobuf/descriptor.pb.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/base/env.h"

namespace moerl {

const std::vector<const google::protobuf::FileDescriptor*>& ProtoFiles() {
  static const auto* files = [] {
    google::protobuf::FileDescriptorSet set;
    MOERL_CHECK(set.ParseFromString(PosixEnv()->ReadFile(MOERL_DESCRIPTOR_SET).value()));
    auto* pool = new google::protobuf::DescriptorPool;
    auto* found = new std::vector<const google::protobuf::FileDescriptor*>;
    for (const google::protobuf::FileDescriptorProto& proto : set.file()) {
      const google::protobuf::FileDescriptor* file = pool->BuildFile(proto);
      MOERL_CHECK(file != nullptr);
      if (absl::StartsWith(file->name(), "moerl/")) found->push_back(file);
    }
    std::sort(found->begin(), found->end(), [](const auto* a, const auto* b) { return a->name() < b->name(); });
    return found;
  }();
  return *files;
}

void ExpectGolden(const std::string& text, const std::string& path) {
  const std::string file = absl::StrCat(MOERL_SOURCE_DIR, "/", path);
  if (std::getenv("MOERL_UPDATE_GOLDEN") != nullptr) {
    ASSERT_TRUE(PosixEnv()->WriteFileDurably(file, text).ok());
    return;
  }
  EXPECT_EQ(PosixEnv()->ReadFile(file).value_or(""), text) << path << " is not current; run scripts/update-golden";
}

}  // namespace moerl
