#include "libs/model/config.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <numbers>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "libs/base/status_macros.h"
#include "libs/model/parameters.h"

namespace moerl::model {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kSizeMax = std::numeric_limits<int32_t>::max();
constexpr int64_t kLayersMax = 4096;
constexpr int64_t kExpertsMax = 4096;  // what the router's kernels take; expert ids travel as u16, 0xFFFF means none
constexpr int64_t kHeadDimMax = 512;   // what the attention kernels take

struct FamilyInfo {
  Family family;
  absl::string_view model_type, architecture;
  double rms_norm_eps, rope_theta;  // what transformers assumes when config.json is silent
};
constexpr FamilyInfo kFamilies[] = {
    {Family::kLlama, "llama", "LlamaForCausalLM", 1e-6, 1e4},
    {Family::kQwen2, "qwen2", "Qwen2ForCausalLM", 1e-6, 1e4},
    {Family::kQwen3, "qwen3", "Qwen3ForCausalLM", 1e-6, 1e4},
    {Family::kMixtral, "mixtral", "MixtralForCausalLM", 1e-5, 1e6},
    {Family::kQwen2Moe, "qwen2_moe", "Qwen2MoeForCausalLM", 1e-6, 1e4},
    {Family::kQwen3Moe, "qwen3_moe", "Qwen3MoeForCausalLM", 1e-6, 1e4},
    {Family::kOlmoe, "olmoe", "OlmoeForCausalLM", 1e-5, 1e4},
    {Family::kGlm4Moe, "glm4_moe", "Glm4MoeForCausalLM", 1e-5, 1e4},
};

const FamilyInfo& Info(Family family) { return kFamilies[static_cast<int>(family)]; }

bool HasExperts(Family family) { return family >= Family::kMixtral; }

// Reads typed fields and remembers the first thing that is wrong.
class Fields {
 public:
  explicit Fields(const Json& json, std::string where = "") : json_(json), where_(std::move(where)) {}

  bool Has(const char* name) const { return json_.contains(name) && !json_[name].is_null(); }

  int64_t Integer(const char* name) { return Has(name) ? Checked(name) : (Fail(name, "an integer", "nothing"), 0); }
  int64_t Integer(const char* name, int64_t fallback) { return Has(name) ? Checked(name) : fallback; }

  double Number(const char* name, double fallback) {
    if (!Has(name)) return fallback;
    if (!json_[name].is_number()) return Fail(name, "a number", json_[name].dump()), fallback;
    return json_[name].get<double>();
  }

  bool Bool(const char* name, bool fallback) {
    if (!Has(name)) return fallback;
    if (!json_[name].is_boolean()) return Fail(name, "true or false", json_[name].dump()), fallback;
    return json_[name].get<bool>();
  }

  std::string String(const char* name, std::string fallback) {
    if (!Has(name)) return fallback;
    if (!json_[name].is_string()) return Fail(name, "a string", json_[name].dump()), fallback;
    return json_[name].get<std::string>();
  }

  // A list of integers, or one integer, or nothing.
  std::vector<int64_t> Integers(const char* name) {
    std::vector<int64_t> out;
    if (!Has(name)) return out;
    const Json& value = json_[name];
    if (value.is_number_integer()) return {value.get<int64_t>()};
    if (!value.is_array()) return Fail(name, "a list of integers", value.dump()), out;
    for (const Json& item : value) {
      if (!item.is_number_integer()) return Fail(name, "a list of integers", value.dump()), out;
      out.push_back(item.get<int64_t>());
    }
    return out;
  }

  const Json& json() const { return json_; }
  const absl::Status& status() const { return status_; }

  void Fail(const char* name, absl::string_view expected, absl::string_view found) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(
        absl::StrCat("config.json: ", where_, name, ": expected ", expected, ", found ", found.substr(0, 80)));
  }
  void Refuse(absl::string_view what) {
    if (status_.ok()) status_ = absl::UnimplementedError(absl::StrCat("config.json: ", what));
  }

 private:
  int64_t Checked(const char* name) {
    if (!json_[name].is_number_integer()) return Fail(name, "an integer", json_[name].dump()), 0;
    return json_[name].get<int64_t>();
  }

  const Json& json_;
  std::string where_;
  absl::Status status_;
};

