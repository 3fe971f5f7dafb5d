#include "libs/model/config.h"

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "tests/unit/model/test_models.h"

namespace moerl::model {
namespace {

constexpr char kQwen3Moe[] = R"({"model_type":"qwen3_moe","vocab_size":50,"hidden_size":32,"num_hidden_layers":4,
  "num_attention_heads":4,"num_key_value_heads":2,"head_dim":16,"max_position_embeddings":100,"intermediate_size":48,
  "num_experts":8,"num_experts_per_tok":2,"moe_intermediate_size":16,"decoder_sparse_step":2,"mlp_only_layers":[3],
  "norm_topk_prob":true,"eos_token_id":[1,2]%s})";

std::string With(const std::string& extra) {
  std::string text = kQwen3Moe;
  text.replace(text.find("%s"), 2, extra);
  return text;
}

std::string ErrorOf(const std::string& text) {
  const auto config = ParseConfig(text);
  return config.ok() ? "accepted" : std::string(config.status().message());
}

TEST(Config, ReadsLayersWithAndWithoutExperts) {
  const auto config = ParseConfig(With(""));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->layer_has_experts, (std::vector<bool>{false, true, false, false}));
  EXPECT_EQ(config->eos_token_ids, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(config->qk_norm, QkNorm::kPerHead);
}

TEST(Config, ReadsBothSpellingsOfRope) {
  const auto old = ParseConfig(With(R"(,"rope_theta":5e5,"rope_scaling":{"type":"linear","factor":2.0})"));
  const auto fresh = ParseConfig(With(R"(,"rope_parameters":{"rope_theta":5e5,"rope_type":"linear","factor":2.0})"));
  ASSERT_TRUE(old.ok()) << old.status();
  ASSERT_TRUE(fresh.ok()) << fresh.status();
  EXPECT_TRUE(*old == *fresh);
  EXPECT_EQ(old->rope.theta, 5e5f);
}

TEST(Config, RoundTripsThroughItsOwnText) {
  for (const ModelConfig& config :
       {SmallMoe(), SharedExpertMoe(), ClippedOlmoe(), TiedDense(), SmallMixtral(), SmallGlm()}) {
    const auto again = ParseConfig(FormatConfig(config, "float32"));
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_TRUE(*again == config) << FormatConfig(config, "float32");
  }
}

TEST(Config, RefusesWhatItDoesNotCompute) {
  const struct {
    std::string text, part;
  } cases[] = {
      {R"({"model_type":"gpt2"})", "supported: llama, qwen2"},
      {"[]", "JSON object"},
      {"{", "JSON object"},
      {With(R"(,"rope_scaling":{"rope_type":"dynamic","factor":2.0})"), "dynamic"},
      {With(R"(,"rope_scaling":{"rope_type":"longrope"})"), "longrope"},
      {With(R"(,"attention_dropout":0.1)"), "attention_dropout"},
      {With(R"(,"use_sliding_window":true)"), "sliding window"},
      {With(R"(,"hidden_act":"gelu")"), "gelu"},
      {With(R"(,"rms_norm_eps":"x")"), "rms_norm_eps: expected a number"},
  };
  for (const auto& c : cases) EXPECT_NE(ErrorOf(c.text).find(c.part), std::string::npos) << ErrorOf(c.text);
}

constexpr char kGlm[] = R"({"model_type":"glm4_moe","vocab_size":50,"hidden_size":32,"num_hidden_layers":4,
  "num_attention_heads":4,"num_key_value_heads":2,"head_dim":12,"max_position_embeddings":100,"intermediate_size":48,
  "n_routed_experts":8,"num_experts_per_tok":2,"moe_intermediate_size":16%s})";

std::string GlmWith(const std::string& extra) {
  std::string text = kGlm;
  text.replace(text.find("%s"), 2, extra);
  return text;
}

TEST(Config, ReadsGlmWithTheDefaultsOfTransformers) {
  const auto config = ParseConfig(GlmWith(""));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->layer_has_experts, (std::vector<bool>{false, true, true, true}));
  EXPECT_EQ(config->rotary_dim(), 6);
  EXPECT_EQ(config->shared_expert_intermediate_size, 16);
  EXPECT_EQ(config->qk_norm, QkNorm::kNone);
  EXPECT_EQ(config->rms_norm_eps, 1e-5f);
  EXPECT_TRUE(config->norm_topk_prob && config->scores_by_sigmoid && config->has_router_bias);
  EXPECT_FALSE(config->qkv_bias || config->o_bias || config->gates_shared_expert);
  const auto set =
      ParseConfig(GlmWith(R"(,"use_qk_norm":true,"attention_bias":true,"n_shared_experts":2,"first_k_dense_replace":0,
                 "routed_scaling_factor":2.5,"partial_rotary_factor":1.0,"rope_parameters":{"rope_theta":1e6,
                 "partial_rotary_factor":0.25})"));
  ASSERT_FALSE(set.ok());  // 3 columns
  EXPECT_NE(set.status().message().find("partial_rotary_factor * head_dim"), std::string::npos) << set.status();
}

