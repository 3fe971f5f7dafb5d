#ifndef MOERL_LIBS_BASE_YAML_TREE_H_
#define MOERL_LIBS_BASE_YAML_TREE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

// YAML as a small tree that knows where each value stands, parsed under bounds. Private to libs/base.
namespace moerl {

// Where a value was written: "reverse.yaml:14", or "--set a.b=c" with line 0.
struct YamlPlace {
  std::string source;
  int line = 0;  // from 1; 0: the source has no lines

  std::string ToString() const;
};

struct YamlEntry;

struct YamlNode {
  enum class Kind { kNull, kScalar, kList, kMap };

  Kind kind = Kind::kNull;
  YamlPlace place;
  YamlPlace key_place;             // of a map's value: where its key stands
  std::string text;                // of a scalar
  bool is_quoted = false;          // of a scalar: 'a', "a", | and >
  std::vector<YamlNode> elements;  // of a list
  std::vector<YamlEntry> entries;  // of a map, in their order

  YamlNode* Find(absl::string_view key);

  // Where one looks for the value: at its key, or at the value itself when it has none.
  const YamlPlace& KeyOrPlace() const { return key_place.source.empty() ? place : key_place; }
};

// A key of a map and its value.
struct YamlEntry {
  std::string key;
  YamlNode value;
};

// At most 60 bytes of `text`, escaped so that they fit a line of an error.
std::string Shorten(absl::string_view text);

// Bounds of what is parsed: a configuration is far below them, and anything within them parses in well
// under a second.
constexpr size_t kYamlBytesMax = size_t{1} << 20;
constexpr int kYamlDepthMax = 32;
constexpr int kYamlNodesMax = 100'000;

// Parses one document. INVALID_ARGUMENT with one line that starts with the place, for bad YAML, duplicate
// keys, keys that are not text, anchors, aliases, tags, a second document, and what exceeds the bounds.
// An empty document is a null node.
absl::StatusOr<YamlNode> ParseYaml(absl::string_view text, const std::string& source, bool has_lines = true);

}  // namespace moerl

#endif  // MOERL_LIBS_BASE_YAML_TREE_H_
