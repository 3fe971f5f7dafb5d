#include "libs/model/generator.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "libs/model/training.h"
#include "tests/unit/model/test_models.h"

namespace moerl::model {
namespace {

using SampleId = std::pair<uint64_t, uint32_t>;

// Everything a sample reported, put together.
struct Collected {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  std::vector<Version> versions;
  std::vector<uint16_t> routes;
  int64_t first_route = -1, routes_end = -1;
  std::vector<std::vector<int32_t>> kept;
  FinishReason finish = FinishReason::kNone;
};

void Collect(const StepOutput& output, int64_t route_width, std::map<SampleId, Collected>* all) {
  for (const SampleOutput& s : output.samples) {
    Collected& c = (*all)[{s.request_id, s.sample_index}];
    ASSERT_EQ(c.finish, FinishReason::kNone);
    c.tokens.insert(c.tokens.end(), s.tokens.begin(), s.tokens.end());
    c.logprobs.insert(c.logprobs.end(), s.logprobs.begin(), s.logprobs.end());
    c.versions.insert(c.versions.end(), s.tokens.size(), s.version);
    if (!s.routes.empty()) {
      if (c.first_route < 0) c.first_route = c.routes_end = s.first_route;
      ASSERT_EQ(s.first_route, c.routes_end);  // every position once
      c.routes_end += static_cast<int64_t>(s.routes.size()) / route_width;
      c.routes.insert(c.routes.end(), s.routes.begin(), s.routes.end());
    }
    for (size_t i = 0; i + 1 < s.kept_offsets.size(); ++i) {
      c.kept.emplace_back(s.kept_ids.begin() + s.kept_offsets[i], s.kept_ids.begin() + s.kept_offsets[i + 1]);
    }
    c.finish = s.finish;
  }
}

std::map<SampleId, Collected> RunAll(Generator& generator, int steps_max = 10000) {
  std::map<SampleId, Collected> all;
  const ModelConfig& c = generator.weights()->config();
  const int64_t width = std::max<int64_t>(1, c.num_moe_layers() * c.top_k);
  for (int step = 0; !generator.idle(); ++step) {
    EXPECT_LT(step, steps_max) << "no end";
    if (step >= steps_max) break;
    auto output = generator.Step();
    EXPECT_TRUE(output.ok()) << output.status();
    Collect(*output, width, &all);
  }
  EXPECT_EQ(generator.load().pages_used, 0);
  return all;
}

std::unique_ptr<Generator> Make(std::shared_ptr<const Weights> weights, GeneratorOptions options = {}) {
  options.poison_free_pages = true;
  auto generator = Generator::Create(std::move(weights), {1, 0}, options);
  EXPECT_TRUE(generator.ok()) << generator.status();
  return *std::move(generator);
}

Request MakeRequest(uint64_t id, std::vector<int32_t> prompt, int n, int64_t max_new_tokens) {
  Request r;
  r.id = r.group_id = id;
  r.prompt = std::move(prompt);
  for (int i = 0; i < n; ++i) r.samples.push_back({static_cast<uint32_t>(i), {}});
  r.sampling.max_new_tokens = max_new_tokens;
  r.run_seed = 42;
  return r;
}

// The trainer's view of a generated sample: prompt and tokens, kept sets, temperature.
ForwardResult ScoreSample(const Weights& weights, const Request& r, const Collected& c) {
  std::vector<int32_t> tokens = r.prompt;
  tokens.insert(tokens.end(), c.tokens.begin(), c.tokens.end());
  PackedBatch batch = Pack({tokens});
  batch.temperature = {r.sampling.temperature};
  if (!c.kept.empty()) {
    batch.kept_offsets.assign(r.prompt.size() + 1, 0);
    for (const auto& kept : c.kept) {
      batch.kept_ids.insert(batch.kept_ids.end(), kept.begin(), kept.end());
      batch.kept_offsets.push_back(static_cast<int64_t>(batch.kept_ids.size()));
    }
  }
  auto result = Score(weights, batch, {.want_routes = true});
  EXPECT_TRUE(result.ok()) << result.status();
  return *result;
}

void ExpectSameBits(const std::vector<float>& found, const float* expected, const char* what) {
  EXPECT_EQ(std::memcmp(found.data(), expected, found.size() * sizeof(float)), 0) << what;
}

class BothTypes : public testing::TestWithParam<Compute> {};
INSTANTIATE_TEST_SUITE_P(Compute, BothTypes, testing::Values(Compute::kFp32, Compute::kBf16),
                         [](const auto& info) { return std::string(ComputeName(info.param)); });

TEST_P(BothTypes, TheTrainerSeesTheGeneratorsLogProbabilitiesBitForBit) {
  for (const ModelConfig& config :
       {SmallMoe(), SharedExpertMoe(), ClippedOlmoe(), TiedDense(), SmallMixtral(), SmallGlm()}) {
    const auto weights = MakeWeights(config, 7, GetParam());
    GeneratorOptions options;
    options.step_tokens_max = 300;
    auto generator = Make(weights, options);
    std::mt19937 random(1);
    std::vector<Request> requests;
    for (uint64_t id = 0; id < 6; ++id) {
      Request r =
          MakeRequest(id, RandomTokens(random, 1 + random() % 150, config.vocab_size), 1 + id % 4, 20 + 30 * (id % 3));
      r.sampling.temperature = id % 2 == 0 ? 1.0f : 0.7f;
      if (id == 2) r.sampling.top_k = 5;
      if (id == 3) r.sampling.top_p = 0.8f;
      if (id == 4) r.sampling.min_p = 0.05f;
      if (id == 5) r.sampling.temperature = 0.0f;
      r.want_routes = true;
      requests.push_back(r);
      ASSERT_TRUE(generator->Add(r).ok());
    }
    const auto all = RunAll(*generator);
    const int64_t width = config.num_moe_layers() * config.top_k;
    for (const Request& r : requests) {
      for (const SampleStart& s : r.samples) {
        const Collected& c = all.at({r.id, s.sample_index});
        EXPECT_EQ(c.finish, FinishReason::kLength);
        ASSERT_EQ(static_cast<int64_t>(c.tokens.size()), r.sampling.max_new_tokens);
        const ForwardResult scored = ScoreSample(*weights, r, c);
        ExpectSameBits(c.logprobs, &scored.logprobs[r.prompt.size()], std::string(ModelType(config.family)).c_str());
        if (width == 0) continue;
        const int64_t inputs = static_cast<int64_t>(r.prompt.size() + c.tokens.size()) - 1;
        EXPECT_EQ(c.first_route, 0);
        ASSERT_EQ(static_cast<int64_t>(c.routes.size()), inputs * width);
        EXPECT_TRUE(std::equal(c.routes.begin(), c.routes.end(), scored.routes.begin()));
      }
    }
  }
}

TEST_P(BothTypes, ASampleDoesNotDependOnWhatRunsBesideIt) {
  const ModelConfig config = SmallMoe();
  const auto weights = MakeWeights(config, 7, GetParam());
  std::mt19937 random(2);
  std::vector<Request> requests;
  for (uint64_t id = 0; id < 12; ++id) {
    requests.push_back(MakeRequest(id, RandomTokens(random, 1 + random() % 140, config.vocab_size), 3, 40));
    requests.back().want_routes = true;
  }
  std::map<SampleId, Collected> alone;
  for (const Request& r : requests) {
    auto generator = Make(weights);
    ASSERT_TRUE(generator->Add(r).ok());
    alone.merge(RunAll(*generator));
  }
  // Tight pools preempt, small steps chunk the prefill, few places admit in parts.
  const struct {
    int64_t pages, running, rows;
    int threads;
  } shapes[] = {{1024, 256, 2048, 1}, {8, 256, 256, 1}, {6, 5, 7, 2}, {4, 2, 3, 1}};
  for (const auto& shape : shapes) {
    GeneratorOptions options;
    options.num_pages = shape.pages;
    options.running_samples_max = shape.running;
    options.step_tokens_max = shape.rows;
    options.num_threads = shape.threads;
    auto generator = Make(weights, options);
    for (const Request& r : requests) ASSERT_TRUE(generator->Add(r).ok());
    const auto all = RunAll(*generator);
    ASSERT_EQ(all.size(), alone.size());
    for (const auto& [id, expected] : alone) {
      const Collected& found = all.at(id);
      EXPECT_EQ(found.tokens, expected.tokens);
      ExpectSameBits(found.logprobs, expected.logprobs.data(), "log-probabilities");
      EXPECT_EQ(found.routes, expected.routes);
    }
    if (shape.pages == 8) {
      EXPECT_GT(generator->load().preemptions_total, 0);
    }
  }
}

TEST(Generator, ContinuesASampleStartedElsewhere) {
  const ModelConfig config = SmallMoe();
  const auto weights = MakeWeights(config, 7, Compute::kFp32);
  std::mt19937 random(3);
  Request r = MakeRequest(9, RandomTokens(random, 70, config.vocab_size), 2, 80);
  r.want_routes = true;
  auto whole = Make(weights);
  ASSERT_TRUE(whole->Add(r).ok());
  const auto expected = RunAll(*whole);
  for (const int64_t done : {1, 5, 79}) {
    Request rest = r;
    for (SampleStart& s : rest.samples) {
      const auto& tokens = expected.at({9, s.sample_index}).tokens;
      s.tokens.assign(tokens.begin(), tokens.begin() + done);
    }
    auto other = Make(weights);
    ASSERT_TRUE(other->Add(rest).ok());
    const auto found = RunAll(*other);
    const int64_t width = config.num_moe_layers() * config.top_k;
    for (const auto& [id, e] : expected) {
      const Collected& f = found.at(id);
      EXPECT_EQ(f.tokens, std::vector<int32_t>(e.tokens.begin() + done, e.tokens.end()));
      ExpectSameBits(f.logprobs, e.logprobs.data() + done, "continued");
      EXPECT_EQ(f.first_route, 70 + done - 1);
      EXPECT_EQ(f.routes, std::vector<uint16_t>(e.routes.begin() + (70 + done - 1) * width, e.routes.end()));
    }
  }
}

TEST(Generator, StopsAtTokensAndSequencesAndCountsSharedPrefill) {
  const ModelConfig config = SmallMoe();
  const auto weights = MakeWeights(config, 7, Compute::kFp32);
  Request r = MakeRequest(1, {1, 2, 3}, 4, 60);
  auto generator = Make(weights);
  ASSERT_TRUE(generator->Add(r).ok());
  const auto free = RunAll(*generator);
  EXPECT_EQ(generator->load().prompt_tokens_total, 12);
  EXPECT_EQ(generator->load().prefix_hit_tokens_total, 9);
  const auto& tokens = free.at({1, 0}).tokens;
  r.sampling.stop_token_ids = {tokens[5]};
  r.sampling.stop_sequences = {{tokens[2], tokens[3]}};
  ASSERT_TRUE(generator->Add(r).ok());
  const auto stopped = RunAll(*generator).at({1, 0});
  EXPECT_EQ(stopped.finish, FinishReason::kStop);
  ASSERT_LE(stopped.tokens.size(), 4u);
  EXPECT_TRUE(std::equal(stopped.tokens.begin(), stopped.tokens.end(), tokens.begin()));
}

TEST(Generator, GreedyTakesTheLikeliestTokenWithItsPlainLogProbability) {
  const auto weights = MakeWeights(SmallMoe(), 7, Compute::kFp32);
  Request r = MakeRequest(1, {4, 5}, 2, 10);
  r.sampling.temperature = 0;
  auto generator = Make(weights);
  ASSERT_TRUE(generator->Add(r).ok());
  const auto all = RunAll(*generator);
  EXPECT_EQ(all.at({1, 0}).tokens, all.at({1, 1}).tokens);
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  std::vector<int32_t> tokens = r.prompt;
  const auto& c = all.at({1, 0});
  tokens.insert(tokens.end(), c.tokens.begin(), c.tokens.end());
  ASSERT_TRUE(Score(*weights, Pack({tokens}), {.top_n = 1, .top_ids = &ids, .top_logprobs = &logprobs}).ok());
  for (size_t i = 0; i < c.tokens.size(); ++i) {
    EXPECT_EQ(ids[2 + i], c.tokens[i]);
    EXPECT_EQ(logprobs[2 + i], c.logprobs[i]);
  }
}

TEST(Generator, SamplesInProportionToProbability) {
  const auto weights = MakeWeights(SmallMoe(), 7, Compute::kFp32);
  const std::vector<int32_t> prompt = {4, 5, 6};
  auto generator = Make(weights, {.running_samples_max = 2048});
  const int n = 2000;
  ASSERT_TRUE(generator->Add(MakeRequest(1, prompt, n, 1)).ok());
  std::map<int32_t, int> counts;
  std::map<int32_t, float> logprobs;
  for (const auto& [id, c] : RunAll(*generator)) {
    ++counts[c.tokens[0]];
    logprobs[c.tokens[0]] = c.logprobs[0];
  }
  for (const auto& [token, count] : counts) {
    const double p = std::exp(logprobs[token]);
    EXPECT_NEAR(count, n * p, 5 * std::sqrt(n * p * (1 - p)) + 1) << "token " << token;
  }
}

TEST(Generator, ReportsPromptLogProbabilities) {
  const ModelConfig config = SmallMoe();
  const auto weights = MakeWeights(config, 7, Compute::kBf16);
  std::mt19937 random(5);
  Request r = MakeRequest(1, RandomTokens(random, 150, config.vocab_size), 2, 3);
  r.sampling.temperature = 0.8f;
  r.want_prompt_logprobs = true;
  auto generator = Make(weights, {.running_samples_max = 16, .step_tokens_max = 40});
  ASSERT_TRUE(generator->Add(r).ok());
  std::vector<float> found;
  while (!generator->idle()) {
    auto output = generator->Step();
    for (const PromptOutput& p : output->prompts) found = p.logprobs;
  }
  PackedBatch batch = Pack({r.prompt});
  batch.temperature = {0.8f};
  const auto scored = Score(*weights, batch);
  ASSERT_EQ(found.size(), scored->logprobs.size());
  ExpectSameBits(found, scored->logprobs.data(), "prompt");
}

TEST(Generator, AbortsAndKeepsItsPages) {
  const auto weights = MakeWeights(SmallMoe(), 7, Compute::kFp32);
  auto generator = Make(weights);
  ASSERT_TRUE(generator->Add(MakeRequest(1, {1, 2}, 3, 50)).ok());
  ASSERT_TRUE(generator->Add(MakeRequest(2, {3}, 1, 5)).ok());
  ASSERT_TRUE(generator->Step().ok());
  ASSERT_TRUE(generator->Abort(1).ok());
  EXPECT_EQ(generator->Abort(1).code(), absl::StatusCode::kNotFound);
  const auto all = RunAll(*generator);
  for (uint32_t i = 0; i < 3; ++i) EXPECT_EQ(all.at({1, i}).finish, FinishReason::kAbort);
  EXPECT_EQ(all.at({2, 0}).finish, FinishReason::kLength);
}

TEST(Generator, FlipsWeightsByPolicy) {
  const ModelConfig config = SmallMoe();
  const auto old_weights = MakeWeights(config, 7, Compute::kFp32), new_weights = MakeWeights(config, 8, Compute::kFp32);
  std::mt19937 random(5);
  Request r = MakeRequest(1, RandomTokens(random, 70, config.vocab_size), 2, 20);
  const Request later = MakeRequest(2, {1, 2, 3}, 1, 5);
  for (const FlipPolicy policy : {FlipPolicy::kRecompute, FlipPolicy::kFinish, FlipPolicy::kContinue}) {
    auto generator = Make(old_weights);
    ASSERT_TRUE(generator->Add(r).ok());
    std::map<SampleId, Collected> all;
    for (int step = 0; step < 8; ++step) Collect(*generator->Step(), 4, &all);
    ASSERT_TRUE(generator->SetWeights(new_weights, {1, 1}, policy).ok());
    ASSERT_TRUE(generator->Add(later).ok());
    while (!generator->idle()) Collect(*generator->Step(), 4, &all);
    for (uint32_t i = 0; i < 2; ++i) {
      const Collected& c = all.at({1, i});
      ASSERT_EQ(c.tokens.size(), 20u);
      const ForwardResult before = ScoreSample(*old_weights, r, c), after = ScoreSample(*new_weights, r, c);
      for (size_t t = 0; t < 20; ++t) {
        const bool flipped = t >= 8 && policy != FlipPolicy::kFinish;
        EXPECT_EQ(c.versions[t], (Version{1, flipped ? 1u : 0u}));
        const float b = before.logprobs[70 + t], a = after.logprobs[70 + t];
        if (policy != FlipPolicy::kContinue || t < 8) {
          EXPECT_EQ(c.logprobs[t], flipped ? a : b);  // what its version says
        } else {
          EXPECT_NE(c.logprobs[t], a);  // old keys and values under new weights
        }
      }
    }
    EXPECT_EQ(all.at({2, 0}).versions[0], (Version{1, 1}));
    ExpectSameBits(all.at({2, 0}).logprobs, &ScoreSample(*new_weights, later, all.at({2, 0})).logprobs[3], "later");
  }
}

TEST(Generator, RefusesWhatItCannotServe) {
  const ModelConfig config = SmallMoe();
  const auto weights = MakeWeights(config, 7, Compute::kFp32);
  auto generator =
      Make(weights, {.num_pages = 2, .running_samples_max = 4, .step_tokens_max = 64, .waiting_requests_max = 1});
  const auto error = [&](Request r) {
    const absl::Status status = generator->Add(std::move(r));
    return status.ok() ? "accepted" : std::string(status.message());
  };
  const auto contains = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(contains(error(MakeRequest(1, {}, 1, 5)), "prompt: expected at least one token"));
  EXPECT_TRUE(contains(error(MakeRequest(1, {37}, 1, 5)), "prompt[0]: expected an id below 37, found 37"));
  EXPECT_TRUE(contains(error(MakeRequest(1, {-1}, 1, 5)), "found -1"));
  EXPECT_TRUE(contains(error(MakeRequest(1, std::vector<int32_t>(1020, 1), 1, 5)), "exceed the context of 1024"));
  EXPECT_TRUE(contains(error(MakeRequest(1, {1}, 0, 5)), "samples: expected 1"));
  EXPECT_TRUE(contains(error(MakeRequest(1, std::vector<int32_t>(100, 1), 1, 29)), "needs 3 KV pages, the pool has 2"));
  Request r = MakeRequest(1, {1}, 1, 5);
  r.sampling.top_p = 0;
  EXPECT_TRUE(contains(error(r), "top_p"));
  r = MakeRequest(1, {1}, 1, 5);
  r.samples[0].tokens = {1, 2, 3, 4, 5};
  EXPECT_TRUE(contains(error(r), "already at its end"));
  r = MakeRequest(1, {1}, 2, 5);
  r.samples[1].sample_index = 0;
  EXPECT_TRUE(contains(error(r), "given twice"));
  EXPECT_EQ(error(MakeRequest(1, {1}, 1, 5)), "accepted");
  EXPECT_TRUE(contains(error(MakeRequest(2, {1}, 1, 5)), "queued"));
  const auto bf16 = MakeWeights(config, 7, Compute::kBf16);
  EXPECT_FALSE(generator->SetWeights(bf16, {1, 1}, FlipPolicy::kRecompute).ok());
}

}  // namespace
}  // namespace moerl::model
