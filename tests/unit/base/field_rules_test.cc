#include "libs/base/field_rules.h"

#include <gtest/gtest.h>

#include <cmath>

#include "moerl/v1/config.pb.h"
#include "moerl/v1/trajectory.pb.h"
#include "moerl/v1/weight_sync.pb.h"

namespace moerl {
namespace {

std::string ErrorOf(const google::protobuf::Message& message) { return std::string(CheckRules(message).message()); }

v1::SamplingParams LegalSampling() {
  v1::SamplingParams sampling;
  sampling.set_max_new_tokens(8);
  return sampling;
}

TEST(FieldRules, LegalMessagesPass) { EXPECT_TRUE(CheckRules(LegalSampling()).ok()); }

TEST(FieldRules, ARequiredFieldMustBeGiven) {
  EXPECT_EQ(ErrorOf(v1::SamplingParams()), "max_new_tokens: expected an integer from 1 to 1000000, found nothing");
}

TEST(FieldRules, AnOptionalFieldMayBeAbsentButNotIllegal) {
  v1::SamplingParams sampling = LegalSampling();
  sampling.set_temperature(-1);
  EXPECT_EQ(ErrorOf(sampling), "temperature: expected a number from 0 to 100, found -1");
  sampling.set_temperature(std::nanf(""));
  EXPECT_EQ(ErrorOf(sampling), "temperature: expected a number from 0 to 100, found nan");
  sampling.set_temperature(0);
  sampling.set_top_p(0);
  EXPECT_EQ(ErrorOf(sampling), "top_p: expected a number above 0 and up to 1, found 0");
}

TEST(FieldRules, ZeroWithoutPresenceStandsForTheDefault) {
  v1::WarmStartConfig warm_start;  // batch_size: from 1, default 64
  EXPECT_TRUE(CheckRules(warm_start).ok()) << ErrorOf(warm_start);
  warm_start.set_batch_size(100000);
  EXPECT_EQ(ErrorOf(warm_start), "batch_size: expected an integer from 1 to 65536, found 100000");
}

TEST(FieldRules, ListsAreCountedAndTheirMessagesChecked) {
  v1::SamplingParams sampling = LegalSampling();
  for (int i = 0; i < 65; ++i) sampling.add_stop_token_ids(i);
  EXPECT_EQ(ErrorOf(sampling),
            "stop_token_ids: expected a list of at most 64 elements, each an integer, found 65 elements");
  sampling.clear_stop_token_ids();
  sampling.add_stop_sequences()->add_token_ids(1);
  sampling.add_stop_sequences();
  EXPECT_EQ(ErrorOf(sampling),
            "stop_sequences[1].token_ids: expected a list of 1 to 64 elements, each an integer, found 0 elements");
}

TEST(FieldRules, AnUnknownEnumNumberIsIllegal) {
  v1::ModelConfig model;
  model.set_compute(static_cast<v1::Compute>(9));
  EXPECT_EQ(ErrorOf(model), "compute: expected one of fp32, bf16, found 9");
}

TEST(FieldRules, TextIsMeasuredInBytes) {
  v1::Config config;
  config.set_name(std::string(64, 'x'));
  EXPECT_EQ(ErrorOf(config),
            "name: expected text of 1 to 63 bytes, found \"" + std::string(60, 'x') + "... (64 bytes)\"");
}

}  // namespace
}  // namespace moerl
