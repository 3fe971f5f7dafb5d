#include "services/rollout/leased_group.h"

#include <gtest/gtest.h>

namespace moerl::rollout {
namespace {

rl::TokenRun Tokens(const std::vector<int32_t>& ids, const std::vector<uint8_t>& trainable) {
  rl::TokenRun run;
  run.ids = ids;
  run.trainable = trainable;
  run.logprobs.resize(ids.size());
  run.versions.resize(ids.size());
  return run;
}

TEST(LeasedGroup, KnowsHowASampleHasEnded) {
  model::SamplingParams sampling;
  sampling.max_new_tokens = 5;
  sampling.stop_token_ids = {9};
  sampling.stop_sequences = {{4, 4}};
  EXPECT_EQ(EndOf(Tokens({}, {}), 3, sampling, 100), std::nullopt);
  EXPECT_EQ(EndOf(Tokens({1, 9}, {1, 1}), 3, sampling, 100), model::FinishReason::kStop);
  EXPECT_EQ(EndOf(Tokens({9, 1}, {1, 1}), 3, sampling, 100), std::nullopt);
  EXPECT_EQ(EndOf(Tokens({1, 4, 4}, {1, 1, 1}), 3, sampling, 100), model::FinishReason::kStop);
  EXPECT_EQ(EndOf(Tokens({1, 2, 3, 4, 5}, {1, 1, 1, 1, 1}), 3, sampling, 100), model::FinishReason::kLength);
  EXPECT_EQ(EndOf(Tokens({1, 2}, {1, 1}), 3, sampling, 5), model::FinishReason::kLength) << "the context is full";
  EXPECT_EQ(EndOf(Tokens({1, 9}, {1, 0}), 3, sampling, 100), std::nullopt) << "the environment wrote the 9";
}

TEST(LeasedGroup, TellsTurnsApartByWhoWroteThem) {
  const auto turns = TranscriptOf({1, 2}, Tokens({3, 4, 5, 6, 7}, {1, 1, 0, 1, 1}), true);
  ASSERT_EQ(turns.size(), 4u);
  EXPECT_EQ(turns[0].token_ids, (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(turns[1].token_ids, (std::vector<int32_t>{3, 4}));
  EXPECT_TRUE(turns[1].is_action);
  EXPECT_FALSE(turns[1].is_truncated);
  EXPECT_EQ(turns[2].token_ids, (std::vector<int32_t>{5}));
  EXPECT_FALSE(turns[2].is_action);
  EXPECT_EQ(turns[3].token_ids, (std::vector<int32_t>{6, 7}));
  EXPECT_TRUE(turns[3].is_truncated);
}

TEST(LeasedGroup, GivesEachTokenTheRoutesOfThePositionItWasDrawnFrom) {
  model::SampleOutput output;
  output.first_token = 1;
  output.tokens = {50, 51};
  output.logprobs = {-1, -2};
  output.version = {3, 4};
  output.first_route = 1;  // positions 1..4; with a prompt of 3, tokens 1 and 2 come from positions 3 and 4
  output.routes = {10, 11, 20, 21, 30, 31, 40, 41};
  const RouteFormat bytes{.ids_per_token = 2, .bytes_per_id = 1};
  EXPECT_EQ(RunOf(output, 3, &bytes).routes, std::string({30, 31, 40, 41}));
  const RouteFormat words{.ids_per_token = 2, .bytes_per_id = 2};
  EXPECT_EQ(RunOf(output, 3, &words).routes, std::string({30, 0, 31, 0, 40, 0, 41, 0}));
  const rl::TokenRun run = RunOf(output, 3, nullptr);
  EXPECT_TRUE(run.routes.empty());
  EXPECT_EQ(run.versions, std::vector<VersionName>(2, {3, 4}));
}

TEST(LeasedGroup, TakesUnsetSamplingFieldsAsTheirDefaults) {
  v1::SamplingParams proto;
  proto.set_max_new_tokens(7);
  proto.add_stop_sequences()->add_token_ids(3);
  const model::SamplingParams params = SamplingFromProto(proto);
  EXPECT_EQ(params.temperature, 1.0f);
  EXPECT_EQ(params.top_p, 1.0f);
  EXPECT_EQ(params.top_k, 0);
  EXPECT_EQ(params.max_new_tokens, 7);
  EXPECT_EQ(params.stop_sequences, (std::vector<std::vector<int32_t>>{{3}}));
  proto.set_temperature(0);
  EXPECT_EQ(SamplingFromProto(proto).temperature, 0.0f);
}

}  // namespace
}  // namespace moerl::rollout