float YarnAttentionFactor(Fields& scaling, double factor) {
  const auto mscale = [](double scale, double m) { return scale <= 1 ? 1.0 : 0.1 * m * std::log(scale) + 1.0; };
  if (scaling.Has("attention_factor")) return static_cast<float>(scaling.Number("attention_factor", 1.0));
  const double m = scaling.Number("mscale", 0), m_all = scaling.Number("mscale_all_dim", 0);
  if (m != 0 && m_all != 0) return static_cast<float>(mscale(factor, m) / mscale(factor, m_all));
  return static_cast<float>(mscale(factor, 1.0));
}

// `rope_parameters` (newer) or `rope_scaling` beside `rope_theta`.
RopeConfig ReadRope(Fields& top, Family family, int64_t max_position) {
  RopeConfig rope;
  const char* key = top.Has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  rope.theta = static_cast<float>(top.Number("rope_theta", Info(family).rope_theta));
  const bool partial = family == Family::kGlm4Moe;
  if (partial) rope.partial_factor = top.Number("partial_rotary_factor", 0.5);
  if (!top.Has(key)) return rope;
  if (!top.json()[key].is_object()) return top.Fail(key, "an object", top.json()[key].dump()), rope;
  Fields scaling(top.json()[key], absl::StrCat(key, "."));
  rope.theta = static_cast<float>(scaling.Number("rope_theta", rope.theta));
  const double part = scaling.Number("partial_rotary_factor", rope.partial_factor);
  if (!partial && part != 1.0) {
    top.Refuse(absl::StrCat("partial_rotary_factor other than 1 is refused for ", ModelType(family)));
  }
  if (partial) rope.partial_factor = part;
  const std::string type = scaling.String("rope_type", scaling.String("type", "default"));
  const auto original = [&] { return scaling.Integer("original_max_position_embeddings", max_position); };
  if (type != "default") rope.factor = static_cast<float>(scaling.Number("factor", 1.0));
  if (type == "linear") {
    rope.scaling = RopeConfig::Scaling::kLinear;
  } else if (type == "llama3") {
    rope.scaling = RopeConfig::Scaling::kLlama3;
    rope.low_freq_factor = static_cast<float>(scaling.Number("low_freq_factor", 1.0));
    rope.high_freq_factor = static_cast<float>(scaling.Number("high_freq_factor", 4.0));
    rope.original_max_position = original();
  } else if (type == "yarn") {
    rope.scaling = RopeConfig::Scaling::kYarn;
    rope.original_max_position = original();
    if (!scaling.Has("factor")) {
      rope.factor = static_cast<float>(static_cast<double>(max_position) / rope.original_max_position);
    }
    rope.beta_fast = static_cast<float>(scaling.Number("beta_fast", 32));
    rope.beta_slow = static_cast<float>(scaling.Number("beta_slow", 1));
    rope.truncate = scaling.Bool("truncate", true);
    rope.attention_factor = YarnAttentionFactor(scaling, rope.factor);
  } else if (type != "default") {
    top.Refuse(absl::StrCat(key, " type \"", type, "\" is refused; default, linear, llama3 and yarn are supported"));
  }
  if (!scaling.status().ok()) top.Fail(key, "legal RoPE parameters", scaling.status().message());
  return rope;
}

// GLM-4.5: dense layers first, an ungated shared expert, sigmoid scores with a bias that only chooses.
void ReadGlmExperts(Fields& f, ModelConfig& c) {
  for (const char* field : {"n_group", "topk_group"}) {
    const int64_t value = f.Integer(field, 1);
    if (value != 1)
      f.Refuse(
          absl::StrCat(field, " ", value, " is refused: experts are chosen among all of them; only 1 is supported"));
  }
  c.num_experts = f.Has("n_routed_experts") ? f.Integer("n_routed_experts") : f.Integer("num_local_experts");
  c.top_k = f.Integer("num_experts_per_tok");
  c.norm_topk_prob = f.Bool("norm_topk_prob", true);
  c.scores_by_sigmoid = c.has_router_bias = true;
  c.routed_scaling_factor = static_cast<float>(f.Number("routed_scaling_factor", 1.0));
  c.moe_intermediate_size = f.Integer("moe_intermediate_size");
  const int64_t shared = f.Integer("n_shared_experts", 1);
  if (shared < 1 || shared > kExpertsMax) f.Fail("n_shared_experts", "1 to 4096", absl::StrCat(shared));
  if (c.moe_intermediate_size < 1 || c.moe_intermediate_size > kSizeMax) {
    f.Fail("moe_intermediate_size", absl::StrCat("1 to ", kSizeMax), absl::StrCat(c.moe_intermediate_size));
  }
  c.shared_expert_intermediate_size = f.status().ok() ? shared * c.moe_intermediate_size : 0;
  c.gates_shared_expert = false;
  const int64_t dense = f.Integer("first_k_dense_replace", 1);
  if (dense < 0) f.Fail("first_k_dense_replace", "at least 0", absl::StrCat(dense));
  for (size_t layer = 0; layer < c.layer_has_experts.size(); ++layer) {
    c.layer_has_experts[layer] = static_cast<int64_t>(layer) >= dense;
  }
}

