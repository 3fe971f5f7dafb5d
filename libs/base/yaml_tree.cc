#include "libs/base/yaml_tree.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <istream>
#include <streambuf>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace moerl {
namespace {

// Stops the parser from inside an event; caught in ParseYaml.
struct Refused {
  YamlPlace place;
  std::string why;
};

// Reads `text` in place.
class ViewBuffer final : public std::streambuf {
 public:
  explicit ViewBuffer(absl::string_view text) {
    char* begin = const_cast<char*>(text.data());
    setg(begin, begin, begin + text.size());
  }
};

// Bytes from `at` on that form one UTF-8 character (RFC 3629); 0 when they form none.
size_t Utf8Length(absl::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const unsigned lead = byte(at);
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xc2 && lead < 0xe0   ? 2
                        : lead >= 0xe0 && lead < 0xf0 ? 3
                        : lead >= 0xf0 && lead < 0xf5 ? 4
                                                      : 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xc0) != 0x80) return 0;
  }
  // Overlong forms, surrogates, and what lies past U+10FFFF.
  const unsigned second = byte(at + 1);
  if ((lead == 0xe0 && second < 0xa0) || (lead == 0xed && second >= 0xa0)) return 0;
  if ((lead == 0xf0 && second < 0x90) || (lead == 0xf4 && second >= 0x90)) return 0;
  return length;
}

// The line, from 1, of the first byte that is not UTF-8; 0 when all are.
int LineThatIsNotUtf8(absl::string_view text) {
  int line = 1;
  for (size_t at = 0; at < text.size();) {
    const size_t length = Utf8Length(text, at);
    if (length == 0) return line;
    if (text[at] == '\n') ++line;
    at += length;
  }
  return 0;
}

class TreeBuilder final : public YAML::EventHandler {
 public:
  TreeBuilder(const std::string& source, bool has_lines) : source_(source), has_lines_(has_lines) {}

  YamlNode Take() { return std::move(root_); }

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (num_documents_++ > 0) throw Refused{PlaceOf(mark), "one document expected, found a second after '---'"};
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override { Add(mark, "", anchor, YamlNode::Kind::kNull); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    throw Refused{PlaceOf(mark), "an alias (*name) is not taken here; write the value out"};
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    // yaml-cpp makes bytes of the escapes \N and \_ that are no UTF-8.
    if (LineThatIsNotUtf8(value) != 0)
      throw Refused{PlaceOf(mark), "UTF-8 text expected, found an escape of other bytes"};
    if (IsKeyNext()) return AddKey(mark, value);
    YamlNode& node = Add(mark, tag, anchor, YamlNode::Kind::kScalar);
    node.text = value;
    node.is_quoted = tag == "!";
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    Open(Add(mark, tag, anchor, YamlNode::Kind::kList));
  }
  void OnSequenceEnd() override { open_.pop_back(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    Open(Add(mark, tag, anchor, YamlNode::Kind::kMap));
  }
  void OnMapEnd() override { open_.pop_back(); }

 private:
  // A container being filled. Pointers to it stay valid: it is the last element of its parent, and the
  // parent grows only after it is closed.
  struct Container {
    YamlNode* node;
    bool has_key = false;  // of a map: a key waits for its value
  };

  YamlPlace PlaceOf(const YAML::Mark& mark) const { return {source_, has_lines_ ? mark.line + 1 : 0}; }

  bool IsKeyNext() const {
    return !open_.empty() && open_.back().node->kind == YamlNode::Kind::kMap && !open_.back().has_key;
  }

  void AddKey(const YAML::Mark& mark, const std::string& key) {
    YamlNode& map = *open_.back().node;
    if (map.Find(key) != nullptr) {
      throw Refused{PlaceOf(mark), absl::StrCat("duplicate key \"", Shorten(key), "\", first at ",
                                                map.Find(key)->key_place.ToString(), "; keep one")};
    }
    // A map of the configuration has at most some dozens of keys; more would make the look-up above slow.
    if (map.entries.size() >= kKeysMax) {
      throw Refused{PlaceOf(mark), absl::StrCat("at most ", kKeysMax, " keys in one section expected")};
    }
    map.entries.push_back({key, YamlNode{}});
    map.entries.back().value.place = map.entries.back().value.key_place = PlaceOf(mark);
    open_.back().has_key = true;
  }

  YamlNode& Add(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor, YamlNode::Kind kind) {
    const YamlPlace place = PlaceOf(mark);
    if (++num_nodes_ > kYamlNodesMax) throw Refused{place, absl::StrCat("at most ", kYamlNodesMax, " values expected")};
    if (anchor != 0) throw Refused{place, "an anchor (&name) is not taken here; write the value out"};
    if (!tag.empty() && tag != "?" && tag != "!")
      throw Refused{place, absl::StrCat("a tag (", tag, ") is not taken here")};
    if (IsKeyNext()) throw Refused{place, "a field name expected as the key"};
    YamlNode* node = &root_;
    if (!open_.empty()) {
      Container& container = open_.back();
      if (container.has_key) {
        node = &container.node->entries.back().value;
        container.has_key = false;
      } else {
        node = &container.node->elements.emplace_back();
      }
    }
    node->kind = kind;
    node->place = place;
    return *node;
  }

  void Open(YamlNode& node) {
    if (open_.size() >= kYamlDepthMax) {
      throw Refused{node.place, absl::StrCat("at most ", kYamlDepthMax, " levels of nesting expected")};
    }
    open_.push_back({&node});
  }

  static constexpr size_t kKeysMax = 1000;

  const std::string source_;
  const bool has_lines_;
  YamlNode root_;
  std::vector<Container> open_;
  int num_nodes_ = 0;
  int num_documents_ = 0;
};

absl::Status Bad(const YamlPlace& place, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(place.ToString(), ": ", why));
}

}  // namespace

std::string YamlPlace::ToString() const { return line == 0 ? source : absl::StrCat(source, ":", line); }

std::string Shorten(absl::string_view text) {
  const std::string head = absl::Utf8SafeCHexEscape(text.substr(0, 60));
  return text.size() > 60 ? absl::StrCat(head, "...") : head;
}

YamlNode* YamlNode::Find(absl::string_view key) {
  for (auto& [name, node] : entries) {
    if (name == key) return &node;
  }
  return nullptr;
}

absl::StatusOr<YamlNode> ParseYaml(absl::string_view text, const std::string& source, bool has_lines) {
  if (text.size() > kYamlBytesMax) {
    return Bad({source}, absl::StrCat("at most ", kYamlBytesMax, " bytes expected, found ", text.size()));
  }
  if (const int line = LineThatIsNotUtf8(text); line != 0) {
    return Bad({source, has_lines ? line : 0}, "UTF-8 text expected, found another encoding");
  }
  ViewBuffer buffer(text);
  std::istream stream(&buffer);
  TreeBuilder builder(source, has_lines);
  try {
    YAML::Parser parser(stream);
    while (parser.HandleNextDocument(builder)) {
    }
  } catch (const Refused& refused) {
    return Bad(refused.place, refused.why);
  } catch (const YAML::Exception& error) {
    return Bad({source, has_lines ? error.mark.line + 1 : 0},
               absl::StrCat("bad YAML: ", absl::Utf8SafeCHexEscape(error.msg)));
  }
  YamlNode root = builder.Take();
  if (root.place.source.empty()) root.place = {source, has_lines ? 1 : 0};
  return root;
}

}  // namespace moerl
