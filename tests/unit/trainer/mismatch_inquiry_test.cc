#include "services/trainer/mismatch_inquiry.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace moerl::trainer {
namespace {

using testing::HasSubstr;

constexpr VersionName kVersion = {1, 4};
const std::vector<uint64_t> kSound = {10, 11, 12, 13, 14, 15, 16};  // of two layers

class MismatchInquiryTest : public testing::Test {
 protected:
  MismatchInquiryTest() {
    config_.num_layers = 2;
    config_.layer_has_experts = {false, true};
  }
  MismatchInquiry Ask(std::map<ConnectionId, std::string> workers) {
    return MismatchInquiry(7, kVersion, kSound, config_, std::move(workers));
  }
  static std::vector<uint64_t> PartingAt(size_t stage) {
    std::vector<uint64_t> digests = kSound;
    for (size_t i = stage; i < digests.size(); ++i) digests[i] += 100;
    return digests;
  }
  model::ModelConfig config_;
};

TEST_F(MismatchInquiryTest, NamesTheStageAndTheServer) {
  const char* stages[] = {"embedding",       "layer 0 attention", "layer 0 mlp", "layer 1 attention",
                          "layer 1 experts", "final norm",        "head"};
  for (size_t stage = 0; stage < kSound.size(); ++stage) {
    MismatchInquiry inquiry = Ask({{1, "sound"}, {2, "spoiled"}});
    inquiry.OnReport(1, 7, kVersion, kSound);
    EXPECT_FALSE(inquiry.is_done());
    inquiry.OnReport(2, 7, kVersion, PartingAt(stage));
    EXPECT_TRUE(inquiry.is_done());
    EXPECT_EQ(inquiry.Verdict(), std::string(stages[stage]) + " of spoiled");
  }
}

TEST_F(MismatchInquiryTest, SaysWhyNoPlaceCanBeNamed) {
  MismatchInquiry inquiry = Ask({{1, "a"}, {2, "b"}, {3, "c"}, {4, "d"}, {5, "e"}});
  inquiry.OnReport(1, 7, kVersion, kSound);
  inquiry.OnReport(2, 7, {1, 5}, {});          // newer weights
  inquiry.OnReport(3, 7, kVersion, {10, 11});  // another model
  inquiry.OnBreak(4);
  inquiry.OnReport(5, 6, kVersion, kSound);        // an answer to an earlier question
  inquiry.OnReport(9, 7, kVersion, PartingAt(0));  // was not asked
  inquiry.OnReport(1, 7, kVersion, PartingAt(0));  // has answered
  EXPECT_FALSE(inquiry.is_done());
  EXPECT_EQ(
      inquiry.Verdict(),
      "not found: asked again, 1 rollout servers compute what the trainer does, 2 have other weights by now, 1 are "
      "gone, 1 did not answer");
}

TEST_F(MismatchInquiryTest, NamesEightServersAtMost) {
  std::map<ConnectionId, std::string> workers;
  for (ConnectionId i = 0; i < 20; ++i) workers[i] = "w" + std::to_string(i);
  MismatchInquiry inquiry = Ask(workers);
  for (ConnectionId i = 0; i < 20; ++i) inquiry.OnReport(i, 7, kVersion, PartingAt(1));
  EXPECT_THAT(inquiry.Verdict(), HasSubstr("layer 0 attention of w7, and 12 more"));
}

}  // namespace
}  // namespace moerl::trainer
