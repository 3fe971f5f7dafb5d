#include "libs/model/ep_exchange.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <thread>

#include "absl/strings/match.h"
#include "libs/fabric/in_process_fabric.h"
#include "libs/model/generator.h"
#include "libs/model/rank_scorer.h"
#include "libs/model/training.h"
#include "tests/unit/model/test_models.h"

namespace moerl::model {
namespace {

// Every shape must give the bits of one rank: 2 and 4 ranks on one node and on several, and 3, which is uneven.
const std::vector<std::vector<int>> kShapes = {{0}, {0, 0}, {0, 1}, {0, 0, 1}, {0, 0, 1, 1}, {0, 1, 2}};

void OnEveryRank(const std::vector<int>& node_of, const std::function<void(ep::Group&)>& body) {
  fabric::InProcessFabric fabric({.node_of = node_of});
  std::vector<fabric::Endpoint> endpoints;
  for (int rank = 0; rank < fabric.size(); ++rank) endpoints.push_back(fabric.Open(rank));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < fabric.size(); ++rank) {
    threads.emplace_back([&, rank] {
      ep::Group::Options options;
      options.spin = absl::ZeroDuration();
      ep::Group group(std::move(endpoints[rank]), options);
      body(group);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

std::unique_ptr<ExpertExchange> NewExchange(const ModelConfig& config, Compute compute, ep::Group& group) {
  auto map = ep::ExpertMap::Aligned(group.membership(), static_cast<int>(config.num_experts));
  MOERL_CHECK(map.ok());
  auto exchange = MakeEpExchange(config, compute, &group, *map);
  MOERL_CHECK(exchange.ok());
  return *std::move(exchange);
}

ModelConfig SixteenExperts() {
  ModelConfig config = SmallMoe();
  config.num_experts = 16;
  config.top_k = 5;
  return config;
}

// GLM-4.5's router and shared expert over the same experts.
ModelConfig SixteenGlmExperts() {
  ModelConfig config = SmallGlm();
  config.num_experts = 16;
  config.top_k = 5;
  config.layer_has_experts = {true, true};
  config.intermediate_size = 0;
  return config;
}

std::vector<std::vector<int32_t>> Sequences(const ModelConfig& config) {
  std::mt19937 random(3);
  std::vector<std::vector<int32_t>> sequences;
  for (const int length : {9, 17, 4, 30, 12}) sequences.push_back(RandomTokens(random, length, config.vocab_size));
  return sequences;
}

// The sequences that rank `rank` of `size` works on: neighbours, so that (rank, row) is the order of one rank.
PackedBatch Share(const std::vector<std::vector<int32_t>>& all, int rank, int size) {
  const size_t begin = all.size() * rank / size, end = all.size() * (rank + 1) / size;
  return Pack({all.begin() + begin, all.begin() + end});
}

template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Compute type, and whether the model is the GLM-4.5.
class EpExchangeTest : public testing::TestWithParam<std::tuple<Compute, bool>> {
 protected:
  Compute compute() const { return std::get<0>(GetParam()); }
  ModelConfig Model() const { return std::get<1>(GetParam()) ? SixteenGlmExperts() : SixteenExperts(); }
};

// Log-probabilities and the experts' gradients, which see all ranks' rows in one order, are equal to the bit; so are
// the gradients of the activations, hence each rank's share of the replicated gradients.
TEST_P(EpExchangeTest, ForwardAndBackwardGiveTheBitsOfOneRank) {
  const ModelConfig config = Model();
  const auto sequences = Sequences(config);
  const TensorSet tensors = RandomEverything(config, 5);
  std::vector<float> want_logprobs;
  std::vector<std::vector<float>> want_gradients(config.num_experts);
  for (const std::vector<int>& shape : kShapes) {
    const int size = static_cast<int>(shape.size());
    std::vector<std::vector<float>> logprobs(size), gradients(config.num_experts);
    OnEveryRank(shape, [&](ep::Group& group) {
      const auto exchange = NewExchange(config, compute(), group);
      TrainerModelOptions options;
      options.compute = compute();
      options.exchange = exchange.get();
      options.recompute = size % 2 == 0;
      const auto model = TrainerModel::Create(config, tensors.views(), options);
      ASSERT_TRUE(model.ok()) << model.status();
      const PackedBatch batch = Share(sequences, group.rank(), size);
      const auto forward = (*model)->Forward(batch);
      ASSERT_TRUE(forward.ok()) << forward.status();
      logprobs[group.rank()] = forward->logprobs;
      BackwardInput backward;
      for (const float logprob : forward->logprobs) backward.d_logprobs.push_back(0.1f * logprob);
      ASSERT_TRUE((*model)->Backward(backward).ok());
      for (const int expert : exchange->local_experts()) {
        for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
          for (int layer = 0; layer < config.num_layers; ++layer) {
            const auto gradient =
                (*model)->gradient(absl::StrCat("model.layers.", layer, ".mlp.experts.", expert, ".", name, ".weight"));
            ASSERT_FALSE(gradient.empty());
            gradients[expert].insert(gradients[expert].end(), gradient.begin(), gradient.end());
          }
        }
      }
    });
    std::vector<float> all;
    for (const auto& share : logprobs) all.insert(all.end(), share.begin(), share.end());
    if (size == 1) {
      want_logprobs = all;
      want_gradients = gradients;
    }
    EXPECT_TRUE(SameBits(all, want_logprobs)) << size << " ranks";
    for (int expert = 0; expert < config.num_experts; ++expert) {
      EXPECT_TRUE(SameBits(gradients[expert], want_gradients[expert])) << size << " ranks, expert " << expert;
    }
  }
  // Against the local exchange too, which is another implementation of the combine tree.
  TrainerModelOptions options;
  options.compute = compute();
  const auto model = TrainerModel::Create(config, tensors.views(), options);
  ASSERT_TRUE(model.ok());
  const auto forward = (*model)->Forward(Pack(sequences));
  ASSERT_TRUE(forward.ok());
  EXPECT_TRUE(SameBits(forward->logprobs, want_logprobs));
}

// A rank without sequences takes part in every layer.
TEST_P(EpExchangeTest, ARankWithoutWorkTakesPart) {
  const ModelConfig config = Model();
  const auto sequences = Sequences(config);
  const TensorSet tensors = RandomEverything(config, 5);
  std::vector<float> together(1);
  OnEveryRank({0, 1}, [&](ep::Group& group) {
    const auto exchange = NewExchange(config, compute(), group);
    TrainerModelOptions options;
    options.compute = compute();
    options.exchange = exchange.get();
    const auto model = TrainerModel::Create(config, tensors.views(), options);
    ASSERT_TRUE(model.ok()) << model.status();
    const auto forward = (*model)->Forward(group.rank() == 0 ? Pack(sequences) : Pack({}));
    ASSERT_TRUE(forward.ok()) << forward.status();
    BackwardInput backward;
    backward.d_logprobs.assign(forward->logprobs.size(), 1.0f);
    ASSERT_TRUE((*model)->Backward(backward).ok());
    if (group.rank() == 0) together = forward->logprobs;
  });
  TrainerModelOptions options;
  options.compute = compute();
  const auto model = TrainerModel::Create(config, tensors.views(), options);
  EXPECT_TRUE(SameBits((*model)->Forward(Pack(sequences))->logprobs, together));
}

// Tokens, log-probabilities and routes of every request, wherever it is generated. Ranks step together; those that are
// done take part with zero rows.
TEST_P(EpExchangeTest, GenerationGivesTheBitsOfOneRank) {
  constexpr int kRequests = 6, kSteps = 40;
  const ModelConfig config = Model();
  const TensorSet tensors = RandomEverything(config, 5);
  struct Generated {
    std::vector<int32_t> tokens;
    std::vector<float> logprobs;
    std::vector<uint16_t> routes;
  };
  std::vector<Generated> want;
  for (const std::vector<int>& shape : kShapes) {
    const int size = static_cast<int>(shape.size());
    std::vector<Generated> found(kRequests);
    OnEveryRank(shape, [&](ep::Group& group) {
      const auto exchange = NewExchange(config, compute(), group);
      WeightsOptions options;
      options.compute = compute();
      options.local_experts.assign(exchange->local_experts().begin(), exchange->local_experts().end());
      const auto weights = Weights::FromTensors(config, tensors.views(), options);
      ASSERT_TRUE(weights.ok()) << weights.status();
      auto generator = Generator::Create(*weights, {1, 0}, {.exchange = exchange.get()});
      ASSERT_TRUE(generator.ok()) << generator.status();
      std::mt19937 random(9);
      for (int i = 0; i < kRequests; ++i) {
        Request r;
        r.id = r.group_id = i;
        r.prompt = RandomTokens(random, 1 + i * 20, config.vocab_size);
        r.samples.resize(1);
        r.sampling.max_new_tokens = 10 + 5 * i;
        r.want_routes = true;
        if (i % size != group.rank()) continue;
        ASSERT_TRUE((*generator)->Add(std::move(r)).ok());
      }
      for (int step = 0; step < kSteps; ++step) {
        const auto output = (*generator)->Step();
        ASSERT_TRUE(output.ok()) << output.status();
        for (const SampleOutput& s : output->samples) {
          Generated& g = found[s.request_id];
          g.tokens.insert(g.tokens.end(), s.tokens.begin(), s.tokens.end());
          g.logprobs.insert(g.logprobs.end(), s.logprobs.begin(), s.logprobs.end());
          g.routes.insert(g.routes.end(), s.routes.begin(), s.routes.end());
        }
      }
      EXPECT_TRUE((*generator)->idle());
    });
    if (size == 1) want = found;
    for (int i = 0; i < kRequests; ++i) {
      EXPECT_EQ(found[i].tokens.size(), 10u + 5 * i);
      EXPECT_EQ(found[i].tokens, want[i].tokens) << size << " ranks, request " << i;
      EXPECT_TRUE(SameBits(found[i].logprobs, want[i].logprobs)) << size << " ranks, request " << i;
      EXPECT_EQ(found[i].routes, want[i].routes) << size << " ranks, request " << i;
    }
  }
}

// What `moerl logprobs --ep-size` prints: five sequences, in rounds of as many as there are ranks.
TEST_P(EpExchangeTest, ScoringOnRanksOfOneProcessGivesTheBitsOfOneRank) {
  const ModelConfig config = Model();
  const auto sequences = Sequences(config);
  const TensorSet tensors = RandomEverything(config, 5);
  std::vector<std::vector<float>> want;
  for (const int size : {1, 2, 3, 4}) {
    const auto scorer = RankScorer::Create(config, compute(), size, [&](const WeightsOptions& options) {
      EXPECT_EQ(options.local_experts.empty(), size == 1);
      return Weights::FromTensors(config, tensors.views(), options);
    });
    ASSERT_TRUE(scorer.ok()) << scorer.status();
    std::vector<std::vector<float>> found;
    for (size_t begin = 0; begin < sequences.size(); begin += size) {
      std::vector<PackedBatch> batches;
      for (size_t i = begin; i < std::min(begin + size, sequences.size()); ++i) batches.push_back(Pack({sequences[i]}));
      const auto results = (*scorer)->Score(batches, std::vector<ScoreOptions>(batches.size()));
      ASSERT_TRUE(results.ok()) << results.status();
      for (const ForwardResult& result : *results) found.push_back(result.logprobs);
    }
    if (size == 1) want = found;
    ASSERT_EQ(found.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i) {
      EXPECT_TRUE(SameBits(found[i], want[i])) << size << " ranks, sequence " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, EpExchangeTest,
                         testing::Combine(testing::Values(Compute::kFp32, Compute::kBf16), testing::Bool()),
                         [](const auto& info) {
                           return absl::StrCat(ComputeName(std::get<0>(info.param)),
                                               std::get<1>(info.param) ? "_glm4_moe" : "_qwen3_moe");
                         });

TEST(RankScorer, NamesTheRankOfABadBatchBeforeAnyRankWaits) {
  const ModelConfig config = SixteenExperts();
  const TensorSet tensors = RandomEverything(config, 5);
  const auto load = [&](const WeightsOptions& options) {
    return Weights::FromTensors(config, tensors.views(), options);
  };
  const auto scorer = RankScorer::Create(config, Compute::kFp32, 2, load);
  ASSERT_TRUE(scorer.ok()) << scorer.status();
  const std::vector<PackedBatch> batches = {Pack({{1, 2}}), Pack({{1, 1 << 20}})};
  const auto results = (*scorer)->Score(batches, std::vector<ScoreOptions>(2));
  EXPECT_EQ(results.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StartsWith(results.status().message(), "rank 1: ")) << results.status();
}

TEST(RankScorer, RefusesMoreRanksThanExperts) {
  const auto load = [](const WeightsOptions&) -> absl::StatusOr<std::shared_ptr<const Weights>> {
    return absl::InternalError("not asked for");
  };
  for (const auto& [ranks, experts] : {std::make_pair(17, 16), {2, 0}, {0, 16}}) {
    ModelConfig config = SixteenExperts();
    config.num_experts = experts;
    EXPECT_EQ(RankScorer::Create(config, Compute::kFp32, ranks, load).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

TEST(EpExchange, RefusesAMapOfAnotherNumberOfExperts) {
  OnEveryRank({0}, [](ep::Group& group) {
    const auto exchange =
        MakeEpExchange(SixteenExperts(), Compute::kFp32, &group, *ep::ExpertMap::Aligned(group.membership(), 8));
    EXPECT_EQ(exchange.status().message(), "model: the expert map places 8 experts, the model has 16");
  });
}

}  // namespace
}  // namespace moerl::model