void ReadExperts(Fields& f, ModelConfig& c) {
  c.layer_has_experts.assign(std::clamp<int64_t>(c.num_layers, 0, kLayersMax), false);
  if (!HasExperts(c.family)) return;
  if (c.family == Family::kGlm4Moe) {
    ReadGlmExperts(f, c);
    if (c.num_moe_layers() == c.num_layers) c.intermediate_size = 0;
    return;
  }
  c.num_experts = f.Has("num_local_experts") ? f.Integer("num_local_experts") : f.Integer("num_experts");
  c.top_k = f.Integer("num_experts_per_tok");
  c.norm_topk_prob = c.family == Family::kMixtral || f.Bool("norm_topk_prob", false);
  const bool own_size = c.family == Family::kQwen2Moe || c.family == Family::kQwen3Moe;
  c.moe_intermediate_size = f.Integer(own_size ? "moe_intermediate_size" : "intermediate_size");
  if (c.family == Family::kQwen2Moe) c.shared_expert_intermediate_size = f.Integer("shared_expert_intermediate_size");
  const int64_t sparse_step = own_size ? f.Integer("decoder_sparse_step", 1) : 1;
  if (sparse_step < 1) f.Fail("decoder_sparse_step", "at least 1", absl::StrCat(sparse_step));
  const std::vector<int64_t> dense = own_size ? f.Integers("mlp_only_layers") : std::vector<int64_t>{};
  for (size_t layer = 0; layer < c.layer_has_experts.size() && sparse_step >= 1; ++layer) {
    c.layer_has_experts[layer] = c.num_experts > 0 && (static_cast<int64_t>(layer) + 1) % sparse_step == 0 &&
                                 std::find(dense.begin(), dense.end(), static_cast<int64_t>(layer)) == dense.end();
  }
  if (c.num_moe_layers() == c.num_layers) c.intermediate_size = 0;
}

void RefuseUnsupported(Fields& f, Family family) {
  const std::string act = f.String("hidden_act", "silu");
  if (act != "silu") f.Refuse(absl::StrCat("hidden_act \"", act, "\" is refused; only silu is supported"));
  if (f.Number("attention_dropout", 0) != 0) f.Refuse("attention_dropout other than 0 is refused");
  if (f.Number("router_jitter_noise", 0) != 0) f.Refuse("router_jitter_noise other than 0 is refused");
  const bool window = family == Family::kMixtral ? f.Has("sliding_window") : f.Bool("use_sliding_window", false);
  if (window) f.Refuse("a sliding window is refused; set it to null (Qwen: use_sliding_window false)");
}

void ReadAttentionOptions(Fields& f, ModelConfig& c) {
  switch (c.family) {
    case Family::kLlama:
      c.qkv_bias = c.o_bias = f.Bool("attention_bias", false);
      c.mlp_bias = f.Bool("mlp_bias", false);
      break;
    case Family::kQwen2:
      c.qkv_bias = true;
      break;
    case Family::kQwen2Moe:
      c.qkv_bias = f.Bool("qkv_bias", true);
      break;
    case Family::kQwen3:
    case Family::kQwen3Moe:
      c.qk_norm = QkNorm::kPerHead;
      c.qkv_bias = c.o_bias = f.Bool("attention_bias", false);
      break;
    case Family::kOlmoe:
      c.qk_norm = QkNorm::kFull;
      c.qkv_bias = c.o_bias = f.Bool("attention_bias", false);
      if (f.Has("clip_qkv")) c.clip_qkv = static_cast<float>(f.Number("clip_qkv", 0));
      break;
    case Family::kGlm4Moe:
      if (f.Bool("use_qk_norm", false)) c.qk_norm = QkNorm::kPerHead;
      c.qkv_bias = f.Bool("attention_bias", false);
      break;
    case Family::kMixtral:
      break;
  }
}

