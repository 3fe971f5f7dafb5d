// The row rule over the whole model: a token's log-probability has the same bits alone, among 64 other sequences at any
// place, prefilled in chunks of any size, decoded token by token, with two threads, in the training forward, and on
// every instruction set.
//   --cases=N        random cases for each compute type (1000)
//   --first-case=S   the first one (0): replays a failure
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <string_view>

#include "libs/model/generator.h"
#include "libs/model/training.h"
#include "tests/unit/model/test_models.h"

namespace moerl::model {
namespace {

uint64_t num_cases = 1000, first_case = 0;

constexpr int kOthers = 64;
// Every so many cases also run the slower instruction sets and the trainer.
constexpr uint64_t kEveryIsa = 8;

struct Case {
  ModelConfig config;
  Compute compute;
  std::vector<int32_t> prompt;
  int64_t new_tokens;
  float temperature;
  int num_samples;
  std::vector<std::vector<int32_t>> others;
};

// Three attention blocks and pages at least, GQA, sizes that are multiples of nothing, an odd vocabulary.
Case MakeCase(uint64_t number, Compute compute, std::mt19937& random) {
  const auto between = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % (high - low + 1));
  };
  Case c;
  const ModelConfig families[] = {SmallMoe(),  SharedExpertMoe(), ClippedOlmoe(),
                                  TiedDense(), SmallMixtral(),    SmallGlm()};
  c.config = families[number % 6];
  c.config.vocab_size = 2 * between(5, 30) + 1;
  c.config.hidden_size = between(17, 45);
  c.config.num_kv_heads = between(1, 2);
  c.config.num_heads = c.config.num_kv_heads * between(1, 3);
  c.config.head_dim = 2 * between(2, 9);
  if (c.config.num_experts > 0) {
    c.config.num_experts = between(2, 11);
    c.config.top_k = between(1, std::min<int64_t>(4, c.config.num_experts));
    c.config.moe_intermediate_size = between(5, 37);
    if (c.config.family == Family::kGlm4Moe) {
      c.config.shared_expert_intermediate_size = c.config.moe_intermediate_size * between(1, 2);
      c.config.head_dim = 4 * between(1, 5);  // half of it turns, an even number of columns
      c.config.norm_topk_prob = between(0, 1) == 1;
    }
  }
  c.compute = compute;
  c.new_tokens = between(1, 70);
  c.prompt = RandomTokens(random, between(200 - c.new_tokens, 260 - c.new_tokens), c.config.vocab_size);
  const float temperatures[] = {1.0f, 0.6f, 1.7f};
  c.temperature = temperatures[random() % 3];
  c.num_samples = static_cast<int>(between(1, 3));
  for (int i = 0; i < kOthers; ++i) c.others.push_back(RandomTokens(random, between(1, 12), c.config.vocab_size));
  return c;
}

struct Generated {
  std::vector<std::vector<int32_t>> tokens;
  std::vector<std::vector<float>> logprobs;
  std::vector<float> prompt_logprobs;
  bool operator==(const Generated&) const = default;
};

// Samples of the case's prompt; `busy` adds other requests, `rows` bounds a step and so the prefill chunks.
Generated Generate(const Case& c, std::shared_ptr<const Weights> weights, int64_t rows, bool busy, int threads) {
  GeneratorOptions options;
  options.num_pages = busy ? 64 : 16;
  options.step_tokens_max = rows;
  options.running_samples_max = std::min<int64_t>(rows, 16);
  options.num_threads = threads;
  options.poison_free_pages = true;
  auto generator = Generator::Create(std::move(weights), {1, 0}, options);
  EXPECT_TRUE(generator.ok()) << generator.status();
  Generated out;
  const auto add = [&](uint64_t id, const std::vector<int32_t>& prompt, int n, int64_t new_tokens) {
    Request r;
    r.id = r.group_id = id;
    r.prompt = prompt;
    for (int i = 0; i < n; ++i) r.samples.push_back({static_cast<uint32_t>(i), {}});
    r.sampling.max_new_tokens = new_tokens;
    r.sampling.temperature = c.temperature;
    r.run_seed = 5;
    r.want_prompt_logprobs = true;
    EXPECT_TRUE((*generator)->Add(std::move(r)).ok());
  };
  if (busy) {
    for (int i = 0; i < 8; ++i) add(100 + i, c.others[i], 2, 3);  // its pages are reused
    EXPECT_TRUE((*generator)->Step().ok());
  }
  add(1, c.prompt, c.num_samples, c.new_tokens);
  if (busy) {
    for (int i = 8; i < 16; ++i) add(100 + i, c.others[i], 1, 20);
  }
  out.tokens.resize(c.num_samples);
  out.logprobs.resize(c.num_samples);
  while (!(*generator)->idle()) {
    auto output = (*generator)->Step();
    EXPECT_TRUE(output.ok()) << output.status();
    for (const PromptOutput& p : output->prompts) {
      if (p.request_id == 1) out.prompt_logprobs = p.logprobs;
    }
    for (const SampleOutput& s : output->samples) {
      if (s.request_id != 1) continue;
      auto& tokens = out.tokens[s.sample_index];
      auto& logprobs = out.logprobs[s.sample_index];
      tokens.insert(tokens.end(), s.tokens.begin(), s.tokens.end());
      logprobs.insert(logprobs.end(), s.logprobs.begin(), s.logprobs.end());
    }
  }
  return out;
}

