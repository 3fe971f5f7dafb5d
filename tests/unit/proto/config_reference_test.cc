// docs/configuration.md is generated from config.proto, its comments and its rules; scripts/update-golden writes it
// anew.
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "libs/base/field_rules.h"
#include "tests/unit/proto/descriptor_set.h"

namespace moerl {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;

constexpr char kIntroduction[] = R"(# Configuration

*Generated from proto/moerl/v1/config.proto by scripts/update-golden; do not edit.*

One YAML file configures every program of a run; each reads what concerns it. `moerl config FILE` checks a file and prints
it with every default written out. `--set trainer.num_ranks=2` on a command line overrides a field. An unknown field, a wrong
type or a value out of range stops the program with exit code 2 and one line that names the file, the line, the field and
the legal values:

    config: reverse.yaml:14: trainer.num_ranks: expected an integer from 1 to 4096, found many

A field marked *env* may hold `${NAME}`, which stands for the environment variable NAME and must then be set.
A field marked *required* must be given. A field marked *fixed*, and every field of a section so marked, stays what it was when
the run began: `--resume` refuses another value in `--set`, and does not take one from the file.
)";

// Comments as one paragraph, safe inside a table.
std::string Prose(const std::string& comments) {
  std::string text = absl::StrReplaceAll(comments, {{"\n", " "}, {"|", "\\|"}, {"<", "&lt;"}});
  while (absl::StrReplaceAll({{"  ", " "}}, &text) > 0) {
  }
  return std::string(absl::StripAsciiWhitespace(text));
}

template <typename Described>
std::string CommentOf(const Described& described) {
  google::protobuf::SourceLocation location;
  return described.GetSourceLocation(&location) ? Prose(location.leading_comments) : "";
}

std::string Marks(const FieldDescriptor& field) {
  std::string marks;
  if (IsRequired(field)) marks += " *required*";
  if (TakesEnvironment(field)) marks += " *env*";
  if (IsFixed(field)) marks += " *fixed*";
  return marks;
}

void AppendSection(const Descriptor& message, const std::string& path, int level, std::string& out) {
  absl::StrAppend(&out, "\n", std::string(level, '#'), " ", path.empty() ? "Top level" : path, "\n\n");
  if (const std::string comment = CommentOf(message); !comment.empty() && !path.empty()) {
    absl::StrAppend(&out, comment, "\n\n");
  }
  out += "| field | takes | default | meaning |\n|---|---|---|---|\n";
  std::vector<const FieldDescriptor*> sections;
  for (int i = 0; i < message.field_count(); ++i) {
    const FieldDescriptor& field = *message.field(i);
    const std::string fallback = DefaultOf(field);
    absl::StrAppend(&out, "| `", field.name(), "`", Marks(field), " | ", DescribeLegalValues(field), " | ",
                    fallback.empty() ? "" : absl::StrCat("`", fallback, "`"), " | ", CommentOf(field), " |\n");
    if (field.message_type() != nullptr) sections.push_back(&field);
  }
  for (const FieldDescriptor* field : sections) {
    const std::string suffix = field->is_repeated() ? "[]" : "";
    AppendSection(*field->message_type(), absl::StrCat(path, path.empty() ? "" : ".", field->name(), suffix),
                  std::min(level + 1, 4), out);
  }
}

TEST(ConfigurationReference, IsCurrent) {
  for (const auto* file : ProtoFiles()) {
    const Descriptor* config = file->FindMessageTypeByName("Config");
    if (config == nullptr) continue;
    std::string out = kIntroduction;
    AppendSection(*config, "", 2, out);
    return ExpectGolden(out, "docs/configuration.md");
  }
  FAIL() << "no message Config";
}

}  // namespace
}  // namespace moerl