std::string ReadText(const std::string& path, absl::Status& status) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) status = absl::NotFoundError(absl::StrCat(path, ": cannot be read; is this a model directory?"));
  return text.str();
}

}  // namespace

absl::string_view ModelType(Family family) { return Info(family).model_type; }
absl::string_view ArchitectureName(Family family) { return Info(family).architecture; }

absl::StatusOr<Compute> ParseCompute(absl::string_view name) {
  if (name == "fp32") return Compute::kFp32;
  if (name == "bf16") return Compute::kBf16;
  return absl::InvalidArgumentError(absl::StrCat("compute: expected fp32 or bf16, found \"", name, "\""));
}

absl::string_view ComputeName(Compute compute) { return compute == Compute::kFp32 ? "fp32" : "bf16"; }

int64_t ModelConfig::num_moe_layers() const {
  return std::count(layer_has_experts.begin(), layer_has_experts.end(), true);
}

int64_t ModelConfig::num_parameters() const {
  const ParameterTable table(*this);
  int64_t sum = 0;
  for (const Parameter& p : table.parameters()) sum += p.size();
  return sum;
}

int64_t ModelConfig::num_active_parameters() const {
  const int64_t expert = 3 * hidden_size * moe_intermediate_size;
  const int64_t embedding = tie_word_embeddings ? 0 : vocab_size * hidden_size;
  return num_parameters() - embedding - num_moe_layers() * (num_experts - top_k) * expert;
}

absl::StatusOr<ModelConfig> ParseConfig(absl::string_view text) {
  const Json json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return absl::InvalidArgumentError("config.json: expected a JSON object");
  Fields f(json);
  const std::string type = f.String("model_type", "");
  const auto* info = std::find_if(std::begin(kFamilies), std::end(kFamilies),
                                  [&](const FamilyInfo& i) { return i.model_type == type; });
  if (info == std::end(kFamilies)) {
    const std::string known = absl::StrJoin(
        kFamilies, ", ", [](std::string* out, const FamilyInfo& i) { absl::StrAppend(out, i.model_type); });
    return absl::UnimplementedError(
        absl::StrCat("config.json: model_type \"", type, "\" is not supported; supported: ", known));
  }
  ModelConfig c;
  c.family = info->family;
  c.vocab_size = f.Integer("vocab_size");
  c.hidden_size = f.Integer("hidden_size");
  c.num_layers = f.Integer("num_hidden_layers");
  c.num_heads = f.Integer("num_attention_heads");
  c.num_kv_heads = f.Integer("num_key_value_heads", c.num_heads);
  const int64_t default_head_dim = c.family == Family::kQwen3 ? 128 : c.hidden_size / std::max<int64_t>(1, c.num_heads);
  c.head_dim = f.Integer("head_dim", default_head_dim);
  c.max_position = f.Integer("max_position_embeddings");
  c.intermediate_size = HasExperts(c.family) ? f.Integer("intermediate_size", 0) : f.Integer("intermediate_size");
  c.rms_norm_eps = static_cast<float>(f.Number("rms_norm_eps", info->rms_norm_eps));
  c.tie_word_embeddings = f.Bool("tie_word_embeddings", false);
  c.initializer_range = static_cast<float>(f.Number("initializer_range", 0.02));
  c.eos_token_ids = f.Integers("eos_token_id");
  if (f.Has("bos_token_id")) c.bos_token_id = f.Integer("bos_token_id");
  if (f.Has("pad_token_id")) c.pad_token_id = f.Integer("pad_token_id");
  c.rope = ReadRope(f, c.family, c.max_position);
  ReadAttentionOptions(f, c);
  ReadExperts(f, c);
  RefuseUnsupported(f, c.family);
  MOERL_RETURN_IF_ERROR(f.status());
  MOERL_RETURN_IF_ERROR(ValidateConfig(c));
  return c;
}

absl::StatusOr<ModelConfig> LoadConfig(const std::string& directory) {
  absl::Status status;
  const std::string text = ReadText(directory + "/config.json", status);
  MOERL_RETURN_IF_ERROR(status);
  auto config = ParseConfig(text);
  if (config.ok()) return config;
  return absl::Status(config.status().code(), absl::StrCat(directory, "/", config.status().message()));
}

