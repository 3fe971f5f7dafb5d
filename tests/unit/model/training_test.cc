#include "libs/model/training.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "libs/model/parameters.h"
#include "libs/model/stages.h"
#include "tests/unit/model/test_models.h"

namespace moerl::model {
namespace {

const ModelConfig kConfigs[] = {SmallMoe(), SharedExpertMoe(), ClippedOlmoe(), TiedDense(), SmallMixtral(), SmallGlm()};

std::unique_ptr<TrainerModel> Make(const ModelConfig& config, TrainerModelOptions options = {}, uint64_t seed = 7) {
  auto model = TrainerModel::Create(config, RandomEverything(config, seed).views(), options);
  EXPECT_TRUE(model.ok()) << model.status();
  return *std::move(model);
}

std::vector<float> RandomFloats(std::mt19937& random, int64_t n) {
  std::normal_distribution<float> normal;
  std::vector<float> out(n);
  for (float& x : out) x = normal(random);
  return out;
}

// Gradients of one batch, all parameters one after another.
std::vector<float> GradientsOf(TrainerModel& model, const PackedBatch& batch, const BackwardInput& input) {
  EXPECT_TRUE(model.Forward(batch).ok());
  EXPECT_TRUE(model.Backward(input).ok());
  std::vector<float> out(model.replicated_gradients().begin(), model.replicated_gradients().end());
  out.insert(out.end(), model.expert_gradients().begin(), model.expert_gradients().end());
  model.ZeroGradients();
  return out;
}

BackwardInput RandomInput(std::mt19937& random, int64_t tokens) {
  BackwardInput input;
  input.d_logprobs = RandomFloats(random, tokens);
  input.d_entropy = RandomFloats(random, tokens);
  input.d_balance_loss = 0.3f;
  input.d_z_loss = 0.01f;
  return input;
}

double LossOf(TrainerModel& model, const PackedBatch& batch, const BackwardInput& input) {
  auto result = model.Score(batch, {.want_entropy = true});
  EXPECT_TRUE(result.ok()) << result.status();
  double loss = 0;
  for (int64_t t = 0; t < batch.num_tokens(); ++t) {
    if (!input.d_logprobs.empty()) loss += static_cast<double>(input.d_logprobs[t]) * result->logprobs[t];
    if (!input.d_entropy.empty()) loss += static_cast<double>(input.d_entropy[t]) * result->entropy[t];
    if (!input.d_values.empty()) loss += static_cast<double>(input.d_values[t]) * result->values[t];
  }
  for (const double x : result->balance_loss) loss += input.d_balance_loss * x;
  for (const double x : result->z_loss) loss += input.d_z_loss * x;
  return loss;
}

PackedBatch FullBatch(const ModelConfig& config, std::mt19937& random) {
  PackedBatch batch = Pack({RandomTokens(random, 9, config.vocab_size), RandomTokens(random, 1, config.vocab_size),
                            RandomTokens(random, 14, config.vocab_size)});
  batch.temperature = {0.7f, 1.0f, 1.3f};
  batch.kept_offsets = {0};
  for (int64_t t = 0; t < batch.num_tokens(); ++t) {
    if (t % 3 == 1) {
      for (int32_t id = 0; id < config.vocab_size; ++id) {
        if (id == batch.tokens[t] || random() % 2 == 0) batch.kept_ids.push_back(id);
      }
    }
    batch.kept_offsets.push_back(static_cast<int64_t>(batch.kept_ids.size()));
  }
  return batch;
}

// Where a parameter first shows.
std::string StageOf(const ModelConfig& config, const Parameter& p) {
  if (p.role == Role::kEmbedding) return "embedding";
  if (p.role == Role::kFinalNorm) return "final norm";
  if (p.role == Role::kLmHead) return "head";
  if (p.role < Role::kMlpNorm) return absl::StrCat("layer ", p.layer, " attention");
  return absl::StrCat("layer ", p.layer, config.layer_has_experts[p.layer] ? " experts" : " mlp");
}

TEST(Training, StageDigestsPartWhereAWeightDiffers) {
  std::mt19937 random(11);
  for (const ModelConfig& config : kConfigs) {
    std::vector<int32_t> all_tokens(config.vocab_size);
    std::iota(all_tokens.begin(), all_tokens.end(), 0);
    const PackedBatch batch = Pack({all_tokens});  // every embedding is used
    std::vector<int64_t> expert_tokens;
    const auto digests_of = [&](const std::vector<TensorView>& views) {
      const auto weights = Weights::FromTensors(config, views, {});
      EXPECT_TRUE(weights.ok()) << weights.status();
      std::vector<uint64_t> digests;
      ScoreOptions options;
      options.stage_digests = &digests;
      const auto result = Score(**weights, batch, options);
      EXPECT_TRUE(result.ok()) << result.status();
      expert_tokens = result->expert_tokens;
      return digests;
    };
    const TensorSet set = RandomEverything(config, 5);
    const std::vector<TensorView> views(set.views().begin(), set.views().end());
    const std::vector<uint64_t> sound = digests_of(views);
    ASSERT_EQ(static_cast<int64_t>(sound.size()), NumStages(config.num_layers));
    EXPECT_EQ(digests_of(views), sound);
    const std::vector<int64_t> sound_expert_tokens = expert_tokens;
    const ParameterTable table(config);
    for (const Parameter& p : table.parameters()) {
      if (p.role == Role::kKBias) continue;  // softmax takes no notice of what all keys share
      std::vector<TensorView> spoiled = views;
      auto view = std::find_if(spoiled.begin(), spoiled.end(), [&](const auto& v) { return v.name == p.name; });
      ASSERT_NE(view, spoiled.end()) << p.name;
      const int64_t moe_layer =
          std::count(config.layer_has_experts.begin(), config.layer_has_experts.begin() + std::max(p.layer, 0), true);
      // A sigmoid score shows where its expert is chosen: the router's row of the busiest one.
      size_t at = 0;
      if (p.role == Role::kRouter) {
        const auto first = sound_expert_tokens.begin() + moe_layer * config.num_experts;
        at = (std::max_element(first, first + config.num_experts) - first) * p.cols * sizeof(float);
      }
      std::string bytes(view->bytes);
      float value;
      std::memcpy(&value, &bytes[at], sizeof(value));
      value += 0.5f;
      std::memcpy(&bytes[at], &value, sizeof(value));
      view->bytes = bytes;
      const std::vector<uint64_t> found = digests_of(spoiled);
      if (p.expert >= 0 && sound_expert_tokens[moe_layer * config.num_experts + p.expert] == 0) {
        EXPECT_EQ(found, sound) << p.name;
        continue;
      }
      const auto part = std::mismatch(sound.begin(), sound.end(), found.begin()).first;
      ASSERT_NE(part, sound.end()) << p.name;
      EXPECT_EQ(StageName(config, part - sound.begin()), StageOf(config, p)) << p.name;
    }
  }
}

// Directional finite differences: d/ds L(w + s v) against gradient . v, for the whole loss (log-probabilities under
// temperature and kept sets, entropy, balance and z losses) with routes held fixed.
TEST(Training, GradientsAgreeWithFiniteDifferences) {
  for (const ModelConfig& config : kConfigs) {
    std::mt19937 random(11);
    const TensorSet set = RandomEverything(config, 7);
    PackedBatch batch = FullBatch(config, random);
    const BackwardInput input = RandomInput(random, batch.num_tokens());
    TrainerModelOptions options;
    options.compute = Compute::kFp32;
    auto model = Make(config, options);
    batch.routes = model->Score(batch, {.want_routes = true})->routes;
    ASSERT_TRUE(model->Forward(batch).ok());
    ASSERT_TRUE(model->Backward(input).ok());
    for (const TensorView& view : set.views()) {
      const absl::Span<const float> gradient = model->gradient(view.name);
      const std::vector<float> direction = RandomFloats(random, static_cast<int64_t>(gradient.size()));
      double expected = 0, norm = 0;
      for (size_t i = 0; i < direction.size(); ++i) {
        expected += static_cast<double>(gradient[i]) * direction[i];
        norm += static_cast<double>(gradient[i]) * gradient[i];
      }
      float* values = reinterpret_cast<float*>(const_cast<char*>(view.bytes.data()));
      const std::vector<float> original(values, values + direction.size());
      double loss[2];
      const float step = 2e-3f / std::sqrt(static_cast<float>(direction.size()));
      for (const int side : {0, 1}) {
        for (size_t i = 0; i < direction.size(); ++i)
          values[i] = original[i] + (side == 0 ? step : -step) * direction[i];
        auto moved = TrainerModel::Create(config, set.views(), options);
        loss[side] = LossOf(**moved, batch, input);
      }
      std::copy(original.begin(), original.end(), values);
      const double found = (loss[0] - loss[1]) / (2 * static_cast<double>(step));
      EXPECT_NEAR(found, expected, 0.02 * std::sqrt(norm) + 0.02) << ModelType(config.family) << " " << view.name;
    }
  }
}

TEST(Training, PackedEqualsUnpacked) {
  for (const Compute compute : {Compute::kFp32, Compute::kBf16}) {
    for (const ModelConfig& config : kConfigs) {
      std::mt19937 random(12);
      auto model = Make(config, {.compute = compute});
      const std::vector<std::vector<int32_t>> sequences = {RandomTokens(random, 70, config.vocab_size),
                                                           RandomTokens(random, 1, config.vocab_size),
                                                           RandomTokens(random, 130, config.vocab_size)};
      const PackedBatch packed = Pack(sequences);
      BackwardInput input = RandomInput(random, packed.num_tokens());
      const std::vector<float> together = GradientsOf(*model, packed, input);
      const auto forward = model->Score(packed);
      ASSERT_TRUE(forward.ok());
      for (size_t s = 0; s < sequences.size(); ++s) {
        const auto alone = model->Score(Pack({sequences[s]}));
        EXPECT_EQ(std::memcmp(alone->logprobs.data(), &forward->logprobs[packed.offsets[s]],
                              alone->logprobs.size() * sizeof(float)),
                  0);
        BackwardInput part = input;
        const auto slice = [&](const std::vector<float>& all) {
          return std::vector<float>(all.begin() + packed.offsets[s], all.begin() + packed.offsets[s + 1]);
        };
        part.d_logprobs = slice(input.d_logprobs);
        part.d_entropy = slice(input.d_entropy);
        ASSERT_TRUE(model->Forward(Pack({sequences[s]})).ok());
        ASSERT_TRUE(model->Backward(part).ok());
      }
      const ParameterTable table(config);
      size_t at = 0;
      // The flat order: replicated parameters, then experts.
      for (const bool experts : {false, true}) {
        for (const Parameter& p : table.parameters()) {
          if ((p.expert >= 0) != experts) continue;
          const absl::Span<const float> apart = model->gradient(p.name);
          float largest = 0, worst = 0;
          for (size_t i = 0; i < apart.size(); ++i) {
            largest = std::max(largest, std::fabs(together[at + i]));
            worst = std::max(worst, std::fabs(together[at + i] - apart[i]));
          }
          EXPECT_LE(worst, 1e-6f * largest + 1e-12f) << ModelType(config.family) << " " << p.name;
          at += apart.size();
        }
      }
    }
  }
}

TEST(Training, RecomputationThreadsAndRepeatsGiveTheSameBits) {
  for (const Compute compute : {Compute::kFp32, Compute::kBf16}) {
    for (const ModelConfig& config : kConfigs) {
      std::mt19937 random(13);
      PackedBatch batch =
          Pack({RandomTokens(random, 100, config.vocab_size), RandomTokens(random, 33, config.vocab_size)});
      const BackwardInput input = RandomInput(random, batch.num_tokens());
      auto model = Make(config, {.compute = compute});
      const std::vector<float> expected = GradientsOf(*model, batch, input);
      const auto same = [&](const std::vector<float>& found) {
        return std::memcmp(found.data(), expected.data(), expected.size() * sizeof(float)) == 0;
      };
      EXPECT_TRUE(same(GradientsOf(*model, batch, input))) << "repeat";
      auto recomputing = Make(config, {.compute = compute, .recompute = true});
      EXPECT_TRUE(same(GradientsOf(*recomputing, batch, input))) << "recomputation";
      auto threaded = Make(config, {.compute = compute, .num_threads = 2});
      EXPECT_TRUE(same(GradientsOf(*threaded, batch, input))) << "threads";
      batch.routes = model->Score(batch, {.want_routes = true})->routes;
      EXPECT_TRUE(same(GradientsOf(*recomputing, batch, input))) << "replay of the same routes";
    }
  }
}

TEST(Training, WantedTokensAloneGoThroughTheVocabulary) {
  const ModelConfig config = SmallMoe();
  std::mt19937 random(14);
  auto model = Make(config, {.compute = Compute::kFp32});
  PackedBatch batch = Pack({RandomTokens(random, 20, config.vocab_size), RandomTokens(random, 9, config.vocab_size)});
  const auto all = model->Score(batch);
  batch.wanted.assign(29, 0);
  batch.wanted[0] = batch.wanted[7] = batch.wanted[20] = batch.wanted[28] = 1;
  const auto some = model->Score(batch);
  for (int64_t t = 0; t < 29; ++t) {
    EXPECT_EQ(some->logprobs[t], t == 7 || t == 28 ? all->logprobs[t] : 0.0f) << t;
  }
}

TEST(Training, ReplaysRoutes) {
  const ModelConfig config = SmallMoe();
  std::mt19937 random(15);
  auto model = Make(config, {.compute = Compute::kFp32});
  PackedBatch batch = Pack({RandomTokens(random, 12, config.vocab_size)});
  const auto own = model->Score(batch, {.want_routes = true});
  batch.routes = own->routes;
  batch.routes[0] = 1;  // token 0, layer 0, other experts, in any order
  batch.routes[1] = 0;
  batch.routes[3 * 4] = kNoRoute;
  const auto replayed = model->Score(batch, {.want_routes = true});
  ASSERT_TRUE(replayed.ok()) << replayed.status();
  EXPECT_EQ(replayed->routes[0], 0);
  EXPECT_EQ(replayed->routes[1], 1);
  EXPECT_NE(replayed->routes[3 * 4], kNoRoute);
  batch.routes[1] = 1;
  EXPECT_NE(model->Score(batch).status().message().find("different experts"), std::string::npos);
  batch.routes.pop_back();
  EXPECT_NE(model->Score(batch).status().message().find("batch.routes: expected"), std::string::npos);
}

TEST(Training, StepsDownTheGradientAndPublishesWhatItRunsOn) {
  for (const Compute compute : {Compute::kFp32, Compute::kBf16}) {
    const ModelConfig config = SharedExpertMoe();
    std::mt19937 random(16);
    auto model = Make(config, {.compute = compute});
    const PackedBatch batch =
        Pack({RandomTokens(random, 40, config.vocab_size), RandomTokens(random, 25, config.vocab_size)});
    BackwardInput input;
    input.d_logprobs.assign(65, -1.0f / 65);
    const double before = LossOf(*model, batch, input);
    for (int step = 0; step < 20; ++step) {
      ASSERT_TRUE(model->Forward(batch).ok());
      ASSERT_TRUE(model->Backward(input).ok());
      const StepResult result = model->ClipAndStep({.learning_rate = 1e-2f, .weight_decay = 0.01f});
      EXPECT_FALSE(result.skipped);
      EXPECT_GT(result.grad_norm, 0);
    }
    EXPECT_LT(LossOf(*model, batch, input), before - 0.5);
    // The rollout builds its weights from what ForEachTensor publishes.
    TensorSet published;
    ASSERT_TRUE(model
                    ->ForEachTensor([&](const TensorView& view) {
                      std::string& bytes = published.Add(view.name, view.dtype, view.shape);
                      std::memcpy(bytes.data(), view.bytes.data(), bytes.size());
                      return absl::OkStatus();
                    })
                    .ok());
    auto rollout = Weights::FromTensors(config, published.views(), {.compute = compute});
    ASSERT_TRUE(rollout.ok()) << rollout.status();
    const auto theirs = Score(**rollout, batch), ours = model->Score(batch);
    EXPECT_EQ(theirs->logprobs, ours->logprobs);
  }
}

TEST(Training, SkipsAStepWithANonFiniteGradientAndSaysWhich) {
  const ModelConfig config = SmallMoe();
  auto model = Make(config, {.compute = Compute::kFp32});
  const std::vector<float> before(model->master("lm_head.weight").begin(), model->master("lm_head.weight").end());
  std::mt19937 random(17);
  ASSERT_TRUE(model->Forward(Pack({RandomTokens(random, 10, config.vocab_size)})).ok());
  ASSERT_TRUE(model->Backward({.d_logprobs = std::vector<float>(10, NAN)}).ok());
  const StepResult result = model->ClipAndStep({});
  EXPECT_TRUE(result.skipped);
  EXPECT_NE(result.skipped_because.find("is not finite"), std::string::npos);
  EXPECT_EQ(model->num_updates(), 0);
  EXPECT_TRUE(std::equal(before.begin(), before.end(), model->master("lm_head.weight").begin()));
  EXPECT_EQ(model->ClipAndStep({}).grad_norm, 0);
}

TEST(Training, RestoresItsStateToTheBit) {
  const ModelConfig config = SmallMoe();
  std::mt19937 random(18);
  const PackedBatch batch = Pack({RandomTokens(random, 30, config.vocab_size)});
  BackwardInput input;
  input.d_logprobs.assign(30, -0.1f);
  const auto step = [&](TrainerModel& model) {
    EXPECT_TRUE(model.Forward(batch).ok());
    EXPECT_TRUE(model.Backward(input).ok());
    model.ClipAndStep({.learning_rate = 3e-3f});
  };
  TemporaryDirectory dir;
  auto model = Make(config, {.compute = Compute::kBf16});
  step(*model);
  step(*model);
  ASSERT_TRUE(model->SaveState(dir.path() + "/state").ok());
  auto restored = Make(config, {.compute = Compute::kBf16}, /*seed=*/99);
  ASSERT_TRUE(restored->RestoreState(dir.path() + "/state").ok());
  EXPECT_EQ(restored->num_updates(), 2);
  for (int i = 0; i < 3; ++i) {
    step(*model);
    step(*restored);
  }
  const ParameterTable table(config);
  for (const Parameter& p : table.parameters()) {
    const auto a = model->master(p.name), b = restored->master(p.name);
    EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << p.name;
  }
  auto other = Make(SharedExpertMoe());
  EXPECT_NE(other->RestoreState(dir.path() + "/state").message().find("missing"), std::string::npos);
}

TEST(Training, ACriticStartsAtZeroAndLearnsValues) {
  const ModelConfig config = SmallMoe();
  std::mt19937 random(19);
  TrainerModelOptions options;
  options.compute = Compute::kFp32;
  options.value_head = true;
  auto critic = Make(config, options);  // from a policy's tensors
  const PackedBatch batch =
      Pack({RandomTokens(random, 15, config.vocab_size), RandomTokens(random, 8, config.vocab_size)});
  auto first = critic->Forward(batch);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->values, std::vector<float>(23, 0.0f));
  const std::vector<float> target = RandomFloats(random, 23);
  double error = 0, start = 0;
  for (int step = 0; step < 800; ++step) {
    auto result = critic->Forward(batch);
    BackwardInput input;
    error = 0;
    for (size_t t = 0; t < 23; ++t) {
      const float difference = result->values[t] - target[t];
      input.d_values.push_back(difference);
      error += difference * difference;
    }
    if (step == 0) start = error;
    ASSERT_TRUE(critic->Backward(input).ok());
    critic->ClipAndStep({.learning_rate = 1e-2f});
  }
  EXPECT_LT(error, 0.2 * start);
}

TEST(Training, RefusesBadBatches) {
  const ModelConfig config = SmallMoe();
  auto model = Make(config, {.compute = Compute::kFp32});
  const auto error = [&](const PackedBatch& batch) {
    const auto result = model->Forward(batch);
    return result.ok() ? "accepted" : std::string(result.status().message());
  };
  const auto contains = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };
  PackedBatch batch = Pack({{1, 2, 37}});
  EXPECT_TRUE(contains(error(batch), "batch.tokens[2]: expected 0 to 36, found 37"));
  batch = Pack({{1, 2, 3}});
  batch.offsets = {0, 2};
  EXPECT_TRUE(contains(error(batch), "batch.offsets[1]"));
  batch = Pack({std::vector<int32_t>(1025, 1)});
  EXPECT_TRUE(contains(error(batch), "1 to 1024"));
  batch = Pack({{1, 2, 3}});
  batch.kept_offsets = {0, 0, 2, 2};
  batch.kept_ids = {1, 3};
  EXPECT_TRUE(contains(error(batch), "a set with token 1's id 2"));
  batch = Pack({{1, 2, 3}});
  batch.temperature = {NAN};
  EXPECT_TRUE(contains(error(batch), "temperature[0]"));
  EXPECT_EQ(error(PackedBatch()), "accepted");  // a rank without work
  EXPECT_TRUE(model->Backward({}).ok());
  EXPECT_EQ(model->Backward({}).code(), absl::StatusCode::kFailedPrecondition);
}

