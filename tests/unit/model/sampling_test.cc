#include "libs/model/sampling.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>

namespace moerl::model {
namespace {

TEST(Philox, GivesThePublishedVectors) {
  // Random123's known answers for philox4x32 with 10 rounds.
  EXPECT_EQ(Philox({0, 0, 0, 0}, 0, 0), (PhiloxBlock{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t ones = 0xffffffff;
  EXPECT_EQ(Philox({ones, ones, ones, ones}, ones, ones),
            (PhiloxBlock{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0),
            (PhiloxBlock{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(UniformRandom, DependsOnEveryPartOfItsKey) {
  std::set<double> seen;
  for (uint64_t i = 0; i < 3; ++i) {
    seen.insert(UniformRandom({i + 1, 0, 0}, RandomPurpose::kSampling, 0));
    seen.insert(UniformRandom({0, i + 1, 0}, RandomPurpose::kSampling, 0));
    seen.insert(UniformRandom({0, 0, static_cast<uint32_t>(i + 1)}, RandomPurpose::kSampling, 0));
    seen.insert(UniformRandom({0, 0, 0}, RandomPurpose::kSampling, i + 1));
    seen.insert(UniformRandom({0, (i + 1) << 32, 0}, RandomPurpose::kTask, 0));
  }
  EXPECT_EQ(seen.size(), 15u);
  double sum = 0;
  for (uint64_t i = 0; i < 10000; ++i) {
    const double u = UniformRandom({1, 2, 3}, RandomPurpose::kSampling, i);
    ASSERT_TRUE(u >= 0 && u < 1);
    sum += u;
  }
  EXPECT_NEAR(sum / 10000, 0.5, 0.02);
}

TEST(KeptIds, FiltersInOrderAndBreaksTiesByTheLowestId) {
  const std::vector<float> z = {1.0f, 3.0f, 2.0f, 3.0f, 0.0f};
  SamplingParams p;
  p.top_k = 1;
  EXPECT_EQ(KeptIdsOf(z, p), (std::vector<int32_t>{1}));
  p.top_k = 3;
  EXPECT_EQ(KeptIdsOf(z, p), (std::vector<int32_t>{1, 2, 3}));
  p.top_k = 99;
  EXPECT_EQ(KeptIdsOf(z, p).size(), 5u);
  // Probabilities: e^z over 52.0: .052 .386 .142 .386 .019.
  p.top_k = 0;
  p.top_p = 0.38f;
  EXPECT_EQ(KeptIdsOf(z, p), (std::vector<int32_t>{1}));
  p.top_p = 0.5f;
  EXPECT_EQ(KeptIdsOf(z, p), (std::vector<int32_t>{1, 3}));
  p.top_p = 0.95f;
  EXPECT_EQ(KeptIdsOf(z, p), (std::vector<int32_t>{0, 1, 2, 3}));
  // top_p sees what top_k left, renormalised: .5 each.
  p.top_k = 2;
  p.top_p = 0.45f;
  EXPECT_EQ(KeptIdsOf(z, p), (std::vector<int32_t>{1}));
  p = SamplingParams();
  p.min_p = 0.3f;  // e^-1 = .37 stays, e^-2 = .14 goes
  EXPECT_EQ(KeptIdsOf(z, p), (std::vector<int32_t>{1, 2, 3}));
}

// Frequencies of draws at evenly spread u are the probabilities to within one draw's share.
TEST(DrawId, DrawsInProportion) {
  const int vocab = 700, draws = 200'000;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> z(vocab);
  for (float& x : z) x = normal(random);
  const float max = *std::max_element(z.begin(), z.end());
  std::vector<int32_t> thirds;
  for (int i = 0; i < vocab; i += 3) thirds.push_back(i);
  for (const std::vector<int32_t>& kept : {std::vector<int32_t>(), thirds}) {
    std::vector<double> p(vocab, 0.0);
    double total = 0;
    for (int i = 0; i < vocab; ++i) {
      if (kept.empty() || i % 3 == 0) total += p[i] = std::exp(static_cast<double>(z[i]) - max);
    }
    std::vector<int> counts(vocab);
    const float log_sum = static_cast<float>(std::log(total));
    for (int i = 0; i < draws; ++i) ++counts[DrawId(z, kept, max, log_sum, (i + 0.5) / draws)];
    for (int i = 0; i < vocab; ++i) EXPECT_NEAR(counts[i], draws * p[i] / total, 2.0) << i;
  }
}

TEST(DrawId, NeverDrawsWhatHasNoProbability) {
  std::vector<float> z(600, -INFINITY);
  z[300] = 0.0f;
  for (const double u : {0.0, 0.5, 0x1.fffffffffffffp-1}) EXPECT_EQ(DrawId(z, {}, 0.0f, 0.0f, u), 300);
}

TEST(SamplingParams, NamesTheFieldThatIsOutOfRange) {
  const auto error = [](auto change) {
    SamplingParams p;
    change(p);
    const absl::Status status = ValidateSamplingParams(p, 10);
    return status.ok() ? "accepted" : std::string(status.message());
  };
  const auto contains = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  EXPECT_EQ(error([](SamplingParams&) {}), "accepted");
  EXPECT_TRUE(contains(error([](SamplingParams& p) { p.temperature = -1; }), "temperature"));
  EXPECT_TRUE(contains(error([](SamplingParams& p) { p.temperature = NAN; }), "temperature"));
  EXPECT_TRUE(contains(error([](SamplingParams& p) { p.top_p = 1.5f; }), "top_p: expected a number in (0, 1]"));
  EXPECT_TRUE(contains(error([](SamplingParams& p) { p.min_p = 1.0f; }), "min_p"));
  EXPECT_TRUE(contains(error([](SamplingParams& p) { p.top_k = -1; }), "top_k"));
  EXPECT_TRUE(contains(error([](SamplingParams& p) { p.max_new_tokens = 0; }), "max_new_tokens"));
  EXPECT_TRUE(
      contains(error([](SamplingParams& p) { p.stop_token_ids = {10}; }), "stop_token_ids: expected ids below 10"));
  EXPECT_TRUE(contains(error([](SamplingParams& p) { p.stop_sequences = {{}}; }), "stop_sequences"));
}

}  // namespace
}  // namespace moerl::model