absl::Status ValidateConfig(const ModelConfig& c) {
  const auto bad = [](absl::string_view field, absl::string_view expected, int64_t found) {
    return absl::InvalidArgumentError(absl::StrCat("config.json: ", field, ": expected ", expected, ", found ", found));
  };
  const std::pair<const char*, int64_t> sizes[] = {
      {"vocab_size", c.vocab_size},
      {"hidden_size", c.hidden_size},
      {"num_attention_heads", c.num_heads},
      {"num_key_value_heads", c.num_kv_heads},
      {"head_dim", c.head_dim},
      {"max_position_embeddings", c.max_position},
      {"head_dim * heads", c.num_heads > 0 && c.head_dim > kSizeMax / c.num_heads ? 0 : c.num_heads * c.head_dim}};
  for (const auto& [name, value] : sizes) {
    if (value < 1 || value > kSizeMax) return bad(name, "1 to 2^31-1", value);
  }
  if (c.num_layers < 1 || c.num_layers > kLayersMax) return bad("num_hidden_layers", "1 to 4096", c.num_layers);
  if (static_cast<int64_t>(c.layer_has_experts.size()) != c.num_layers) {
    return bad("layer_has_experts", absl::StrCat(c.num_layers, " entries"), c.layer_has_experts.size());
  }
  if (c.num_heads % c.num_kv_heads != 0) {
    return bad("num_key_value_heads", absl::StrCat("a divisor of ", c.num_heads, " heads"), c.num_kv_heads);
  }
  if (c.head_dim > kHeadDimMax) return bad("head_dim", "1 to 512", c.head_dim);
  if (c.head_dim % 2 != 0) return bad("head_dim", "an even number (RoPE turns pairs)", c.head_dim);
  if (!(c.rope.partial_factor > 0 && c.rope.partial_factor <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("config.json: partial_rotary_factor: expected above 0 to 1, found ", c.rope.partial_factor));
  }
  if (c.rotary_dim() < 2 || c.rotary_dim() % 2 != 0) {
    return bad("partial_rotary_factor * head_dim", "an even number of columns, 2 at least (RoPE turns pairs)",
               c.rotary_dim());
  }
  if (c.num_moe_layers() < c.num_layers && (c.intermediate_size < 1 || c.intermediate_size > kSizeMax)) {
    return bad("intermediate_size", "1 to 2^31-1 where a layer has no experts", c.intermediate_size);
  }
  if (c.num_experts < 0 || c.num_experts > kExpertsMax) return bad("num_experts", "0 to 4096", c.num_experts);
  if (c.num_moe_layers() > 0) {
    if (c.num_experts < 1) return bad("num_experts", "1 to 4096 where a layer has experts", c.num_experts);
    if (c.top_k < 1 || c.top_k > std::min<int64_t>(64, c.num_experts)) {
      return bad("num_experts_per_tok", absl::StrCat("1 to ", std::min<int64_t>(64, c.num_experts)), c.top_k);
    }
    if (c.moe_intermediate_size < 1 || c.moe_intermediate_size > kSizeMax) {
      return bad("moe_intermediate_size", "1 to 2^31-1", c.moe_intermediate_size);
    }
  }
  if (c.shared_expert_intermediate_size < 0 || c.shared_expert_intermediate_size > kSizeMax) {
    return bad("shared_expert_intermediate_size", "0 to 2^31-1", c.shared_expert_intermediate_size);
  }
  if (!(c.routed_scaling_factor > 0 && c.routed_scaling_factor < 1e6f)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "config.json: routed_scaling_factor: expected above 0 and below 1e6, found ", c.routed_scaling_factor));
  }
  if (!(c.rms_norm_eps >= 0 && c.rms_norm_eps < 1))
    return absl::InvalidArgumentError("config.json: rms_norm_eps: expected 0 to 1");
  if (!(c.rope.theta > 1)) return absl::InvalidArgumentError("config.json: rope_theta: expected a number above 1");
  if (!(c.rope.factor >= 1)) return absl::InvalidArgumentError("config.json: rope factor: expected at least 1");
  if (c.rope.scaling == RopeConfig::Scaling::kLlama3 && !(c.rope.high_freq_factor > c.rope.low_freq_factor)) {
    return absl::InvalidArgumentError("config.json: high_freq_factor: expected more than low_freq_factor");
  }
  const bool scales_by_position =
      c.rope.scaling == RopeConfig::Scaling::kLlama3 || c.rope.scaling == RopeConfig::Scaling::kYarn;
  if (scales_by_position && c.rope.original_max_position < 1)
    return bad("original_max_position_embeddings", "at least 1", c.rope.original_max_position);
  if (c.clip_qkv && !(*c.clip_qkv > 0))
    return absl::InvalidArgumentError("config.json: clip_qkv: expected a number above 0");
  return absl::OkStatus();
}

