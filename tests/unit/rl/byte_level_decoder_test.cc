#include "libs/rl/byte_level_decoder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"

namespace moerl::rl {
namespace {

using testing::HasSubstr;

std::string Tokenizer(const std::string& vocab, const std::string& rest = "\"decoder\":{\"type\":\"ByteLevel\"}") {
  return absl::StrCat("{\"model\":{\"type\":\"BPE\",\"vocab\":", vocab, "},", rest, "}");
}

TEST(ByteLevelDecoder, DecodesAsTheTokenizersLibraryDoes) {
  std::ifstream file(std::string(MOERL_SOURCE_DIR) + "/tests/golden/byte_level_tokenizer.json");
  const nlohmann::json golden = nlohmann::json::parse(file);
  const auto codec = ParseByteLevelTokenizer(golden["tokenizer"].dump());
  ASSERT_TRUE(codec.ok()) << codec.status();
  ASSERT_GE(golden["cases"].size(), 7u);
  for (const auto& test : golden["cases"]) {
    EXPECT_EQ((*codec)->Decode(test["ids"].get<std::vector<int32_t>>()), test["text"].get<std::string>());
  }
}

TEST(ByteLevelDecoder, DecodesBytesThatTokensSplit) {
  // "Ġ" is a space, "Ċ" a line feed; an e acute is split over two tokens.
  const auto codec = ParseByteLevelTokenizer(
      Tokenizer("{\"Hi\":0,\"\\u0120there\":1,\"\\u010a\":2,\"caf\\u00c3\":3,\"\\u00a9\":4,\"<|im_end|>\":6}",
                "\"added_tokens\":[{\"id\":6,\"content\":\"<|im_end|>\",\"special\":true},{\"id\":7,\"content\":\"<"
                "think>\",\"special\":false}],"
                "\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"ByteLevel\"}]}"));
  ASSERT_TRUE(codec.ok()) << codec.status();
  EXPECT_EQ((*codec)->vocab_size(), 8);
  EXPECT_EQ((*codec)->Decode(std::vector<int32_t>{0, 1, 2, 3, 4, 6}), "Hi there\ncaf\xC3\xA9");
  EXPECT_EQ((*codec)->Decode(std::vector<int32_t>{7, 5, 8, -1}), "<think>\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD");
  EXPECT_EQ((*codec)->Encode("Hi").status().code(), absl::StatusCode::kUnimplemented);
}

TEST(ByteLevelDecoder, MapsEveryByte) {
  // The mapping as GPT-2 states it: printable bytes are themselves, the others U+0100 and up in order.
  std::string vocab = "{";
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool is_printable =
        (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
    const int character = is_printable ? byte : next++;
    absl::StrAppend(&vocab, byte ? "," : "", "\"\\u", absl::Hex(character, absl::kZeroPad4), "\":", byte);
  }
  const auto codec = ParseByteLevelTokenizer(Tokenizer(vocab + "}"));
  ASSERT_TRUE(codec.ok()) << codec.status();
  for (int32_t byte = 0; byte < 256; ++byte) {
    EXPECT_EQ((*codec)->Decode(std::vector<int32_t>{byte}), std::string(1, static_cast<char>(byte)));
  }
}

TEST(ByteLevelDecoder, RefusesFilesThatAreNotByteLevel) {
  const std::pair<std::string, const char*> cases[] = {
      {"{", "not a JSON object"},
      {"[]", "not a JSON object"},
      {Tokenizer("{\"a\":0}", "\"decoder\":{\"type\":\"Metaspace\"}"), "decoder is not ByteLevel"},
      {Tokenizer("{\"a\":0}", "\"decoder\":null"), "decoder is not ByteLevel"},
      {Tokenizer("[[\"a\",0.5]]"), "model.vocab is missing"},
      {Tokenizer("{\"a\":0,\"b\":0}"), "two tokens have the id 0"},
      {Tokenizer("{\"a\":-1}"), "id -1 of token \"a\""},
      {Tokenizer("{\"a\":4194304}"), "id 4194304 of token \"a\""},
      {Tokenizer("{\"a\":\"0\"}"), "id \"0\" of token \"a\""},
      {Tokenizer("{\"\\u2581a\":0}"), "stands for no byte"},
      {Tokenizer("{\"\\u0144\":0}"), "stands for no byte"},
      {Tokenizer("{\"a b\":0}"), "stands for no byte"},
      {Tokenizer("{\"a\":0}", "\"added_tokens\":[{\"id\":1}],\"decoder\":{\"type\":\"ByteLevel\"}"),
       "added_tokens has no id or no content"},
  };
  for (const auto& [file, words] : cases) {
    const absl::Status status = ParseByteLevelTokenizer(file).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << file;
    EXPECT_THAT(std::string(status.message()), HasSubstr(words)) << file;
  }
}

}  // namespace
}  // namespace moerl::rl
