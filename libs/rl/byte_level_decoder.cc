#include "libs/rl/byte_level_decoder.h"

#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libs/base/status_macros.h"

namespace moerl::rl {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxTokenId = 4'194'303;
constexpr uint32_t kMaxMappedCharacter = 323;  // 256 bytes stand for the characters up to U+0143

absl::Status FileError(std::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("tokenizer.json: ", std::string(what)));
}

// GPT-2 writes each byte as a printable character: itself if it is one, else U+0100 and up in byte order. This is the
// way back, by code point; -1 where no byte is meant.
std::array<int16_t, kMaxMappedCharacter + 1> ByteOfCharacter() {
  std::array<int16_t, kMaxMappedCharacter + 1> table;
  table.fill(-1);
  uint32_t next = 256;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool is_printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    table[is_printable ? byte : next++] = static_cast<int16_t>(byte);
  }
  return table;
}

// Takes one UTF-8 character of at most two bytes, all that the mapping uses; none if there is no such character.
std::optional<uint32_t> TakeCharacter(std::string_view& text) {
  const auto first = static_cast<uint8_t>(text[0]);
  if (first < 0x80) {
    text.remove_prefix(1);
    return first;
  }
  if (first < 0xC2 || first > 0xDF || text.size() < 2) return std::nullopt;
  const auto second = static_cast<uint8_t>(text[1]);
  if ((second & 0xC0) != 0x80) return std::nullopt;
  text.remove_prefix(2);
  return static_cast<uint32_t>(first & 0x1F) << 6 | static_cast<uint32_t>(second & 0x3F);
}

absl::StatusOr<std::string> BytesOfToken(std::string_view token) {
  static const auto table = ByteOfCharacter();
  std::string bytes;
  for (std::string_view rest = token; !rest.empty();) {
    const std::optional<uint32_t> character = TakeCharacter(rest);
    if (!character || *character > kMaxMappedCharacter || table[*character] < 0) {
      return FileError(absl::StrCat("token \"", std::string(token.substr(0, 40)),
                                    "\" has a character that stands for no byte; expected a byte-level vocabulary"));
    }
    bytes += static_cast<char>(table[*character]);
  }
  return bytes;
}

// Whether a decoder section is ByteLevel, or a sequence that has one.
bool IsByteLevel(const Json& decoder) {
  if (!decoder.is_object()) return false;
  if (decoder.value("type", Json()) == "ByteLevel") return true;
  const auto parts = decoder.find("decoders");
  if (parts == decoder.end() || !parts->is_array()) return false;
  for (const Json& part : *parts) {
    if (part.is_object() && part.value("type", Json()) == "ByteLevel") return true;
  }
  return false;
}

class ByteLevelCodec final : public TokenCodec {
 public:
  // `texts[id]` is what a token stands for; none for ids that mean nothing.
  explicit ByteLevelCodec(std::vector<std::optional<std::string>> texts) : texts_(std::move(texts)) {}

  int32_t vocab_size() const override { return static_cast<int32_t>(texts_.size()); }

  std::string Decode(std::span<const int32_t> ids) const override {
    std::string text;
    for (int32_t id : ids) {
      const bool is_known = id >= 0 && id < vocab_size() && texts_[static_cast<size_t>(id)].has_value();
      text += is_known ? *texts_[static_cast<size_t>(id)] : "\xEF\xBF\xBD";
    }
    return text;
  }

  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view) const override {
    return absl::UnimplementedError(
        "text is not encoded here with a tokenizer.json; give token_ids in the prompt file, or an environment that "
        "owns the "
        "tokenizer");
  }

 private:
  const std::vector<std::optional<std::string>> texts_;
};

absl::Status Put(const Json& id, std::string text, std::vector<std::optional<std::string>>& texts) {
  if (!id.is_number_integer() || id < 0 || id > kMaxTokenId) {
    return FileError(
        absl::StrCat("id ", id.dump(), " of token \"", text.substr(0, 40), "\"; expected 0 to ", kMaxTokenId));
  }
  const auto at = id.get<size_t>();
  if (at >= texts.size()) texts.resize(at + 1);
  if (texts[at].has_value()) return FileError(absl::StrCat("two tokens have the id ", at));
  texts[at] = std::move(text);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<TokenCodec>> ParseByteLevelTokenizer(std::string_view tokenizer_json) {
  const Json file = Json::parse(tokenizer_json, nullptr, /*allow_exceptions=*/false);
  if (file.is_discarded() || !file.is_object()) return FileError("not a JSON object");
  const auto model = file.find("model");
  const auto decoder = file.find("decoder");
  if (decoder == file.end() || !IsByteLevel(*decoder)) {
    return FileError(
        "the decoder is not ByteLevel; only byte-level vocabularies are decoded here, serve an environment "
        "with this tokenizer instead");
  }
  if (model == file.end() || !model->is_object() || !model->contains("vocab") || !(*model)["vocab"].is_object()) {
    return FileError("model.vocab is missing or no object of tokens and ids");
  }

  // Added tokens may stand in the vocabulary too; what they are is said by added_tokens.
  std::vector<std::optional<std::string>> texts;
  std::unordered_map<std::string, Json> added_ids;
  const Json added = file.value("added_tokens", Json::array());
  for (const Json& token : added) {
    if (!token.is_object() || !token.contains("id") || !token.value("content", Json()).is_string()) {
      return FileError("an entry of added_tokens has no id or no content");
    }
    const std::string content = token["content"].get<std::string>();
    const bool is_special = token.value("special", Json(false)) == true;
    MOERL_RETURN_IF_ERROR(Put(token["id"], is_special ? "" : content, texts));
    added_ids.emplace(content, token["id"]);
  }
  for (const auto& [token, id] : (*model)["vocab"].items()) {
    const auto found = added_ids.find(token);
    if (found != added_ids.end() && found->second == id) continue;
    MOERL_ASSIGN_OR_RETURN(std::string bytes, BytesOfToken(token));
    MOERL_RETURN_IF_ERROR(Put(id, std::move(bytes), texts));
  }
  return std::make_unique<ByteLevelCodec>(std::move(texts));
}

}  // namespace moerl::rl