// The router's bias against the rule written out, and a skewed router that becomes even.
TEST(Training, LossFreeBiasUpdateFollowsTheRuleAndEvensOutASkewedRouter) {
  const ModelConfig config = SmallGlm();
  constexpr char kBias[] = "model.layers.1.mlp.gate.e_score_correction_bias";
  TrainerModelOptions options;
  options.compute = Compute::kFp32;
  auto model = Make(config, options);
  std::mt19937 random(3);
  const PackedBatch batch = Pack({RandomTokens(random, 200, config.vocab_size)});
  const auto spread = [](const std::vector<int64_t>& loads) {
    return *std::max_element(loads.begin(), loads.end()) - *std::min_element(loads.begin(), loads.end());
  };
  int64_t first = 0, last = 0;
  for (int step = 0; step < 800; ++step) {
    const auto forward = model->Forward(batch);
    ASSERT_TRUE(forward.ok());
    last = spread(forward->expert_tokens);
    if (step == 0) first = last;
    const absl::Span<const float> now = model->master(kBias);
    std::vector<float> want(now.begin(), now.end());
    const double mean = 200.0 * config.top_k / config.num_experts;
    for (int e = 0; e < config.num_experts; ++e) {
      const double error = mean - forward->expert_tokens[e];
      want[e] += error > 0 ? 0.002f : error < 0 ? -0.002f : 0.0f;
    }
    AdamWOptions adam;
    adam.learning_rate = 0.0f;
    adam.weight_decay = 0.5f;
    EXPECT_FALSE(model->ClipAndStep(adam, {}, {0.002f, forward->expert_tokens}).skipped);
    const absl::Span<const float> found = model->master(kBias);
    EXPECT_EQ(std::vector<float>(found.begin(), found.end()), want) << "step " << step;
  }
  EXPECT_GT(first, 60);
  EXPECT_LT(last, 20) << "at first " << first;
}

}  // namespace
}  // namespace moerl::model
