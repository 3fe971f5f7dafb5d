#include "libs/rpc/trace.h"

#include <algorithm>
#include <random>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace moerl::rpc {
namespace {

constexpr size_t kTraceIdDigits = 32;
constexpr size_t kTraceparentBytes = 55;  // version 2, trace id 32, span 16, flags 2, three dashes

bool IsTraceId(absl::string_view text) {
  const auto is_digit = [](char c) {
    return absl::ascii_isxdigit(static_cast<unsigned char>(c)) && !absl::ascii_isupper(c);
  };
  return text.size() == kTraceIdDigits && std::all_of(text.begin(), text.end(), is_digit) &&
         text.find_first_not_of('0') != absl::string_view::npos;
}

}  // namespace

std::string FormatTraceparent(absl::string_view trace_id) {
  if (!IsTraceId(trace_id)) return "";
  thread_local std::mt19937_64 random{std::random_device{}()};
  return absl::StrCat("00-", trace_id, "-", absl::Hex(random() | 1, absl::kZeroPad16), "-01");
}

std::string TraceIdOf(absl::string_view traceparent) {
  if (traceparent.size() < kTraceparentBytes || traceparent[2] != '-' || traceparent[35] != '-') return "";
  const absl::string_view trace_id = traceparent.substr(3, kTraceIdDigits);
  return IsTraceId(trace_id) ? std::string(trace_id) : "";
}

}  // namespace moerl::rpc