bool SameBits(absl::Span<const float> a, absl::Span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void RunCase(uint64_t number, Compute compute) {
  SCOPED_TRACE(testing::Message() << "case " << number << " " << ComputeName(compute) << ": --first-case=" << number
                                  << " --cases=1");
  std::mt19937 random(static_cast<uint32_t>(number * 2 + (compute == Compute::kBf16)));
  const Case c = MakeCase(number, compute, random);
  const TensorSet parameters = RandomEverything(c.config, number);
  auto made = Weights::FromTensors(c.config, parameters.views(), {.compute = compute});
  ASSERT_TRUE(made.ok()) << made.status();
  const std::shared_ptr<const Weights> weights = *made;

  // Decoded: alone in one piece, then chunked among others.
  const Generated alone = Generate(c, weights, 1024, false, 1);
  const int64_t rows = 1 + static_cast<int64_t>(random() % 90);
  const Generated chunked = Generate(c, weights, rows, true, 1 + static_cast<int>(random() % 2));
  ASSERT_EQ(alone.tokens, chunked.tokens) << "chunks of " << rows;
  ASSERT_TRUE(SameBits(alone.prompt_logprobs, chunked.prompt_logprobs)) << "prompt, chunks of " << rows;

  // Scored: alone, and in a random place among 64 others.
  for (int sample = 0; sample < c.num_samples; ++sample) {
    ASSERT_TRUE(SameBits(alone.logprobs[sample], chunked.logprobs[sample])) << "decoded, chunks of " << rows;
    std::vector<int32_t> sequence = c.prompt;
    sequence.insert(sequence.end(), alone.tokens[sample].begin(), alone.tokens[sample].end());
    PackedBatch single = Pack({sequence});
    single.temperature = {c.temperature};
    auto scored = Score(*weights, single);
    ASSERT_TRUE(scored.ok()) << scored.status();
    const absl::Span<const float> expected = scored->logprobs;
    ASSERT_TRUE(SameBits(expected.subspan(0, c.prompt.size()), alone.prompt_logprobs)) << "prefill";
    ASSERT_TRUE(SameBits(expected.subspan(c.prompt.size()), alone.logprobs[sample])) << "decode";

    std::vector<std::vector<int32_t>> sequences = c.others;
    const size_t place = random() % (sequences.size() + 1);
    sequences.insert(sequences.begin() + place, sequence);
    PackedBatch packed = Pack(sequences);
    packed.temperature.assign(sequences.size(), 1.3f);
    packed.temperature[place] = c.temperature;
    scored = Score(*weights, packed, {.num_threads = 2});
    ASSERT_TRUE(scored.ok()) << scored.status();
    const auto in_batch = absl::MakeConstSpan(scored->logprobs).subspan(packed.offsets[place], sequence.size());
    auto first = Score(*weights, single);
    ASSERT_TRUE(SameBits(first->logprobs, in_batch)) << "batch of 65, place " << place;

    if (number % kEveryIsa != 0 || sample > 0) continue;
    auto trainer = TrainerModel::Create(c.config, parameters.views(), {.compute = compute});
    ASSERT_TRUE(trainer.ok()) << trainer.status();
    const auto trained = (*trainer)->Forward(packed);
    ASSERT_TRUE(SameBits(trained->logprobs, scored->logprobs)) << "training forward";
    for (const char* isa : {"portable", "avx2", "avx512"}) {
      setenv("MOERL_CPU_ISA", isa, 1);
      const auto other = Score(*weights, single);
      unsetenv("MOERL_CPU_ISA");
      if (other.status().code() == absl::StatusCode::kFailedPrecondition) continue;  // not this processor
      ASSERT_TRUE(other.ok()) << other.status();
      ASSERT_TRUE(SameBits(first->logprobs, other->logprobs)) << isa;
    }
  }
}

class RowRule : public testing::TestWithParam<Compute> {};
INSTANTIATE_TEST_SUITE_P(Compute, RowRule, testing::Values(Compute::kFp32, Compute::kBf16),
                         [](const auto& info) { return std::string(ComputeName(info.param)); });

TEST_P(RowRule, HoldsForRandomModelsSequencesAndBatches) {
  for (uint64_t number = first_case; number < first_case + num_cases && !HasFatalFailure(); ++number) {
    RunCase(number, GetParam());
  }
}

// The check can fail: one bit of one weight shows.
TEST_P(RowRule, ShowsOneFlippedBit) {
  const ModelConfig config = SmallMoe();
  const TensorSet parameters = RandomEverything(config, 1);
  std::mt19937 random(1);
  const PackedBatch batch = Pack({RandomTokens(random, 100, config.vocab_size)});
  const auto score = [&] {
    auto weights = Weights::FromTensors(config, parameters.views(), {.compute = GetParam()});
    return Score(**weights, batch)->logprobs;
  };
  const std::vector<float> before = score();
  char* bytes = const_cast<char*>(parameters.views()[3].bytes.data());
  bytes[2] ^= 0x01;  // the lowest bit that bf16 keeps, of model.layers.0.self_attn.k_proj.weight[0]
  EXPECT_FALSE(SameBits(before, score()));
}

}  // namespace

void SetCases(uint64_t cases, uint64_t first) {
  num_cases = cases;
  first_case = first;
}

}  // namespace moerl::model

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  uint64_t cases = 1000, first = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    constexpr std::string_view kCases = "--cases=", kFirst = "--first-case=";
    if (argument.substr(0, kCases.size()) == kCases) cases = std::strtoull(argv[i] + kCases.size(), nullptr, 10);
    if (argument.substr(0, kFirst.size()) == kFirst) first = std::strtoull(argv[i] + kFirst.size(), nullptr, 10);
  }
  moerl::model::SetCases(cases, first);
  return RUN_ALL_TESTS();
}
