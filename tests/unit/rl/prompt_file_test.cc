#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "libs/rl/byte_level_decoder.h"
#include "libs/rl/prompt_source.h"

namespace moerl::rl {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(PromptFile, ReadsTokenIdsOrTextWithAnswerAndTask) {
  const auto source = ParsePromptFile(
      "{\"task\": \"gsm8k\", \"answer\": \"72\", \"token_ids\": [5, 0, 151935]}\n"
      "\n"
      "{\"answer\": {\"lines\": [1]}, \"text\": \"How many?\", \"solution\": \"#### 72\"}\r\n",
      "countdown", 1);
  ASSERT_TRUE(source.ok()) << source.status();
  ASSERT_EQ((*source)->size(), 2u);
  Prompt first = *(*source)->Get(0), second = *(*source)->Get(1);
  if (first.token_ids.empty()) std::swap(first, second);
  EXPECT_EQ(first.task.name, "gsm8k");
  EXPECT_EQ(first.task.payload, "72");
  EXPECT_THAT(first.token_ids, ElementsAre(5, 0, 151935));
  EXPECT_EQ(second.task.name, "countdown");
  EXPECT_EQ(second.task.payload, "{\"lines\":[1]}");
  EXPECT_EQ(second.text, "How many?");
  EXPECT_EQ(second.solution, "#### 72");
}

std::string Rows(int count) {
  std::string content;
  for (int i = 0; i < count; ++i) absl::StrAppend(&content, "{\"answer\":\"", i, "\",\"token_ids\":[", i, "]}\n");
  return content;
}

TEST(PromptFile, EveryPassHasEveryPromptOnceInItsOwnOrder) {
  for (int count : {1, 2, 3, 7, 64, 100}) {
    const auto source = *ParsePromptFile(Rows(count), "gsm8k", 5);
    std::vector<std::vector<int32_t>> passes;
    for (uint64_t pass = 0; pass < 3; ++pass) {
      std::vector<int32_t> order;
      for (uint64_t i = 0; i < source->size(); ++i)
        order.push_back(source->Get(pass * source->size() + i)->token_ids[0]);
      EXPECT_EQ(std::set<int32_t>(order.begin(), order.end()).size(), static_cast<size_t>(count));
      passes.push_back(order);
    }
    if (count >= 7) {
      EXPECT_NE(passes[0], passes[1]);
      EXPECT_NE(passes[1], passes[2]);
      EXPECT_FALSE(std::is_sorted(passes[0].begin(), passes[0].end()));
    }
  }
}

TEST(PromptFile, AChangedFileIsNoticedOnResume) {
  const auto source = *ParsePromptFile(Rows(10), "gsm8k", 5);
  const std::string fingerprint = source->fingerprint();
  EXPECT_EQ(fingerprint.size(), 32u);
  EXPECT_TRUE(CheckFingerprint(*source, fingerprint).ok());
  EXPECT_TRUE(CheckFingerprint(**ParsePromptFile(Rows(10), "gsm8k", 5), fingerprint).ok());
  std::string changed = Rows(10);
  changed[changed.find("3")] = '4';
  for (const auto& other : {*ParsePromptFile(changed, "gsm8k", 5), *ParsePromptFile(Rows(11), "gsm8k", 5),
                            *ParsePromptFile(Rows(10), "gsm8k", 6), *ParsePromptFile(Rows(10), "countdown", 5)}) {
    const absl::Status status = CheckFingerprint(*other, fingerprint);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("the checkpoint was made with"));
  }
}

TEST(PromptFile, NamesTheLineAndTheFieldOfAnError) {
  const std::string good = "{\"answer\":\"1\",\"token_ids\":[1]}\n";
  const std::pair<const char*, const char*> cases[] = {
      {"nonsense", "line 2: not a JSON object"},
      {"[1]", "line 2: not a JSON object"},
      {"{\"answer\":\"1\",\"token_ids\":[1]", "line 2: not a JSON object"},
      {"{\"token_ids\":[1]}", "line 2: answer is missing"},
      {"{\"answer\":\"1\"}", "line 2: neither token_ids nor text"},
      {"{\"answer\":\"1\",\"token_ids\":[]}", "line 2: token_ids is not a list"},
      {"{\"answer\":\"1\",\"token_ids\":\"1\"}", "line 2: token_ids is not a list"},
      {"{\"answer\":\"1\",\"token_ids\":[1,-1]}", "line 2: token_ids has -1"},
      {"{\"answer\":\"1\",\"token_ids\":[1.5]}", "line 2: token_ids has 1.5"},
      {"{\"answer\":\"1\",\"token_ids\":[99999999999999999999]}", "line 2: token_ids has "},
      {"{\"answer\":\"1\",\"text\":1}", "line 2: text is not a string"},
      {"{\"answer\":\"1\",\"token_ids\":[1],\"anwser\":2}", "line 2: unknown field \"anwser\""},
  };
  for (const auto& [row, words] : cases) {
    const absl::Status status = ParsePromptFile(good + row + "\n" + good, "gsm8k", 1).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << row;
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
  }
  EXPECT_THAT(std::string(ParsePromptFile(good, "", 1).status().message()), HasSubstr("line 1: task is missing"));
  EXPECT_THAT(std::string(ParsePromptFile(" \n\n", "gsm8k", 1).status().message()), HasSubstr("no prompts"));
}

std::string Tokenizer(const std::string& vocab, const std::string& rest = "\"decoder\":{\"type\":\"ByteLevel\"}") {
  return absl::StrCat("{\"model\":{\"type\":\"BPE\",\"vocab\":", vocab, "},", rest, "}");
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