namespace {

Json FormatRope(const RopeConfig& rope) {
  Json out;
  out["rope_theta"] = rope.theta;
  if (rope.partial_factor != 1.0) out["partial_rotary_factor"] = rope.partial_factor;
  using S = RopeConfig::Scaling;
  out["rope_type"] = rope.scaling == S::kLinear   ? "linear"
                     : rope.scaling == S::kLlama3 ? "llama3"
                     : rope.scaling == S::kYarn   ? "yarn"
                                                  : "default";
  if (rope.scaling != S::kNone) out["factor"] = rope.factor;
  if (rope.scaling == S::kLlama3 || rope.scaling == S::kYarn) {
    out["original_max_position_embeddings"] = rope.original_max_position;
  }
  if (rope.scaling == S::kLlama3) {
    out["low_freq_factor"] = rope.low_freq_factor;
    out["high_freq_factor"] = rope.high_freq_factor;
  }
  if (rope.scaling == S::kYarn) {
    out["beta_fast"] = rope.beta_fast;
    out["beta_slow"] = rope.beta_slow;
    out["attention_factor"] = rope.attention_factor;
    out["truncate"] = rope.truncate;
  }
  return out;
}

void FormatGlmExperts(const ModelConfig& c, Json& out) {
  out["n_routed_experts"] = c.num_experts;
  out["num_experts_per_tok"] = c.top_k;
  out["norm_topk_prob"] = c.norm_topk_prob;
  out["routed_scaling_factor"] = c.routed_scaling_factor;
  out["moe_intermediate_size"] = c.moe_intermediate_size;
  out["n_shared_experts"] = c.shared_expert_intermediate_size / c.moe_intermediate_size;
  out["n_group"] = out["topk_group"] = 1;
  out["first_k_dense_replace"] = c.num_layers - c.num_moe_layers();
  out["num_nextn_predict_layers"] = 0;  // the multi-token prediction layer is neither read nor written
  out["use_qk_norm"] = c.qk_norm != QkNorm::kNone;
  out["attention_bias"] = c.qkv_bias;
  out["partial_rotary_factor"] = c.rope.partial_factor;
}

void FormatExperts(const ModelConfig& c, Json& out) {
  if (c.family == Family::kGlm4Moe) return FormatGlmExperts(c, out);
  if (c.family == Family::kMixtral) out["num_local_experts"] = c.num_experts;
  if (c.family != Family::kMixtral) {
    out["num_experts"] = c.num_experts;
    out["norm_topk_prob"] = c.norm_topk_prob;
  }
  out["num_experts_per_tok"] = c.top_k;
  if (c.family == Family::kMixtral || c.family == Family::kOlmoe) {
    out["intermediate_size"] = c.moe_intermediate_size;
    return;
  }
  out["moe_intermediate_size"] = c.moe_intermediate_size;
  out["decoder_sparse_step"] = 1;
  Json dense = Json::array();
  for (size_t layer = 0; layer < c.layer_has_experts.size(); ++layer) {
    if (!c.layer_has_experts[layer]) dense.push_back(layer);
  }
  out["mlp_only_layers"] = dense;
  if (c.family == Family::kQwen2Moe) out["shared_expert_intermediate_size"] = c.shared_expert_intermediate_size;
}

}  // namespace

