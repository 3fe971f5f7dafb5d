#include "libs/base/measurement.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace moerl {
namespace {

// Names and units are written by programs: quotes and backslashes are all that could need escaping.
std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + "\"";
}

std::string Number(std::optional<double> value) {
  return value.has_value() && std::isfinite(*value) ? absl::StrFormat("%.6g", *value) : "null";
}

}  // namespace

std::string ToJsonLine(const Measurement& m) {
  return absl::StrCat("{\"name\":", Quoted(m.name), ",\"value\":", Number(m.value), ",\"unit\":", Quoted(m.unit),
                      ",\"reference\":", m.reference.empty() ? "null" : Quoted(m.reference),
                      ",\"ratio\":", Number(m.ratio), ",\"goal\":", Number(m.goal), ",\"better\":\"",
                      m.higher_is_better ? "higher" : "lower", "\"}");
}

}  // namespace moerl