TEST(Config, RefusesAGlmWithExpertsOfNoWidthThoughNoLayerHasThem) {
  for (const char* width : {"0", "-1", "-4611686018427387904"}) {
    std::string text = GlmWith(R"(,"first_k_dense_replace":4,"n_shared_experts":4)");
    const std::string field = "\"moe_intermediate_size\":";
    text.replace(text.find(field) + field.size(), 2, width);
    EXPECT_NE(ErrorOf(text).find("moe_intermediate_size: expected 1 to"), std::string::npos) << ErrorOf(text);
  }
}

TEST(Config, RefusesAGlmThatItDoesNotCompute) {
  const struct {
    std::string text, part;
    absl::StatusCode code;
  } cases[] = {
      {R"(,"n_group":2)", "n_group 2 is refused", absl::StatusCode::kUnimplemented},
      {R"(,"topk_group":4)", "topk_group 4 is refused", absl::StatusCode::kUnimplemented},
      {R"(,"n_shared_experts":0)", "n_shared_experts: expected 1", absl::StatusCode::kInvalidArgument},
      {R"(,"first_k_dense_replace":-1)", "first_k_dense_replace", absl::StatusCode::kInvalidArgument},
      {R"(,"routed_scaling_factor":0)", "routed_scaling_factor", absl::StatusCode::kInvalidArgument},
      {R"(,"partial_rotary_factor":1.5)", "partial_rotary_factor", absl::StatusCode::kInvalidArgument},
      {R"(,"partial_rotary_factor":0.1)", "partial_rotary_factor * head_dim", absl::StatusCode::kInvalidArgument},
      {R"(,"attention_bias":1)", "attention_bias: expected true or false", absl::StatusCode::kInvalidArgument},
  };
  for (const auto& c : cases) {
    const auto config = ParseConfig(GlmWith(c.text));
    ASSERT_FALSE(config.ok()) << c.text;
    EXPECT_EQ(config.status().code(), c.code) << config.status();
    EXPECT_NE(config.status().message().find(c.part), std::string::npos) << config.status();
  }
}

TEST(Config, NamesFieldsThatDoNotFit) {
  ModelConfig c = SmallMoe();
  c.num_kv_heads = 3;
  EXPECT_NE(ValidateConfig(c).message().find("num_key_value_heads: expected a divisor of 4"), std::string::npos);
  c = SmallMoe();
  c.top_k = 6;
  EXPECT_NE(ValidateConfig(c).message().find("num_experts_per_tok: expected 1 to 5, found 6"), std::string::npos);
  c = SmallMoe();
  c.head_dim = 7;
  EXPECT_NE(ValidateConfig(c).message().find("head_dim"), std::string::npos);
  c = SmallMoe();
  c.hidden_size = int64_t{1} << 40;
  EXPECT_NE(ValidateConfig(c).message().find("hidden_size"), std::string::npos);
}

TEST(Config, RefusesSizesThatTheKernelsDoNotTake) {
  const struct {
    std::string field, value, part;
  } cases[] = {
      {"\"num_experts\":", "-5", "num_experts: expected 0 to 4096, found -5"},
      {"\"num_experts\":", "4097", "num_experts: expected 0 to 4096, found 4097"},
      {"\"head_dim\":", "514", "head_dim: expected 1 to 512, found 514"},
  };
  for (const auto& c : cases) {
    std::string text = With("");
    const size_t at = text.find(c.field) + c.field.size();
    text.replace(at, text.find(',', at) - at, c.value);
    EXPECT_NE(ErrorOf(text).find(c.part), std::string::npos) << ErrorOf(text);
  }
  for (const char* type : {"llama3", "yarn"}) {
    const std::string rope = absl::StrCat(R"(,"rope_scaling":{"factor":2.0,"original_max_position_embeddings":0,)",
                                          R"("rope_type":")", type, R"("})");
    EXPECT_NE(ErrorOf(With(rope)).find("original_max_position_embeddings: expected at least 1"), std::string::npos);
  }
}

TEST(Config, CountsParameters) {
  const ModelConfig c = SmallMoe();
  // Embedding and head, final norm; two layers of attention (q, k, v, o, two norms, QK-norms), router and experts.
  const int64_t attention = 20 * (24 + 12 + 12) + 24 * 20 + 20 + 12, experts = 5 * 20 + 5 * 3 * 20 * 9 + 20;
  EXPECT_EQ(c.num_parameters(), 2 * 37 * 20 + 20 + 2 * (attention + experts));
  EXPECT_EQ(c.num_active_parameters(), c.num_parameters() - 37 * 20 - 2 * 3 * 3 * 20 * 9);
}

}  // namespace
}  // namespace moerl::model