std::string FormatConfig(const ModelConfig& c, absl::string_view torch_dtype) {
  Json out;
  out["architectures"] = Json::array({std::string(ArchitectureName(c.family))});
  out["model_type"] = std::string(ModelType(c.family));
  out["torch_dtype"] = std::string(torch_dtype);
  out["vocab_size"] = c.vocab_size;
  out["hidden_size"] = c.hidden_size;
  out["num_hidden_layers"] = c.num_layers;
  out["num_attention_heads"] = c.num_heads;
  out["num_key_value_heads"] = c.num_kv_heads;
  out["head_dim"] = c.head_dim;
  out["max_position_embeddings"] = c.max_position;
  out["intermediate_size"] = c.intermediate_size > 0 ? c.intermediate_size : c.moe_intermediate_size;
  out["hidden_act"] = "silu";
  out["rms_norm_eps"] = c.rms_norm_eps;
  out["tie_word_embeddings"] = c.tie_word_embeddings;
  out["attention_dropout"] = 0.0;
  out["initializer_range"] = c.initializer_range;
  out["rope_theta"] = c.rope.theta;
  out["rope_parameters"] = FormatRope(c.rope);
  if (c.rope.scaling != RopeConfig::Scaling::kNone) {
    out["rope_scaling"] = FormatRope(c.rope);
    out["rope_scaling"].erase("rope_theta");
  }
  if (c.family == Family::kQwen2Moe) out["qkv_bias"] = c.qkv_bias;
  if (c.family == Family::kLlama || c.qk_norm != QkNorm::kNone) out["attention_bias"] = c.o_bias;  // GLM-4.5: below
  if (c.family == Family::kLlama) out["mlp_bias"] = c.mlp_bias;
  if (c.clip_qkv) out["clip_qkv"] = *c.clip_qkv;
  if (HasExperts(c.family)) FormatExperts(c, out);
  if (c.family == Family::kMixtral) out["sliding_window"] = nullptr;
  // A family's default ids would be wrong here, so silence is written down.
  out["bos_token_id"] = c.bos_token_id ? Json(*c.bos_token_id) : Json(nullptr);
  out["pad_token_id"] = c.pad_token_id ? Json(*c.pad_token_id) : Json(nullptr);
  out["eos_token_id"] = c.eos_token_ids.empty()       ? Json(nullptr)
                        : c.eos_token_ids.size() == 1 ? Json(c.eos_token_ids[0])
                                                      : Json(c.eos_token_ids);
  return out.dump(2) + "\n";
}

RopeFrequencies ComputeRopeFrequencies(const ModelConfig& config) {
  const RopeConfig& rope = config.rope;
  const int64_t dim = config.rotary_dim();
  RopeFrequencies out;
  out.inverse.resize(dim / 2);
  std::vector<float> wavelength_base(dim / 2);
  for (int64_t i = 0; i < dim / 2; ++i) {
    wavelength_base[i] = std::pow(rope.theta, static_cast<float>(2 * i) / static_cast<float>(dim));
    out.inverse[i] = 1.0f / wavelength_base[i];
  }
  const double two_pi = 2 * std::numbers::pi;
  if (rope.scaling == RopeConfig::Scaling::kLinear) {
    for (float& f : out.inverse) f /= rope.factor;
  }
  if (rope.scaling == RopeConfig::Scaling::kLlama3) {
    const double original = static_cast<double>(rope.original_max_position);
    const double low = original / rope.low_freq_factor, high = original / rope.high_freq_factor;
    for (float& f : out.inverse) {
      const float wavelength = static_cast<float>(two_pi) / f;
      if (wavelength < high) continue;
      const float scaled = f / rope.factor;
      const float smooth = (static_cast<float>(original) / wavelength - rope.low_freq_factor) /
                           (rope.high_freq_factor - rope.low_freq_factor);
      f = wavelength > low ? scaled : (1 - smooth) * scaled + smooth * f;
    }
  }
  if (rope.scaling == RopeConfig::Scaling::kYarn) {
    out.attention_factor = rope.attention_factor;
    const auto correction = [&](double rotations) {
      return dim * std::log(rope.original_max_position / (rotations * two_pi)) / (2 * std::log(rope.theta));
    };
    double low = correction(rope.beta_fast), high = correction(rope.beta_slow);
    if (rope.truncate) low = std::floor(low), high = std::ceil(high);
    low = std::max(low, 0.0), high = std::min(high, static_cast<double>(dim - 1));
    if (low == high) high += 0.001;
    for (int64_t i = 0; i < dim / 2; ++i) {
      const float ramp = std::clamp(static_cast<float>((i - low) / (high - low)), 0.0f, 1.0f);
      const float keep = 1 - ramp;
      out.inverse[i] = 1.0f / (rope.factor * wavelength_base[i]) * (1 - keep) + out.inverse[i] * keep;
    }
  }
  return out;
}

}  // namespace moerl::model
